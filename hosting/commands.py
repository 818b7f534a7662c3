"""The instructor's commands: start a class, look at it, end it, and help one team."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hosting.deployment import Deployment
from hosting.engine import LOG, Engine
from hosting.files import HOME, PORT, PYTHON, name_container
from hosting.guard import REMEDY, can_guard, start_guard, stop_guard
from hosting.handout import write_handout
from hosting.limits import describe_limits, forget_shares
from hosting.settings import Settings, save_settings
from hosting.teams import Team
from lab_common import LabError, checkout
from lab_common.text import clean_name

START_SECONDS = 180.0
LOG_LINES = 40
# Of an answer through the front, which may be a team's own.
PAGE_SECONDS, LONGEST_PAGE = 5.0, 1 << 16
# Asked in a team's container: whether JupyterLab answers there.
ALIVE = f"""
import os, urllib.request
urllib.request.urlopen("http://127.0.0.1:{PORT}" + os.environ["LAB_BASE_URL"] + "api", timeout=5)
"""


def build(engine: Engine, settings: Settings, *, base: str = "", torch: str = "") -> None:
    """Builds the teams' image from this checkout.

    Args:
        engine: The engine that builds.
        settings: The deployment's settings, which name the image.
        base: The image to build on; the Dockerfile's own by default.
        torch: ``cpu`` takes PyTorch's smaller builds without CUDA.
    """
    arguments = [f"--build-arg={name}={value}" for name, value in (("BASE", base), ("TORCH", torch)) if value]
    engine.run("build", "-f", "hosting/Dockerfile", "-t", settings.image, *arguments, ".", cwd=checkout())


def up(deployment: Deployment, *, say: Callable[[str], None] = print, seconds: float = START_SECONDS) -> Path:
    """Starts what does not run yet, waits until every team's JupyterLab answers, and writes the hand-out.

    Containers that are up to date are left alone: a team at work does not notice.

    Raises:
        LabError: The port is taken, Compose failed, or a team's JupyterLab does not answer in time.
    """
    deployment = prepare(deployment, say)
    settings = deployment.settings
    deployment.engine.run_compose(deployment.write(), "up", "-d", *deployment.engine.orphans)
    _end_orphans(deployment)
    guard(deployment)
    end = time.monotonic() + seconds
    for team in deployment.teams:
        _wait_for(deployment, team, f"JupyterLab of team {team.name} does not answer.", end, *PYTHON, ALIVE)
        if settings.nodes > 1:
            reach = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "node1", "true")
            _wait_for(deployment, team, f"node0 of team {team.name} does not reach its node1.", end, *reach)
    wait_for_front(deployment, end)
    sheet = write_handout(deployment.folder, deployment.teams, deployment.tokens, settings)
    say(f"{len(deployment.teams)} teams are up at {settings.url}/; hand out: {sheet}")
    return sheet


def _wait_for(deployment: Deployment, team: Team, what: str, end: float, *command: str) -> None:
    """Repeats a command in a team's container until it succeeds or time runs out."""
    while (answer := deployment.ask(team, *command, timeout=20))[0]:
        if time.monotonic() > end:
            container = name_container(deployment.settings, team, 0)
            cause = clean_name(answer[1].splitlines()[-1], 300) if answer[1] else "it is still starting"
            fix = f"python3 -m hosting logs {container}"
            raise LabError(what, where=container, cause=cause, fix=fix, log=deployment.engine.folder / LOG)
        time.sleep(0.5)


def wait_for_front(deployment: Deployment, end: float) -> None:
    """Waits until the first team's JupyterLab, or the hub, answers through the front.

    Raises:
        LabError: It is later than ``end``, in seconds of the monotonic clock.
    """
    while not is_served(deployment.settings, deployment.teams[0]):
        if time.monotonic() > end:
            fix = f"python3 -m hosting logs {deployment.settings.project}-front"
            raise LabError("The front does not answer.", where=deployment.settings.url, cause="see its log", fix=fix)
        time.sleep(0.5)


def prepare(deployment: Deployment, say: Callable[[str], None]) -> Deployment:
    """Prepares both variants: ends the other one, checks port and image, and finds out what can be guarded.

    Returns:
        The deployment, whose settings say whether the teams' containers can be kept from the cloud's metadata.

    Raises:
        LabError: The port is taken, or the image cannot be built.
    """
    settings = deployment.settings
    names = _list_composed(deployment)
    if names and (f"{settings.project}-hub" in names) != settings.hub:
        # The variants share the front's name and the teams' volumes.
        deployment.engine.ask("stop", *names, timeout=120)
        deployment.engine.ask("rm", "-f", *names, timeout=120)
        end_spawned(deployment)
    running = deployment.engine.ask("inspect", "-f", "{{.State.Running}}", f"{settings.project}-front")
    if running.stdout.strip() != "true":
        _check_port(settings)
    if not deployment.engine.has_image(settings.image):
        say(f"building {settings.image}; the first time takes some minutes (log: {deployment.engine.folder / LOG})")
        build(deployment.engine, settings)
    deployment = replace(deployment, settings=replace(settings, guarded=can_guard(deployment.engine, settings)))
    save_settings(deployment.settings, deployment.folder)
    for line in describe_bounds(deployment):
        say(line)
    return deployment


def guard(deployment: Deployment) -> None:
    """Starts the guard for the teams' networks, which exist by now, or ends it if it can do nothing."""
    if deployment.settings.guarded:
        start_guard(deployment.engine, deployment.settings, deployment.teams, image_id=deployment.image_id)
    else:
        stop_guard(deployment.engine, deployment.settings)


def describe_bounds(deployment: Deployment, fault: Sequence[str] = ()) -> list[str]:
    """Describes the teams' limits, in lines for a terminal.

    Args:
        deployment: Of these teams.
        fault: What is wrong with the guard, in place of what it does.
    """
    lines = describe_limits(deployment.shares, deployment.machine)
    if fault:
        return [*lines, *fault]
    if deployment.settings.guarded:
        return [*lines, "the cloud's metadata service: kept from the teams"]
    return [*lines, f"the cloud's metadata service: NOT kept from the teams, this engine may not; {REMEDY}"]


def _list_composed(deployment: Deployment) -> list[str]:
    """Lists the containers that Compose has made for this deployment."""
    label = f"label=com.docker.compose.project={deployment.settings.project}"
    return deployment.engine.ask("ps", "-a", "--filter", label, "--format", "{{.Names}}").stdout.split()


def _end_orphans(deployment: Deployment) -> None:
    """Ends the containers of teams that have left, if Compose did not."""
    if deployment.engine.orphans:
        return
    settings = deployment.settings
    ours = {name_container(settings, team, node) for team in deployment.teams for node in range(settings.nodes)}
    if left := sorted(set(_list_composed(deployment)) - ours - {f"{settings.project}-front"}):
        deployment.engine.ask("rm", "-f", *left, timeout=120)


def end_spawned(deployment: Deployment) -> None:
    """Ends the containers that a hub has started: Compose does not know of them."""
    label = f"label=labs.hub={deployment.settings.project}"
    if names := deployment.engine.ask("ps", "-a", "-q", "--filter", label).stdout.split():
        deployment.engine.ask("stop", *names, timeout=120)
        # The engine removes them, too, but some time after they have ended; until then their names are taken.
        deployment.engine.ask("rm", "-f", *names, timeout=120)


def _check_port(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.bind, settings.port))
        except PermissionError:
            return  # the engine may be allowed what this user is not
        except OSError as error:
            where = f"{settings.bind}, port {settings.port}"
            fix = f"end what listens there (ss -ltnp 'sport = :{settings.port}'), or --port with another"
            raise LabError("The front cannot listen.", where=where, cause=error.strerror or "", fix=fix) from error


def is_served(settings: Settings, team: Team) -> bool:
    """Returns True if a team's JupyterLab answers through the front. Sends no token, so checks no certificate."""
    url = f"{settings.url}/hub/" if settings.hub else settings.find_url(team.name)
    scheme, _, rest = url.partition("://")
    host, _, path = f"{rest}api".partition("/")
    try:
        request = f"GET /{path} HTTP/1.0\r\nHost: {host}\r\nAccept: */*\r\n\r\n"
        page = _read_page(settings, request, name=host.partition(":")[0] if scheme == "https" else "")
        head, _, body = page.partition(b"\r\n\r\n")
        answer = json.loads(body) if re.match(rb"HTTP/1\.\d 200 ", head) else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and "version" in answer


def _read_page(settings: Settings, request: str, *, name: str) -> bytes:
    """Reads the front's answer, up to ``LONGEST_PAGE`` bytes and for ``PAGE_SECONDS``; follows no redirection.

    The team controls the answer: it may be of any length, arrive byte by byte, or redirect elsewhere.

    Args:
        settings: Of the deployment.
        request: The complete request.
        name: Host name for TLS; "" without TLS.

    Raises:
        OSError: The front does not answer, or not in time.
    """
    end, page = time.monotonic() + PAGE_SECONDS, b""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.create_connection((host, settings.port), timeout=PAGE_SECONDS))
        if name:
            unchecked = ssl._create_unverified_context()
            link = stack.enter_context(unchecked.wrap_socket(link, server_hostname=name))
        link.sendall(request.encode())
        while len(page) < LONGEST_PAGE:
            link.settimeout(max(0.01, end - time.monotonic()))
            part = link.recv(LONGEST_PAGE)
            if not part:
                break
            page += part
            if time.monotonic() > end:
                raise TimeoutError
    return page


def down(deployment: Deployment) -> None:
    """Ends all containers and networks; what the teams saved stays in their volumes."""
    deployment.engine.run_compose(deployment.write(), "down", "--remove-orphans")
    end_bounds(deployment)


def end_bounds(deployment: Deployment) -> None:
    """Ends the guard and forgets the teams' shares, once their containers are gone."""
    stop_guard(deployment.engine, deployment.settings)
    save_settings(replace(deployment.settings, guarded=False), deployment.folder)
    forget_shares(deployment.folder)


def rotate(deployment: Deployment, team: Team) -> Path:
    """Restarts a team's JupyterLab with the new token that ``read_deployment`` made; returns the new hand-out.

    This ends its kernels and its processes on the other node, which shuts out anybody with the old token.
    """
    engine, others = deployment.engine, range(1, deployment.settings.nodes)
    names = [name_container(deployment.settings, team, node) for node in others]
    # Ended first: a program there can enter the new container by the nodes' own keys.
    for name in names:
        engine.run("stop", "-t", "2", name)
    engine.run_compose(deployment.write(), "up", "-d", f"{team.name}-node0")
    for name in names:
        engine.run("start", name)
    return write_handout(deployment.folder, deployment.teams, deployment.tokens, deployment.settings)


def reset(deployment: Deployment, team: Team) -> str:
    """Gives a team a fresh copy of the labs, and returns where the old one is kept in its volume.

    Raises:
        LabError: The team's container does not run.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    kept = f"{HOME}/work/labs-{stamp}"
    move = f"mv {HOME}/work/labs {kept} && python -I -m course.workspace --workspace {HOME}/work/labs"
    status, said = deployment.ask(team, "sh", "-c", move, timeout=120)
    if status:
        raise LabError(
            f"The labs of team {team.name} were not reset.",
            where=kept,
            cause=clean_name(said[-300:]),
            fix="python3 -m hosting status",
        )
    return kept


def read_logs(deployment: Deployment, container: str) -> str:
    """Returns the latest output of a container of the deployment; a team controls what is printed there.

    Raises:
        LabError: There is no such container.
    """
    asked = None
    for lines in (LOG_LINES, 4, 1) if _is_ours(deployment, container) else ():
        asked = deployment.engine.ask("logs", "--tail", str(lines), container)
        if asked.returncode >= 0:  # below: its lines are longer than what is read
            break
    if not asked or asked.returncode:
        known = ", ".join(name_container(deployment.settings, team, 0) for team in deployment.teams)
        cause = clean_name(asked.stderr.strip()[-300:]) if asked else "a typing error"
        raise LabError(f"There is no log of {ascii(container)[:60]}.", cause=cause, fix=f"one of: {known}")
    return (asked.stdout + asked.stderr).rstrip()


def _is_ours(deployment: Deployment, container: str) -> bool:
    return bool(re.fullmatch(rf"{deployment.settings.project}-[a-z0-9-]+", container))


def restart(deployment: Deployment, team: Team) -> None:
    """Restarts a team's containers, as one would a computer that hangs; its files stay."""
    for node in range(deployment.settings.nodes):
        deployment.engine.run("restart", name_container(deployment.settings, team, node))
