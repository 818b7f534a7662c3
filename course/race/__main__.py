"""Runs laps and writes the leaderboard: ``python -m course.race lap scripts/race.py``, ``… board runs/race``."""

from __future__ import annotations

import argparse
import os
import sys

from course.race import runner
from course.race.board import read_entries, write_board
from course.race.images import NAMES
from course.race.records import LEAGUES
from lab_common import LabError, checkout, env_folder, read_path
from lab_common.commandline import find_user, run_command
from lab_common.text import clean, clean_name
from nodelaunch import choose_nodes, local_nodes

BASELINE = checkout() / "notebooks" / "scripts" / "race_baseline.py"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m course.race", description="Runs laps and writes the leaderboard.")
    commands = parser.add_subparsers(dest="command", required=True)
    lap = commands.add_parser(
        "lap", help="run a script as a lap", description="Everything after the script's name is passed to the script."
    )
    lap.add_argument("--league", choices=LEAGUES, default="sprint", help="reach its top-1 in the least time")
    # In a team's container every user is called "learner".
    lap.add_argument("--name", default=os.environ.get("LAB_TEAM") or find_user(), help="your name on the leaderboard")
    lap.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="2: those of LAB_NODES, after one alone")
    lap.add_argument("--processes", type=int, default=1, help="on each node")
    lap.add_argument("--data", choices=NAMES, help="default: CINIC-10 if you have it, otherwise shapes10")
    lap.add_argument("script", type=read_path)
    lap.add_argument("args", nargs=argparse.REMAINDER)
    board = commands.add_parser("board", help="write the leaderboard of race folders")
    board.add_argument("folders", nargs="+", type=read_path, help="such as runs/race; or folders that hold several")
    board.add_argument("--to", type=read_path, default=env_folder("LAB_RUNS", "runs") / "race.html")
    args = parser.parse_args()
    if args.command == "lap":
        _run(args)
    else:
        _write_board(args)


def _run(args: argparse.Namespace) -> None:
    options = {"league": args.league, "name": args.name, "dataset": args.data, "nproc_per_node": args.processes}
    nodes = choose_nodes()[:2] if args.nodes == 2 else local_nodes(1)
    if len(nodes) < args.nodes:
        fix = "export LAB_NODES=local:2, or two hosts: export LAB_NODES=hostA,hostB"
        raise LabError("There is one node only.", where="the variable LAB_NODES", cause="--nodes 2", fix=fix)
    print(clean(runner.tell(runner.run_lap(args.script, args.args, nodes=nodes, **options))))


def _write_board(args: argparse.Namespace) -> None:
    entries, refused = read_entries(args.folders)
    write_board(entries, refused, args.to, baseline=BASELINE.read_text())
    print(f"entries: {len(entries)}, refused: {len(refused)}; {clean_name(args.to)}")
    for line in refused:
        print(f"refused: {clean_name(line)}")
    if refused:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_command(main))
