"""The data sets of the labs: found or drawn, packed once into memory-mapped arrays, handed out in batches.

``data.load()`` gives CINIC-10 where it lies in ``LAB_DATA``, else shapes10, which is drawn on the spot;
``dataset.batches("train", 128, device=device)`` its training images, shuffled and augmented; ``dataset.train`` is a
torch ``Dataset``, for a ``DataLoader``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lab_common import LabError
from lab_common.text import clean
from lab_utils.data.archive import import_archive
from lab_utils.data.batches import Batches
from lab_utils.data.fetch import fetch_archive
from lab_utils.data.folder import classic_loader, export
from lab_utils.data.pack import MANIFEST
from lab_utils.data.sources import find_cinic10, provide_pack
from lab_utils.data.system import choose_root

__all__ = [
    "NAMES",
    "Batches",
    "Dataset",
    "Split",
    "classic_loader",
    "export",
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
        """What a ``DataLoader`` calls for a batch: one gather for all of its images."""
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
        train: 10,000 images of shapes10; 90,000 of the full CINIC-10.
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
        sizes = ", ".join(f"{len(getattr(self, split)):,} {split}" for split in ("train", "valid", "test"))
        notes = [f"{self.skipped:,} unreadable images were left out"] if self.skipped else []
        words = "; ".join([self.source, *notes, *self.notes])
        return f"{self.name}: {sizes} images of {len(self.class_names)} classes, {words}"

    @property
    def for_nodes(self) -> dict[str, object]:
        """Where it is, here and on a node, and what makes it there: the arguments of ``nodelaunch.DataFolder``."""
        fix = "python -m lab_utils.data prepare"
        return {"path": self.pack, "name": f"packed/{self.name}", "identity": MANIFEST, "fix": fix}

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
        if split not in ("train", "valid", "test"):
            raise LabError(
                f"There is no split {split!r} in {self.name}.",
                where=f"batches({split!r}, ...)",
                cause="a mistyped name; what others call 'val' or 'validation' is 'valid' here",
                fix="take 'train', 'valid' or 'test'",
            )
        part: Split = getattr(self, split)
        return Batches(
            part.images,
            part.labels,
            batch_size,
            mean=self.mean,
            std=self.std,
            device=device,
            train=split == "train" if train is None else train,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            pad=pad,
        )


def load(name: str | None = None, root: Path | str | None = None, *, skip_bad: bool = False) -> Dataset:
    """Loads a data set; the first time it is drawn, read or downloaded, and packed.

    Args:
        name: One of :data:`NAMES`; by default ``cinic10`` where it is found under ``root``, else ``shapes10``.
        root: The folder that holds data sets, or a folder in CINIC-10's layout; by default the environment variable
            ``LAB_DATA``, else the repository's ``data/``. Where that is not there, it is named, and made.
        skip_bad: Go on without the images that cannot be read, instead of naming them and stopping.

    Raises:
        LabError: Unknown name, nothing there, a folder or images that cannot be read, a download that failed.
    """
    root = choose_root(root)
    note = ""
    if name is None:
        name = "cinic10" if find_cinic10(root) else "shapes10"
        note = " (no CINIC-10 was found in LAB_DATA)" if name == "shapes10" else ""
        if note and not root.exists():
            print(f"There is no folder {clean(root, 200)}: shapes10 is used.", file=sys.stderr)
    if name not in NAMES:
        where, fix = f"data.load({name!r})", f"choose one of {', '.join(NAMES)}"
        raise LabError(f"There is no data set {name!r}.", where=where, cause="a mistyped name", fix=fix)
    pack, manifest, arrays = provide_pack(name, root, skip_bad=skip_bad)
    mean, std = tuple(manifest["mean"]), tuple(manifest["std"])
    splits = {
        split: Split(torch.from_numpy(images), torch.from_numpy(labels), mean, std)
        for split, (images, labels) in arrays.items()
    }
    return Dataset(
        name,
        tuple(manifest["classes"]),
        mean,
        std,
        manifest["source"]["words"] + note,
        pack,
        **splits,
        skipped=sum(split["skipped"] for split in manifest["splits"].values()),
        notes=tuple(manifest["source"]["notes"]),
    )
