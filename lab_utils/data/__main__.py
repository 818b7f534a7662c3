"""``python -m lab_utils.data``: fetch, import, verify, list and prepare data sets in LAB_DATA."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab_common import LabError
from lab_common.commandline import run_command
from lab_common.text import clean_name
from lab_utils import data
from lab_utils.data.archive import refuse_data_set
from lab_utils.data.fetch import SIZE
from lab_utils.data.layout import explain_unreadable
from lab_utils.data.pack import SPLITS, find_damage, read_manifest, restore_pack
from lab_utils.data.sources import find_cinic10, list_packs, verify_pack
from lab_utils.data.system import choose_root, make_command, quote


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 1 after an error, whose message goes to stderr."""
    arguments = _parse(argv)
    try:
        arguments.run(arguments, choose_root(None))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. What was downloaded is kept; a pack is made whole or not at all.", file=sys.stderr)
        return 130
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(make_command(""), description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch", help="download a data set, check and pack it")
    fetch.add_argument("name", choices=[name for name in data.NAMES if name != "shapes10"])
    fetch.set_defaults(run=_fetch)

    take = commands.add_parser("import", help="pack CINIC-10 from an archive that you have")
    take.add_argument("file", metavar="FILE.tar.gz")
    take.set_defaults(run=_import)

    prepare = commands.add_parser("prepare", help="make the data set ready that the labs will use")
    prepare.set_defaults(run=_prepare)
    for command in (fetch, take, prepare):
        command.add_argument("--skip-bad", action="store_true", help="go on without images that cannot be read")

    verify = commands.add_parser("verify", help="compare packs with their SHA-256")
    verify.add_argument("name", nargs="?", help="one pack's name; by default all")
    verify.set_defaults(run=_verify)

    info = commands.add_parser("info", help="list what is there")
    info.set_defaults(run=_info)
    return parser.parse_args(argv)


def _fetch(arguments: argparse.Namespace, root: Path) -> None:
    if arguments.name == "cinic10":
        refuse_data_set(root)  # now, not after the download
        pack = root / "packed" / "cinic10"
        with explain_unreadable(pack.parent):
            restore_pack(pack)
        if (manifest := read_manifest(pack)) and not find_damage(pack):
            print(f"Nothing to fetch: CINIC-10 is here already, {manifest['source']['words']}.")
            print(f"To fetch it all the same, remove it first: rm -r {quote(pack)}")
            return
        archive = data.fetch_archive(root)
        data.import_archive(archive, root, skip_bad=arguments.skip_bad)
        print(f"{archive.name} is packed; the archive itself is no longer needed: {archive}")
    print(data.load(arguments.name, root, skip_bad=arguments.skip_bad).summary)


def _import(arguments: argparse.Namespace, root: Path) -> None:
    pack = data.import_archive(arguments.file, root, skip_bad=arguments.skip_bad)
    dataset = data.load("cinic10", root)
    print(dataset.summary)
    if (found := find_cinic10(root)) != pack:
        print(f"Note: the labs use the folder {clean_name(found)}, which goes before the imported pack.")


def _prepare(arguments: argparse.Namespace, root: Path) -> None:
    dataset = data.load(root=root, skip_bad=arguments.skip_bad)
    print(dataset.summary)
    if dataset.name == "shapes10":
        print(_explain_real_one())


def _explain_real_one() -> str:
    ways = {
        make_command("fetch cinic10"): f"downloads it ({SIZE / 1e6:,.0f} MB)",
        make_command("import CINIC-10.tar.gz"): "takes a copy that you were given",
        "export LAB_DATA=/a/folder": "in which there is train|valid|test/<class>/*.png",
    }
    width = max(map(len, ways))
    lines = [f"  {way:{width}}   {words}" for way, words in ways.items()]
    return "\n".join(["To work with CINIC-10 itself, do one of these:", *lines])


def _verify(arguments: argparse.Namespace, root: Path) -> None:
    packs = {f: m for f, m in list_packs(root).items() if arguments.name is None or f.name.startswith(arguments.name)}
    if not packs:
        raise LabError(
            f"There is no pack{f' of {arguments.name}' if arguments.name else ''} to verify.",
            where=root,
            cause="no data set was packed yet, or LAB_DATA points elsewhere",
            fix=make_command("prepare"),
        )
    for folder, manifest in packs.items():
        verify_pack(folder)
        print(f"[ok] {clean_name(folder.name)}: {len(manifest['sha256'])} arrays are what was packed")


def _info(arguments: argparse.Namespace, root: Path) -> None:
    print(f"LAB_DATA: {root}")
    print(f"cinic10:  {clean_name(find_cinic10(root) or 'not found; the labs draw shapes10 instead')}")
    for folder, manifest in list_packs(root).items():
        sizes = ", ".join(f"{manifest['splits'][name]['images']:,} {name}" for name in SPLITS)
        megabytes = sum(file.lstat().st_size for file in folder.iterdir()) / 1e6
        print(f"packed:   {clean_name(folder.name)}: {sizes}; {megabytes:,.0f} MB; {manifest['source']['words']}")


if __name__ == "__main__":
    sys.exit(run_command(main))
