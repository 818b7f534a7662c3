"""Status of the teams of a class: containers, GPUs, disk, and which labs are done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hosting.commands import is_served
from hosting.deployment import Deployment
from hosting.files import HOME, PYTHON
from hosting.guard import is_guarded
from hosting.teams import Team
from lab_common.nvidia import query_smi

# Asked in a team's container. What is solved is what the team's own pack has kept.
ASK = f"""
import importlib, json, shutil, subprocess
from course import check
from course.check.attempts import read_standings
standings, labs = read_standings(), []
for lab in check.LABS:
    exercises = importlib.import_module("course.exercises.lab%d" % lab).EXERCISES
    labs.append([sum(number in standings and standings[number].solved for number in exercises), len(exercises)])
used = subprocess.run(["du", "-sb", "{HOME}/work"], capture_output=True, text=True).stdout.split()[0]
print(json.dumps({{"used": int(used), "free": shutil.disk_usage("{HOME}/work").free, "labs": labs}}))
"""
# Where an answer breaks these, its team made it: no container has so much.
MOST_LABS, MOST_EXERCISES, MOST_BYTES = 100, 1000, 10**15
ODD = "odd answer"
# Teams that are asked at a time. One that does not answer holds up the others no longer than itself.
AT_A_TIME = 8
QUERY = "gpu=index,uuid,utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class Standing:
    """Status of one team.

    Attributes:
        team: The team.
        nodes: The state of each of its containers, as the engine names it, such as ``running``.
        answers: True if its JupyterLab answers at its URL.
        gpus: A line per GPU; empty if ``nvidia-smi`` finds none.
        used: Bytes in its work volume; None if its container does not answer.
        free: Free bytes on the volume's disk.
        labs: For each lab, how many of its exercises are solved, and of how many.
        fault: What is wrong with its container's answer.
    """

    team: Team
    nodes: tuple[str, ...]
    answers: bool
    gpus: tuple[str, ...] = ()
    used: int | None = None
    free: int | None = None
    labs: tuple[tuple[int, int], ...] = ()
    fault: str = ""


def read_status(deployment: Deployment) -> list[Standing]:
    """Asks every team's containers for their status."""
    devices = read_gpus()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda team: _read_team(deployment, team, devices), deployment.teams))


def _read_team(deployment: Deployment, team: Team, devices: dict[str, str]) -> Standing:
    states = []
    for node in range(deployment.settings.nodes):
        name = f"{deployment.settings.project}-{team.name}-node{node}"
        asked = deployment.engine.ask("inspect", "-f", "{{.State.Status}}", name)
        states.append(asked.stdout.strip() if asked.returncode == 0 else "absent")
    gpus = tuple(devices[gpu] for gpu in team.gpus if gpu in devices)
    standing = Standing(team, tuple(states), is_served(deployment.settings, team), gpus)
    status, said = deployment.ask(team, *PYTHON, ASK)
    if status:
        return replace(standing, fault=ODD) if status < 0 else standing
    try:
        used, free, labs = parse_facts(said)
    except (ValueError, TypeError, KeyError, RecursionError):
        return replace(standing, fault=ODD)
    return replace(standing, used=used, free=free, labs=labs)


def parse_facts(said: str) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Returns a team's container's answer: used bytes, free bytes, and solved exercises of each lab.

    The team can make its container answer anything.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The answer is not what ``ASK`` prints.
    """
    facts = json.loads(said.splitlines()[-1] if said else "")
    labs = [(_check_count(solved, of), _check_count(of, MOST_EXERCISES)) for solved, of in facts["labs"]]
    if len(labs) > MOST_LABS:
        raise ValueError("more labs than there are")
    return _check_count(facts["used"], MOST_BYTES), _check_count(facts["free"], MOST_BYTES), tuple(labs)


def _check_count(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("not a count")
    return value


def check_guard(deployment: Deployment) -> list[str]:
    """Describes what is wrong with the guard, in a line for a terminal; empty if it runs, or cannot."""
    if not deployment.settings.guarded or is_guarded(deployment.engine, deployment.settings):
        return []
    return ["The guard does NOT run: the teams' containers can reach the cloud's metadata. fix: python3 -m hosting up"]


def read_gpus() -> dict[str, str]:
    """Returns how busy each GPU is, in words, by index and by UUID; empty if ``nvidia-smi`` finds none."""
    try:
        rows = query_smi(QUERY)
    except OSError:
        return {}
    states = {}
    for index, uuid, busy, used, total in rows:
        states[index] = states[uuid] = f"GPU {index}: {busy} %, {used} of {total} MiB"
    return states


def show_status(standings: Sequence[Standing]) -> str:
    """Returns a table for a terminal, a line per team."""
    rows = [("team", "containers", "URL answers", "work", "labs solved", "GPUs")]
    for one in standings:
        labs = " ".join(f"{number}:{solved}/{of}" for number, (solved, of) in enumerate(one.labs) if solved)
        work = (one.fault or "?") if one.used is None else f"{one.used / 1e6:.0f} MB ({one.free / 1e9:.0f} GB free)"
        gpus = "; ".join(one.gpus) or (f"{', '.join(one.team.gpus)} (no nvidia-smi)" if one.team.gpus else "none")
        alive = "yes" if one.answers else "NO"
        rows.append((one.team.name, " ".join(one.nodes), alive, work, labs or "none yet", gpus))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
