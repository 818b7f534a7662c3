"""Measures the top-1 accuracy of saved weights in a separate process: ``python -m course.race.evaluate FOLDER``.

The folder has ``images.npy`` uint8 (N, 3, 32, 32), ``labels.npy`` int64 (N,), ``given.json``, which names the versions.
Files are read with ``weights_only=True``: no code of their author runs.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from lab_common import LabError
from lab_common.text import clean, clean_name
from lab_utils import machine, models

PROGRAM = (sys.executable, "-m", "course.race.evaluate")
BATCH = 256
SECONDS = 900.0  # for all versions of a lap
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
    """Evaluates files of weights.

    Returns:
        For each file the network and its top-1, or the reason why there is none.

    Raises:
        LabError: The evaluation did not end, or ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="race-") as name:
        folder = Path(name)
        np.save(folder / "images.npy", on.images)
        np.save(folder / "labels.npy", on.labels)
        given = {"mean": [*on.mean], "std": [*on.std], "classes": on.classes}
        given["versions"] = [str(path.resolve()) for path in versions]
        (folder / "given.json").write_text(json.dumps(given))
        try:
            done = subprocess.run([*PROGRAM, name], capture_output=True, text=True, timeout=SECONDS, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            cause = clean((getattr(error, "stderr", "") or str(error)).strip()[-300:], 300)
            if isinstance(error, subprocess.TimeoutExpired):
                cause = f"it did not end within {SECONDS:g} s"
            what = "The saved weights could not be evaluated."
            fix = "end what else runs on this machine, then run the lap again"
            raise LabError(what, where=clean(versions[0]), cause=cause, fix=fix) from error
    return [clean_name(one, 300) if isinstance(one, str) else tuple(one) for one in found]


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


def _read(path: Path, num_classes: int) -> tuple[str, torch.nn.Module]:
    with path.open("rb") as file:
        # torch.save compresses nothing: what is compressed may be a bomb of another team's.
        with zipfile.ZipFile(file) as records:
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
                raise ValueError("its records are compressed")
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
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


def _tell(error: Exception) -> str:
    """Returns an error's message on one line, without torch's advice to load the file unsafely."""
    if isinstance(error, pickle.UnpicklingError):
        error = error.__context__ or error
    words = " ".join(str(error)[:1000].split()).partition(" Please use `torch.serialization")[0]
    return f"{type(error).__name__}: {words}"


def main(folder: Path) -> None:
    """Prints the result of :func:`evaluate` as one line of JSON."""
    given = json.loads((folder / "given.json").read_text())
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    mean, std = (torch.tensor(given[key]).view(3, 1, 1) for key in ("mean", "std"))
    images = (torch.from_numpy(np.load(folder / "images.npy")) / 255 - mean) / std
    found: list[object] = []
    for version in given["versions"]:
        try:
            name, net = _read(Path(version), given["classes"])
            found.append((name, _measure(net, images, labels)))
        except Exception as error:  # a stranger's file: whatever it makes torch raise, it has no top-1
            found.append(_tell(error))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
