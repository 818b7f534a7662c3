"""A folder in CINIC-10's layout: take its fingerprint, pack it, read it classically, write one."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab_common import LabError, read_folder, read_path
from lab_common.text import clean_name
from lab_utils import load_torchvision
from lab_utils.bars import open_bar
from lab_utils.data.images import load_picture, read_image, refuse_bad
from lab_utils.data.layout import CLASS_NAMES, Folder, LeftOut, Listing, list_split, survey
from lab_utils.data.pack import SPLITS
from lab_utils.data.write import write_pack

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lab_utils.data import Dataset

# Published with the data set: https://github.com/BayesWatch/cinic-10, "Normalization".
MEAN_STD = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))

# Raised whenever the same files would give other arrays or notes, so that they are packed anew.
PACKING = b"packing 2\n"


def survey_folder(folder: Path) -> tuple[Listing, str, str]:
    """Lists the images of a folder in CINIC-10's layout.

    Returns:
        The images; in words what was left out; and a fingerprint of both, with the files' sizes and times of change.

    Raises:
        LabError: As :func:`lab_utils.data.layout.survey` says.
    """
    listing, left_out = survey(Folder(folder))
    stamp = hashlib.sha256(PACKING + left_out.encode())
    for split, classes in listing.items():
        for class_name, names in classes.items():
            for name in names:
                file = f"{split}/{class_name}/{name}"
                stamp.update(f"{file}\0{_describe_state(f'{folder}/{file}')}\n".encode(errors="surrogateescape"))
    return listing, left_out, stamp.hexdigest()


def _describe_state(file: str) -> str:
    """Size and time of change; a link that leads nowhere has none, and is counted as bad when it is read."""
    try:
        state = os.stat(file)  # noqa: PTH116 (a Path for each of 270,000 files takes longer than to ask for its state)
    except OSError:
        return "unreadable"
    return f"{state.st_size}\0{state.st_mtime_ns}"


def pack_folder(
    folder: Path, pack: Path, listing: Listing, *, source: dict[str, object], left_out: str, skip_bad: bool
) -> None:
    """Reads every image of a folder in CINIC-10's layout, in the order of ImageFolder, into a pack."""
    counts = {split: sum(map(len, listing[split].values())) for split in SPLITS}
    with (
        write_pack(pack, counts, class_names=CLASS_NAMES, source=source, mean_std=MEAN_STD, left_out=left_out) as draft,
        open_bar(sum(counts.values()), "packing cinic10", unit=" images", delay=3) as bar,
    ):
        for split in SPLITS:
            files = ((label, n, f) for label, n in enumerate(CLASS_NAMES) for f in listing[split][n])
            for position, (label, class_name, file) in enumerate(files):
                name = f"{split}/{class_name}/{file}"
                draft.labels[split][position] = label
                draft.put(name, split, position, partial(read_image, folder / name))
                bar.update()
        if not skip_bad:
            refuse_bad(draft.bad, bar.total, folder)


def classic_loader(
    folder: Path | str,
    split: str,
    batch_size: int,
    *,
    num_workers: int = 0,
    train: bool | None = None,
    seed: int = 0,
    mean_std: tuple[Sequence[float], Sequence[float]] = MEAN_STD,
) -> DataLoader:
    """The classical path: one file, one decoding, one augmentation at a time, by torchvision's ImageFolder.

    Args:
        folder: In CINIC-10's layout.
        split: ``train``, ``valid`` or ``test``.
        batch_size: Images per batch.
        num_workers: Processes that make batches ahead.
        train: Shuffle and augment; by default for the split ``train`` only.
        seed: Of the order.
        mean_std: What to normalise by, per channel in 0..1.

    Raises:
        LabError: The split or one of its classes has no images; or, from the loader, an image cannot be used.
    """
    import torch

    load_torchvision()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    train = split == "train" if train is None else train
    augmentation = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()] if train else []
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*mean_std)]
    folder, left_out = read_folder(folder), LeftOut()
    listing = list_split(Folder(folder), split, left_out)
    if not listing or not all(listing.values()):
        cause, fix = "a class in it has no images, or there is none", "name a folder train|valid|test/<class>/*.png"
        cause = left_out.describe() or cause
        raise LabError("The images cannot be listed.", where=clean_name(folder / split), cause=cause, fix=fix)
    if left_out.describe():
        print(f"Note: {left_out.describe()}.", file=sys.stderr)
    images = ImageFolder(
        folder / split,
        v2.Compose(augmentation + to_tensor),
        loader=load_picture,
        is_valid_file=lambda path: False,
        allow_empty=True,
    )
    # The list that is packed: ImageFolder's own has what lies in hidden folders and below a class, too.
    images.classes, images.class_to_idx = [*listing], {name: label for label, name in enumerate(listing)}
    files = ((label, f"{name}/{file}") for label, name in enumerate(listing) for file in listing[name])
    images.samples = images.imgs = [(str(folder / split / file), label) for label, file in files]
    images.targets = [label for _, label in images.samples]
    return torch.utils.data.DataLoader(
        images,
        batch_size,
        shuffle=train,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(seed),
    )


def _name_folders(class_names: Sequence[str]) -> list[str]:
    """Returns a folder's name for each class: letters, digits and what leads to no other folder.

    Raises:
        LabError: Two classes would share one.
    """
    names = [re.sub(r"[^\w. -]", "-", name).strip(". ") for name in class_names]
    if len(set(names)) < len(names) or not all(names):
        raise LabError(
            "The classes cannot be written as folders.",
            where=clean_name(", ".join(class_names), 300),
            cause="two of them would have the same folder, or one has a name without letters and digits",
            fix="load another data set: data.load('shapes10')",
        )
    return names


def export(dataset: Dataset, folder: Path | str) -> Path:
    """Writes a data set as PNG files in CINIC-10's layout, and returns the folder.

    Raises:
        LabError: The folder is there already and not empty, or cannot be written.
    """
    folder = read_path(folder)
    try:
        if folder.exists() and any(folder.iterdir()):
            cause = "an earlier export lies there; mixing two would make a third data set"
            raise LabError("The folder is not empty.", where=folder, cause=cause, fix="choose another folder")
        _write_pictures(dataset, folder)
    except OSError as error:
        raise LabError(
            f"The data set cannot be written here: {error.strerror or error}.",
            where=clean_name(folder),
            cause="a file has the folder's name, it is not yours to write, or the disk is full",
            fix="choose another folder",
        ) from error
    return folder


def _write_pictures(dataset: Dataset, folder: Path) -> None:
    from PIL import Image

    names = _name_folders(dataset.class_names)
    total = sum(len(getattr(dataset, split)) for split in SPLITS)
    with open_bar(total, f"writing {dataset.name}", unit=" files", delay=3) as bar:
        for split in SPLITS:
            part = getattr(dataset, split)
            for name in names:
                (folder / split / name).mkdir(parents=True)
            for index, (image, label) in enumerate(zip(part.images.numpy(), part.labels.tolist(), strict=True)):
                file = folder / split / names[label] / f"{dataset.name}-{index:05}.png"
                Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file)
                bar.update()
