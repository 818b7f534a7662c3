"""Writes a pack: as a draft whose arrays are filled by position, finished with its manifest and put into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from lab_common import LabError
from lab_common.files import sync_folder
from lab_common.text import clean_name
from lab_utils.data.images import decode, describe_bad, is_deep
from lab_utils.data.pack import FORMAT, MANIFEST, SPLITS, make_draft_folder, put_into_place, sweep_drafts
from lab_utils.data.system import make_command


@dataclass
class Draft:
    """The arrays of a pack that is being written, to be filled by position.

    ``skipped`` has the positions, per split, whose image could not be read, and ``bad`` their names: they are taken out
    in the end. ``deep`` names the images that had 16 bits a channel.
    """

    folder: Path
    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    skipped: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    bad: list[str] = field(default_factory=list)
    deep: list[str] = field(default_factory=list)

    def put(self, name: str, split: str, position: int, read: Callable[[], bytes]) -> None:
        """Decodes an image file to its position, or notes that it is bad."""
        try:
            content = read()
            self.images[split][position] = decode(content)
            if is_deep(content):
                self.deep.append(name)
        except (ValueError, OSError) as error:
            self.bad.append(describe_bad(name, error))
            self.skipped[split].append(position)

    def describe(self, left_out: str) -> dict[str, object]:
        """What the manifest keeps of the images that were changed or not taken; told once, on stderr."""
        notes = [left_out] if left_out else []
        if count := len(self.deep):
            few = f"{count:,} image{'s' * (count > 1)} (such as {clean_name(self.deep[0], 200)})"
            notes.append(f"scaled from 16 bits a channel to 8: {few}")
        for note in notes:
            print(f"Note: {note}.", file=sys.stderr)
        return {"bad": self.bad[:100], "notes": notes}


@contextlib.contextmanager
def write_pack(
    folder: Path,
    counts: Mapping[str, int],
    *,
    class_names: tuple[str, ...],
    source: dict[str, object],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    left_out: str = "",
) -> Iterator[Draft]:
    """Opens a draft of ``counts`` images per split; when the block ends well, the pack stands at ``folder``.

    When the block fails or is interrupted, the draft is removed and ``folder`` is as it was before.

    Args:
        folder: The pack's place.
        counts: Images per split.
        class_names: In the order of the labels.
        source: Where the images come from; ``fingerprint`` says whether the pack is still up to date.
        mean_std: Per channel, in 0..1; worked out over the training images where it is None.
        left_out: In words, the files that were not taken.
    """
    draft_folder, lock = make_draft_folder(folder)
    try:
        sweep_drafts(folder, keep=draft_folder)
        arrays = {}
        for split in SPLITS:
            for kind, dtype, shape in (("images", np.uint8, (3, 32, 32)), ("labels", np.int64, ())):
                path = draft_folder / f"{split}-{kind}.npy"
                arrays[split, kind] = open_memmap(path, "w+", dtype, (counts[split], *shape))
                _reserve(path, start=arrays[split, kind].offset)
        draft = Draft(draft_folder, {s: arrays[s, "images"] for s in SPLITS}, {s: arrays[s, "labels"] for s in SPLITS})
        yield draft
        _finish(draft, class_names, source | draft.describe(left_out), mean_std)
        put_into_place(draft_folder, folder)
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


def _reserve(path: Path, *, start: int) -> None:
    """Has the disk set aside all bytes of a file whose content begins at ``start``.

    A mapped file is sparse at first; were the disk to fill up under it, the write would kill the process (SIGBUS).

    Raises:
        OSError: The disk is full.
    """
    size = path.stat().st_size
    with path.open("rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except AttributeError:  # macOS
            pass
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        file.seek(start)
        for at in range(start, size, 2**20):
            file.write(bytes(min(2**20, size - at)))


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
                fix=f"copy the data set again: {make_command('fetch cinic10')}",
            )
        manifest["splits"][split] = {
            "images": len(draft.labels[split]),
            "per_class": dict(zip(class_names, per_class.tolist(), strict=True)),
            "skipped": len(draft.skipped[split]),
        }
    mean, std = mean_std or measure_mean_std(draft.images["train"])
    manifest |= {"mean": list(mean), "std": list(std), "source": source}
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
        # By 1 where all pixels have one value: nothing can be divided by 0.
        stds.append(float(np.average((values - mean) ** 2, weights=histogram)) ** 0.5 or 1.0)
    return tuple(means), tuple(stds)
