"""The claims about batches: packed ones against what else makes them, and against one pass over the memory.

All in CPU seconds of one thread, in turn, and over the same augmentation: a shift of up to four pixels, a mirror, the
normalisation.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.claims import Claim
from lab_utils import data, load_torchvision, timing
from lab_utils.data.batches import PADDING

BATCH = 128  # lab 0's; a smaller one, as in other labs, costs more per image
SMALL = 64
# Images of a pass: slow ways get few, so that no pass takes longer than a second or two.
SLOW, FAST = 1500, 9600
# Larger than the caches of most processors, as the images of CINIC-10 are, and the batches of an epoch.
PASS, ONE_PASS = 20_000, "one pass over the memory"
SMALL_ONES = f"packed batches of {SMALL}"


class OneByOne(Dataset):
    """torchvision's transforms on images that are tensors in memory: what many write who have packed their images."""

    def __init__(self, dataset: data.Dataset) -> None:
        load_torchvision()
        from torchvision.transforms import v2

        self._split = dataset.train
        self._mean, self._std = mean, std = dataset.mean, dataset.std
        moves = [v2.RandomCrop(32, padding=PADDING), v2.RandomHorizontalFlip()]
        self._transform = v2.Compose([*moves, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._split.images[index]), int(self._split.labels[index])


class ManyAtOnce(OneByOne):
    """The same images through ``__getitems__``, which a DataLoader calls once for a batch: gathered and augmented."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        rows, columns = torch.randint(0, 2 * PADDING + 1, (2, len(chosen)))
        windows = F.pad(self._split.images[chosen], (PADDING,) * 4).unfold(2, 32, 1).unfold(3, 32, 1)
        images = windows[torch.arange(len(chosen)), :, rows, columns]
        mirrored = (torch.rand(len(chosen)) < 0.5).view(-1, 1, 1, 1)
        images = torch.where(mirrored, images.flip(3), images).to(torch.float32)
        mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (self._mean, self._std))
        return images.div_(255).sub_(mean).div_(std), self._split.labels[chosen]


def load_files(part: data.Dataset, folder: Path) -> DataLoader:
    """Writes the training images as PNG files in a folder per class, and returns the loader that most people use."""
    from PIL import Image

    load_torchvision()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    for index, (image, label) in enumerate(zip(part.train.images, part.train.labels.tolist(), strict=True)):
        place = folder / f"{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(place / f"{index}.png")
    moves = [v2.RandomCrop(32, padding=PADDING), v2.RandomHorizontalFlip()]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(part.mean, part.std)]
    return DataLoader(ImageFolder(folder, v2.Compose(moves + to_tensor)), BATCH, shuffle=True)


def check_all(folder: Path) -> list[Claim]:
    """Measures all claims of this module."""
    dataset = data.load()
    part = replace(dataset, train=take_some(dataset.train, SLOW))
    packed = dataset.batches("train", BATCH)
    one_by_one = DataLoader(OneByOne(part), BATCH, shuffle=True)
    at_once = DataLoader(ManyAtOnce(dataset), BATCH, shuffle=True, collate_fn=lambda batch: batch)
    ways = {
        "ImageFolder + DataLoader": (load_files(part, folder), SLOW),
        "torchvision v2 on tensors + DataLoader": (one_by_one, SLOW),
        "__getitems__ + DataLoader": (at_once, FAST),
        "packed batches": (packed, FAST),
        SMALL_ONES: (dataset.batches("train", SMALL), FAST),
    }
    timings = measure_images(ways)
    ours, one_pass, slowest = timings["packed batches"], timings[ONE_PASS], timings[next(iter(ways))]
    rates = {name: one.images_per_second for name, one in timings.items() if name != SMALL_ONES}
    gain = timing.find_speed_up(slowest, ours)
    text = f"speed-up of packed batches of {BATCH} over {slowest.name} ({dataset.name}, images per CPU second)"
    claims = [Claim(text, str(gain), "at least 30", gain.value >= 30, rates)]
    for other in (name for name in ways if name not in (ours.name, SMALL_ONES, slowest.name)):
        name = other.replace("__getitems__", "`__getitems__`")  # which would be bold in Markdown
        claims.append(Claim(f"speed-up of packed batches over {name}", str(timing.find_speed_up(timings[other], ours))))
    text = f"speed-up of one pass over {PASS:,} images, read as bytes, written as float32, over packed batches"
    gain, words = timing.find_speed_up(ours, one_pass), f"{rates[ours.name]:,.0f} images per CPU second"
    claims.append(Claim(text, f"{gain}; packed batches: {words}", "at most 2", gain.value <= 2))
    small = timing.find_speed_up(timings[SMALL_ONES], one_pass)
    return [*claims, Claim(f"the same over batches of {SMALL}", str(small))]


def measure_images(ways: dict[str, tuple[Iterable, int]]) -> dict[str, timing.Timing]:
    """Returns the CPU seconds of one image in each way to make batches, and in ``ONE_PASS``, in seven rounds."""
    images = torch.randint(0, 256, (PASS, 3, 32, 32), dtype=torch.uint8)
    floats = torch.zeros(PASS, 3, 32, 32)
    steps: dict[str, Callable[[], object]] = {ONE_PASS: lambda: floats.copy_(images)}
    counts = {ONE_PASS: PASS}
    for name, (batches, most) in ways.items():
        count = -(-most // BATCH)
        # Each batch is dropped, as in a training: to keep them all would cost more than to make them.
        steps[name] = lambda batches=batches, count=count: deque(itertools.islice(batches, count), maxlen=0)
        counts[name] = sum(len(labels) for _, labels in itertools.islice(batches, count))
    timings = timing.interleave(steps, repeats=7, warmup=1, device="cpu")
    per_image = {one.name: tuple(second / counts[one.name] for second in one.cpu_seconds) for one in timings}
    return {name: timing.Timing(name, seconds, images=1) for name, seconds in per_image.items()}


def take_some(split: data.Split, size: int) -> data.Split:
    """Returns images of a split chosen at random, so that every class is among them whatever the split's order."""
    chosen = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size]
    return data.Split(split.images[chosen], split.labels[chosen])
