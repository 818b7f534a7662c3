"""The instructor's commands: start a class, end it, and help one team."""

from __future__ import annotations

import datetime
import http.client
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from hosting import compose, hub
from hosting.compose import HOME
from hosting.deployment import Deployment
from hosting.engine import Engine
from hosting.guard import can_guard, describe_guard
from hosting.handout import write_handout
from hosting.limits import SHARES, describe_limits
from hosting.settings import Settings, save_settings
from hosting.teams import Team
from lab_common import LabError, checkout
from lab_common.text import clean, clean_name

START_SECONDS = 180.0
LOG_LINES = 40
# For an answer through the front, which may be a team's own. A name that is lost is asked for again after 5 s.
PAGE_SECONDS = 8.0
# Asked on node0.
REACH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "node1", "true")


def build(engine: Engine, settings: Settings, *, base: str = "", torch: str = "") -> None:
    """Builds the teams' image from this checkout, on another base or with PyTorch's builds for ``cpu`` if told."""
    arguments = [f"--build-arg={name}={value}" for name, value in (("BASE", base), ("TORCH", torch)) if value]
    file = str(checkout() / "hosting" / "Dockerfile")
    engine.run("build", "-f", file, "-t", settings.image, *arguments, str(checkout()))


def say(text: str) -> None:
    """Prints what a command has to say. Names and answers of teams are in it, and a terminal must not obey them."""
    print(clean(text), flush=True)


def up(deployment: Deployment) -> Path:
    """Starts what does not run yet, waits until all of it answers, and writes the hand-out.

    Containers that are up to date are left alone: a team at work does not notice. With a hub, a team's first login
    starts its container.

    Raises:
        LabError: The port is taken, Compose failed, or a server does not answer in time.
    """
    deployment = _prepare(deployment)
    settings = deployment.settings
    _run_compose(deployment, "up", "-d", *(["--build"] if settings.hub else []))
    # Compose's own --remove-orphans would end too much, in podman-compose 1.6.
    ours = [name for team in deployment.teams for name in deployment.name_nodes(team)]
    ours += [f"{settings.project}-{name}" for name in ("front", "guard", "hub")]
    _remove(deployment, [name for name in _list_composed(deployment) if name not in ours])
    end = time.monotonic() + START_SECONDS
    for team in deployment.teams:
        while not _answers(deployment, team):
            if time.monotonic() > end:
                what = f"The URL of team {team.name} does not answer, or its node1."
                name = f"{settings.project}-hub" if settings.hub else deployment.name_container(team)
                cause = f"it is still starting, or it or {settings.project}-front has failed"
                fix = f"python3 -m hosting logs {name}"
                raise LabError(what, where=settings.url, cause=cause, fix=fix, log=deployment.engine.log)
            time.sleep(0.5)
    for line in describe_bounds(deployment):
        say(line)
    sheet = write_handout(deployment.folder, deployment.teams, deployment.tokens, settings)
    say(f"{len(deployment.teams)} teams are up at {settings.url}/; hand out: {sheet}")
    return sheet


def _prepare(deployment: Deployment) -> Deployment:
    """Ends the other variant, checks port and image, and finds out whether the metadata can be guarded."""
    settings, engine = deployment.settings, deployment.engine
    names = _list_composed(deployment)
    if names and (f"{settings.project}-hub" in names) != settings.hub:
        # The variants share the front's name and the teams' volumes.
        _remove(deployment, names)
        _end_spawned(deployment)
    running = engine.ask("inspect", "-f", "{{.State.Running}}", f"{settings.project}-front")
    if running.stdout.strip() != "true":
        _check_port(settings)
    if engine.ask("image", "inspect", settings.image).returncode:
        say(f"building {settings.image}; the first time takes some minutes (log: {engine.log})")
        build(engine, settings)
    # What could be guarded once can be until `down`: a guard does not end because the machine is busy.
    settings = replace(settings, guarded=settings.guarded or can_guard(engine, settings))
    save_settings(settings, deployment.folder)
    return replace(deployment, settings=settings)


def _run_compose(deployment: Deployment, *arguments: str) -> None:
    """Writes Compose's files and runs it on them."""
    paths = (hub if deployment.settings.hub else compose).write_files(deployment)
    deployment.engine.run_compose(deployment.settings.project, paths, *arguments)


def _answers(deployment: Deployment, team: Team) -> bool:
    """Returns True if a team's URL answers, and its node0 reaches its node1."""
    if not is_served(deployment.settings, team):
        return False
    node0 = deployment.name_container(team)
    return deployment.settings.nodes == 1 or deployment.run_in(node0, *REACH, timeout=20)[0] == 0


def describe_bounds(deployment: Deployment) -> list[str]:
    """Describes the teams' limits and the guard, in lines for a terminal."""
    limits = describe_limits(deployment.shares, deployment.machine)
    return [*limits, describe_guard(deployment.engine, deployment.settings)]


def _list_composed(deployment: Deployment) -> list[str]:
    """Lists the containers that Compose has made for this deployment."""
    label = f"label=com.docker.compose.project={deployment.settings.project}"
    return deployment.engine.ask("ps", "-a", "--filter", label, "--format", "{{.Names}}").stdout.split()


def _end_spawned(deployment: Deployment) -> None:
    """Ends the containers that a hub has started: Compose does not know of them."""
    label = f"label=labs.hub={deployment.settings.project}"
    _remove(deployment, deployment.engine.ask("ps", "-a", "-q", "--filter", label).stdout.split())


def _remove(deployment: Deployment, names: list[str]) -> None:
    if names:
        deployment.engine.ask("stop", *names, timeout=120)
        # The engine removes some itself, a while after they have ended; until then their names are taken.
        deployment.engine.ask("rm", "-f", *names, timeout=120)


def _check_port(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    try:
        with suppress(PermissionError):  # the engine may be allowed what this user is not
            socket.create_server((settings.bind, settings.port), family=family).close()
    except (OSError, OverflowError) as error:
        where = f"{settings.bind}, port {settings.port}"
        fix = f"end what listens there (ss -ltnp 'sport = :{settings.port}'), or --port with another"
        raise LabError("The front cannot listen.", where=where, cause=str(error), fix=fix) from error


def is_served(settings: Settings, team: Team) -> bool:
    """Returns True if a team's JupyterLab, or the hub, answers through the front within ``PAGE_SECONDS``.

    The team controls the answer: only its status is read. No token is sent, so no certificate is checked.
    """
    url = urlsplit(f"{settings.url}/hub/api" if settings.hub else f"{settings.find_url(team.name)}api")
    secure = partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)
    link = (secure if url.scheme == "https" else http.client.HTTPConnection)(host, settings.port, timeout=PAGE_SECONDS)
    timer = None
    try:
        link.connect()
        # The connection's own limit is for each part of an answer, which may come byte by byte.
        timer = threading.Timer(PAGE_SECONDS, link.sock.shutdown, [socket.SHUT_RDWR])
        timer.start()
        link.request("GET", url.path, headers={"Host": url.netloc})
        answer = link.getresponse()
        answer.read(1 << 16)  # without it, Caddy's log would have an error
        return answer.status == 200
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        if timer:
            timer.cancel()
        link.close()


def down(deployment: Deployment) -> None:
    """Ends all containers and networks; what the teams saved stays in their volumes."""
    _end_spawned(deployment)
    _run_compose(deployment, "down", "--remove-orphans")
    save_settings(replace(deployment.settings, guarded=False), deployment.folder)
    # The next `up` divides the machine again.
    (deployment.folder / SHARES).unlink(missing_ok=True)


def rotate(deployment: Deployment, team: Team) -> Path:
    """Puts a new token into use, which ends whatever runs or is logged in by the old one; returns the new hand-out."""
    if deployment.settings.hub:
        hub.write_files(deployment)
    else:
        first, *others = deployment.name_nodes(team)
        # Ended first: a program there can enter the new container by the nodes' own keys.
        for name in others:
            deployment.engine.run("stop", "-t", "2", name)
        _run_compose(deployment, "up", "-d", first.removeprefix(f"{deployment.settings.project}-"))
        for name in others:
            deployment.engine.run("start", name)
    return write_handout(deployment.folder, deployment.teams, deployment.tokens, deployment.settings)


def reset(deployment: Deployment, team: Team) -> str:
    """Gives a team a fresh copy of the labs, and returns where the old one is kept in its volume.

    Raises:
        LabError: The team's container does not run.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    kept = f"{HOME}/work/labs-{stamp}"
    move = f"mv {HOME}/work/labs {kept} && python -I -m course.workspace --workspace {HOME}/work/labs"
    status, said = deployment.run_in(deployment.name_container(team), "sh", "-c", move, timeout=120)
    if status:
        what, cause = f"The labs of team {team.name} were not reset.", clean_name(said[-300:])
        raise LabError(what, where=kept, cause=cause, fix="python3 -m hosting status")
    return kept


def read_logs(deployment: Deployment, container: str) -> str:
    """Returns the latest output of a container of the deployment; a team controls what is printed there.

    Raises:
        LabError: There is no such container.
    """
    ours = re.fullmatch(rf"{deployment.settings.project}-[a-z0-9-]+", container)
    asked = deployment.engine.ask("logs", "--tail", str(LOG_LINES), container) if ours else None
    if not asked or asked.returncode > 0:
        cause = clean_name(asked.stderr.strip()[-300:]) if asked else "a typing error"
        known = ", ".join(deployment.name_container(team) for team in deployment.teams)
        raise LabError(f"There is no log of {ascii(container)[:60]}.", cause=cause, fix=f"one of: {known}")
    return (asked.stdout + asked.stderr).rstrip()


def restart(deployment: Deployment, team: Team) -> None:
    """Restarts a team's containers, as one would a computer that hangs; its files stay."""
    for name in deployment.name_nodes(team):
        deployment.engine.run("restart", name)
