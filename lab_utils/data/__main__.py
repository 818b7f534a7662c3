"""``python -m lab_utils.data``: fetch, import and prepare data sets in LAB_DATA."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab_common import LabError
from lab_common.commandline import run_command
from lab_common.text import clean_name
from lab_utils import data
from lab_utils.data.download import SIZE
from lab_utils.data.packing import choose_root, find_cinic10, has_split, make_command, open_pack


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; raises a LabError if it fails."""
    parser = argparse.ArgumentParser("python -m lab_utils.data", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="download a data set, check and pack it")
    fetch.add_argument("name", choices=[name for name in data.NAMES if name != "shapes10"])
    take = commands.add_parser("import", help="pack CINIC-10 from an archive that you have")
    take.add_argument("file", metavar="FILE.tar.gz")
    prepare = commands.add_parser("prepare", help="make the data set ready that the labs will use")
    prepare.add_argument("--skip-bad", action="store_true", help="go on without images that cannot be read")
    arguments, root = parser.parse_args(argv), choose_root(None)
    if arguments.command == "prepare":
        _prepare(root, skip_bad=arguments.skip_bad)
        return 0
    name = getattr(arguments, "name", "cinic10")
    there = find_cinic10(root) if name == "cinic10" else None
    if arguments.command == "import" and there and has_split(there):
        cause = "a folder in CINIC-10's layout is read before any pack"
        fix = "move it out of there, or name another folder in LAB_DATA; then import the archive again"
        raise LabError("There is a folder of CINIC-10 already.", where=clean_name(there), cause=cause, fix=fix)
    if arguments.command == "import":
        data.import_archive(arguments.file, root)
    elif there and (has_split(there) or open_pack(there)):
        print(f"Nothing to fetch: CINIC-10 is here already, in the folder {clean_name(there)}.")
    elif name == "cinic10":
        archive = data.fetch_archive(root)
        data.import_archive(archive, root)
        print(f"{archive.name} is packed; the archive itself is no longer needed: {archive}")
    print(data.load(name, root).summary)
    return 0


def _prepare(root: Path, *, skip_bad: bool) -> None:
    dataset = data.load(root=root, skip_bad=skip_bad)
    print(dataset.summary)
    if dataset.name == "shapes10":
        print("To work with CINIC-10 itself, do one of these:")
        print(f"  {make_command('fetch cinic10')}   downloads it ({SIZE / 1e6:,.0f} MB)")
        print(f"  {make_command('import CINIC-10.tar.gz')}   takes a copy that you were given")
        print("  export LAB_DATA=/a/folder   in which there is train|valid|test/<class>/*.png")


if __name__ == "__main__":
    sys.exit(run_command(main))
