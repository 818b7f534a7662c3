"""Sets the reports of several teams side by side. A report is a file of somebody else, and nothing in it is trusted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from course import check
from course.check.guesses import MOST_QUESTIONS
from course.report.pages import make_page, make_table, shorten
from lab_common.files import read_bounded

BEGIN, END = b'<script type="application/json" id="report">', b"</script>"
# A page with the figures of all labs has 3 MB, its data have 5 kB.
PAGE_BYTES, DATA_BYTES = 64 * 2**20, 2**20
# Of all teams together: a team can ask what no other asks.
MOST_ROWS = 200
GUESS = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
SOLVED = {"propertyNames": {"pattern": r"^[0-9]{1,2}\.[0-9]{1,2}$"}, "additionalProperties": {"type": "boolean"}}
PROPERTIES = {
    **{key: {"type": "string"} for key in ("team", "machine", "when")},
    "solved": {"type": "object", "maxProperties": 200, **SOLVED},
    "guesses": {"type": "object", "maxProperties": MOST_QUESTIONS, "additionalProperties": GUESS},
}
VALIDATOR = jsonschema.Draft202012Validator({"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES})


@dataclass(frozen=True)
class Summary:
    """The data of one report.

    Attributes:
        path: The report.
        team: Its team's name, one line of at most 60 characters.
        machine: What it was made on.
        when: When, as the report says it.
        solved: For each exercise, by its number, whether it was solved.
        guesses: Guess and finding for each question; any of them may be infinite or not a number.
    """

    path: Path
    team: str
    machine: str
    when: str
    solved: dict[str, bool]
    guesses: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """Several reports side by side.

    Attributes:
        page: The page, which names also what was left out.
        left_out: Path, as it is shown, and reason of each report that was left out.
    """

    page: str
    left_out: tuple[tuple[str, str], ...]


def compare_reports(paths: Iterable[Path]) -> Comparison:
    """Sets several teams' reports side by side; what is no report is left out and named, and the page is there."""
    teams, left_out = [], []
    for path in paths:
        try:
            teams.append(read_report(path))
        except (OSError, ValueError) as error:
            left_out.append((shorten(path), shorten(getattr(error, "strerror", None) or error)))
    labs, names = [f"{lab}." for lab in check.LABS], _name_teams(teams)
    rows = []
    for team, name in zip(teams, names, strict=True):
        per_lab = [[done for number, done in team.solved.items() if number.startswith(lab)] for lab in labs]
        counts = [f"{sum(row)} of {len(row)}" for row in per_lab]
        rows.append((name, team.machine, team.when, *counts))
    asked = Counter(what for team in teams for what in team.guesses)
    questions = sorted(what for what, _ in asked.most_common(MOST_ROWS))
    found = [(what, *(_tell_guess(team.guesses.get(what)) for team in teams)) for what in questions]
    head = ["team", "machine", "when", *(f"lab {lab}" for lab in check.LABS)]
    parts = [make_table("Exercises solved", rows, head), make_table("Found (guessed)", found, ["question", *names])]
    if len(asked) > len(questions):
        parts.append(f"<p>{len(asked) - len(questions)} more questions are not shown.</p>")
    if left_out:
        parts.append(make_table("Left out", left_out, ["file", "why"]))
    return Comparison(make_page("Distributed Training Labs: all teams", parts), tuple(left_out))


def read_report(path: Path) -> Summary:
    """Reads the data of a report, whatever its file is, in bounded time and memory.

    Raises:
        OSError: It is no regular file, or a link, or larger than ``PAGE_BYTES``, or cannot be read.
        ValueError: It has no data in it, or they are not those of a report; the message says what is wrong.
    """
    content = find_data(read_bounded(path, PAGE_BYTES, follow=False))
    if error := next(VALIDATOR.iter_errors(content), None):
        keys = " in ".join(repr(str(part)) for part in reversed(error.absolute_path))
        raise ValueError(f"{keys or 'a key'} in its data is missing or not valid")
    team, machine, when = (shorten(content[key], 60) for key in ("team", "machine", "when"))
    try:
        guesses = {shorten(what): (float(one), float(found)) for what, (one, found) in content["guesses"].items()}
    except OverflowError as error:
        raise ValueError("a guess is too large a number") from error
    return Summary(path, team or "(no name)", machine, when, content["solved"], guesses)


def find_data(page: bytes) -> Any:
    """Returns the data in a report's page as JSON has them.

    Raises:
        ValueError: There are none, or they are larger than ``DATA_BYTES``, nested deeply, or no JSON.
    """
    start = page.find(BEGIN) + len(BEGIN)
    end = page.find(END, start)
    if start < len(BEGIN) or end < 0:
        raise ValueError("it has no data in it")
    if end - start > DATA_BYTES:
        raise ValueError(f"its data have {(end - start) / 2**20:.1f} MB, and {DATA_BYTES // 2**20} is the most")
    try:
        return json.loads(page[start:end].decode())
    except RecursionError as error:
        raise ValueError("its data are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"its data are no JSON: {error}") from error


def _name_teams(teams: Sequence[Summary]) -> list[str]:
    """The teams' names; with the file where several teams have the same."""
    counts = Counter(team.team for team in teams)
    return [f"{team.team} ({team.path})" if counts[team.team] > 1 else team.team for team in teams]


def _tell_guess(pair: tuple[float, float] | None) -> str:
    return f"{pair[1]:.3g} ({pair[0]:.3g})" if pair else "–"
