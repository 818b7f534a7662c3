"""The variant with accounts: JupyterHub before the same teams, with their tokens as passwords and their volumes.

Constant files are in ``hosting/hub/``; this module writes those that depend on the deployment.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from hosting.compose import CADDY, COMPOSE, GPU_ULIMITS, make_caddyfile, make_environment, make_front, make_networks
from hosting.deployment import Deployment
from hosting.guard import make_guard
from hosting.limits import limit
from hosting.settings import Settings, write_text
from hosting.teams import Team
from lab_common import checkout

FOLDER, TEAMS, SECRETS = "hub", "teams.json", "secrets.env"
# The proxy's, and that of what the hub keeps of a login.
VARIABLES = ("CONFIGPROXY_AUTH_TOKEN", "JUPYTERHUB_CRYPT_KEY")
PORT = 8000


def write_files(deployment: Deployment) -> list[Path]:
    """Writes the files of the hub and its front; returns those to pass to Compose, in order.

    All goes into the deployment's folder ``hub``. Only the hashes of the tokens are written.
    """
    folder = deployment.folder / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / SECRETS).exists():
        # Kept: with a new key the hub could not read its stored data.
        text = "".join(f"{name}={secrets.token_hex(32)}\n" for name in VARIABLES)
        write_text(folder / SECRETS, text, mode=0o600)
    known = {team.name: _describe_team(deployment, team) for team in deployment.teams}
    caddy = make_hub_caddyfile(deployment.teams, deployment.settings)
    write_text(folder / TEAMS, json.dumps(known, indent=2) + "\n", mode=0o600)
    write_text(folder / CADDY, caddy)
    write_text(folder / COMPOSE, json.dumps(make_compose(deployment, caddy), indent=2) + "\n")
    return [checkout() / "hosting" / "hub" / COMPOSE, folder / COMPOSE]


def _describe_team(deployment: Deployment, team: Team) -> dict:
    """Describes a team for the hub. Its container is that of Compose, in terms of the engine's API."""
    (share,) = deployment.shares[team.name]
    made = limit(share, deployment.machine)
    host = {name: made[name] for name in ("mem_limit", "memswap_limit", "pids_limit") if name in made}
    host |= {"shm_size": share.shm, "log_config": {"type": "json-file", "config": made["logging"]["options"]}}
    host |= {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]}
    if team.gpus:
        host["device_requests"] = [{"driver": "nvidia", "device_ids": list(team.gpus), "capabilities": [["gpu"]]}]
        host["ulimits"] = [{"name": name} | bounds for name, bounds in GPU_ULIMITS.items()]
    if "cpuset" in made:
        host["cpuset_cpus"] = made["cpuset"]
    if "cpus" in made:
        # Of 100 ms each, in microseconds: DockerSpawner sets the period, with which nano_cpus would be refused.
        host |= {"cpu_period": 100_000, "cpu_quota": int(made["cpus"] * 100_000)}
    return {
        "sha256": hashlib.sha256(deployment.tokens[team.name].encode()).hexdigest(),
        "host_config": host,
        "environment": make_environment(deployment.settings, team, share),
    }


def make_hub_caddyfile(teams: Sequence[Team], settings: Settings) -> str:
    """Returns the Caddyfile: TLS as without accounts, each team's path to its server, all other paths to the hub."""
    routes = "".join(
        f"\tredir /{team.name} /user/{team.name}/\n\tredir /{team.name}/ /user/{team.name}/\n" for team in teams
    )
    return make_caddyfile([], settings).replace("\trespond 404\n", f"{routes}\treverse_proxy hub:{PORT}\n")


def make_compose(deployment: Deployment, caddy: str) -> dict:
    """Returns Compose's file for front, guard and hub; the hub itself starts the teams' containers.

    The project and the teams' networks have the same names as without accounts: ``up`` of one variant ends the other,
    so that two servers never work on one volume.
    """
    settings, folder = deployment.settings, deployment.folder / FOLDER
    front, networks = make_front(deployment, caddy), make_networks(deployment)
    del front["networks"]  # hub/compose.json has it, and the volume of the front's data
    front["volumes"] = [f"{folder}/{CADDY}:/etc/caddy/{CADDY}:ro", *front["volumes"][2:]]
    hub = {
        "image": f"localhost/{settings.project}-hub:latest",
        "container_name": f"{settings.project}-hub",
        "environment": {
            "HUB_PROJECT": settings.project,
            "HUB_IMAGE": settings.image,
            "HUB_DATA": settings.data,
            "HUB_TLS": settings.tls,
        },
        "volumes": [f"{folder}:/srv/hub:ro"],
        "networks": list(networks),
    }
    # An underscore is in no team's name.
    networks["hub_front"] = networks[deployment.teams[0].name] | {"name": f"{settings.project}_hub_front"}
    volumes = {
        "front-data": {"name": f"{settings.project}-front-data"},
        "hub_state": {"name": f"{settings.project}_hub_state"},
    }
    services = {"front": front, "hub": hub} | ({"guard": make_guard(settings)} if settings.guarded else {})
    return {"name": settings.project, "services": services, "networks": networks, "volumes": volumes}
