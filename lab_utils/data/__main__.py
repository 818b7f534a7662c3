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
from lab_utils.data.download import SIZE
from lab_utils.data.packing import SPLITS, choose_root, find_damage, make_command, open_pack, quote, read_manifest


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
        for home in data.list_homes(root):
            if pack := open_pack(home / "cinic10"):
                print(f"Nothing to fetch: CINIC-10 is here already, {pack.manifest['source']['words']}.")
                print(f"To fetch it all the same, remove it first: rm -r {quote(pack.folder)}")
                return
        archive = data.fetch_archive(root)
        data.import_archive(archive, root, skip_bad=arguments.skip_bad)
        print(f"{archive.name} is packed; the archive itself is no longer needed: {archive}")
    print(data.load(arguments.name, root, skip_bad=arguments.skip_bad).summary)


def _import(arguments: argparse.Namespace, root: Path) -> None:
    pack = data.import_archive(arguments.file, root, skip_bad=arguments.skip_bad)
    dataset = data.load("cinic10", root)
    print(dataset.summary)
    if (found := data.find_cinic10(root)) != pack:
        print(f"Note: the labs use the folder {clean_name(found)}, which goes before the imported pack.")


def _prepare(arguments: argparse.Namespace, root: Path) -> None:
    dataset = data.load(root=root, skip_bad=arguments.skip_bad)
    print(dataset.summary)
    if dataset.name == "shapes10":
        print("To work with CINIC-10 itself, do one of these:")
        ways = {
            make_command("fetch cinic10"): f"downloads it ({SIZE / 1e6:,.0f} MB)",
            make_command("import CINIC-10.tar.gz"): "takes a copy that you were given",
            "export LAB_DATA=/a/folder": "in which there is train|valid|test/<class>/*.png",
        }
        width = max(map(len, ways))
        print(*(f"  {command:{width}}   {words}" for command, words in ways.items()), sep="\n")


def _list_packs(root: Path) -> dict[Path, dict]:
    """Returns the packs that this root can use, with their manifests."""
    folders = [folder for home in data.list_homes(root) if home.is_dir() for folder in sorted(home.glob("[!.]*"))]
    return {folder: manifest for folder in folders if (manifest := read_manifest(folder))}


def _verify(arguments: argparse.Namespace, root: Path) -> None:
    packs = [folder for folder in _list_packs(root) if folder.name.startswith(arguments.name or "")]
    if not packs:
        raise LabError(
            f"There is no pack{f' of {arguments.name}' if arguments.name else ''} to verify.",
            where=root,
            cause="no data set was packed yet, or LAB_DATA points elsewhere",
            fix=make_command("prepare"),
        )
    for folder in packs:
        if damaged := find_damage(folder):
            again = (
                f"&& {make_command('import CINIC-10.tar.gz')}" if folder.name == "cinic10" else "  (and load it again)"
            )
            raise LabError(
                f"{len(damaged)} file(s) of the pack {clean_name(folder.name, 40)} are not what was packed.",
                where=f"{clean_name(folder)}: {', '.join(damaged)}",
                cause="the disk is failing, or a program wrote into the pack",
                fix=f"rm -r {quote(folder)} {again}",
            )
        print(f"[ok] {clean_name(folder.name)}: 6 arrays are what was packed")


def _info(arguments: argparse.Namespace, root: Path) -> None:
    print(f"LAB_DATA: {root}")
    print(f"cinic10:  {clean_name(data.find_cinic10(root) or 'not found; the labs draw shapes10 instead')}")
    for folder, manifest in _list_packs(root).items():
        sizes = ", ".join(f"{manifest['splits'][name]['images']:,} {name}" for name in SPLITS)
        megabytes = sum(file.lstat().st_size for file in folder.iterdir()) / 1e6
        print(f"packed:   {clean_name(folder.name)}: {sizes}; {megabytes:,.0f} MB; {manifest['source']['words']}")


if __name__ == "__main__":
    sys.exit(run_command(main))
