"""Reads ``teams.csv``, and refuses what would break a class before anything starts."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError
from lab_common.nvidia import run_smi

# A name becomes part of an address, a host name, a volume and a variable: what all of these take, and no more.
NAME = re.compile(r"(?=.{1,32}$)[a-z](?:-?[a-z0-9])*")
# A team's path leads to its JupyterLab; with accounts, these lead to the hub.
TAKEN = ("hub", "services", "user")
# A line of ``nvidia-smi -L``: a GPU, or an instance of the one above it, which has no index of its own.
LISTED_GPU = re.compile(r"\s*(?:GPU (\d+))?.*\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")
# Docker's address pools hold some thirty networks, and each team has its own.
MOST_TEAMS = 30
EXAMPLE = "write it as in hosting/teams.example.csv, with commas, in UTF-8"


@dataclass(frozen=True)
class Team:
    """One line of ``teams.csv``.

    Attributes:
        name: Lower-case letters, digits and hyphens; the path of the team's URL.
        gpus: Indices or UUIDs as ``nvidia-smi -L`` prints them; empty for a team that works on CPUs.
    """

    name: str
    gpus: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The name of the team's token in ``tokens.env``."""
        return "TOKEN_" + self.name.upper().replace("-", "_")


def read_teams(path: Path, *, project: str = "labs") -> list[Team]:
    """Reads the teams of a class.

    Args:
        path: A CSV file with the columns ``team`` and ``gpus``; several GPUs are separated by spaces.
        project: What the names of all containers begin with, and so no team's.

    Raises:
        LabError: The file cannot be read, or a line of it would break the class; names file and line.
    """
    teams: dict[str, Team] = {}
    for number, row in _read_rows(path):
        where, name = f"{path}, line {number}", row["team"]
        # To the front, the container of team red, labs-red-node0, and the service of a team labs-red are one name.
        if not NAME.fullmatch(name) or name in TAKEN or name.startswith(f"{project}-"):
            what, cause = f"{name[:40]!a} cannot be the name of a team.", "it becomes part of addresses and containers"
            fix = f"1 to 32 of a-z, 0-9, single hyphens, not {', '.join(TAKEN)} or {project}-…; such as team-1"
            raise LabError(what, where=where, cause=cause, fix=fix)
        if name in teams:
            fix = "give each team a name of its own"
            raise LabError(f"Team {name} is there twice.", where=where, cause="a line was copied", fix=fix)
        # "01" would be another name for the GPU that "1" names.
        teams[name] = Team(name, tuple(str(int(gpu)) if gpu.isdecimal() else gpu for gpu in row["gpus"].split()))
    if not 0 < len(teams) <= MOST_TEAMS:
        what, cause = f"A machine can host 1 to {MOST_TEAMS} teams, not {len(teams)}.", "each has a network of its own"
        fix = "one line a team, such as red,0 1; for more teams, use several machines or Kubernetes"
        raise LabError(what, where=path, cause=cause, fix=fix)
    return list(teams.values())


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Returns the lines that hold a team, as (line number, fields by column)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            rows = [(lines.line_num, [field.strip() for field in fields]) for fields in lines if any(fields)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LabError("The list of teams cannot be read.", where=path, cause=str(error), fix=EXAMPLE) from error
    header = [name.lower() for name in rows[0][1]] if rows else []
    if sorted(header) not in (["team"], ["gpus", "team"]):
        what, cause = "The first line has to be: team,gpus", "a spreadsheet saved the file in its own way"
        raise LabError(what, where=path, cause=cause, fix=EXAMPLE)
    for number, fields in rows:
        if len(fields) > len(header):
            what = f"This line has {len(fields)} fields, and the first line has {len(header)}."
            fix = "separate a team's GPUs by spaces: red,0 1"
            raise LabError(what, where=f"{path}, line {number}", cause="GPUs with a comma between them", fix=fix)
    return [(number, {"gpus": ""} | dict(zip(header, fields, strict=False))) for number, fields in rows[1:]]


def find_gpus() -> dict[str, str]:
    """Returns this machine's GPUs as ``{index or UUID: UUID}``; empty where ``nvidia-smi -L`` finds none."""
    try:
        lines = run_smi("-L")
    except OSError:
        return {}
    known = {}
    for line in lines:
        if match := LISTED_GPU.match(line):
            index, uuid = match.groups()
            known |= {key: uuid for key in (index, uuid) if key}
    return known


def check_gpus(teams: Sequence[Team], there: dict[str, str], *, path: Path, share: bool = False) -> None:
    """Refuses a GPU that is not there (``find_gpus``), and one that is given twice, unless teams may share.

    Raises:
        LabError: Names the team and the GPU.
    """
    owners: dict[str, Team] = {}
    for team in teams:
        mine: set[str] = set()
        for gpu in team.gpus:
            if gpu not in there:
                what = f"Team {team.name} is to have GPU {gpu[:60]}, which this machine does not have."
                known = ", ".join(key for key in there if key.isdigit()) or "none (nvidia-smi finds no GPU)"
                fix = "name those that `nvidia-smi -L` lists, separated by spaces, or none for a team without GPUs"
                raise LabError(what, where=path, cause=f"it has {known}", fix=fix)
            owner = owners.setdefault(there[gpu], team)
            if there[gpu] in mine or (owner != team and not share):
                what = f"GPU {gpu} is given twice, to {owner.name} and {team.name}."
                fix = "give each team its own; if they shall share it: --share-gpus"
                raise LabError(what, where=path, cause="a number was copied, or two names are the same GPU", fix=fix)
            mine.add(there[gpu])
