"""The images of a lap: the script's own pack, and the images for the judge's evaluation.

The script gets only images of the split ``train``, in a new order and with renumbered classes, so weights of an earlier
lap predict the wrong numbers.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np

from course.race.evaluate import Images
from lab_common import LabError
from lab_utils import data
from lab_utils.data import shapes
from lab_utils.data.packing import write_pack

# Share of `train` that the script gets as its `valid` and as its `test`.
HELD_OUT = 0.1
NAMES = ("shapes10", "cinic10")


def draw_lap(dataset: data.Dataset, root: Path) -> tuple[list[int], dict[str, int]]:
    """Writes the pack of a lap below ``root``, for ``data.load(root=root)``.

    Returns:
        The mapping (a label of the data set → the label in the lap), and the number of images of each split.

    Raises:
        LabError: The data set has too few images, or the pack cannot be written.
    """
    rng = np.random.default_rng(secrets.randbits(128))
    classes, labels = len(dataset.class_names), dataset.train.labels.numpy()
    mapping, order = rng.permutation(classes), rng.permutation(len(labels))
    # The same share of each class, in random order.
    each = [order[labels[order] == label] for label in range(classes)]
    if min(map(len, each)) < 1 / HELD_OUT:
        fix = f"use a data set with at least {1 / HELD_OUT:.0f} training images of each class"
        raise LabError(f"{dataset.name} has too few images for a race.", where=dataset.pack, fix=fix)
    held = rng.permutation(np.concatenate([part[: round(HELD_OUT * len(part))] for part in each]))
    parts = {"train": order[~np.isin(order, held)], "valid": held, "test": held}
    counts = {split: len(part) for split, part in parts.items()}
    fingerprint = shapes.FINGERPRINT if dataset.name == "shapes10" else "of a lap of the race"
    source = {"words": "one lap's share of the training images", "fingerprint": fingerprint}
    names = tuple(f"class {number}" for number in range(classes))
    arrays = ((split, dataset.train.images.numpy()[part], mapping[labels[part]]) for split, part in parts.items())
    folder, statistics = root / "packed" / dataset.name, (dataset.mean, dataset.std)
    write_pack(folder, arrays, class_names=names, source=source, mean_std=statistics)
    return mapping.tolist(), counts


def choose_seed(dataset: data.Dataset) -> int | None:
    """Returns a new seed for a drawn data set; None for one with a fixed ``valid`` split."""
    return secrets.randbits(63) if dataset.name == "shapes10" else None


def find_images(dataset: data.Dataset, mapping: list[int], seed: int | None) -> Images:
    """Returns the images for the evaluation: ``valid``, or as many unseen images of shapes10, drawn with ``seed``."""
    images, labels = dataset.valid.images.numpy(), dataset.valid.labels.numpy()
    if seed is not None:
        images, labels = shapes.draw_images("valid", range(len(labels)), seed=seed)
    return Images(images, np.array(mapping)[labels], dataset.mean, dataset.std, len(mapping))
