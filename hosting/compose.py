"""Writes what Compose and Caddy read: one service per team and node, and the front before them.

The files are JSON, which every YAML parser reads. No token is in any of them. A team's container has the token as a
file: podman-compose puts every variable on the command line of podman, which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosting.deployment import Deployment
from hosting.guard import make_guard
from hosting.limits import GIB, SMALLEST_SHM, Share, limit
from hosting.settings import TLS, Settings, write_text
from hosting.teams import Team

COMPOSE, CADDY = "compose.json", "Caddyfile"
# The folder of the teams' tokens beside them, and where a container finds its own.
TOKENS, TOKEN = "tokens", "/srv/token"
HOME = "/home/learner"
PORT, FRONT_PORT = 8888, 8443
# NVIDIA's advice for its containers: pinned memory, and deep stacks.
GPU_ULIMITS = {"memlock": {"soft": -1, "hard": -1}, "stack": {"soft": 67108864, "hard": 67108864}}
FRONT_SHARE = {"memory": GIB // 4, "shm": SMALLEST_SHM, "processes": 512}


def write_files(deployment: Deployment) -> list[Path]:
    """Writes Compose's, Caddy's and the tokens' files; returns those to pass to Compose."""
    folder = deployment.folder
    write_tokens(folder / TOKENS, deployment.tokens)
    caddy = make_caddyfile(deployment.teams, deployment.settings)
    write_text(folder / CADDY, caddy)
    write_text(folder / COMPOSE, json.dumps(make_compose(deployment, caddy), indent=2) + "\n")
    return [folder / COMPOSE]


def write_tokens(folder: Path, tokens: Mapping[str, str]) -> None:
    """Writes each team's token into its own file, and removes those of teams that have left.

    The container's user, who differs from the user here, must be able to read it. The folder keeps others out.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in tokens:
            path.unlink()
    for name, token in tokens.items():
        write_text(folder / name, token)


def make_compose(deployment: Deployment, caddy: str) -> dict:
    """Returns Compose's file: the front, the guard, and for each team its nodes on its own network."""
    settings, teams = deployment.settings, deployment.teams
    # The image's name stays the same when it is rebuilt, and podman-compose looks at the name alone.
    image_id = deployment.engine.ask("image", "inspect", "-f", "{{.Id}}", settings.image).stdout.strip()
    services = {"front": make_front(deployment, caddy)}
    if settings.guarded:
        services["guard"] = make_guard(settings, image_id)
    volumes = {"front-data": {"name": f"{settings.project}-front-data"}}
    for team in teams:
        volumes |= {f"{team.name}-work": {"name": f"{settings.project}-{team.name}-work"}}
        services[f"{team.name}-node0"] = _make_lab(deployment, team, image_id)
        if settings.nodes > 1:
            volumes |= {f"{team.name}-keys": {"name": f"{settings.project}-{team.name}-keys"}}
            services[f"{team.name}-node1"] = _make_node(deployment, team, 1, image_id) | {"command": ["node"]}
    return {"name": settings.project, "services": services, "networks": make_networks(deployment), "volumes": volumes}


def make_front(deployment: Deployment, caddy: str) -> dict:
    """Returns the front's service: the only one with a published port."""
    settings, machine = deployment.settings, deployment.machine
    bind = f"[{settings.bind}]" if ":" in settings.bind else settings.bind
    front: dict = {
        "image": settings.front,
        "container_name": f"{settings.project}-front",
        "command": ["caddy", "run", "--config", f"/etc/caddy/{CADDY}", "--adapter", "caddyfile"],
        # One that changes makes Compose start the front anew, which reads the file at its start.
        "labels": {"labs.caddyfile": make_mark(caddy)},
        "ports": [f"{bind}:{settings.port}:{FRONT_PORT}"],
        "volumes": [f"./{CADDY}:/etc/caddy/{CADDY}:ro", "front-data:/data"],
        "networks": [team.name for team in deployment.teams],
        # Caddy's program asks for the first, and does not start without it.
        "cap_drop": ["ALL"],
        "cap_add": ["NET_BIND_SERVICE"],
        "security_opt": ["no-new-privileges"],
        "restart": "always",
    } | limit(Share(**FRONT_SHARE, cpus=len(machine.cpus)), machine)
    if settings.tls not in TLS:
        front["volumes"].append(f"{settings.tls}:/certificate:ro")
        # The key is readable for its owner alone, who need not be root.
        front["cap_add"].append("DAC_OVERRIDE")
    return front


def make_networks(deployment: Deployment) -> dict:
    """Returns a network for each team; those of Podman reach each other unless they are told not to."""
    options = {"driver_opts": {"isolate": "true"}} if deployment.engine.podman else {}
    return {team.name: {"name": f"{deployment.settings.project}-{team.name}"} | options for team in deployment.teams}


def make_mark(text: str) -> str:
    """Returns a label's value that differs if the text does: Compose then starts the container anew."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make_node(deployment: Deployment, team: Team, node: int, image_id: str) -> dict:
    """Returns the settings that both nodes of a team have in common."""
    settings, share = deployment.settings, deployment.shares[team.name][node]
    made: dict = {
        "image": settings.image,
        "container_name": deployment.name_container(team, node),
        "labels": {"labs.image": image_id},
        "hostname": f"node{node}",
        "environment": make_environment(settings, team, share),
        "networks": {team.name: {"aliases": [f"node{node}"]}},
        "volumes": [f"{settings.data}:/srv/data:ro"] if settings.data else [],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart": "always",
    } | limit(share, deployment.machine)
    if settings.nodes > 1:
        # For the keys that both nodes make for each other.
        made["volumes"].append(f"{team.name}-keys:/srv/keys")
    # With one process per node, as in lab 5, the nodes train on different GPUs, and lab 4 has all of them on node0. The
    # ids isolate: anybody can unset CUDA_VISIBLE_DEVICES, and without either a container gets every GPU of the machine.
    gpus = team.gpus[len(team.gpus) // 2 :] if node else team.gpus
    if gpus:
        device = {"driver": "nvidia", "device_ids": list(gpus), "capabilities": ["gpu"]}
        made |= {"deploy": {"resources": {"reservations": {"devices": [device]}}}, "ulimits": GPU_ULIMITS}
    return made


def make_environment(settings: Settings, team: Team, share: Share) -> dict[str, str]:
    """Returns the variables that tell a container its team, its share, and whether to wait for the guard.

    A team's nodes have the same CPUs, so a job on all of them takes a part of the threads on each: threads that wait
    for each other on too few CPUs are many times slower than one.
    """
    # JupyterLab shows the memory beside its limit.
    told = {"LAB_TEAM": team.name, "MEM_LIMIT": str(share.memory)} | ({"LAB_GUARDED": "1"} if settings.guarded else {})
    threads = str(max(1, int(share.cpus) // settings.nodes))
    if settings.nodes > 1:
        told["LAB_NODE_THREADS"] = threads
    # PyTorch starts a thread for each CPU that it sees; here it sees more than it may use. The launcher hands it on.
    return told if share.cpuset else told | {"OMP_NUM_THREADS": threads}


def _make_lab(deployment: Deployment, team: Team, image_id: str) -> dict:
    """Returns node0, which runs JupyterLab."""
    lab = _make_node(deployment, team, 0, image_id)
    lab["command"] = ["lab"]
    lab["volumes"] += [f"{team.name}-work:{HOME}/work", f"./{TOKENS}/{team.name}:{TOKEN}:ro"]
    lab["environment"] |= {"JUPYTER_TOKEN_FILE": TOKEN, "LAB_BASE_URL": f"/{team.name}/"}
    if deployment.settings.nodes > 1:
        # The data sets are in both nodes: nothing of them has to be copied.
        lab["environment"] |= {"LAB_NODES": "node0,node1", "LAB_NODES_DATA": "/srv/data"}
    lab["labels"]["labs.token"] = make_mark(deployment.tokens[team.name])
    return lab


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
