"""Packed data sets: a folder with one .npy file of images and one of labels per split, and a manifest.

    packed/cinic10/manifest.json        counts, class names, mean and std, SHA-256 of each array, where it came from
    packed/cinic10/train-images.npy     uint8 (N, 3, 32, 32)
    packed/cinic10/train-labels.npy     int64 (N,)          ... and the same for valid and test

A pack is written into a temporary folder beside its place (``.cinic10-*.draft``), flushed to the disk and renamed, so
that whatever carries the final name is whole. The pack that it replaces is set aside meanwhile (``.cinic10-*.old``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lab_utils import LabError
from lab_utils.data.system import hold_lock
from lab_utils.files import sync_folder

SPLITS = ("train", "valid", "test")
FORMAT = 1
MANIFEST = "manifest.json"


def make_draft_folder(folder: Path) -> tuple[Path, int]:
    """Makes a temporary folder beside the pack's place and holds a lock on it, which ends with this process.

    Returns:
        The folder, and the descriptor that holds the lock.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".draft", dir=folder.parent))
    except OSError as error:
        raise LabError(
            f"The pack {folder.name} cannot be written here: {error.strerror}.",
            where=folder.parent,
            cause="the folder is not yours to write",
            fix="choose another folder with LAB_DATA=/another/folder (a link to the data set in it is enough)",
        ) from error
    draft.chmod(0o755)  # mkdtemp makes it private, but a pack may be shared by a class
    lock = os.open(draft, os.O_RDONLY)
    hold_lock(lock)
    return draft, lock


def sweep_drafts(folder: Path, *, keep: Path) -> None:
    """Removes what killed processes left beside the pack's place, but nothing that the pack can be restored from."""
    restore_pack(folder)
    for old in folder.parent.glob(f".{folder.name}-*.old"):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
    for other in folder.parent.glob(f".{folder.name}-*.draft"):
        with contextlib.suppress(OSError):  # a neighbour's draft may get its final name at any moment
            # A minute's grace: between another's mkdtemp and its lock the lock is free, too.
            if other != keep and time.time() - other.stat().st_mtime >= 60:
                with _hold(other):
                    shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def _hold(draft: Path) -> Iterator[None]:
    """Holds the lock of another's draft for a block.

    Raises:
        OSError: It is still being written, or nobody can tell, because the file system has no locks.
    """
    lock = os.open(draft, os.O_RDONLY)
    try:
        if not hold_lock(lock):
            raise OSError("no locks here")
        yield
    finally:
        os.close(lock)


def restore_pack(folder: Path) -> None:
    """Where a process was killed while it replaced a pack, gives its place to the finished draft, else to the old pack.

    Does nothing where a pack stands already, or where the folder cannot be written.
    """
    if folder.exists():
        return
    for suffix in ("draft", "old"):
        for other in folder.parent.glob(f".{folder.name}-*.{suffix}"):
            if not read_manifest(other):  # the manifest is written last
                continue
            # Nobody locks an old pack: whoever set it aside tries again when its place is taken.
            with contextlib.suppress(OSError), _hold(other) if suffix == "draft" else contextlib.nullcontext():
                # The rmtree of an old pack, too, may have been killed midway.
                if not find_damage(other):
                    other.rename(folder)
                    sync_folder(folder.parent)
                    return


def put_into_place(draft: Path, folder: Path) -> None:
    """Renames the draft to its final name, over an older pack; if another process was first, its pack stays."""
    fingerprint = read_manifest(draft)["source"]["fingerprint"]
    for _ in range(10):
        standing = read_manifest(folder)
        if standing and standing["source"]["fingerprint"] == fingerprint and not find_damage(folder):
            return
        with contextlib.suppress(OSError):
            _replace(draft, folder)
            return
    raise OSError(f"{folder.name} could not be renamed into place")


def _replace(draft: Path, folder: Path) -> None:
    """Sets the standing pack aside, renames the draft, and only then removes the old one."""
    if not folder.exists():
        draft.rename(folder)
        sync_folder(folder.parent)
        return
    # Its own name while it goes, so that two processes that replace it do not meet.
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".old", dir=folder.parent))
    try:
        folder.rename(old)
        try:
            draft.rename(folder)
        except BaseException:
            with contextlib.suppress(OSError):  # fails where the place is taken, as it should
                old.rename(folder)
            raise
        sync_folder(folder.parent)
    finally:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path) -> dict | None:
    """Returns the manifest of a pack, or None where there is no pack of this format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest if manifest["format"] == FORMAT and manifest["source"]["fingerprint"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_arrays(folder: Path, manifest: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Maps a pack's arrays into memory: per split, images uint8 (N, 3, 32, 32) and labels int64 (N,).

    The maps are copy-on-write (``mode="c"``): torch takes them without a warning, and nothing can change the files.

    Raises:
        ValueError, OSError: An array is missing, cut short, or not what the manifest says.
    """
    arrays = {}
    for split in SPLITS:
        count = manifest["splits"][split]["images"]
        images = np.load(folder / f"{split}-images.npy", mmap_mode="c")
        labels = np.load(folder / f"{split}-labels.npy")
        if images.shape != (count, 3, 32, 32) or images.dtype != np.uint8 or labels.shape != (count,):
            raise ValueError(f"{split}: {images.shape} and {labels.shape}, where the manifest says {count}")
        arrays[split] = images, labels
    return arrays


def find_damage(folder: Path) -> list[str]:
    """Returns the names of the files of a pack that are missing or whose SHA-256 is not the one in its manifest."""
    damaged = []
    for name, expected in read_manifest(folder)["sha256"].items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            found = ""
        damaged += [name] if found != expected else []
    return damaged
