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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lab_common import LabError
from lab_common.files import hold_lock, open_regular, read_bounded, sync_folder
from lab_common.text import clean_name

SPLITS = ("train", "valid", "test")
FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = tuple(f"{split}-{kind}.npy" for split in SPLITS for kind in ("images", "labels"))
MANIFEST_BYTES = 2**20  # with the names of a hundred bad images it has some 30 kB
HEADER_BYTES = 2**16  # before an array's content; numpy takes 128


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
        # rmtree opens what it removes: it would wait for a pipe, whatever its name.
        with contextlib.suppress(OSError):
            if folder.exists() and old.is_dir():
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
    # What bears a draft's name may be a pipe, which would wait for somebody to write, or a link to elsewhere.
    lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    """Returns the manifest of a pack, or None where there is no pack of this format.

    Somebody else may have written it: what is returned has all that the labs use, with names that are safe to print.
    """
    try:
        manifest = json.loads(read_bounded(folder / MANIFEST, MANIFEST_BYTES).decode("utf-8"))
        if not _is_sound(manifest):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    manifest["classes"] = [clean_name(name, 80) for name in manifest["classes"]]
    source = manifest["source"]
    source["words"] = clean_name(source["words"], 200)
    source["notes"] = [clean_name(note, 2000) for note in source["notes"]]
    return manifest


def _is_sound(manifest: dict) -> bool:
    """Says whether a manifest has everything, each of its kind; raises what a wrong kind makes Python raise."""
    classes, source, sums = manifest["classes"], manifest["source"], manifest["sha256"]
    counts = [manifest["splits"][split][key] for split in SPLITS for key in ("images", "skipped")]
    return (
        manifest["format"] == FORMAT
        and isinstance(classes, list)
        and 0 < len(classes) <= 1000
        and all(isinstance(text, str) and text for text in (*classes, source["words"], source["fingerprint"]))
        and all(type(count) is int and 0 <= count <= 10_000_000 for count in counts)
        and len(manifest["mean"]) == len(manifest["std"]) == 3
        and all(abs(number) < 1000 for number in manifest["mean"])
        and all(1e-6 < number < 1000 for number in manifest["std"])
        and isinstance(sums, dict)
        and set(sums) == set(ARRAYS)
        and all(isinstance(text, str) for text in sums.values())
        and isinstance(source["notes"], list)
        and len(source["notes"]) <= 10
    )


def open_arrays(folder: Path, manifest: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Maps a pack's arrays into memory: per split, images uint8 (N, 3, 32, 32) and labels int64 (N,).

    The maps are copy-on-write (``mode="c"``): torch takes them without a warning, and nothing can change the files.

    Raises:
        ValueError, OSError: An array is missing, cut short, or not what the manifest says.
    """
    arrays = {}
    for split in SPLITS:
        count = manifest["splits"][split]["images"]
        images, labels = (_map_array(folder / f"{split}-{kind}.npy") for kind in ("images", "labels"))
        if images.shape != (count, 3, 32, 32) or labels.shape != (count,):
            raise ValueError(f"{split}: {images.shape} and {labels.shape}, where the manifest says {count}")
        if images.dtype != np.uint8 or labels.dtype != np.int64:
            raise ValueError(f"{split}: images of {images.dtype} and labels of {labels.dtype}")
        labels = np.array(labels)  # only now: a file that is one hole may announce labels of a megabyte each
        if not ((labels >= 0) & (labels < len(manifest["classes"]))).all():
            raise ValueError(f"{split}: labels that are no class")
        arrays[split] = images, labels
    return arrays


def _map_array(path: Path) -> np.ndarray:
    with open_regular(path):  # a pipe would keep numpy waiting
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # those of numpy, about a header of another version
            return np.lib.format.open_memmap(path, mode="c")
    except OSError:
        raise
    except Exception as error:  # what its parser of headers raises, a SyntaxError or a MemoryError as well
        raise ValueError(f"{path.name} is no array") from error


def digest(file: BinaryIO, algorithm: str) -> str:
    """Hashes an open file from its start as far as it reaches now: one that grows, or is the kernel's, may never end.

    Raises:
        OSError: It cannot be read.
    """
    left, state = os.fstat(file.fileno()).st_size, hashlib.new(algorithm, usedforsecurity=False)
    file.seek(0)
    while left and (block := file.read(min(2**20, left))):
        state.update(block)
        left -= len(block)
    return state.hexdigest()


def find_damage(folder: Path) -> list[str]:
    """Returns the names of the files of a pack that are missing or whose SHA-256 is not the one in its manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [MANIFEST]
    damaged = []
    for name, expected in manifest["sha256"].items():
        split, _, kind = name.partition("-")
        most = manifest["splits"][split]["images"] * (3 * 32 * 32 if kind == "images.npy" else 8) + HEADER_BYTES
        try:
            with open_regular(folder / name) as file:
                # A hole takes nothing on the disk, and hours to hash.
                found = digest(file, "sha256") if os.fstat(file.fileno()).st_size <= most else ""
        except OSError:
            found = ""
        damaged += [name] if found != expected else []
    return damaged
