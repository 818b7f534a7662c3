"""CIFAR-10 and Fashion-MNIST, downloaded and checked by torchvision, packed like the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab_common import LabError
from lab_utils import load_torchvision
from lab_utils.data.write import write_pack

VALID = 5_000  # neither set has a validation split: the last 5,000 training images become it


def pack_torchvision(name: str, pack: Path, folder: Path, *, fingerprint: str) -> None:
    """Packs ``cifar10`` or ``fashion_mnist``, downloading it into ``folder`` unless it lies there.

    Fashion-MNIST's images are padded with two black pixels on each side to 32×32 and repeated to three channels.

    Raises:
        LabError: The download failed.
    """
    datasets = load_torchvision().datasets
    maker = datasets.CIFAR10 if name == "cifar10" else datasets.FashionMNIST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole, test = (maker(str(folder), train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError, EOFError) as error:  # URLError and a wrong checksum are among them
        raise LabError(
            f"{name} could not be downloaded.",
            where=folder,
            cause=f"no connection, or the server is down: {str(error).splitlines()[0] if str(error) else error!r}",
            fix="try again later, copy the downloaded files into that folder, or work with data.load('shapes10')",
        ) from error

    images, labels = _to_uint8(whole.data), np.asarray(whole.targets, dtype=np.int64)
    cut = len(images) - VALID
    parts = {
        "train": (images[:cut], labels[:cut]),
        "valid": (images[cut:], labels[cut:]),
        "test": (_to_uint8(test.data), np.asarray(test.targets, dtype=np.int64)),
    }
    counts = {split: len(part[1]) for split, part in parts.items()}
    source = {"kind": "torchvision", "words": "downloaded by torchvision", "fingerprint": fingerprint}
    with write_pack(pack, counts, class_names=tuple(whole.classes), source=source) as draft:
        for split, part in parts.items():
            draft.images[split][:], draft.labels[split][:] = part


def _to_uint8(images: object) -> np.ndarray:
    """Makes uint8 (N, 3, 32, 32) of CIFAR-10's (N, 32, 32, 3) or Fashion-MNIST's (N, 28, 28)."""
    array = np.asarray(images)
    if array.ndim == 4:
        return array.transpose(0, 3, 1, 2)
    return np.repeat(np.pad(array, ((0, 0), (2, 2), (2, 2)))[:, None], 3, axis=1)
