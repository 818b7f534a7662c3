"""Measures the top-1 of saved weights. They are read with ``weights_only=True``: no code of their author runs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from lab_common.files import read_bounded
from lab_common.text import clean_name
from lab_utils import machine, models

BATCH = 256
WEIGHTS_BYTES = 512 * 2**20
# What wrappers put in front of a weight's name.
WRAPPERS = ("module.", "_orig_mod.", "module.")


@dataclass(frozen=True)
class Images:
    """The images of the judge's evaluation.

    Attributes:
        images: uint8 (N, 3, 32, 32).
        labels: int64 (N,), in the lap's numbering of the classes.
        mean: Per channel, in 0..1; subtracted.
        std: Standard deviation, by which the images are divided.
        classes: The number of classes.
    """

    images: np.ndarray
    labels: np.ndarray
    mean: Sequence[float]
    std: Sequence[float]
    classes: int


def evaluate(versions: Sequence[Path], on: Images) -> list[tuple[str, float] | str]:
    """Evaluates files of weights; returns for each the network and its top-1, or the reason why there is none."""
    mean, std = (torch.tensor(given).view(3, 1, 1) for given in (on.mean, on.std))
    images, labels = (torch.from_numpy(on.images) / 255 - mean) / std, torch.from_numpy(on.labels)
    found: list[tuple[str, float] | str] = []
    for version in versions:
        try:
            name, net = read_weights(version, on.classes)
            found.append((name, _measure(net, images, labels)))
        except Exception as error:  # somebody else's file: whatever it makes torch raise, it has no top-1
            found.append(_describe_error(error))
    return found


def find_net(state: Mapping[str, torch.Tensor], num_classes: int) -> tuple[str, str]:
    """Returns the name and the stem of the network of ``lab_utils.models`` that these weights fit.

    Raises:
        ValueError: They fit no network.
    """
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for name in models.NAMES:
        for stem in ("imagenet", "cifar"):
            with torch.device("meta"):
                net = models.build(name, num_classes=num_classes, stem=stem)
            if shapes == {key: tuple(value.shape) for key, value in net.state_dict().items()}:
                return name, stem
    raise ValueError(f"they fit no network of lab_utils.models ({', '.join(models.NAMES)})")


def read_weights(path: Path, num_classes: int) -> tuple[str, torch.nn.Module]:
    """Returns the name of the network that a file of weights fits, and the network with these weights.

    Raises:
        ValueError: The file has no weights, or they fit no network; torch raises other errors for damaged files.
    """
    content = io.BytesIO(read_bounded(path, WEIGHTS_BYTES, follow=False))  # a pipe would keep us waiting
    state = torch.load(content, map_location="cpu", weights_only=True)
    state = state.get("model", state) if isinstance(state, dict) else {}
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("the file is no state_dict, and has none under 'model'")
    for prefix in WRAPPERS:
        consume_prefix_in_state_dict_if_present(state, prefix)
    name, stem = find_net(state, num_classes)
    net = models.build(name, num_classes=num_classes, stem=stem)
    net.load_state_dict({key: value.to(torch.get_default_dtype()) for key, value in state.items()})
    return name if stem == "imagenet" or name == "tiny" else f"{name}, {stem} stem", net.eval()


@torch.no_grad()
def _measure(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    device = machine.device()
    net, hits = net.to(device), 0
    for part, right in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        hits += int((net(part.to(device)).argmax(1).cpu() == right).sum())
    return hits / len(labels)


def _describe_error(error: Exception) -> str:
    """Returns an error's message on one line, without torch's advice to load the file unsafely."""
    if isinstance(error, pickle.UnpicklingError):
        error = error.__context__ or error
    words = " ".join(str(error)[:1000].split()).partition(" Please use `torch.serialization")[0]
    return clean_name(f"{type(error).__name__}: {words}", 300)
