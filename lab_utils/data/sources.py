"""From a name and a root folder to a pack: which source is there, is its pack up to date, and if not, make it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np

from lab_common import LabError, checkout
from lab_common.text import clean_name
from lab_utils.bars import open_bar
from lab_utils.data import shapes
from lab_utils.data.folder import pack_folder, survey_folder
from lab_utils.data.layout import Folder, explain_unreadable, find_data_sets, is_data_set
from lab_utils.data.pack import MANIFEST, find_damage, open_arrays, read_manifest, restore_pack
from lab_utils.data.system import make_command, quote
from lab_utils.data.write import write_pack

# Raised whenever another picture would be drawn for the same seed, so that packs of the old ones are drawn anew.
SHAPES_FINGERPRINT = "shapes10, drawing 1, seed 0"


def find_cinic10(root: Path) -> Path | None:
    """Returns what ``cinic10`` means under a root: a folder in CINIC-10's layout, an imported pack, or None.

    Raises:
        LabError: Several folders could be meant, or one cannot be read.
    """
    tree, imported = Folder(root), root / "packed" / "cinic10"
    tops = find_data_sets(tree, deepest=1) if root.is_dir() else []
    if "cinic" not in "".join(tops[:1]).lower() and tops != [""]:
        with explain_unreadable(imported.parent):
            restore_pack(imported)
        if read_manifest(imported):
            return imported
        tops = tops or (find_data_sets(tree) if root.is_dir() else [])
    if len(tops) > 1:
        raise LabError(
            f"{len(tops)} folders could be CINIC-10.",
            where=", ".join(clean_name(root / top) for top in tops),
            cause="more than one folder here has the splits train, valid, test in it",
            fix=f"point at the one you mean: export LAB_DATA={quote(root / tops[0])}",
        )
    return root / tops[0] if tops else None


def pack_homes(root: Path) -> list[Path]:
    """Returns the folders where packs may lie, one that can be written first; never inside somebody's data set."""
    own, spare = root / "packed", checkout() / "data" / "packed"
    if root.is_dir() and is_data_set(Folder(root)):
        return [spare]
    existing = next(parent for parent in (own, root, *root.parents) if parent.exists())
    return [own, spare] if os.access(existing, os.W_OK | os.X_OK) else [spare, own]


def provide_pack(name: str, root: Path, *, skip_bad: bool = False) -> tuple[Path, dict, dict]:
    """Opens the pack of a data set, making or renewing it first where its source asks for that.

    Returns:
        The pack's folder, its manifest, and per split the images uint8 (N, 3, 32, 32) and labels int64 (N,).

    Raises:
        LabError: As :func:`lab_utils.data.load` says.
    """
    if name != "cinic10":
        return _provide_made(name, root)
    found = find_cinic10(root)
    if found is None:
        raise _explain_absence(root)
    if found == root / "packed" / "cinic10":
        return _open(found, read_manifest(found))
    listing, left_out, fingerprint = survey_folder(found)
    # The path is part of the name: two folders may share the spare home.
    pack_name = f"cinic10-folder-{hashlib.sha256(os.fsencode(found)).hexdigest()[:8]}"
    opened = _open_current(root, pack_name, fingerprint)
    if opened is None:
        words = "from a folder in CINIC-10's layout"
        pack = pack_homes(root)[0] / pack_name
        source = {"kind": "folder", "words": words, "fingerprint": fingerprint}
        pack_folder(found, pack, listing, source=source, left_out=left_out, skip_bad=skip_bad)
        opened = _open(pack, read_manifest(pack))
    return opened


def _provide_made(name: str, root: Path) -> tuple[Path, dict, dict]:
    """Provides a data set whose source never changes once it is packed: drawn, or from torchvision."""
    from lab_utils.data.downloads import pack_torchvision

    fingerprint = SHAPES_FINGERPRINT if name == "shapes10" else f"{name}, packing 1"
    opened = _open_current(root, name, fingerprint)
    if opened is None:
        home = pack_homes(root)[0]
        if name == "shapes10":
            pack_shapes(home / name)
        else:
            pack_torchvision(name, home / name, home.parent, fingerprint=fingerprint)
        opened = _open(home / name, read_manifest(home / name))
    return opened


def pack_shapes(pack: Path) -> None:
    """Draws shapes10 into a pack."""
    source = {"kind": "drawn", "words": "drawn on the spot", "fingerprint": SHAPES_FINGERPRINT}
    with (
        write_pack(pack, shapes.COUNTS, class_names=shapes.CLASS_NAMES, source=source) as draft,
        open_bar(sum(shapes.COUNTS.values()), "drawing shapes10", unit=" images", delay=3) as bar,
    ):
        for split, count in shapes.COUNTS.items():
            for index in range(count):
                draft.images[split][index], draft.labels[split][index] = shapes.draw_image(split, index)
                bar.update()


def _open_current(root: Path, pack_name: str, fingerprint: str) -> tuple[Path, dict, dict] | None:
    """Opens the pack that was made from exactly this source, if there is a whole one in any of its homes."""
    for home in pack_homes(root):
        manifest = read_manifest(home / pack_name)
        if manifest and manifest["source"]["fingerprint"] == fingerprint:
            try:
                return home / pack_name, manifest, open_arrays(home / pack_name, manifest)
            except (ValueError, FileNotFoundError):
                # Cut short by a full disk or by hand: its source is there, so it is made again.
                with contextlib.suppress(OSError):
                    (home / pack_name / MANIFEST).unlink()
            except OSError:
                # Too many open files, another user's, a disk that is away: the pack may be whole, and stays.
                continue
    return None


def _open(pack: Path, manifest: dict | None) -> tuple[Path, dict, dict[str, tuple[np.ndarray, np.ndarray]]]:
    try:
        if manifest is None:
            raise ValueError("its manifest is missing")
        return pack, manifest, open_arrays(pack, manifest)
    except (OSError, ValueError) as error:
        raise LabError(
            f"The pack {clean_name(pack.name, 60)} is damaged.",
            where=clean_name(pack),
            cause=f"a file was cut short or changed by hand ({clean_name(error, 200)})",
            fix=f"{make_command('import CINIC-10.tar.gz')}  (or fetch cinic10)",
        ) from error


def _explain_absence(root: Path) -> LabError:
    archives = sorted(f for f in root.glob("*[Cc][Ii][Nn][Ii][Cc]*.*") if f.is_file()) if root.is_dir() else []
    if archives:
        cause, fix = "the archive lies there, but was not imported", make_command(f"import {quote(archives[0])}")
    else:
        cause = "it was not downloaded yet, or LAB_DATA points elsewhere"
        fix = f"{make_command('fetch cinic10')}   (or work with data.load('shapes10'))"
    return LabError("CINIC-10 was not found.", where=root, cause=cause, fix=fix)


def list_packs(root: Path) -> dict[Path, dict]:
    """Returns the packs that this root can use, with their manifests.

    Raises:
        LabError: A folder cannot be read.
    """
    with explain_unreadable(root):
        folders = [folder for home in pack_homes(root) if home.is_dir() for folder in sorted(home.iterdir())]
    return {f: manifest for f in folders if not f.name.startswith(".") and (manifest := read_manifest(f))}


def verify_pack(folder: Path) -> None:
    """Reads a whole pack and compares it with the SHA-256 in its manifest.

    Raises:
        LabError: An array is missing or is not what was packed.
    """
    if damaged := find_damage(folder):
        imported = folder.name == "cinic10"
        again = f"&& {make_command('import CINIC-10.tar.gz')}" if imported else "  (the next load makes it again)"
        raise LabError(
            f"{len(damaged)} file(s) of the pack {clean_name(folder.name, 40)} are not what was packed.",
            where=f"{clean_name(folder)}: {', '.join(damaged)}",
            cause="the disk is failing, or a program wrote into the pack",
            fix=f"rm -r {quote(folder)} {again}",
        )
