"""The claim about the training loop: what times, counts, a record and TensorBoard add to a loop of five lines.

Steps of ResNet-18 differ by per cents on a shared machine, whatever is measured. So what is added is measured around
steps that cost next to nothing, and divided by the time of a step of ResNet-18. A bare loop that runs twice in each
round, as two ways that are the same, says how much of the difference is noise.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from benchmarks.claims import Claim
from lab_utils import data, models, timing, training
from lab_utils.timing.comparison import find_middle

BATCH, EVERY, ROUNDS = 16, 10, 41


def check_all(folder: Path) -> list[Claim]:
    """Measures all claims of this module, in CPU seconds of one thread."""
    batches = data.load().batches("train", BATCH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    records, numbers = timing.Records("benchmark", folder), itertools.count()

    def run_bare() -> None:
        for images, labels in itertools.islice(batches, EVERY):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

    with SummaryWriter(folder / "board") as writer:

        def run_ours() -> None:
            epoch, number = training.train_epoch(model, batches, optimizer, limit=EVERY), next(numbers)
            records.add("epoch", {"loss": epoch.loss, "compute_seconds": epoch.compute_seconds}, number=number)
            writer.add_scalar("loss", epoch.loss, number)
            writer.add_scalar("images per second", epoch.images_per_second, number)

        ways = {"bare": run_bare, "bare again": run_bare, "ours": run_ours}
        bare, again, ours = (one.cpu_seconds for one in timing.interleave(ways, repeats=ROUNDS, warmup=3, device="cpu"))
    step = measure_step(batches)
    more, noise = (100 * compare(one, bare) / EVERY / step for one in (ours, again))
    text = f"training loop with times, and a record and TensorBoard every {EVERY} steps, against a bare loop "
    text += f"(share of a ResNet-18 step of {1e3 * step:.0f} ms, CPU seconds)"
    claims = [Claim(text, _write(more), "at most +0.5 %", more[0] <= 0.5)]
    words = "the same loop against itself: the noise of that measurement"
    return [*claims, Claim(words, _write(noise), "below 0.2 %", abs(noise[0]) < 0.2)]


def compare(ours: tuple[float, ...], bare: tuple[float, ...]) -> np.ndarray:
    """Returns the middle difference of neighbours in time, since what slows one slows both, and its interval."""
    return np.array(find_middle([one - other for one, other in zip(ours, bare, strict=True)]))


def _write(share: np.ndarray) -> str:
    middle, low, high = share
    return f"{middle:+.3f} % ({low:+.3f} to {high:+.3f}, n = {ROUNDS})"


def measure_step(batches: data.Batches) -> float:
    """Returns the CPU seconds of a training step of ResNet-18."""
    model = models.build("resnet18")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = next(iter(batches))
    step = timing.measure(lambda: training.plain_step(model, images, labels, optimizer), repeats=9, device="cpu")
    return statistics.median(step.cpu_seconds)
