"""Defends the claims about speed: ``make bench``, or ``python -m benchmarks``; it takes about five minutes.

Most claims are a ratio or a difference of CPU seconds, measured in one interleaved run on one thread, so that they mean
the same on a busy machine and on a quiet one; those about launches are wall-clock seconds. The exit status is 1 where a
bound is broken. ``python -m benchmarks launch`` measures one section alone: data, training, import or launch.
"""

from __future__ import annotations

import os

# Before torch is imported: the CPU seconds of threads that wait for each other would count as work.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import launch
from benchmarks.claims import Claim, print_table
from lab_utils import data, models, timing, training

IMPORT_SCRIPT = """
import time
import torch
start = time.process_time()
import lab_utils
bare = time.process_time()
from lab_utils import data, machine, models, timing, training
print(bare - start, time.process_time() - start)
"""


def check_packed_batches(folder: Path) -> Claim:
    """Packed batches against ImageFolder and DataLoader, over the same augmentation, in images per CPU second."""
    dataset = data.load()
    sizes = {"train": 1500, "valid": 200, "test": 200}
    part = replace(dataset, **{name: take_some(getattr(dataset, name), size) for name, size in sizes.items()})
    loader = data.classic_loader(data.export(part, folder), "train", 64)
    packed = dataset.batches("train", 64)
    # As many batches as make the packed step long enough for the clock.
    count = min(len(packed), 150)
    steps = {"classic": lambda: drain(iter(loader)), "packed": lambda: drain(itertools.islice(packed, count))}
    classic, fast = timing.interleave(steps, repeats=7, warmup=1, device="cpu")
    images = {"classic": len(part.train), "packed": min(64 * count, len(dataset.train))}
    speeds = [images[one.name] / statistics.median(one.cpu_seconds) for one in (classic, fast)]
    ratio = speeds[1] / speeds[0]
    text = f"packed batches against ImageFolder + DataLoader ({dataset.name}, images per CPU second)"
    measured = f"{ratio:.1f} times ({speeds[1]:,.0f} against {speeds[0]:,.0f})"
    return Claim(text, measured, "at least 20 times", ratio >= 20)


def take_some(split: data.Split, size: int) -> data.Split:
    # At random, so that every class is among them whether the data set is sorted by class or not.
    chosen = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size]
    return data.Split(split.images[chosen], split.labels[chosen])


def drain(batches: Iterator) -> None:
    for _ in batches:
        pass


def check_training_loop(folder: Path) -> Claim:
    """The epoch with its times, counts and record against a loop of five lines, in CPU seconds."""
    batches = data.load().batches("train", 16)
    torch.manual_seed(0)
    model = models.build("resnet18")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    records, number = timing.Records("benchmark", folder), itertools.count()
    # Short epochs and many of them: one pair is off by several per cent on a shared machine, the median of many is not.
    limit = 12

    def run_bare() -> None:
        for images, labels in itertools.islice(batches, limit):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

    def run_ours() -> None:
        epoch = training.train_epoch(model, batches, optimizer, limit=limit)
        records.add("epoch", {"loss": epoch.loss, "compute_seconds": epoch.compute_seconds}, number=next(number))

    bare, ours = timing.interleave({"bare": run_bare, "ours": run_ours}, repeats=45, warmup=1, device="cpu")
    # Neighbours in time are compared with each other: what slows one round slows both of its halves.
    ratios = [one / other for one, other in zip(ours.cpu_seconds, bare.cpu_seconds, strict=True)]
    more = 100 * (statistics.median(ratios) - 1)
    step = 1e3 * statistics.median(bare.cpu_seconds) / limit
    text = f"training loop with times and records against a bare loop (ResNet-18, {step:.0f} ms a step, CPU seconds)"
    return Claim(text, f"{more:+.2f} %", "at most +2 %", more <= 2)


def check_import() -> Claim:
    """What the package, and what a torchrun script takes of it, add to ``import torch``, in CPU seconds."""
    command = [sys.executable, "-c", IMPORT_SCRIPT]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(5)]
    seconds = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    bare, rooms = (1e3 * statistics.median(each) for each in seconds)
    text = "import lab_utils with data, machine, models, timing, training on top of import torch (CPU seconds)"
    return Claim(text, f"{rooms:.1f} ms (lab_utils alone: {bare:.1f})", "at most 50 ms", rooms <= 50)


SECTIONS = {
    "data": lambda folder: [check_packed_batches(folder / "images")],
    "training": lambda folder: [check_training_loop(folder / "records")],
    "import": lambda folder: [check_import()],
    "launch": launch.check_all,
}


def main() -> int:
    """Measures the claims of the named sections, of all where none is named; prints them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all where none is named"
    )
    wanted = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"there is no section {min(unknown)!r}; choose from {', '.join(SECTIONS)}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        # Jobs leave their logs there.
        os.environ["LAB_RUNS"] = folder
        claims = [claim for name in SECTIONS if name in wanted for claim in SECTIONS[name](Path(folder))]
    print_table(claims)
    print(f"load in the minute before: {load:.1f} on {os.cpu_count()} cores; the seconds of a launch grow with it")
    return 1 if any(claim.holds is False for claim in claims) else 0


if __name__ == "__main__":
    sys.exit(main())
