"""Status of the teams of a class: containers, disk, and which labs are done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from hosting.commands import is_served
from hosting.compose import HOME
from hosting.deployment import Deployment
from hosting.teams import Team

# Asked in a team's container. What is solved is what the team's own pack has kept.
ASK = f"""
import json, shutil, subprocess
from course import check
from course.check.attempts import read_standings
from course.check.hints import SECOND_HINTS
standings, labs = read_standings(), [[n for n in SECOND_HINTS if n.split(".")[0] == str(lab)] for lab in check.LABS]
labs = [[sum(n in standings and standings[n].solved for n in numbers), len(numbers)] for numbers in labs]
used = subprocess.run(["du", "-sb", "{HOME}/work"], capture_output=True, text=True).stdout.split()[0]
print(json.dumps({{"used": int(used), "free": shutil.disk_usage("{HOME}/work").free, "labs": labs}}))
"""
# Where an answer breaks these, its team made it: no container has so much.
MOST_LABS, MOST, ODD = 100, 10**15, "odd answer"
# Teams that are asked at a time. One that does not answer holds up the others no longer than itself.
AT_A_TIME = 8


@dataclass(frozen=True)
class TeamStatus:
    """Status of one team.

    Attributes:
        team: The team.
        nodes: The state of each of its containers, as the engine names it, such as ``running``.
        answers: True if its JupyterLab answers at its URL.
        work: The size of its work, in words; ``?`` if its container does not answer.
        labs: The solved exercises of each lab, in words, or ``?`` likewise.
    """

    team: Team
    nodes: tuple[str, ...]
    answers: bool
    work: str = "?"
    labs: str = "?"


def read_status(deployment: Deployment) -> list[TeamStatus]:
    """Asks every team's containers for their status."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda team: _read_team(deployment, team), deployment.teams))


def _read_team(deployment: Deployment, team: Team) -> TeamStatus:
    states = []
    for name in deployment.name_nodes(team):
        asked = deployment.engine.ask("inspect", "-f", "{{.State.Status}}", name)
        states.append("absent" if asked.returncode else asked.stdout.strip())
    standing = TeamStatus(team, tuple(states), is_served(deployment.settings, team))
    status, said = deployment.run_in(deployment.name_container(team), "python", "-I", "-c", ASK)
    if status > 0:
        return standing
    try:
        work, labs = parse_facts(said)
    except (ValueError, TypeError, KeyError, RecursionError):
        return replace(standing, work=ODD)
    return replace(standing, work=work, labs=labs)


def parse_facts(said: str) -> tuple[str, str]:
    """Returns the size of a team's work and its solved exercises, in words, from its container's answer.

    The team can make its container answer anything.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The answer is not what ``ASK`` prints.
    """
    facts = json.loads(said.splitlines()[-1] if said else "")
    used, free = (_check_count(facts[name], MOST) for name in ("used", "free"))
    if len(facts["labs"]) > MOST_LABS:
        raise ValueError("more labs than there are")
    labs = [(_check_count(solved, of), _check_count(of, MOST)) for solved, of in facts["labs"]]
    words = " ".join(f"{number}:{solved}/{of}" for number, (solved, of) in enumerate(labs) if solved)
    return f"{used / 1e6:.0f} MB ({free / 1e9:.0f} GB free)", words or "none yet"


def _check_count(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("not a count")
    return value


def show_status(standings: Sequence[TeamStatus]) -> str:
    """Returns a table for a terminal, a line per team."""
    rows = [("team", "containers", "URL answers", "work", "labs solved", "GPUs")]
    for one in standings:
        alive, gpus = "yes" if one.answers else "NO", " ".join(one.team.gpus) or "none"
        rows.append((one.team.name, " ".join(one.nodes), alive, one.work, one.labs, gpus))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
