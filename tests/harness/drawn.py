"""Small data sets, drawn on the spot, for the tests of the data room."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from lab_common import LabError
from lab_utils.data import pack_shapes, shapes
from lab_utils.data.packing import CLASS_NAMES

PER_CLASS = {"train": 4, "valid": 2, "test": 3}


def make_folder(folder: Path, *, per_class: dict[str, int] | None = None) -> Path:
    """Writes a folder in CINIC-10's layout with a few drawn PNGs per class, and returns it."""
    for split, count in (per_class or PER_CLASS).items():
        for label, name in enumerate(CLASS_NAMES):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                image, _ = shapes.draw_image(split, number * 10 + label)
                # Names in CINIC-10's two manners, so that sorting by name and by number differ.
                file = f"cifar10-train-{number}.png" if number % 2 else f"n0{9 - number}_{number}.png"
                Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(place / file)
    return folder


def make_pack(home: Path, name: str = "shapes10") -> Path:
    """Packs twenty training images that count as a data set of that name, and returns the folder of data sets."""
    counts = {"train": 20, "valid": 10, "test": 10}
    pack_shapes(home / "packed" / name, counts)
    return home


def make_archive(folder: Path, file: Path, *, top: str = ".") -> Path:
    """Packs a folder into a .tar.gz, in the arbitrary order of a file system."""
    with tarfile.open(file, "w:gz", compresslevel=1) as tar:
        for path in sorted(folder.rglob("*"), key=lambda path: str(path)[::-1]):
            tar.add(path, f"{top}/{path.relative_to(folder)}", recursive=False)
    return file


def assert_explains(error: LabError, *words: str) -> None:
    """Asserts that an error says what, where, why and how to fix it, and contains these words."""
    assert error.what and error.where and error.cause and error.fix, str(error)
    assert len(error.what) <= 120, error.what
    for word in words:
        assert word in str(error), f"{word!r} is not in:\n{error}"


def list_all(folder: Path) -> list[str]:
    """Returns everything under a folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
