"""The variant with accounts: JupyterHub before the same teams, with their tokens as passwords and their volumes.

Constant files are in ``hosting/hub/``; this module writes those that depend on the deployment.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hosting.commands import START_SECONDS, end_bounds, end_spawned, guard, prepare, wait_for_front
from hosting.deployment import Deployment
from hosting.files import CADDY, Setup, make_base, make_caddyfile, make_environment, write_changed
from hosting.handout import write_handout
from hosting.limits import limit
from hosting.settings import Settings
from hosting.teams import Team
from lab_common import LabError, checkout

FOLDER, BASE, CLASS, TEAMS, SECRETS = "hub", "compose.json", "compose.json", "teams.json", "secrets.env"
# The proxy's, and that of what the hub keeps of a login.
VARIABLES = ("CONFIGPROXY_AUTH_TOKEN", "JUPYTERHUB_CRYPT_KEY")
# A team's path leads to its server; these lead to the hub.
TAKEN = ("hub", "services", "user")
HUB_PORT = 8000
# Asked in the hub's container.
ALIVE = f'import urllib.request; urllib.request.urlopen("http://127.0.0.1:{HUB_PORT}/hub/health", timeout=5)'


def write_hub(folder: Path, teams: Sequence[Team], settings: Settings, setup: Setup) -> list[Path]:
    """Writes the files of the hub and its front; returns the files for Compose, in order.

    Args:
        folder: The deployment's; all goes into its folder ``hub``.
        teams: Result of ``read_teams``.
        settings: The deployment's settings.
        setup: Decisions beyond the settings. Only the hashes of the tokens are written.

    Raises:
        LabError: A team has the name of one of the hub's own paths, or others can read its secrets.
    """
    _check_names(teams, settings)
    folder = folder / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep_secrets(folder / SECRETS)
    known = {team.name: _describe_team(team, setup) for team in teams}
    caddy = make_front(teams, settings)
    write_changed(folder / TEAMS, json.dumps(known, indent=2) + "\n", mode=0o600)
    write_changed(folder / CADDY, caddy)
    write_changed(folder / CLASS, json.dumps(make_compose(folder, teams, settings, caddy, setup), indent=2) + "\n")
    return [checkout() / "hosting" / "hub" / BASE, folder / CLASS]


def _describe_team(team: Team, setup: Setup) -> dict:
    """Describes a team for the hub. The limits are those of Compose, in terms of the engine's API."""
    (share,) = setup.shares[team.name]
    made = limit(share, setup.machine)
    host = {name: made[name] for name in ("mem_limit", "memswap_limit", "pids_limit") if name in made}
    host |= {"shm_size": share.shm, "log_config": {"type": "json-file", "config": made["logging"]["options"]}}
    if "cpuset" in made:
        host["cpuset_cpus"] = made["cpuset"]
    if "cpus" in made:
        # Of 100 ms each, in microseconds: DockerSpawner sets the period, with which nano_cpus would be refused.
        host |= {"cpu_period": 100_000, "cpu_quota": int(made["cpus"] * 100_000)}
    return {
        "sha256": hashlib.sha256(setup.tokens[team.name].encode()).hexdigest(),
        "gpus": list(team.gpus),
        "host_config": host,
        "environment": make_environment(share, guarded=setup.guarded),
    }


def make_front(teams: Sequence[Team], settings: Settings) -> str:
    """Returns the Caddyfile: TLS as without accounts, each team's path to its server, all other paths to the hub."""
    routes = "".join(
        f"\tredir /{team.name} /user/{team.name}/\n\tredir /{team.name}/ /user/{team.name}/\n" for team in teams
    )
    return make_caddyfile([], settings).replace("\trespond 404\n", f"{routes}\treverse_proxy hub:{HUB_PORT}\n")


def make_compose(folder: Path, teams: Sequence[Team], settings: Settings, caddy: str, setup: Setup) -> dict:
    """Returns Compose's file for the front and the hub; the hub itself starts the teams' containers.

    The project and the teams' networks have the same names as without accounts: ``up`` of one variant ends the other,
    so that two servers never work on one volume.
    """
    plain = make_base(teams, settings, caddy, setup)
    options = {"driver_opts": {"isolate": "true"}} if setup.podman else {}
    usual = plain["services"]["front"]
    front = {key: value for key, value in usual.items() if key not in ("volumes", "networks")}
    certificate = [volume for volume in usual["volumes"] if volume.endswith(":/certificate:ro")]
    front["volumes"] = [f"{folder}/{CADDY}:/etc/caddy/{CADDY}:ro", *certificate]
    environment = {
        "HUB_PROJECT": settings.project,
        "HUB_IMAGE": settings.image,
        "HUB_DATA": str(Path(settings.data).resolve()) if settings.data else "",
        "HUB_TLS": settings.tls,
    }
    hub = {
        "image": f"localhost/{settings.project}-hub:latest",
        "container_name": f"{settings.project}-hub",
        "environment": environment,
        "volumes": [f"{folder}:/srv/hub:ro"],
        "networks": [team.name for team in teams],
    }
    # An underscore is in no team's name.
    networks = {"hub_front": {"name": f"{settings.project}_hub_front"} | options} | plain["networks"]
    volumes = {
        "front-data": plain["volumes"]["front-data"],
        "hub_state": {"name": f"{settings.project}_hub_state"},
    }
    services = {"front": front, "hub": hub}
    return {"name": settings.project, "services": services, "networks": networks, "volumes": volumes}


def _check_names(teams: Sequence[Team], settings: Settings) -> None:
    for team in teams:
        if team.name in TAKEN:
            what = f"Team {team.name} would have a path that JupyterHub needs itself."
            cause = "its pages lie below the same address"
            raise LabError(what, where=settings.teams, cause=cause, fix=f"any name but {', '.join(TAKEN)}")


def _keep_secrets(path: Path) -> None:
    """Makes the hub's secrets once: with a new key the hub could not read its stored data."""
    if not path.exists():
        write_changed(path, "".join(f"{name}={secrets.token_hex(32)}\n" for name in VARIABLES), mode=0o600)
    elif path.stat().st_mode & 0o077:
        cause = "the file was written anew or copied"
        raise LabError("Others can read the hub's secrets.", where=path, cause=cause, fix=f"chmod 600 {path}")
    text = path.read_text(encoding="utf-8")
    for name in VARIABLES:
        if not re.search(rf"^{name}=[0-9a-f]{{64}}$", text, re.MULTILINE):
            fix = f"rm {path}; all teams then log in again"
            raise LabError(f"The hub's {name} is missing.", where=path, cause="the file was edited", fix=fix)


def up(deployment: Deployment, *, say: Callable[[str], None] = print, seconds: float = START_SECONDS) -> Path:
    """Starts the hub, or changes it to what ``teams.csv`` says now, and writes the hand-out.

    A team's first login starts its container, which keeps running while the hub restarts.

    Raises:
        LabError: The port is taken, Compose failed, or the hub does not answer in time.
    """
    _check_names(deployment.teams, deployment.settings)
    deployment = prepare(deployment, say)
    settings, engine = deployment.settings, deployment.engine
    files = write_hub(deployment.folder, deployment.teams, settings, deployment.setup)
    _run_compose(deployment, files, "up", "-d", "--build", *engine.orphans)
    guard(deployment)
    end, name = time.monotonic() + seconds, f"{settings.project}-hub"
    while (asked := engine.ask("exec", name, "python3", "-c", ALIVE, timeout=20)).returncode:
        if time.monotonic() > end:
            cause = (asked.stderr.strip().splitlines() or [""])[-1][:300]
            fix = f"python3 -m hosting logs {name}"
            raise LabError("The hub does not answer.", where=name, cause=cause, fix=fix)
        time.sleep(0.5)
    wait_for_front(deployment, end)
    sheet = write_handout(deployment.folder, deployment.teams, deployment.tokens, settings)
    say(f"the hub of {len(deployment.teams)} teams is up at {settings.url}/; hand out: {sheet}")
    return sheet


def _run_compose(deployment: Deployment, files: Sequence[Path], *arguments: str) -> None:
    """Runs Compose on the hub's files, in the deployment's project: podman-compose reads the first file's name only."""
    deployment.engine.run_compose(files, *arguments, variables={"COMPOSE_PROJECT_NAME": deployment.settings.project})


def down(deployment: Deployment) -> None:
    """Ends the teams' containers, the hub and the front; the teams' work stays in their volumes."""
    end_spawned(deployment)
    files = write_hub(deployment.folder, deployment.teams, deployment.settings, deployment.setup)
    _run_compose(deployment, files, "down", "--remove-orphans")
    end_bounds(deployment)


def rotate(deployment: Deployment, team: Team) -> Path:
    """Gives the hub the team's new token, which ends logins made with the old one; returns the new hand-out."""
    write_hub(deployment.folder, deployment.teams, deployment.settings, deployment.setup)
    return write_handout(deployment.folder, deployment.teams, deployment.tokens, deployment.settings)
