"""What a team did, as one HTML page that needs no other file: progress, guesses, measurements, figures, answers.

``python -m lab_utils.report --team "Team 3"`` writes it, to be handed in; ``python -m lab_utils.report compare A.html
B.html`` sets several teams side by side. It reads what the labs kept under ``LAB_RUNS`` and the figures that are saved
in the team's notebooks; nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import html
import importlib
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab_utils import LabError, check, checkout, env_folder, machine
from lab_utils.check.guesses import read_guesses
from lab_utils.check.tries import Standing, read_standings
from lab_utils.files import write_atomically
from lab_utils.timing import Records, Timing

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}caption{text-align:left;font-weight:bold}"
    "th,td{border:1px solid #ccc;padding:.2rem .6rem;text-align:left}"
    "img{max-width:100%}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}figure{margin:1rem 0}"
)
DATA = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)


def make_report(workspace: Path, *, team: str) -> str:
    """Returns the page.

    Args:
        workspace: The folder of the team's notebooks.
        team: Its name, as a heading.

    Raises:
        LabError: There are no notebooks in the folder.
    """
    notebooks = {int(path.name[:2]): path for path in sorted(workspace.glob("[0-9][0-9]_*.ipynb"))}
    if not notebooks:
        cause, fix = "another folder, or no copy was made yet", "make workspace, or give --workspace FOLDER"
        raise LabError("There are no labs in this folder.", where=workspace, cause=cause, fix=fix)
    standings, guesses, here = read_standings(), read_guesses(), machine.describe()
    exercises = {lab: importlib.import_module(f"lab_utils.check.lab{lab}").EXERCISES for lab in check.LABS}
    summary = {
        "team": team,
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": here.label,
        "torch": here.torch,
        "solved": {number: _get(standings, number).solved for row in exercises.values() for number in row},
        "guesses": guesses,
    }
    parts = [_make_table("This machine", [("hardware", here.label), ("torch", here.torch), ("Python", here.python)])]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        parts.append(_draw(check.progress, "where the team stands: a row for each lab, a square for each exercise"))
    parts.append(f"<pre>{html.escape(said.getvalue())}</pre>")
    if guesses:
        rows = [(what, guess, found, guess / found if found else "") for what, (guess, found) in guesses.items()]
        head = ["question", "guess", "found", "ratio"]
        parts.append("<h2>Guesses</h2>" + _make_table("Guess beside finding", rows, head))
    for lab, row in exercises.items():
        parts += _describe_lab(lab, notebooks.get(lab), row, standings)
    # A closing tag inside a text would end the script element.
    data = json.dumps(summary, ensure_ascii=False).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="report">{data}</script>')
    return _make_page(f"Distributed Training Labs: {team}", [f"<p>{summary['when']}</p>", *parts])


def compare_reports(paths: Sequence[Path]) -> str:
    """Returns a page that sets several teams' reports side by side.

    Raises:
        LabError: A file is not there, or is no report.
    """
    teams = []
    for path in paths:
        try:
            teams.append(json.loads(DATA.search(path.read_text(encoding="utf-8"))[1]))
        except (OSError, TypeError, ValueError) as error:
            cause, fix = str(error) or "it has no data in it", "python -m lab_utils.report   (on that team's machine)"
            raise LabError(f"{path.name!r:.60} is no report.", where=path, cause=cause, fix=fix) from error
    labs = sorted({number.split(".")[0] for team in teams for number in team["solved"]})
    rows = []
    for team in teams:
        per_lab = [[done for number, done in team["solved"].items() if number.startswith(f"{lab}.")] for lab in labs]
        counts = [f"{sum(row)} of {len(row)}" for row in per_lab]
        rows.append((team["team"], team["machine"], team["when"], *counts))
    head = ["team", "machine", "when", *(f"lab {lab}" for lab in labs)]
    questions = sorted({what for team in teams for what in team["guesses"]})
    found = [(what, *(_tell_guess(team["guesses"].get(what)) for team in teams)) for what in questions]
    tables = [_make_table("Exercises solved", rows, head)]
    tables.append(_make_table("Found (guessed)", found, ["question", *(team["team"] for team in teams)]))
    return _make_page("Distributed Training Labs: all teams", tables)


def _tell_guess(pair: Sequence[float] | None) -> str:
    return f"{pair[1]:.3g} ({pair[0]:.3g})" if pair else "–"


def _get(standings: dict[str, Standing], number: str) -> Standing:
    return standings.get(number, Standing())


def _describe_lab(lab: int, path: Path | None, exercises: dict, standings: dict[str, Standing]) -> Iterator[str]:
    yield f"<h2>Lab {lab}</h2>"
    rows = list(_read_timings(lab))
    if rows:
        head = ["what", "set-up", "images", "ms (median)", "quartiles", "images/s", "measured on", "when"]
        yield _make_table("Measurements", rows, head)
    if path is not None:
        yield from _read_figures(path)
    for number, exercise in exercises.items():
        standing = _get(standings, number)
        state = "solved" if standing.solved else f"tried {standing.wrong}×" if standing.wrong else "open"
        yield f"<h3>{number} {html.escape(exercise.title)}: {state}</h3>"
        if standing.answer:
            yield f"<pre>{html.escape(standing.answer)}</pre>"


def _read_timings(lab: int) -> Iterator[tuple]:
    """A row for each Timing of the newest records of a lab."""
    newest: dict[str, dict] = {}
    with contextlib.suppress(OSError):
        for record in Records(f"lab{lab}").read():
            newest[json.dumps([record["kind"], record["settings"]], sort_keys=True)] = record
    for record in newest.values():
        for one in _find_timings(record["result"]):
            speed = f"{one.images_per_second:.1f}" if one.images else ""
            times = (f"{1e3 * one.median:.2f}", f"{1e3 * one.low:.2f} to {1e3 * one.high:.2f}")
            yield (record["kind"], one.name, one.images or "", *times, speed, record["machine"], record["when"])


def _find_timings(result: Any) -> Iterator[Timing]:
    """The Timings in a result, however deep; those that ran out of memory have no times to show."""
    if isinstance(result, Timing):
        if not result.out_of_memory:
            yield result
    elif isinstance(result, dict | list):
        if isinstance(result, dict) and {"name", "seconds", "warmup"} <= result.keys():
            yield from _find_timings(Timing.from_record(result))
        else:
            for part in result.values() if isinstance(result, dict) else result:
                yield from _find_timings(part)


def _read_figures(path: Path) -> Iterator[str]:
    """The figures that are saved in a notebook, each with the heading above it and the cell's name."""
    import nbformat

    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception as error:  # whatever a broken file makes of the reader, the rest of the page is worth having
        yield f"<p>{html.escape(path.name)} could not be read: {html.escape(str(error)[:200])}</p>"
        return
    heading = path.stem
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#{1,6} +(.+)$", cell.source, re.MULTILINE) or [heading])[-1]
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            if picture:
                text = html.escape(f"{heading} ({cell.id})")
                source = "".join(picture).replace("\n", "")
                yield f'<figure><img alt="{text}" src="data:image/png;base64,{html.escape(source)}">'
                yield f"<figcaption>{text}</figcaption></figure>"


def _draw(function: Any, text: str) -> str:
    from matplotlib import pyplot as plt

    axes, picture = function(), io.BytesIO()
    axes.figure.savefig(picture, format="png", dpi=100)
    plt.close(axes.figure)
    source = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{source}">'


def _make_table(caption: str, rows: Iterable[Sequence], head: Sequence[str] = ()) -> str:
    lines = [f"<table><caption>{html.escape(caption)}</caption>"]
    if head:
        lines.append("<tr>" + "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in head) + "</tr>")
    for first, *rest in rows:
        cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in rest]
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{html.escape(str(first))}</th>{cells}</tr>')
    return "\n".join([*lines, "</table>"])


def _make_page(title: str, parts: Iterable[str]) -> str:
    title = html.escape(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    import matplotlib as mpl

    mpl.use("agg")  # no window, also where there is a screen
    parser = argparse.ArgumentParser(prog="python -m lab_utils.report", description=__doc__.splitlines()[0])
    parser.add_argument("--team", default="one team", help="its name, as a heading")
    parser.add_argument("--workspace", type=Path, default=checkout() / "workspace", help="the team's notebooks")
    parser.add_argument("--output", type=Path, default=env_folder("LAB_RUNS", "runs") / "report.html")
    commands = parser.add_subparsers(dest="command", metavar="compare")
    compare = commands.add_parser("compare", help="set several reports side by side")
    compare.add_argument("reports", nargs="+", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        comparing = chosen.command == "compare"
        page = compare_reports(chosen.reports) if comparing else make_report(chosen.workspace, team=chosen.team)
        try:
            chosen.output.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(chosen.output) as file:
                file.write(page.encode())
        except OSError as error:
            cause, fix = error.strerror or "", "give --output FILE in a folder that you may write to"
            raise LabError("The report cannot be written.", where=chosen.output, cause=cause, fix=fix) from error
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {chosen.output} ({len(page) / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
