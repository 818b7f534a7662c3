"""The images of a lap: the script's own pack, and the images for the judge's evaluation.

The script gets only images of the split ``train``, in a new order and with renumbered classes: weights of an earlier
lap predict the wrong numbers, unless somebody matches them to the lap's own images. The seal
(:mod:`course.race.sealed`) keeps such weights away.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from course.race.evaluate import Images, evaluate
from course.report.pages import shorten
from lab_common import LabError
from lab_utils import data
from lab_utils.data import shapes
from lab_utils.data.packing import write_pack

# Of `train`; the script gets them as its `valid` and, the same ones, as its `test`.
HELD_OUT = 0.1
NAMES = ("shapes10", "cinic10")
# Another device sums in another order, and a few images lie just between two classes.
ROUNDING = 0.005


def draw_lap(dataset: data.Dataset, root: Path) -> tuple[list[int], dict[str, int]]:
    """Writes the pack of a lap below ``root``, for ``data.load(root=root)``.

    Returns:
        The mapping (a label of the data set → the label in the lap), and the number of images of each split.

    Raises:
        LabError: The data set has too few images, or the pack cannot be written.
    """
    # The system's own random numbers: nobody can know them before.
    rng = np.random.default_rng(secrets.randbits(128))
    classes, labels = len(dataset.class_names), dataset.train.labels.numpy()
    mapping, order = rng.permutation(classes), rng.permutation(len(labels))
    # Of each class the same share, in an order that tells nothing.
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


def hash_images(on: Images) -> str:
    """Returns the SHA-256 over images and labels."""
    return hashlib.sha256(np.ascontiguousarray(on.images).tobytes() + on.labels.tobytes()).hexdigest()


def evaluate_again(record: dict[str, Any], weights: Path) -> str:
    """Evaluates the weights of a record once more, on the same images.

    Returns:
        Why the record is wrong, or cannot be tested; "" if it is right.
    """
    told = record["data"]
    if told["name"] not in NAMES:  # of another one nobody is made to fetch anything
        return "it cannot be evaluated again: nobody races on its data set"
    try:
        dataset = data.load(told["name"])
    except LabError as error:
        return f"it cannot be evaluated again: {error.what}"
    classes = len(dataset.class_names)
    # The rest of a record that a stranger wrote; a seed only makes sense for a data set that is drawn.
    if (told["classes"], told["valid"]) != (classes, len(dataset.valid)):
        return "it cannot be evaluated again: its data set is another one than here"
    if (told["seed"] is None) != (choose_seed(dataset) is None):
        return "its images were not chosen by the judge"
    on = find_images(dataset, told["mapping"], told["seed"])
    if hash_images(on) != told["sha256"]:
        return "it was evaluated on other images than those of its data set"
    try:
        (found,) = evaluate([weights], on)
    except LabError as error:  # of this lap alone: whoever wrote it may have made it endless, or larger than the memory
        found = error.cause
    if isinstance(found, str):
        return f"its weights cannot be evaluated: {shorten(found)}"
    net, top1 = found
    right = net == record["net"] and abs(top1 - record["top1"]) <= ROUNDING
    return "" if right else f"its weights are a {net} with {top1:.1%} top-1, the record says otherwise"
