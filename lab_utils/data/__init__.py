"""The data sets of the labs: found or drawn, packed once into memory-mapped arrays, handed out in batches.

``data.load()`` gives CINIC-10 if it is in ``LAB_DATA``, else shapes10, which is drawn on the spot;
``dataset.batches("train", 128, device=device)`` its training images, shuffled and augmented; ``dataset.train`` is a
torch ``Dataset``, for a ``DataLoader``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab_common import LabError
from lab_utils.bars import open_bar
from lab_utils.data import packing, shapes
from lab_utils.data.archive import import_archive
from lab_utils.data.batches import Batches
from lab_utils.data.download import fetch_archive, pack_torchvision
from lab_utils.data.packing import SPLITS

__all__ = ["NAMES", "Batches", "Dataset", "Split", "fetch_archive", "import_archive", "load"]

NAMES = ("shapes10", "cinic10", "cifar10", "fashion_mnist")


@dataclass(frozen=True, eq=False)
class Split(torch.utils.data.Dataset):
    """Images uint8 (N, 3, 32, 32), mapped from the disk, and their labels int64 (N,): a torch ``Dataset``.

    An item is (image (3, 32, 32) of the default dtype, normalised and not augmented; label, an ``int``).

    Attributes:
        mean: Per channel, in 0..1: the items' images have it subtracted.
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
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line, the same on every machine that has this data set: sizes, classes, source."""
        sizes = ", ".join(f"{len(getattr(self, split)):,} {split}" for split in SPLITS)
        words = "; ".join([self.source, *self.notes])
        return f"{self.name}: {sizes} images of {len(self.class_names)} classes, {words}"

    @property
    def for_nodes(self) -> dict[str, object]:
        """The arguments of ``nodelaunch.DataFolder``: the pack here and on a node, and the command that makes it there.

        A pack of somebody's folder is named by the folder's path, and has none.
        """
        command = "prepare" if self.name == "shapes10" else f"fetch {self.name}"
        fix = f"python -m lab_utils.data {command}" if self.pack.name == self.name else ""
        return {"path": self.pack, "name": f"packed/{self.name}", "identity": packing.MANIFEST, "fix": fix}

    def batches(self, split: str, batch_size: int, *, train: bool | None = None, **options: Any) -> Batches:
        """Hands out a split in batches, exactly: over all ranks every image comes once an epoch.

        Args:
            split: ``train``, ``valid`` or ``test``.
            batch_size: Images per batch and rank.
            train: Shuffle and augment; by default for the split ``train`` only.
            options: ``device``, ``seed``, ``rank``, ``world_size`` and ``drop_last``, as for :class:`Batches`.

        Returns:
            An iterable of (images float32 (B, 3, 32, 32), labels int64 (B,)) with ``len`` and ``set_epoch(epoch)``.

        Raises:
            LabError: There is no such split or rank, or no batch of this size.
        """
        if split not in SPLITS:
            raise LabError(f"There is no split {split!r} in {self.name}.", fix="take 'train', 'valid' or 'test'")
        part: Split = getattr(self, split)
        train = split == "train" if train is None else train
        return Batches(part.images, part.labels, batch_size, mean=self.mean, std=self.std, train=train, **options)


@packing.explain("The data set cannot be read", fix="ask its owner to type chmod -R a+rX on it, or remove dead links")
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
    root, note = packing.choose_root(root), ""
    found = packing.find_cinic10(root) if name in (None, "cinic10") else None
    if name is None:
        name = "cinic10" if found else "shapes10"
        note = " (no CINIC-10 was found in LAB_DATA)" if name == "shapes10" else ""
    if name not in NAMES:
        raise LabError(f"There is no data set {name!r}.", fix=f"choose one of {', '.join(NAMES)}")
    if name == "cinic10":
        pack = packing.provide_cinic10(root, found, skip_bad=skip_bad)
    elif name == "shapes10":
        pack = packing.provide(name, root, shapes.FINGERPRINT, pack_shapes)
    else:
        pack = packing.provide(name, root, name, lambda folder: pack_torchvision(name, folder))
    folder, manifest, arrays = pack
    mean, std = tuple(manifest["mean"]), tuple(manifest["std"])
    splits = {split: Split(*map(torch.from_numpy, pair), mean, std) for split, pair in arrays.items()}
    source, classes, notes = manifest["source"]["words"] + note, manifest["classes"], manifest["source"]["notes"]
    return Dataset(name, tuple(classes), mean, std, source, folder, **splits, notes=tuple(notes))


def pack_shapes(folder: Path, counts: Mapping[str, int] | None = None) -> None:
    """Draws shapes10, or its first few images, into a pack."""
    source = {"words": "drawn on the spot", "fingerprint": shapes.FINGERPRINT}
    bars = {"unit": " images", "delay": 3}
    parts = (
        (split, *shapes.draw_images(split, open_bar(count, f"drawing {split} images", iterable=range(count), **bars)))
        for split, count in (counts or shapes.COUNTS).items()
    )
    packing.write_pack(folder, parts, class_names=shapes.CLASS_NAMES, source=source)
