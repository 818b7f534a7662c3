"""The data sets of the labs: found or drawn, packed once into memory-mapped arrays, handed out in batches.

``data.load()`` gives CINIC-10 if it is in ``LAB_DATA``, else shapes10, which is drawn on the spot;
``dataset.batches("train", 128, device=device)`` its training images, shuffled and augmented; ``dataset.train`` is a
torch ``Dataset``, for a ``DataLoader``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from lab_common import LabError
from lab_common.files import read_bounded
from lab_common.text import clean, clean_name
from lab_utils.bars import open_bar
from lab_utils.data import packing, shapes
from lab_utils.data.batches import Batches
from lab_utils.data.download import fetch_archive, import_archive, pack_torchvision
from lab_utils.data.packing import SPLITS, Pack, choose_root, list_homes, make_command, open_pack, quote

__all__ = [
    "NAMES",
    "Batches",
    "Dataset",
    "Split",
    "fetch_archive",
    "import_archive",
    "load",
]

NAMES = ("shapes10", "cinic10", "cifar10", "fashion_mnist")


@dataclass(frozen=True, eq=False)
class Split(torch.utils.data.Dataset):
    """Images uint8 (N, 3, 32, 32), mapped from the disk, and their labels int64 (N,): a torch ``Dataset``.

    An item is (image (3, 32, 32) of the default dtype, normalised and not augmented; label, an ``int``).

    Attributes:
        mean: Per channel, in 0..1; subtracted from the items' images.
        std: Standard deviation, by which they are divided.
    """

    images: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Returns a batch for a ``DataLoader``: one gather for all of its images."""
        chosen = torch.as_tensor(indices)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        images = (self.images[chosen].to(torch.get_default_dtype()) / 255 - mean) / std
        return list(zip(images, self.labels[chosen].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A packed data set.

    Attributes:
        name: One of :data:`NAMES`.
        class_names: In the order of the labels.
        mean: Per channel, in 0..1, over the training images (for cinic10 the published ones).
        std: Standard deviation, likewise.
        source: Where it comes from, in words, without a path.
        pack: Folder of its arrays.
        train: For training: 10,000 images of shapes10; 90,000 of the full CINIC-10.
        valid: For choosing among models.
        test: For the last number only.
        skipped: Images that could not be read and were left out because that was asked for.
        notes: In words, which files were not taken, and which images were changed.
    """

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    source: str
    pack: Path
    train: Split
    valid: Split
    test: Split
    skipped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line, the same on every machine that has this data set: sizes, classes, source."""
        sizes = ", ".join(f"{len(getattr(self, split)):,} {split}" for split in SPLITS)
        notes = [f"{self.skipped:,} unreadable images were left out"] if self.skipped else []
        words = "; ".join([self.source, *notes, *self.notes])
        return f"{self.name}: {sizes} images of {len(self.class_names)} classes, {words}"

    @property
    def for_nodes(self) -> dict[str, object]:
        """The arguments of ``nodelaunch.DataFolder``: the pack here and on a node, and the command that makes it."""
        fix = "python -m lab_utils.data prepare"
        return {"path": self.pack, "name": f"packed/{self.name}", "identity": packing.MANIFEST, "fix": fix}

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        train: bool | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pad: bool = False,
    ) -> Batches:
        """Hands out a split in batches, exactly: over all ranks every image comes once an epoch.

        Args:
            split: ``train``, ``valid`` or ``test``.
            batch_size: Images per batch and rank.
            device: Where the batches are made and end up.
            train: Shuffle and augment; by default for the split ``train`` only.
            seed: Of the order and the augmentation; the same on every rank.
            rank: This process, from 0.
            world_size: Number of processes that share the split.
            drop_last: Leave out what does not fill a batch, so that every rank has as many batches as the others.
            pad: Repeat images from the start of the order until every rank has equally many.

        Returns:
            An iterable of (images float32 (B, 3, 32, 32), labels int64 (B,)) with ``len`` and ``set_epoch(epoch)``.

        Raises:
            LabError: There is no such split or rank, or no batch of this size.
        """
        if split not in SPLITS:
            raise LabError(
                f"There is no split {split!r} in {self.name}.",
                where=f"batches({split!r}, ...)",
                cause="a mistyped name; what others call 'val' or 'validation' is 'valid' here",
                fix="take 'train', 'valid' or 'test'",
            )
        part: Split = getattr(self, split)
        order = {"train": split == "train" if train is None else train, "seed": seed}
        share = {"rank": rank, "world_size": world_size, "drop_last": drop_last, "pad": pad}
        look = {"mean": self.mean, "std": self.std, "device": device}
        return Batches(part.images, part.labels, batch_size, **look, **order, **share)


def load(name: str | None = None, root: Path | str | None = None, *, skip_bad: bool = False) -> Dataset:
    """Loads a data set; the first time it is drawn, read or downloaded, and packed.

    Args:
        name: One of :data:`NAMES`; by default ``cinic10`` if it is found under ``root``, else ``shapes10``.
        root: The folder that holds data sets, or a folder in CINIC-10's layout; by default the environment variable
            ``LAB_DATA``, else the repository's ``data/``.
        skip_bad: Leave out the images that cannot be read, instead of naming them and stopping.

    Raises:
        LabError: Unknown name, nothing there, a folder or images that cannot be read, a download that failed.
    """
    root, note = choose_root(root), ""
    found = find_cinic10(root) if name in (None, "cinic10") else None
    if name is None:
        name = "cinic10" if found else "shapes10"
        note = "" if found else " (no CINIC-10 was found in LAB_DATA)"
        if note and not root.exists():
            print(f"There is no folder {clean(root, 200)}: shapes10 is used.", file=sys.stderr)
    if name not in NAMES:
        where, fix = f"data.load({name!r})", f"choose one of {', '.join(NAMES)}"
        raise LabError(f"There is no data set {name!r}.", where=where, cause="a mistyped name", fix=fix)
    if name == "cinic10":
        pack = _provide_cinic10(found, root, skip_bad=skip_bad)
    elif name == "shapes10":
        pack = _provide(name, root, shapes.FINGERPRINT, pack_shapes)
    else:
        pack = _provide(name, root, f"{name}, packing 1", partial(pack_torchvision, name))
    manifest, mean, std = pack.manifest, tuple(pack.manifest["mean"]), tuple(pack.manifest["std"])
    splits = {
        split: Split(torch.from_numpy(images), torch.from_numpy(labels), mean, std)
        for split, (images, labels) in pack.arrays.items()
    }
    skipped, notes = sum(split["skipped"] for split in manifest["splits"].values()), tuple(manifest["source"]["notes"])
    source = manifest["source"]["words"] + note
    return Dataset(
        name, tuple(manifest["classes"]), mean, std, source, pack.folder, **splits, skipped=skipped, notes=notes
    )


def find_cinic10(root: Path) -> Path | None:
    """Returns what ``cinic10`` means under a root: a folder in CINIC-10's layout, an imported pack, or None.

    Raises:
        LabError: Several folders could be meant, or one cannot be read.
    """
    for deepest in (1, packing.DEEPEST):
        tops = packing.find_data_sets(packing.list_folders(root, deepest)) if root.is_dir() else []
        if len(tops) > 1:
            raise LabError(
                f"{len(tops)} folders could be CINIC-10.",
                where=", ".join(clean_name(root / top) for top in tops),
                cause="more than one folder here has the splits train, valid, test in it",
                fix=f"name the one you mean: export LAB_DATA={quote(root / tops[0])}",
            )
        if tops:
            return root / tops[0]
        for home in list_homes(root):
            if packing.read_manifest(home / "cinic10"):
                return home / "cinic10"
    return None


def _provide_cinic10(found: Path | None, root: Path, *, skip_bad: bool) -> Pack:
    """Opens the pack of what :func:`find_cinic10` found; that of a folder is made, or made again after a change."""
    if found is None:
        archives = sorted(f for f in root.glob("*[Cc][Ii][Nn][Ii][Cc]*.*") if f.is_file())
        cause = "it was not downloaded yet, or LAB_DATA points elsewhere"
        fix = f"{make_command('fetch cinic10')}   (or work with data.load('shapes10'))"
        if archives:
            cause, fix = "its archive is there, but was not imported", make_command(f"import {quote(archives[0])}")
        raise LabError("CINIC-10 was not found.", where=root, cause=cause, fix=fix)
    if packing.read_manifest(found):
        if pack := open_pack(found):
            return pack
        cause = "a file was cut short or changed by hand"
        fix = f"{make_command('import CINIC-10.tar.gz')}  (or fetch cinic10)"
        raise LabError("The pack cinic10 is damaged.", where=clean_name(found), cause=cause, fix=fix)
    images = packing.survey(packing.list_names(found), found)
    fingerprint = packing.hash_folder(found, images)
    source = {"kind": "folder", "words": "from a folder in CINIC-10's layout", "fingerprint": fingerprint}
    option = "" if skip_bad else "prepare --skip-bad"

    def read(image: str) -> bytes:
        return read_bounded(found / image, packing.IMAGE_BYTES)

    def pack_folder(pack: Path) -> None:
        packing.pack_images(pack, images, read, source=source, where=found, option=option)

    # The path is a part of the name, because two folders may have their packs in the same place.
    name = f"cinic10-folder-{hashlib.sha256(os.fsencode(found)).hexdigest()[:8]}"
    return _provide(name, root, fingerprint, pack_folder)


def _provide(name: str, root: Path, fingerprint: str, make: Callable[[Path], None]) -> Pack:
    """Opens the pack that was made from exactly this source, or makes it; several processes make it once."""
    homes = list_homes(root)

    def find() -> Pack | None:
        packs = filter(None, (open_pack(home / name) for home in homes))
        return next((pack for pack in packs if pack.manifest["source"]["fingerprint"] == fingerprint), None)

    if pack := find():
        return pack
    with packing.lock_pack(homes[0] / name):
        if not (pack := find()):
            make(homes[0] / name)
            pack = open_pack(homes[0] / name)
    return pack


def pack_shapes(pack: Path) -> None:
    """Draws shapes10 into a pack."""
    source = {"kind": "drawn", "words": "drawn on the spot", "fingerprint": shapes.FINGERPRINT}
    with (
        packing.write_pack(pack, shapes.COUNTS, class_names=shapes.CLASS_NAMES, source=source) as draft,
        open_bar(sum(shapes.COUNTS.values()), "drawing shapes10", unit=" images", delay=3) as bar,
    ):
        for split, count in shapes.COUNTS.items():
            for index in range(count):
                draft.images[split][index], draft.labels[split][index] = shapes.draw_image(split, index)
                bar.update()
