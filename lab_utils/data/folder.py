"""CINIC-10's layout, ``train|valid|test/<class>/<image>``: survey a folder, pack it, read it classically, write one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab_common import LabError
from lab_common.text import clean_name
from lab_utils import load_torchvision
from lab_utils.bars import open_bar
from lab_utils.data.images import decode, describe_bad, is_image, is_image_path, load_picture, read_image, refuse_bad
from lab_utils.data.pack import SPLITS
from lab_utils.data.system import make_command
from lab_utils.data.write import write_pack

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lab_utils.data import Dataset

# The order of the labels is ImageFolder's, which is CIFAR-10's: alphabetical.
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Published with the data set: https://github.com/BayesWatch/cinic-10, "Normalization".
MEAN_STD = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))

Listing = dict[str, dict[str, list[str]]]
"""Split to class to sorted file names."""


def has_layout(folder: Path) -> bool:
    """Says whether a folder means to be in CINIC-10's layout: it has at least one of the three splits.

    Raises:
        LabError: It cannot be entered.
    """
    with explain_unreadable(folder):
        return any((folder / split).is_dir() for split in SPLITS)


def survey(folder: Path) -> tuple[Listing, str]:
    """Lists all images of a folder in CINIC-10's layout, and takes its fingerprint: names, sizes, times of change.

    Raises:
        LabError: A split or class is missing or empty, there is a class that CINIC-10 does not have, or a folder cannot
            be read.
    """
    listing: Listing = {}
    stamp = hashlib.sha256()
    for split in SPLITS:
        if not (folder / split).is_dir():
            continue
        listing[split] = {}
        for entry in sorted(_visible(folder / split), key=lambda e: e.name):
            with explain_unreadable(entry.path):
                if not entry.is_dir():
                    continue
            files = sorted((e for e in _visible(entry.path) if is_image(e.name)), key=lambda e: e.name)
            listing[split][entry.name] = [file.name for file in files]
            for file in files:
                name = f"{split}/{entry.name}/{file.name}"
                stamp.update(f"{name}\0{_describe_state(file)}\n".encode(errors="surrogateescape"))
    check_listing(listing, folder, CLASS_NAMES)
    return listing, stamp.hexdigest()


def _visible(folder: Path | str) -> list[os.DirEntry]:
    with explain_unreadable(folder), os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


@contextlib.contextmanager
def explain_unreadable(folder: Path | str) -> Iterator[None]:
    """Names a folder that a block cannot enter or list; the one in the error, where it tells, else ``folder``.

    Raises:
        LabError: In place of the block's OSError.
    """
    try:
        yield
    except OSError as error:
        raise LabError(
            f"A folder of the data set cannot be read: {error.strerror}.",
            where=clean_name(error.filename or folder, 1000),
            cause="it belongs to another user, a link leads in a circle, or the disk is failing",
            fix="have its owner run: chmod -R a+rX on the data set",
        ) from error


def _describe_state(file: os.DirEntry) -> str:
    """Size and time of change; a link that leads nowhere has none, and is counted as bad when it is read."""
    try:
        state = file.stat()
    except OSError:
        return "unreadable"
    return f"{state.st_size}\0{state.st_mtime_ns}"


def check_listing(listing: Mapping[str, Mapping[str, Sequence[str]]], where: Path, class_names: Sequence[str]) -> None:
    """Refuses a listing that does not have exactly the three splits with exactly these classes, none of them empty."""
    fix = f"{make_command('import CINIC-10.tar.gz')}, or restore the folder train|valid|test/<class>/*.png"
    for split in SPLITS:
        if split not in listing:
            cause = "the folder was copied or unpacked in part, or the split has another name ('val')"
            raise LabError(f"The split {split!r} is missing.", where=clean_name(where / split), cause=cause, fix=fix)
        for name in sorted(set(listing[split]) - set(class_names)):
            raise LabError(
                f"The folder '{clean_name(name, 40)}' in {split} is none of CINIC-10's ten classes.",
                where=clean_name(where / split / name, 1000),
                cause="a folder of your own lies among the classes, or a class has another name (CINIC-10 has "
                + ", ".join(class_names) + ")",
                fix="move that folder elsewhere, or give it the class's name",
            )  # fmt: skip
        for name in class_names:
            if not listing[split].get(name):
                state = "has no images" if name in listing[split] else "is missing"
                cause = "the folder was copied or unpacked in part"
                place = clean_name(where / split / name)
                raise LabError(f"The class {name!r} in {split} {state}.", where=place, cause=cause, fix=fix)


def pack_folder(folder: Path, pack: Path, listing: Listing, *, source: Mapping[str, object], skip_bad: bool) -> None:
    """Reads every image of a folder in CINIC-10's layout, in the order of ImageFolder, into a pack."""
    counts = {split: sum(map(len, listing[split].values())) for split in SPLITS}
    bad: list[str] = []
    with (
        write_pack(pack, counts, class_names=CLASS_NAMES, source=source, mean_std=MEAN_STD) as draft,
        open_bar(sum(counts.values()), "packing cinic10", unit=" images", delay=3) as bar,
    ):
        for split in SPLITS:
            files = ((label, n, f) for label, n in enumerate(CLASS_NAMES) for f in listing[split][n])
            for position, (label, class_name, file) in enumerate(files):
                draft.labels[split][position] = label
                try:
                    draft.images[split][position] = decode(read_image(folder / split / class_name / file))
                except (ValueError, OSError) as error:
                    bad.append(describe_bad(f"{split}/{class_name}/{file}", error))
                    draft.skipped[split].append(position)
                bar.update()
        if not skip_bad:
            refuse_bad(bad, bar.total, folder)
        draft.notes["bad"] = bad[:100]


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
    try:
        images = ImageFolder(
            Path(folder) / split,
            v2.Compose(augmentation + to_tensor),
            loader=load_picture,
            is_valid_file=is_image_path,
        )
    except OSError as error:
        cause, fix = "no such folder, or a class in it has no images", "name a folder train|valid|test/<class>/*.png"
        raise LabError(
            "The images cannot be listed.", where=clean_name(Path(folder) / split), cause=cause, fix=fix
        ) from error
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
    folder = Path(folder)
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
