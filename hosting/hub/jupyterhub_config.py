"""JupyterHub for the teams of a class: each logs in with its name and token, and gets its own container.

Runs in the hub's container, the only one with the engine's socket. It reads ``teams.json`` and the variables, which
hosting/hub.py writes. This file contains no secret.
"""

import hashlib
import hmac
import json
import os
import sys
from pathlib import Path

from jupyterhub.auth import Authenticator
from jupyterhub.utils import new_token

c = get_config()  # noqa: F821 - JupyterHub puts it there

# Not by Compose's env_file: podman-compose puts what is in there on a command line, which others can read.
for line in Path(os.environ["HUB_SECRETS"]).read_text(encoding="utf-8").split():
    name, _, secret = line.partition("=")
    os.environ[name] = secret
PROJECT, STATE = os.environ["HUB_PROJECT"], Path(os.environ["HUB_STATE"])
WORK = "/home/learner/work"


def read_teams():
    """Returns the teams' records; read at each use, so that a new token needs no restart of the hub."""
    return json.loads(Path(os.environ["HUB_TEAMS"]).read_text(encoding="utf-8"))


class TeamAuthenticator(Authenticator):
    """Admits teams that know their token."""

    def find_hash(self, name):
        """Returns the hash of a team's token; for an unknown team, one that no token has."""
        return read_teams().get(name, {}).get("sha256", "")

    async def authenticate(self, handler, data):
        """Returns who logged in, or None."""
        name, token = data.get("username", ""), data.get("password", "")
        # A fast hash is enough: the tokens are random, 192 bits each, and nobody tries that many.
        got = hashlib.sha256(token.encode()).hexdigest()
        if not hmac.compare_digest(got, self.find_hash(name)):
            return None
        user = handler.find_user(name)
        if user and (await user.get_auth_state() or {}).get("sha256") != got:
            self.end_logins(user)
        return {"name": name, "auth_state": {"sha256": got}}

    def end_logins(self, user):
        """Invalidates the browsers' cookies for a team's old token, which the team's next login would revive."""
        user.orm_user.cookie_id = new_token()
        for token in list(user.orm_user.api_tokens):
            # The server's own token stays, so that it goes on with its kernels.
            if token.client_id != "jupyterhub":
                user.db.delete(token)
        user.db.commit()

    async def refresh_user(self, user, handler=None):
        """Returns True while a login is valid: until the team has a new token or has left."""
        state = await user.get_auth_state() or {}
        return hmac.compare_digest(state.get("sha256", "none"), self.find_hash(user.name))


# Inside the networks of the engine only: the front, which has the certificate, is all that is published.
c.JupyterHub.bind_url = "http://0.0.0.0:8000"
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = "hub"
c.JupyterHub.db_url = f"sqlite:///{STATE}/hub.sqlite"
c.JupyterHub.cookie_secret_file = f"{STATE}/cookie_secret"
# In memory, which a new start finds empty: the hub ends what has the number in this file, whatever it is by then.
c.ConfigurableHTTPProxy.pid_file = "/tmp/proxy.pid"
c.JupyterHub.tornado_settings = {"cookie_options": {"secure": os.environ.get("HUB_TLS") != "none"}}
c.JupyterHub.template_vars = {"announcement_login": "Username: the name of your team. Password: its token."}
# The teams' containers go on while the hub is started anew, for one team more or another certificate.
c.JupyterHub.cleanup_servers = False

c.JupyterHub.authenticator_class = TeamAuthenticator
c.Authenticator.allowed_users = set(read_teams())
# By default, a team that has left teams.csv would stay allowed because the hub's database knows it.
c.Authenticator.allow_existing_users = False
# What refresh_user compares is kept encrypted; the key is JUPYTERHUB_CRYPT_KEY. Strict: what was logged in with the old
# token, and asks with a token that the hub gave it, is refused, too.
c.Authenticator.enable_auth_state = True
c.Authenticator.auth_refresh_age = 60
c.Authenticator.auth_refresh_strict = True


def prepare_container(spawner):
    """Puts a team's container on the team's own network, which the hub joins and no other team."""
    team = read_teams()[spawner.user.name]
    spawner.network_name = f"{PROJECT}-{spawner.user.name}"
    spawner.environment, spawner.extra_host_config = team["environment"], team["host_config"]


c.JupyterHub.spawner_class = "docker"
c.DockerSpawner.image = os.environ["HUB_IMAGE"]
c.DockerSpawner.pull_policy = "never"
# The mode of the image's start.sh; it ends in jupyterhub-singleuser. DockerSpawner leaves the entrypoint as it is.
c.DockerSpawner.cmd = ["hub"]
# The names of the variant without accounts. {username} would be escaped, with -2d for a hyphen, and another volume.
c.DockerSpawner.name_template = PROJECT + "-{raw_username}-node0"
c.DockerSpawner.volumes = {PROJECT + "-{raw_username}-work": WORK}
if os.environ.get("HUB_DATA"):
    c.DockerSpawner.read_only_volumes = {os.environ["HUB_DATA"]: "/srv/data"}
c.DockerSpawner.remove = True
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.extra_create_kwargs = {"hostname": "node0", "labels": {"labs.hub": PROJECT}}
c.Spawner.pre_spawn_hook = prepare_container
c.Spawner.notebook_dir = WORK
c.Spawner.default_url = "/lab/tree/labs"
c.Spawner.start_timeout = c.Spawner.http_timeout = 180

# A team may use its own server, and no more. By default it could also make itself tokens, which would outlive the one
# that it was given.
c.JupyterHub.load_roles = [
    {"name": "user", "scopes": ["read:users!user", "servers!user", "access:servers!user", "users:activity!user"]}
]
idle = int(os.environ.get("HUB_IDLE_SECONDS") or 0)
if idle:
    culler = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={idle}"]
    c.JupyterHub.services = [{"name": "idle-culler", "command": culler}]
    scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    c.JupyterHub.load_roles.append({"name": "idle-culler", "scopes": scopes, "services": ["idle-culler"]})
