"""The variant with accounts: what is written for the hub, and JupyterHub itself with its configuration."""

import hashlib
import json
import os
import re
import subprocess
from dataclasses import replace

import pytest
from harness.containers import install, make_deployment

from hosting.hub import make_compose, write_files
from hosting.settings import Settings
from hosting.teams import read_teams
from hosting.tokens import keep_tokens

pytestmark = pytest.mark.hosting

ONE = Settings(nodes=1, hub=True)
CLASS = "team,gpus\nred,0 1\nblue,\nteam-3,2\n"
# JupyterHub with the configuration, up to where it would listen: teams log in, and the engine, which is not there, is
# asked for their containers.
LOAD = """
import asyncio, hashlib, json, sys
import docker
from dockerspawner import DockerSpawner
from jupyterhub import orm
from jupyterhub.app import JupyterHub

asked = {}

class Engine(docker.APIClient):
    def create_container_from_config(self, config, name=None, platform=None):
        asked[name] = config
        return {"Id": name}

async def load(config, logins, teams):
    hub = JupyterHub()
    await hub.initialize(["--config", config, "--log-level=ERROR"])
    found = {"logins": [], "holds": {}, "networks": {}, "containers": asked}

    class Handler:
        find_user = staticmethod(lambda name: hub.users[name])

    for data in logins:
        model = await hub.authenticator.get_authenticated_user(Handler, data)
        found["logins"].append(model and [model["name"], bool(model["admin"])])
        if model:
            await hub.users[model["name"]].save_auth_state(model["auth_state"])
    DockerSpawner._client = Engine(version="1.43")
    for name, user in [(name, hub.users[name]) for name in sorted(hub.authenticator.allowed_users)]:
        found["holds"][name] = await hub.authenticator.refresh_user(user)
        spawner = user.spawners[""]
        spawner.run_pre_spawn_hook()
        await spawner.create_object()
        found["networks"][name] = spawner.network_name
    # Red has a browser at its server, and the server its own token; then red gets another token.
    red = hub.users["red"]
    hub.db.add(orm.OAuthClient(identifier="jupyterhub-user-red", secret="", redirect_uri="", description=""))
    hub.db.commit()
    for client in ("jupyterhub-user-red", "jupyterhub"):
        orm.APIToken.new(user=red.orm_user, client_id=client, scopes=[])
    cookie = red.cookie_id
    with open(teams, "w") as file:
        json.dump({"red": {"sha256": hashlib.sha256(b"another").hexdigest()}}, file)
    found["holds_later"] = [await hub.authenticator.refresh_user(hub.users[name]) for name in ("red", "blue")]
    again = {"username": "red", "password": "another"}
    model = await hub.authenticator.get_authenticated_user(Handler, again)
    await red.save_auth_state(model["auth_state"])
    found["left"] = [token.client_id for token in red.orm_user.api_tokens]
    found["cookie"] = [red.cookie_id != cookie, await hub.authenticator.refresh_user(red)]
    cookie = red.cookie_id
    await hub.authenticator.get_authenticated_user(Handler, again)
    found["cookie"].append(red.cookie_id == cookie)
    found["admins"] = [user.name for user in hub.users.values() if user.admin]
    print("FOUND" + json.dumps(found))

asyncio.run(load(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
"""


def make_class(folder, settings=ONE):
    (folder / "teams.csv").write_text(CLASS)
    teams = read_teams(folder / "teams.csv")
    return replace(make_deployment(folder, teams, settings), tokens=keep_tokens(folder, teams))


def test_the_hub_has_hashes_of_tokens_and_secrets_that_are_made_once(tmp_path):
    deployment, folder = make_class(tmp_path), tmp_path / "hub"
    write_files(deployment)
    kept = (folder / "secrets.env").read_text()
    write_files(deployment)
    assert (folder / "secrets.env").read_text() == kept and len(set(kept.split())) == 2
    for name in ("secrets.env", "teams.json"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    known = json.loads((folder / "teams.json").read_text())
    hashes = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in deployment.tokens.items()}
    assert {name: team["sha256"] for name, team in known.items()} == hashes
    written = "".join(path.read_text() for path in folder.iterdir())
    assert not any(token in written for token in deployment.tokens.values())


def test_the_hub_alone_has_the_socket_and_the_front_alone_a_port(tmp_path):
    certificate = tmp_path / "certificate"
    deployment = make_class(tmp_path, replace(ONE, project="course", tls=str(certificate), guarded=True))
    fixed = json.loads(write_files(deployment)[0].read_text())["services"]
    made = make_compose(deployment, "")
    assert made["services"].pop("guard")["cap_add"] == ["NET_ADMIN"]
    services = {name: (fixed[name], made["services"][name]) for name in ("front", "hub")}
    assert set(fixed) == set(made["services"]) == set(services)
    text = {name: json.dumps(parts) for name, parts in services.items()}
    assert "docker.sock" in text["hub"] and "docker.sock" not in text["front"]
    assert '"ports"' in text["front"] and '"ports"' not in text["hub"]
    assert "secrets.env" in text["hub"] and "secrets.env" not in text["front"]
    assert "env_file" not in text["hub"], "podman-compose would put what is in it on a command line"
    front = made["services"]["front"]
    assert front["cap_drop"] == ["ALL"] and front["security_opt"] == ["no-new-privileges"] and front["mem_limit"]
    assert f"{certificate}:/certificate:ro" in text["front"] and 'privileged": true' not in json.dumps(text)
    # The hub is on each team's network; the front is on none.
    assert made["services"]["hub"]["networks"] == ["red", "blue", "team-3"]
    assert fixed["hub"]["networks"] == fixed["front"]["networks"] == ["hub_front"]
    assert {network["name"] for network in made["networks"].values()} == {
        "course_hub_front",
        "course-red",
        "course-blue",
        "course-team-3",
    }
    assert made["name"] == "course", "the project of the other variant, which `up` then ends"


@pytest.fixture(scope="module")
def loaded(root, tmp_path_factory):
    """A class at a loaded hub, of the versions in the hub's image: its folder, its tokens, and the results."""
    folder = tmp_path_factory.mktemp("class")
    deployment = make_class(folder, replace(ONE, data=str(folder)))
    write_files(deployment)
    tokens = deployment.tokens
    right = {"username": "red", "password": tokens["red"]}
    last = "0" if tokens["red"][-1] != "0" else "1"
    refused = [
        {"username": "red", "password": tokens["red"][:-1] + last},
        {"username": "red", "password": ""},
        {"username": "red", "password": tokens["blue"]},
        {"username": "red", "password": hashlib.sha256(tokens["red"].encode()).hexdigest()},
        {"username": "red", "password": "ä" * 48},
        {"username": "green", "password": tokens["red"]},
        {"username": "admin", "password": tokens["red"]},
    ]
    wanted = re.findall(r"\S+==[\d.]+", (root / "hosting/hub/Dockerfile").read_text())
    assert {name.partition("==")[0] for name in wanted} == {"jupyterhub", "dockerspawner", "jupyterhub-idle-culler"}
    python = install(tmp_path_factory.mktemp("hub"), *wanted) / "python"
    made = make_compose(deployment, "")
    fixed = json.loads((root / "hosting/hub/compose.json").read_text())["services"]["hub"]["environment"]
    state, known = folder / "hub-state", folder / "hub" / "teams.json"
    here = {"HUB_STATE": str(state), "HUB_TEAMS": str(known), "HUB_IDLE_SECONDS": "60"}
    here["HUB_SECRETS"] = str(folder / "hub" / "secrets.env")
    assert set(here) <= set(fixed), "what the test sets is what Compose sets"
    state.mkdir()
    env = {"PATH": os.environ["PATH"], **made["services"]["hub"]["environment"], **here}
    command = [python, "-c", LOAD, root / "hosting/hub/jupyterhub_config.py", json.dumps([right, *refused]), known]
    done = subprocess.run(command, cwd=state, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "FOUND" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    return deployment, json.loads(done.stdout.partition("FOUND")[2])


def test_a_team_logs_in_with_its_own_token_only(loaded):
    found = loaded[1]
    assert found["logins"] == [["red", False]] + [None] * 7
    assert found["admins"] == []
    # A login holds for as long as the team has its token, and the team is there.
    assert found["holds"] == {"red": True, "blue": False, "team-3": False}
    assert found["holds_later"] == [False, False]


def test_the_first_login_with_a_new_token_ends_those_with_the_old_one(loaded):
    found = loaded[1]
    assert found["left"] == ["jupyterhub"], "the browsers' tokens go, the server's own stays"
    assert found["cookie"] == [True, True, True], "another cookie, that holds; a second login leaves it as it is"


def test_a_teams_container_has_its_own_cpus_data_and_no_secret(loaded):
    deployment, found = loaded
    assert found["networks"] == {name: f"labs-{name}" for name in ("red", "blue", "team-3")}
    kept = (deployment.folder / "hub" / "secrets.env").read_text().split()
    secrets = [line.partition("=")[2] for line in kept] + list(deployment.tokens.values())
    for name in found["networks"]:
        made = found["containers"][f"labs-{name}-node0"]
        host = made["HostConfig"]
        assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"] and host["Memory"] > 1 << 30
        assert host["CpusetCpus"] == deployment.shares[name][0].cpuset in ("0,1", "2,3", "4,5")
        # The names of the variant without accounts, also where a name has a hyphen; and no socket.
        data = f"{deployment.folder}:/srv/data:ro"
        assert sorted(host["Binds"]) == sorted([f"labs-{name}-work:/home/learner/work:rw", data])
        environment = dict(line.split("=", 1) for line in made["Env"])
        assert json.loads(environment["JUPYTERHUB_COOKIE_OPTIONS"]) == {"secure": True}
        shown = json.dumps({key: value for key, value in environment.items() if "API_TOKEN" not in key})
        assert not any(secret in shown for secret in secrets)
        assert "DOCKER_HOST" not in environment and "PATH" not in environment


def test_only_teams_with_gpus_get_devices_and_limits(loaded):
    found = loaded[1]
    hosts = {name: found["containers"][f"labs-{name}-node0"]["HostConfig"] for name in ("red", "blue", "team-3")}
    for name, gpus in (("red", ["0", "1"]), ("team-3", ["2"])):
        (device,) = hosts[name]["DeviceRequests"]
        assert device["Driver"] == "nvidia" and device["DeviceIDs"] == gpus and device["Capabilities"] == [["gpu"]]
        assert device["Count"] == 0, "a count beside the ids would be refused"
        limits = {limit["Name"]: (limit["Soft"], limit["Hard"]) for limit in hosts[name]["Ulimits"]}
        assert limits == {"memlock": (-1, -1), "stack": (67108864, 67108864)}
    assert not hosts["blue"].get("DeviceRequests") and not hosts["blue"].get("Ulimits")
    assert not hosts["blue"].get("Devices")
