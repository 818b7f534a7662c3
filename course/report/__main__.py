"""``python -m course.report`` writes a team's page, ``… compare A.html B.html`` one of several teams.

The exit status is 0 if the page has all that was asked for, and 1 if there is no page, or if reports were left
out of it; the page is written then, too, and names them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from course.report import Comparison, compare_reports, make_report
from course.report.pages import shorten
from lab_common import LabError, checkout, env_folder, read_path
from lab_common.commandline import run_command
from lab_common.files import write_atomically


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    import matplotlib as mpl

    mpl.use("agg")  # no window, also where there is a screen
    parser = argparse.ArgumentParser(prog="python -m course.report", description=__doc__.splitlines()[0])
    parser.add_argument("--team", default="one team", help="its name, as a heading")
    parser.add_argument("--workspace", type=read_path, default=checkout() / "workspace", help="the team's notebooks")
    parser.add_argument(
        "--output", type=read_path, help="the page; report.html or comparison.html under LAB_RUNS if not given"
    )
    commands = parser.add_subparsers(dest="command", metavar="compare")
    compare = commands.add_parser("compare", help="set several reports side by side")
    compare.add_argument("reports", nargs="+", type=read_path)
    chosen = parser.parse_args(arguments)
    comparing = chosen.command == "compare"

    def run() -> None:
        output = chosen.output or env_folder("LAB_RUNS", "runs") / ("comparison.html" if comparing else "report.html")
        if not comparing:
            return _write(output, make_report(chosen.workspace, team=chosen.team))
        if os.path.realpath(output) in map(os.path.realpath, chosen.reports):
            cause, fix = "it would be overwritten", "give --output FILE with another name"
            what = "The page of all teams cannot take the place of a report."
            raise LabError(what, where=shorten(output), cause=cause, fix=fix)
        comparison = compare_reports(chosen.reports)
        _write(output, comparison.page)
        return _refuse_left_out(comparison, len(chosen.reports))

    return run_command(run)


def _write(output: Path, page: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as file:
        file.write(page.encode())
    print(f"written: {shorten(output)} ({len(page) / 1e6:.1f} MB)")


def _refuse_left_out(comparison: Comparison, count: int) -> None:
    """Raises LabError where reports were left out, and names each."""
    if comparison.left_out:
        causes = [f"{path}: {why}" for path, why in comparison.left_out]
        what = f"{len(causes)} of {count} reports were left out."
        fix = "have those teams make theirs again: python -m course.report"
        raise LabError(what, where=comparison.left_out[0][0], cause="\n  and: ".join(causes), fix=fix)


if __name__ == "__main__":
    sys.exit(main())
