"""The command line of an instructor: ``python3 -m hosting up hosting/teams.csv``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path

from hosting import commands
from hosting.collect import collect
from hosting.commands import say
from hosting.deployment import merge_settings, read_deployment
from hosting.engine import find_engine
from hosting.settings import Settings, load_settings, read_cpus, read_host, read_size
from hosting.status import read_status, show_status
from lab_common import checkout, read_path
from lab_common.commandline import run_command
from lab_common.files import hold_folder

# One of these at a time.
CHANGES = ("up", "build", "down", "rotate", "reset", "restart")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m hosting", description="Host the labs for teams (hosting/README.md)."
    )
    state = read_path(os.environ.get("LAB_HOSTING") or checkout() / "hosting" / "state")
    parser.add_argument("--state", type=read_path, default=state, help="folder of tokens and files (hosting/state)")
    parser.add_argument("--engine", default="", choices=["docker", "podman"], help="where both are there")
    todo = parser.add_subparsers(dest="command", required=True)

    up = todo.add_parser("up", help="start the class, or change it to what teams.csv says now")
    up.add_argument("teams", nargs="?", help="the list of teams (hosting/teams.csv)")
    up.add_argument("--address", type=read_host, help="host name of the URLs (localhost)")
    up.add_argument("--port", type=int, help="port of the URLs (8443)")
    up.add_argument("--bind", type=ip_address, help="address to listen on (127.0.0.1); 0.0.0.0 for learners elsewhere")
    up.add_argument(
        "--tls", help="auto (Let's Encrypt), internal, none, or a folder with cert.pem and key.pem (internal)"
    )
    up.add_argument("--nodes", type=int, choices=[1, 2], help="containers per team (2)")
    up.add_argument("--data", help="folder with data sets, read-only for all teams")
    up.add_argument("--memory", type=read_size, help="memory of each team (auto: the machine's, divided by the teams)")
    up.add_argument("--cpus", type=read_cpus, help="CPUs of each team (auto: the machine's, divided by the teams)")
    up.add_argument("--shm", type=read_size, help="/dev/shm of each container (auto: half of its memory, at most 16gb)")
    up.add_argument("--image", help="the teams' image")
    up.add_argument("--front", help="the image with Caddy")
    up.add_argument("--project", help="what all names begin with (labs)")
    up.add_argument(
        "--subdomains", action=argparse.BooleanOptionalAction, help="a host name for each team: red.labs.example.org"
    )
    up.add_argument("--share-gpus", action=argparse.BooleanOptionalAction, help="let two teams have one GPU")
    up.add_argument(
        "--hub", action=argparse.BooleanOptionalAction, help="with accounts: JupyterHub (hosting/hub/README.md)"
    )

    build = todo.add_parser("build", help="rebuild the teams' image from this checkout")
    build.add_argument("--base", default="", help="the image to build on")
    build.add_argument("--torch", default="", choices=["cpu"], help="cpu: PyTorch's builds without CUDA")
    build.add_argument("--image", help="its name")

    todo.add_parser("status", help="how each team stands")
    logs = todo.add_parser("logs", help="what a container has printed lately")
    logs.add_argument("container", help="its name, such as labs-red-node0 or labs-front")
    todo.add_parser("down", help="end all containers; the teams' work stays")
    fetch = todo.add_parser("collect", help="fetch every team's report and work")
    fetch.add_argument("--into", type=read_path, default=Path("collected"), help="folder (collected)")
    for name, words in (
        ("rotate", "give a team a new token; its kernels end"),
        ("reset", "give a team a fresh copy of the labs; the old one is kept"),
        ("restart", "restart a team's containers"),
    ):
        todo.add_parser(name, help=words).add_argument("team")
    return parser.parse_args(arguments)


def run(chosen: argparse.Namespace) -> None:
    """Does what the command line says."""
    folder, held = chosen.state.resolve(), contextlib.nullcontext()
    if chosen.command in CHANGES:
        # Two would write each other's tokens.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = hold_folder(folder, "Another command is changing this class")
    with held:
        _run(chosen, folder)


def _run(chosen: argparse.Namespace, folder: Path) -> None:
    engine = chosen.engine
    if chosen.command in ("up", "build"):
        given = {field.name: getattr(chosen, field.name, None) for field in fields(Settings)}
        settings = merge_settings(folder, given)
        if chosen.command == "build":
            return commands.build(find_engine(folder, wanted=engine), settings, base=chosen.base, torch=chosen.torch)
        commands.up(read_deployment(folder, settings, engine=engine))
        return None
    # A class whose data or GPUs are gone can be looked at, collected and ended; a new token starts a container.
    renew = chosen.team if chosen.command == "rotate" else ""
    deployment = read_deployment(folder, load_settings(folder), engine=engine, renew=renew, starts=bool(renew))
    team = deployment.find(chosen.team) if "team" in chosen else None
    if chosen.command == "status":
        say("\n".join([show_status(read_status(deployment)), "", *commands.describe_bounds(deployment)]))
    elif chosen.command == "down":
        commands.down(deployment)
        say("all containers have ended; the teams' work stays in their volumes")
    elif chosen.command == "collect":
        say("\n".join(collect(deployment, chosen.into)))
    elif chosen.command == "logs":
        say(commands.read_logs(deployment, chosen.container))
    elif chosen.command == "rotate":
        say(f"team {team.name} has a new token; hand out: {commands.rotate(deployment, team)}")
    elif chosen.command == "reset":
        say(f"fresh labs for team {team.name}; what it had: {commands.reset(deployment, team)}")
    elif chosen.command == "restart":
        commands.restart(deployment, team)
        say(f"team {team.name} has restarted; its files are unchanged")
    return None


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = parse_arguments(arguments)
    return run_command(lambda: run(chosen))


if __name__ == "__main__":
    sys.exit(main())
