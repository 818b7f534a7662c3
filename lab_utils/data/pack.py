"""Packed data sets: a folder with one .npy file of images and one of labels per split, and a manifest.

    packed/cinic10/manifest.json        counts, class names, mean and std, SHA-256 of each array, where it came from
    packed/cinic10/train-images.npy     uint8 (N, 3, 32, 32)
    packed/cinic10/train-labels.npy     int64 (N,)          ... and the same for valid and test

A pack is written into a temporary folder beside its place, flushed to the disk and renamed, so that whatever carries
the final name is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from lab_utils import LabError
from lab_utils.files import sync_folder

SPLITS = ("train", "valid", "test")
FORMAT = 1
MANIFEST = "manifest.json"


@dataclass
class Draft:
    """The arrays of a pack that is being written, to be filled by position.

    ``skipped`` has the positions, per split, whose image could not be read: they are taken out in the end.
    """

    folder: Path
    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    skipped: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    notes: dict[str, object] = field(default_factory=dict)


@contextlib.contextmanager
def write_pack(
    folder: Path,
    counts: Mapping[str, int],
    *,
    class_names: tuple[str, ...],
    source: Mapping[str, object],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Iterator[Draft]:
    """Opens a draft of ``counts`` images per split; when the block ends well, the pack stands at ``folder``.

    When the block fails or is interrupted, the draft is removed and ``folder`` is as it was before.

    Args:
        folder: The pack's place.
        counts: Images per split.
        class_names: In the order of the labels.
        source: Where the images come from; ``fingerprint`` says whether the pack is still up to date.
        mean_std: Per channel, in 0..1; worked out over the training images where it is None.
    """
    draft_folder, lock = _make_draft_folder(folder)
    try:
        arrays = {}
        for split in SPLITS:
            for kind, dtype, shape in (("images", np.uint8, (3, 32, 32)), ("labels", np.int64, ())):
                path = draft_folder / f"{split}-{kind}.npy"
                arrays[split, kind] = open_memmap(path, "w+", dtype, (counts[split], *shape))
        draft = Draft(draft_folder, {s: arrays[s, "images"] for s in SPLITS}, {s: arrays[s, "labels"] for s in SPLITS})
        yield draft
        _finish(draft, class_names, dict(source), mean_std)
        _put_into_place(draft_folder, folder)
    except OSError as error:
        raise LabError(
            f"The pack {folder.name} could not be written: {error.strerror or error}.",
            where=folder.parent,
            cause="the disk is full or the folder is not yours to write",
            fix="free some space, or choose another folder with LAB_DATA=/another/folder",
        ) from error
    finally:
        shutil.rmtree(draft_folder, ignore_errors=True)
        os.close(lock)


def _make_draft_folder(folder: Path) -> tuple[Path, int]:
    """Makes a temporary folder beside the pack's place and holds a lock on it, which ends with this process.

    Drafts whose lock is free were left by a process that was killed; they are removed on the way.
    """
    import fcntl

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
    fcntl.flock(lock, fcntl.LOCK_EX)
    for other in folder.parent.glob(f".{folder.name}-*.draft"):
        # A minute's grace: between another's mkdtemp and its flock the lock is free, too.
        if other == draft or time.time() - other.stat().st_mtime < 60:
            continue
        with contextlib.suppress(OSError):
            other_lock = os.open(other, os.O_RDONLY)
            try:
                fcntl.flock(other_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(other_lock)
    return draft, lock


def _finish(draft: Draft, class_names: tuple[str, ...], source: dict, mean_std: tuple | None) -> None:
    """Takes the skipped images out, writes the manifest, and has the disk hold all of it."""
    manifest: dict = {"format": FORMAT, "classes": list(class_names), "splits": {}, "sha256": {}}
    for split in SPLITS:
        for kind, arrays in (("images", draft.images), ("labels", draft.labels)):
            path = draft.folder / f"{split}-{kind}.npy"
            arrays[split].flush()
            if draft.skipped[split]:
                kept = np.delete(arrays[split], draft.skipped[split], axis=0)
                path.unlink()
                np.save(path, kept)
                arrays[split] = kept
            with path.open("rb+") as file:
                manifest["sha256"][path.name] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
        per_class = np.bincount(draft.labels[split], minlength=len(class_names))
        if not per_class.all():
            raise LabError(
                f"Not one image of the class {class_names[per_class.argmin()]!r} in {split} can be used.",
                where=source["words"],
                cause="all of its images are damaged or of another size",
                fix="copy the data set again: python -m lab_utils.data fetch cinic10",
            )
        manifest["splits"][split] = {
            "images": len(draft.labels[split]),
            "per_class": dict(zip(class_names, per_class.tolist(), strict=True)),
            "skipped": len(draft.skipped[split]),
        }
    mean, std = mean_std or measure_mean_std(draft.images["train"])
    manifest |= {"mean": list(mean), "std": list(std), "source": source | draft.notes}
    with (draft.folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(draft.folder)


def measure_mean_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation per channel, in 0..1, exactly: from a histogram of the 256 values."""
    values, means, stds = np.arange(256) / 255, [], []
    for channel in range(3):
        # In slices, because bincount makes int64 of its input: eight times the bytes.
        slices = (images[i : i + 4096, channel].reshape(-1) for i in range(0, len(images), 4096))
        histogram = sum(np.bincount(part, minlength=256) for part in slices)
        mean = float(np.average(values, weights=histogram))
        means.append(mean)
        stds.append(float(np.average((values - mean) ** 2, weights=histogram)) ** 0.5)
    return tuple(means), tuple(stds)


def _put_into_place(draft: Path, folder: Path) -> None:
    """Renames the draft to its final name, over an older pack; if another process was first, its pack stays."""
    fingerprint = read_manifest(draft)["source"]["fingerprint"]
    for _ in range(10):
        standing = read_manifest(folder)
        if standing and standing["source"]["fingerprint"] == fingerprint and not find_damage(folder):
            return
        with contextlib.suppress(OSError):
            if folder.exists():
                # Its own name while it goes, so that two processes that replace it do not meet.
                old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".draft", dir=folder.parent))
                folder.rename(old)
                shutil.rmtree(old, ignore_errors=True)
            draft.rename(folder)
            sync_folder(folder.parent)
            return
    raise OSError(f"{folder.name} could not be renamed into place")


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
