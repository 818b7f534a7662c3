"""Writes what Compose and Caddy read: one service per team and node, and the front before them.

The files are JSON, which every YAML parser reads. No token is in any of them. A team's container has the token as a
file: podman-compose puts every variable on the command line of podman, which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hosting.engine import Machine
from hosting.limits import FRONT_MEMORY, FRONT_PROCESSES, SMALLEST_SHM, Share, Shares, limit
from hosting.settings import Settings
from hosting.teams import Team
from lab_common.files import write_atomically

BASE, NODES, GPUS, CADDY = "compose.json", "compose.nodes.json", "compose.gpu.json", "Caddyfile"
# The folder of the teams' tokens beside them, and where a container finds its own.
TOKENS, TOKEN = "tokens", "/srv/token"
HOME = "/home/learner"
# Where our own files are in a team's container; the team cannot write there.
LABS = "/srv/labs"
# A program of ours in a team's container: nothing of the team's own folders is imported in place of what it names.
PYTHON = ("python", "-I", "-c")
PORT, FRONT_PORT = 8888, 8443


@dataclass(frozen=True)
class Setup:
    """Decisions for a deployment beyond its settings.

    Attributes:
        tokens: The teams' tokens by their names.
        shares: The resources that each team's containers may use.
        machine: The resources that the engine has, and the limits that it can enforce.
        image_id: Id of the image that the teams' containers are made from. A rebuilt image has the same name, and
            podman-compose looks at the name alone.
        podman: True if Podman runs the containers: its networks reach each other unless they are told not to.
        guarded: True if the guard (hosting/guard.py) can keep the containers from the cloud's metadata.
    """

    tokens: Mapping[str, str]
    shares: Shares
    machine: Machine
    image_id: str = ""
    podman: bool = False
    guarded: bool = False


def write_files(folder: Path, teams: Sequence[Team], settings: Settings, setup: Setup) -> list[Path]:
    """Writes Compose's and Caddy's files; returns those to pass to Compose, in order.

    Args:
        folder: Folder to write to.
        teams: The class's teams.
        settings: The deployment's settings.
        setup: Decisions beyond the settings.
    """
    write_tokens(folder / TOKENS, setup.tokens)
    caddy = make_caddyfile(teams, settings)
    write_changed(folder / CADDY, caddy)
    parts = {BASE: make_base(teams, settings, caddy, setup)}
    if settings.nodes > 1:
        parts[NODES] = make_nodes(teams, settings, setup)
    if any(team.gpus for team in teams):
        parts[GPUS] = make_gpus(teams, settings)
    for name in {NODES, GPUS} - set(parts):
        (folder / name).unlink(missing_ok=True)
    for name, part in parts.items():
        write_changed(folder / name, json.dumps(part, indent=2) + "\n")
    return [folder / name for name in parts]


def name_container(settings: Settings, team: Team, node: int) -> str:
    """Returns the name of one of a team's containers."""
    return f"{settings.project}-{team.name}-node{node}"


def write_tokens(folder: Path, tokens: Mapping[str, str]) -> None:
    """Writes each team's token into its own file.

    The container's user, who differs from the user here, must be able to read it. The folder keeps others out.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():  # Docker makes one where a file that it is to mount is missing
            shutil.rmtree(path)
        elif path.name not in tokens:
            path.unlink()
    for name, token in tokens.items():
        write_changed(folder / name, token)


def make_base(teams: Sequence[Team], settings: Settings, caddy: str, setup: Setup) -> dict:
    """Returns the base file: the front, and for each team a node with JupyterLab on its own network."""
    options = {"driver_opts": {"isolate": "true"}} if setup.podman else {}
    front: dict = {
        "image": settings.front,
        "container_name": f"{settings.project}-front",
        "command": ["caddy", "run", "--config", f"/etc/caddy/{CADDY}", "--adapter", "caddyfile"],
        # One that changes makes Compose start the front anew, which reads the file at its start.
        "labels": {"labs.caddyfile": hashlib.sha256(caddy.encode()).hexdigest()[:16]},
        "ports": [f"{_quote_host(settings.bind)}:{settings.port}:{FRONT_PORT}"],
        "volumes": [f"./{CADDY}:/etc/caddy/{CADDY}:ro", "front-data:/data"],
        "networks": [team.name for team in teams],
        # Caddy's program asks for the first, and does not start without it.
        "cap_drop": ["ALL"],
        "cap_add": ["NET_BIND_SERVICE"],
        "security_opt": ["no-new-privileges"],
        "restart": "always",
    } | limit(Share(FRONT_MEMORY, SMALLEST_SHM, FRONT_PROCESSES, float(len(setup.machine.cpus))), setup.machine)
    if settings.tls not in ("auto", "internal", "none"):
        front["volumes"].append(f"{Path(settings.tls).resolve()}:/certificate:ro")
        # The key is readable for its owner alone, who need not be root.
        front["cap_add"].append("DAC_OVERRIDE")
    return {
        "name": settings.project,
        "services": {"front": front} | {f"{team.name}-node0": _make_lab(team, settings, setup) for team in teams},
        "networks": {team.name: {"name": f"{settings.project}-{team.name}"} | options for team in teams},
        "volumes": {
            "front-data": {"name": f"{settings.project}-front-data"},
            **{f"{team.name}-work": {"name": f"{settings.project}-{team.name}-work"} for team in teams},
        },
    }


def _make_node(team: Team, settings: Settings, node: int, setup: Setup) -> dict:
    """Returns the settings that both nodes of a team have in common."""
    share = setup.shares[team.name][node]
    made: dict = {
        "image": settings.image,
        "container_name": name_container(settings, team, node),
        "labels": {"labs.image": setup.image_id},
        "hostname": f"node{node}",
        "environment": {"LAB_TEAM": team.name} | make_environment(share, nodes=settings.nodes, guarded=setup.guarded),
        "networks": {team.name: {"aliases": [f"node{node}"]}},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart": "always",
    } | limit(share, setup.machine)
    if settings.data:
        made["volumes"] = [f"{Path(settings.data).resolve()}:/srv/data:ro"]
    return made


def make_environment(share: Share, *, nodes: int = 1, guarded: bool) -> dict[str, str]:
    """Returns the variables that tell a container its share, and whether to wait for the guard.

    A team's nodes have the same CPUs, so a job on all of them takes a part of the threads on each: threads that wait
    for each other on too few CPUs are many times slower than one.
    """
    # JupyterLab shows the memory beside its limit.
    told = {"MEM_LIMIT": str(share.memory)} | ({"LAB_GUARDED": "1"} if guarded else {})
    threads = str(max(1, int(share.cpus) // nodes))
    if nodes > 1:
        told["LAB_NODE_THREADS"] = threads
    # PyTorch starts a thread for each CPU that it sees; here it sees more than it may use. The launcher hands it on.
    return told if share.cpuset else told | {"OMP_NUM_THREADS": threads}


def _make_lab(team: Team, settings: Settings, setup: Setup) -> dict:
    lab = _make_node(team, settings, 0, setup)
    lab["command"] = ["lab"]
    lab["volumes"] = [f"{team.name}-work:{HOME}/work", f"./{TOKENS}/{team.name}:{TOKEN}:ro", *lab.get("volumes", [])]
    lab["environment"] |= {"JUPYTER_TOKEN_FILE": TOKEN, "LAB_BASE_URL": f"/{team.name}/"}
    # Another token makes Compose start the container anew.
    lab["labels"]["labs.token"] = hashlib.sha256(setup.tokens[team.name].encode()).hexdigest()[:16]
    return lab


def make_nodes(teams: Sequence[Team], settings: Settings, setup: Setup) -> dict:
    """Returns the overlay that gives each team a second node, and both nodes the keys they make for each other."""
    services = {}
    # The data sets are in both nodes: nothing of them has to be copied.
    usual = {"LAB_NODES": "node0,node1", "LAB_NODES_DATA": "/srv/data"}
    for team in teams:
        keys = f"{team.name}-keys:/srv/keys"
        services[f"{team.name}-node0"] = {"environment": usual, "volumes": [keys]}
        other = _make_node(team, settings, 1, setup)
        services[f"{team.name}-node1"] = other | {"command": ["node"], "volumes": [keys, *other.get("volumes", [])]}
    volumes = {f"{team.name}-keys": {"name": f"{settings.project}-{team.name}-keys"} for team in teams}
    return {"services": services, "volumes": volumes}


def make_gpus(teams: Sequence[Team], settings: Settings) -> dict:
    """Returns the overlay that gives each team its GPUs: ``node0`` all of them, ``node1`` the second half.

    With one process per node, as in lab 5, the nodes then train on different GPUs, and lab 4 has all of them on one.
    ``device_ids`` is what isolates: CUDA_VISIBLE_DEVICES can be unset by anybody, and without either a container gets
    every GPU of the machine.
    """
    services = {}
    for team in teams:
        halves = {0: team.gpus, 1: team.gpus[len(team.gpus) // 2 :]}
        for node in range(settings.nodes):
            if not halves[node]:
                continue
            device = {"driver": "nvidia", "device_ids": list(halves[node]), "capabilities": ["gpu"]}
            services[f"{team.name}-node{node}"] = {
                "deploy": {"resources": {"reservations": {"devices": [device]}}},
                # NVIDIA's advice for its containers: pinned memory, and deep stacks.
                "ulimits": {"memlock": {"soft": -1, "hard": -1}, "stack": {"soft": 67108864, "hard": 67108864}},
            }
    return {"services": services}


def make_caddyfile(teams: Sequence[Team], settings: Settings) -> str:
    """Returns the front's Caddyfile: TLS, and each team's path to its JupyterLab; other paths and hosts fail."""
    # Port 80 is closed: asked for proof there, Caddy loses time and one of the authority's few attempts.
    auto = "\ttls {\n\t\tissuer acme {\n\t\t\tdisable_http_challenge\n\t\t}\n\t}\n"
    tls = {"auto": auto, "internal": "\ttls internal\n", "none": ""}.get(
        settings.tls, "\ttls /certificate/cert.pem /certificate/key.pem\n"
    )
    scheme, other = ("http", "https") if settings.tls == "none" else ("https", "http")
    routes = {
        team.name: f"\tredir /{team.name} /{team.name}/\n"
        f"\thandle /{team.name}/* {{\n\t\treverse_proxy {team.name}-node0:{PORT}\n\t}}\n"
        for team in teams
    }
    if settings.subdomains:
        sites = {settings.address: ""} | {f"{name}.{settings.address}": route for name, route in routes.items()}
    else:
        sites = {settings.address: "".join(routes.values())}
    # The address of a page with a token in it must not be told to other sites.
    headers = '\theader Referrer-Policy same-origin\n\theader Strict-Transport-Security "max-age=86400"\n'
    return (
        "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n\tstorage file_system /data\n"
        # Both inside the container; only the first is published, as the port of the URLs.
        f"\t{scheme}_port {FRONT_PORT}\n\t{other}_port 8080\n"
        # A computer that calls the front by its address sends no name.
        f"\tdefault_sni {settings.address}\n}}\n"
        + "".join(f"{scheme}://{host} {{\n{tls}{headers}{route}\trespond 404\n}}\n" for host, route in sites.items())
    )


def _quote_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def write_changed(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a file if its text or permissions differ; otherwise leaves it alone."""
    with suppress(OSError):
        if path.read_text(encoding="utf-8") == text and path.stat().st_mode & 0o777 == mode:
            return
    with write_atomically(path, mode=mode) as file:
        file.write(text.encode())
