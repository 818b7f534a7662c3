"""The images of a lap: the script's own pack, and the images on which the judge measures the top-1 of saved weights.

The script gets only images of the split ``train``, in a new order and with renumbered classes, so weights of an earlier
lap predict the wrong numbers. Weights are read with ``weights_only=True``: no code of their author runs.
"""

from __future__ import annotations

import itertools
import pickle
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from lab_common.text import clean_name
from lab_utils import data, machine, models
from lab_utils.data import shapes
from lab_utils.data.packing import write_pack

# Share of `train` that the script gets as its `valid` and as its `test`.
VALID_SHARE = 0.1
NAMES = ("shapes10", "cinic10")
BATCH = 256
# What wrappers put in front of a weight's name.
WRAPPERS = ("module.", "_orig_mod.", "module.")


def draw_lap(dataset: data.Dataset, root: Path) -> tuple[list[int], int]:
    """Writes the pack of a lap below ``root``, for ``data.load(root=root)``.

    Returns:
        The mapping (a label of the data set → the label in the lap), and the number of images to train on.
    """
    rng = np.random.default_rng(secrets.randbits(128))
    classes, labels = len(dataset.class_names), dataset.train.labels.numpy()
    mapping, order = rng.permutation(classes), rng.permutation(len(labels))
    held, rest = np.split(order, [round(VALID_SHARE * len(order))])
    parts = {"train": rest, "valid": held, "test": held}
    fingerprint = shapes.FINGERPRINT if dataset.name == "shapes10" else "of a lap of the race"
    source = {"words": "one lap's share of the training images", "fingerprint": fingerprint}
    names = tuple(f"class {number}" for number in range(classes))
    arrays = ((split, dataset.train.images.numpy()[part], mapping[labels[part]]) for split, part in parts.items())
    folder, statistics = root / "packed" / dataset.name, (dataset.mean, dataset.std)
    write_pack(folder, arrays, class_names=names, source=source, mean_std=statistics)
    return mapping.tolist(), len(rest)


def find_images(dataset: data.Dataset, mapping: list[int], seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images for the evaluation: ``valid``, or as many unseen images of shapes10, drawn with ``seed``.

    Returns:
        Images, normalised, float32 (N, 3, 32, 32); and labels in the lap's numbering, int64 (N,).
    """
    images, labels = dataset.valid.images.numpy(), dataset.valid.labels.numpy()
    if seed is not None:
        images, labels = shapes.draw_images("valid", range(len(labels)), seed=seed)
    mean, std = (torch.tensor(given).view(3, 1, 1) for given in (dataset.mean, dataset.std))
    return (torch.from_numpy(images) / 255 - mean) / std, torch.from_numpy(np.array(mapping)[labels])


@torch.no_grad()
def evaluate(
    versions: Sequence[Path], images: torch.Tensor, labels: torch.Tensor, classes: int
) -> list[tuple[str, float] | str]:
    """Evaluates files of weights on images as of :func:`find_images`.

    Returns:
        For each the name of its network and its top-1, or the reason why there is none.
    """
    device, found = machine.device(), list[tuple[str, float] | str]()
    for version in versions:
        try:
            name, net = read_weights(version, classes)
            net.to(device)
            answers = torch.cat([net(part.to(device)).argmax(1).cpu() for part in images.split(BATCH)])
            found.append((name, (answers == labels).double().mean().item()))
        except Exception as error:  # whatever such a file makes torch raise, it has no top-1
            if isinstance(error, pickle.UnpicklingError):
                error = error.__context__ or error
            # Without torch's advice to load the file unsafely.
            words = " ".join(str(error)[:1000].split()).partition(" Please use `torch.serialization")[0]
            found.append(clean_name(f"{type(error).__name__}: {words}", 300))
    return found


def read_weights(path: Path, num_classes: int) -> tuple[str, torch.nn.Module]:
    """Returns the name of the network of ``lab_utils.models`` that a file of weights fits, and it with these weights.

    Raises:
        ValueError: The file has no weights, or they fit no network; torch raises other errors for damaged files.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = state.get("model", state) if isinstance(state, dict) else {}
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("the file is no state_dict, and has none under 'model'")
    for prefix in WRAPPERS:
        consume_prefix_in_state_dict_if_present(state, prefix)
    sizes = {key: value.shape for key, value in state.items()}
    for name, stem in itertools.product(models.NAMES, ("imagenet", "cifar")):
        with torch.device("meta"):
            net = models.build(name, num_classes=num_classes, stem=stem)
        if sizes == {key: value.shape for key, value in net.state_dict().items()}:
            net = models.build(name, num_classes=num_classes, stem=stem)
            net.load_state_dict(state)
            return name if stem == "imagenet" else f"{name}, {stem} stem", net.eval()
    raise ValueError(f"they fit no network of lab_utils.models ({', '.join(models.NAMES)})")
