"""A team's report as one self-contained HTML page: progress, guesses, measurements, figures, answers.

``python -m course.report --team "Team 3"`` writes it, to be handed in; ``python -m course.report compare A.html
B.html`` compares several teams. It reads the labs' records under ``LAB_RUNS`` and the figures that are saved in the
team's notebooks; nothing leaves the machine. Unreadable files are left out, and the page names them.
"""

from __future__ import annotations

import base64
import contextlib
import html
import importlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course import check
from course.check.attempts import Standing, read_standings
from course.check.guesses import read_guesses
from course.report.comparison import BEGIN, END, Comparison, compare_reports
from course.report.figures import find_lab, show_figures
from course.report.pages import escape, escape_line, make_page, make_table, shorten
from lab_common import LabError
from lab_utils import machine
from lab_utils.timing import Records, Timing

__all__ = ["Comparison", "compare_reports", "make_report"]

# Of one lab; the labs have less than 100.
MOST_TIMINGS = 300


def make_report(workspace: Path, *, team: str) -> str:
    """Returns the page.

    Args:
        workspace: The folder of the team's notebooks.
        team: Its name, as a heading.

    Raises:
        LabError: There are no notebooks in the folder.
    """
    # A lab may have several: a copy, a folder of that name; and it is that lab under any name.
    notebooks: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(workspace.glob("*.ipynb")):
        lab = find_lab(path)
        notebooks[lab if lab in check.LABS else -1].append(path)
    if not notebooks:
        cause, fix = "another folder, or no copy was made yet", "make workspace, or give --workspace FOLDER"
        raise LabError("There are no labs in this folder.", where=workspace, cause=cause, fix=fix)
    team, here = shorten(team, 60), machine.describe()
    exercises = {lab: importlib.import_module(f"course.exercises.lab{lab}").EXERCISES for lab in check.LABS}
    standings, guesses = read_standings(), {shorten(what): pair for what, pair in read_guesses().items()}
    links = "".join(f'<li><a href="#lab{lab}">Lab {lab}</a></li>' for lab in exercises)
    parts = [f"<nav><ul>{links}</ul></nav>", _make_overview(guesses)]
    for lab, row in exercises.items():
        parts += _describe_lab(lab, notebooks[lab], row, standings)
    if others := [path.name for path in notebooks[-1]]:
        parts.append(f"<p>Of no lab: {escape_line(', '.join(others))}</p>")
    summary = {
        "team": team,
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": here.label,
        "torch": here.torch,
        "solved": {number: _get(standings, number).solved for row in exercises.values() for number in row},
        "guesses": guesses,
    }
    # A closing tag inside a text would end the script element.
    data = json.dumps(summary).replace("<", "\\u003c")
    parts.append(f"{BEGIN.decode()}{data}{END.decode()}")
    facts = make_table("This machine", [("hardware", here.label), ("torch", here.torch), ("Python", here.python)])
    return make_page(f"Distributed Training Labs: {team}", [f"<p>{_tell_time(summary['when'])} UTC</p>", facts, *parts])


def _make_overview(guesses: dict[str, tuple[float, float]]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        picture = _draw(check.progress, "where the team stands: a row for each lab, a square for each exercise")
    parts = ["<h2>Exercises</h2>", picture, f"<pre>{escape(said.getvalue())}</pre>"]
    if guesses:
        rows = [(what, guess, found, guess / found if found else "") for what, (guess, found) in guesses.items()]
        head = ["question", "guess", "found", "ratio"]
        parts.append("<h2>Guesses</h2>" + make_table("Guess beside finding", rows, head))
    return "\n".join(parts)


def _get(standings: dict[str, Standing], number: str) -> Standing:
    return standings.get(number, Standing())


def _describe_lab(lab: int, paths: Sequence[Path], exercises: dict, standings: dict[str, Standing]) -> Iterator[str]:
    yield f'<h2 id="lab{lab}">Lab {lab}</h2>'
    rows = list(_read_timings(lab))
    if rows:
        head = ["what", "set-up", "images", "ms (median)", "quartiles", "images/s", "measured on", "when (UTC)"]
        yield make_table("Measurements", rows[-MOST_TIMINGS:], head)
    if len(rows) > MOST_TIMINGS:
        yield f"<p>{len(rows) - MOST_TIMINGS} older measurements are not shown.</p>"
    yield '<div class="figures">'
    yield from show_figures(paths)
    yield "</div>"
    for number, exercise in exercises.items():
        standing = _get(standings, number)
        tries = f"{standing.tries} wrong {'try' if standing.tries == 1 else 'tries'}"
        state = "solved" if standing.solved else "open"
        if standing.tries:
            state += f", after {tries}" if standing.solved else f", {tries}"
        yield f"<h3>{number} {escape_line(exercise.title)}: {state}</h3>"
        if standing.answer:
            yield f"<pre>{escape(standing.answer)}</pre>"


def _read_timings(lab: int) -> Iterator[tuple]:
    """Yields a row for each Timing of the newest records of a lab."""
    newest: dict[str, dict] = {}
    for record in Records(f"lab{lab}").read():
        newest[json.dumps([record["kind"], record["settings"]], sort_keys=True, default=repr)] = record
    differ = _find_differences(newest.values())
    for record in newest.values():
        what = " ".join([record["kind"], *_tell_differences(record, differ)])
        for one in _find_timings(record["result"]):
            speed = f"{one.images_per_second:.1f}" if one.images else ""
            times = (f"{1e3 * one.median:.2f}", f"{1e3 * one.low:.2f} to {1e3 * one.high:.2f}")
            yield (what, one.name, one.images or "", *times, speed, record["machine"], _tell_time(record["when"]))


def _tell_time(when: str) -> str:
    """Returns a time to the minute, as 2026-11-23 06:05; invalid dates are returned unchanged."""
    try:
        return datetime.fromisoformat(when).astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, TypeError, ValueError):
        return when


def _find_differences(records: Iterable[dict]) -> dict[str, set[str]]:
    """Returns, by kind, the names of the settings that differ between its records."""
    first: dict[str, dict] = {}
    differ: dict[str, set[str]] = {}
    for record in records:
        settings = record["settings"] if isinstance(record["settings"], dict) else {}
        usual = first.setdefault(record["kind"], settings)
        names = differ.setdefault(record["kind"], set())
        names |= {name for name in settings.keys() | usual.keys() if settings.get(name) != usual.get(name)}
    return differ


def _tell_differences(record: dict, differ: dict[str, set[str]]) -> list[str]:
    """Lists the settings that distinguish a record from others of its kind, if they are texts or numbers."""
    settings = record["settings"].items() if isinstance(record["settings"], dict) else ()
    return [str(v) for k, v in settings if type(v) in (str, int, float) and k in differ[record["kind"]]]


def _find_timings(result: Any) -> Iterator[Timing]:
    """Yields the Timings in a result, at any depth, except those that ran out of memory."""
    if isinstance(result, dict) and {"name", "seconds", "warmup"} <= result.keys():
        # What only looks like one has nothing to show either.
        with contextlib.suppress(ValueError):
            result = Timing.from_record(result)
    if isinstance(result, Timing):
        if not result.out_of_memory:
            yield result
    elif isinstance(result, dict | list):
        for part in result.values() if isinstance(result, dict) else result:
            yield from _find_timings(part)


def _draw(function: Any, text: str) -> str:
    from matplotlib import pyplot as plt

    there, shown = plt.get_fignums(), []
    function()
    for number in sorted(set(plt.get_fignums()).difference(there)):
        picture = io.BytesIO()
        # As in a notebook: without the margins that a figure of its own would have.
        plt.figure(number).savefig(picture, format="png", dpi=100, bbox_inches="tight")
        plt.close(number)
        source = base64.b64encode(picture.getvalue()).decode()
        shown.append(f'<img alt="{html.escape(text)}" src="data:image/png;base64,{source}">')
    return "\n".join(shown)
