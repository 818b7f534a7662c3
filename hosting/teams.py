"""Reads ``teams.csv``, and refuses what would break a class before anything starts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError
from lab_common.nvidia import run_smi

COLUMNS = ("team", "gpus")
# A name becomes part of an address, a host name, a volume and a variable: what all of these take, and no more.
NAME = re.compile(r"[a-z](?:-?[a-z0-9])*")
LONGEST = 32
GPU = re.compile(r"\d{1,3}|(?:GPU|MIG)-[0-9a-f]+(?:-[0-9a-f]+)*")
# A line of ``nvidia-smi -L``: a GPU, or an instance of the one above it, which has no index of its own.
LISTED_GPU = re.compile(r"\s*(?:GPU (\d+))?.*\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")
# Docker's address pools hold some thirty networks, and each team has its own.
MOST_TEAMS = 30
# Likely cause, and what mends it.
SPREADSHEET = "a spreadsheet saved it in its own way", "save it as CSV, with commas, in UTF-8"
HEADER = "another order or spelling in the header", f"the first line has to be: {','.join(COLUMNS)}"
EXAMPLE = "team,gpus\nred,0 1\nblue,2 3\n"


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
        """The environment variable that holds the team's token."""
        return "TOKEN_" + self.name.upper().replace("-", "_")


def read_teams(path: Path, *, share: bool = False) -> list[Team]:
    """Reads the teams of a class.

    Args:
        path: A CSV file with the columns ``team`` and ``gpus``; several GPUs are separated by spaces.
        share: Whether two teams may be given the same GPU.

    Raises:
        LabError: The file cannot be read, or a line of it would break the class; names file and line.
    """
    rows = _read_rows(path)
    teams: dict[str, Team] = {}
    owners: dict[str, str] = {}
    for number, row in rows:
        team = Team(_check_name(row["team"], path, number), _check_gpus(row["gpus"], path, number))
        if team.name in teams:
            fix = "give each team a name of its own"
            raise _refuse(f"Team {team.name} is there twice.", path, number, "a line was copied", fix)
        for gpu in team.gpus:
            if not share and gpu in owners:
                what = f"GPU {gpu} is given to two teams, {owners[gpu]} and {team.name}."
                fix = "give each team its own; if they shall share it: --share-gpus"
                raise _refuse(what, path, number, "a number was copied", fix)
            owners[gpu] = team.name
        teams[team.name] = team
    if not teams:
        fix = f"one line a team, such as: {EXAMPLE.splitlines()[1]}"
        raise _refuse("No team is in this file.", path, None, "it ends after its header", fix)
    if len(teams) > MOST_TEAMS:
        what = f"{len(teams)} teams are too many for one machine; {MOST_TEAMS} is what its networks are for."
        fix = "use several machines, or Kubernetes (hosting/README.md)"
        raise _refuse(what, path, None, "each team has a network of its own", fix)
    return list(teams.values())


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The lines that hold a team, as (line number, fields by column)."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        cause = error.strerror or ""
        raise LabError("The list of teams cannot be read.", where=path, cause=cause, fix=_example_fix(path)) from error
    except UnicodeDecodeError as error:
        raise _refuse("The list of teams is not UTF-8 text.", path, None, *SPREADSHEET) from error
    if "\0" in text:
        raise _refuse("The list of teams is not a text file.", path, None, *SPREADSHEET)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows, header = [], None
    try:
        for fields in reader:
            fields = [field.strip() for field in fields]
            if not any(fields) or fields[0].startswith("#"):
                continue
            if header is None:
                header = _check_header(fields, path, reader.line_num)
            elif len(fields) > len(header):
                what = f"This line has {len(fields)} fields, the header has {len(header)}."
                fix = "separate a team's GPUs by spaces: red,0 1"
                raise _refuse(what, path, reader.line_num, "GPUs with a comma between them", fix)
            else:
                row = dict.fromkeys(COLUMNS, "") | dict(zip(header, fields, strict=False))
                rows.append((reader.line_num, row))
    except csv.Error as error:
        what, cause = f"This line is no CSV: {error}.", "a quote that is not closed, or has text behind it"
        raise _refuse(what, path, reader.line_num, cause, "names need no quotes: red,0 1") from error
    if header is None:
        raise _refuse("The list of teams is empty.", path, None, "nothing was saved", _example_fix(path))
    return rows


def _check_header(fields: list[str], path: Path, line: int) -> list[str]:
    names = [field.lower() for field in fields]
    if len(names) == 1 and re.search("[;\t]", names[0]):
        raise _refuse("The fields are not separated by commas.", path, line, *SPREADSHEET)
    for name in names:
        if name not in COLUMNS:
            raise _refuse(f"There is no column {_show(name)}.", path, line, *HEADER)
    if len(set(names)) < len(names) or "team" not in names:
        what = "A column is there twice." if "team" in names else "The column team is missing."
        raise _refuse(what, path, line, *HEADER)
    return names


def _check_name(name: str, path: Path, line: int) -> str:
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        what = f"{_show(name)} cannot be the name of a team." if name else "A team has no name."
        fix = f"1 to {LONGEST} of a-z, 0-9 and single hyphens, beginning with a letter, such as team-1"
        cause = "it becomes part of an address, a host name and a volume"
        raise _refuse(what, path, line, cause, fix)
    return name


def _check_gpus(text: str, path: Path, line: int) -> tuple[str, ...]:
    gpus = tuple(text.split())
    for gpu in gpus:
        if not GPU.fullmatch(gpu):
            fix = "indices or UUIDs as `nvidia-smi -L` prints them, separated by spaces: 0 1"
            cause = "a word, a range or a fraction in place of a number"
            raise _refuse(f"{_show(gpu)} is no GPU.", path, line, cause, fix)
    # "01" would be another name for the GPU that "1" names.
    gpus = tuple(str(int(gpu)) if gpu.isdigit() else gpu for gpu in gpus)
    if len(set(gpus)) < len(gpus):
        fix = "name each of the team's GPUs once"
        raise _refuse("A GPU is there twice.", path, line, "a number was copied", fix)
    return gpus


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
    """Refuses a GPU that this machine does not have, and one that two teams name differently.

    Args:
        teams: Of ``read_teams``.
        there: Of ``find_gpus``.
        path: The file, for the message.
        share: Whether two teams may be given the same GPU.

    Raises:
        LabError: Names the team and the GPU.
    """
    owners: dict[str, str] = {}
    for team in teams:
        for gpu in team.gpus:
            if gpu not in there:
                what = f"Team {team.name} is to have GPU {gpu}, which this machine does not have."
                known = ", ".join(key for key in there if key.isdigit()) or "none (nvidia-smi finds no GPU)"
                fix = "name those that `nvidia-smi -L` lists, or none for a team that works on CPUs"
                raise LabError(what, where=path, cause=f"it has {known}", fix=fix)
            owner = owners.setdefault(there[gpu], team.name)
            if owner != team.name and not share:
                what = f"GPU {gpu} is given to two teams, {owner} and {team.name}."
                cause = f"{gpu} and another entry are the same GPU"
                fix = "give each team its own; if they shall share it: --share-gpus"
                raise LabError(what, where=path, cause=cause, fix=fix)


def _example_fix(path: Path) -> str:
    return f"write it first: cp hosting/teams.example.csv {path}"


def _show(text: str) -> str:
    """Text of unknown origin, short and on one line."""
    return ascii(text) if len(text) <= 40 else ascii(text[:30]) + f"… ({len(text)} characters)"


def _refuse(what: str, path: Path, line: int | None, cause: str, fix: str) -> LabError:
    return LabError(what, where=f"{path}, line {line}" if line else path, cause=cause, fix=fix)
