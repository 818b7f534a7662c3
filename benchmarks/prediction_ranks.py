"""One rank of ``benchmarks.prediction``: measures what a step consists of, or whole steps of DDP; on a CPU, over Gloo.

Arguments: ``calibrate`` or ``measure``, a JSON file that says what, and the file that rank 0 writes its report to.
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. The networks have no batch norm, whose buffers DDP
would send as well.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as DDP

WARMUP = 3  # DDP builds its buckets anew after the first step
TRAIN = 4  # all-reduces that are started together, as a step's buckets may be: Gloo has two threads


def build_net(name: str) -> nn.Module:
    """Builds one of three networks for 32×32 images, which differ in where most of their weights are."""
    torch.manual_seed(0)
    if name == "mlp":  # in its first layer, whose gradients come last
        pairs = itertools.pairwise((3072, 192, 512, 512, 10))
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers[:-1])
    if name == "cnn":  # in its last layers, whose gradients come first
        convs = [
            layer
            for pair in ((3, 32), (32, 64), (64, 128))
            for layer in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10))
    # Evenly in all layers.
    convs = [layer for _ in range(10) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, stride=4, padding=1), nn.ReLU(), *convs, *head)


class Step:
    """A network in DDP, its optimizer and its images; called, it takes one step."""

    def __init__(self, net: str, batch: int, cap: float) -> None:
        self.net = build_net(net)
        self.model = DDP(self.net, bucket_cap_mb=cap)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(batch, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)

    def __call__(self) -> tuple[float, float, float, float]:
        """Takes a step; returns when it began, and when forward, backward and all of it had ended."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return start, forward, backward, time.perf_counter()


def find_slowest(rows: list[list[float]]) -> torch.Tensor:
    """The largest value over the ranks of each number: float64, as the rows."""
    slowest = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest


class WatchedStep(Step):
    """A step that sends nothing, and notes when the gradient of each parameter is there."""

    def __init__(self, net: str, batch: int) -> None:
        super().__init__(net, batch, cap=1024)
        self.model.register_comm_hook(None, noop_hook)
        self.numbers, self.marks = [parameter.numel() for parameter in self.net.parameters()], {}
        for index, parameter in enumerate(self.net.parameters()):
            parameter.register_post_accumulate_grad_hook(partial(self.note, index))

    def note(self, index: int, _: torch.Tensor) -> None:
        """Notes the moment."""
        self.marks[index] = time.perf_counter()

    def measure(self) -> list[float]:
        """Seconds of a step, of forward, backward and the rest, and until each gradient, since backward began."""
        start, forward, backward, end = self()
        ready = [self.marks[index] - forward for index in range(len(self.numbers))]
        return [end - start, forward - start, backward - forward, end - backward, *ready]


def calibrate_steps(cases: list[tuple[str, int]], rounds: int) -> list[dict]:
    """The parts of steps of networks and batch sizes, in turn, in all ranks at once, since they share cores.

    Returns:
        Those of the quickest round of each, by the slowest rank, in seconds: ``forward``, ``ready`` (since backward
        began, when each parameter's gradient was there), ``backward``, ``rest`` (the optimizer); and the ``numbers`` of
        elements of the parameters.
    """
    steps = [WatchedStep(net, batch) for net, batch in cases]
    rows: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(WARMUP + rounds):
        for step, row in zip(steps, rows, strict=True):
            dist.barrier()
            row.append(step.measure())
    found = []
    for (net, batch), step, row in zip(cases, steps, rows, strict=True):
        slowest = find_slowest(row[WARMUP:])
        _, forward, backward, rest, *ready = slowest[slowest[:, 0].argmin()].tolist()
        parts = {"forward": forward, "backward": backward, "rest": rest, "ready": ready}
        found.append({"net": net, "batch": batch, "numbers": step.numbers} | parts)
    return found


def calibrate_link(size: int, rounds: int) -> float:
    """Returns the seconds per all-reduce of this size in a series of them: the fastest series, by its slowest rank."""
    tensors, rows = [torch.zeros(size // 4) for _ in range(TRAIN)], []
    for _ in range(2 + rounds):
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        rows.append([(time.perf_counter() - start) / TRAIN])
    return find_slowest(rows[2:]).min().item()


def measure_steps(cases: list[dict], rounds: int) -> list[dict]:
    """The quickest step of each case, measured in turn, each step by its slowest rank; and DDP's buckets in bytes."""
    steps = [Step(case["net"], case["batch"], case["cap"]) for case in cases]
    rows = []
    for _ in range(WARMUP + rounds):
        row = []
        for step in steps:
            dist.barrier()
            start, *_, end = step()
            row.append(end - start)
        rows.append(row)
    seconds = find_slowest(rows[WARMUP:]).amin(0).tolist()
    logged = [step.model._get_ddp_logging_data()["rebuilt_bucket_sizes"] for step in steps]
    buckets = [[int(size) for size in sizes.split(",")] for sizes in logged]
    return [{"seconds": one, "buckets": two} for one, two in zip(seconds, buckets, strict=True)]


def calibrate(asked: dict) -> dict:
    """Measures what the prediction needs: parts of steps at the calibration's batches, and the link by itself."""
    cases, rounds = list(itertools.product(asked["nets"], asked["batches"])), asked["rounds"]
    link = [[size, calibrate_link(size, rounds)] for size in asked["sizes"]]
    return {"steps": calibrate_steps(cases, 2 * rounds), "link": link}


def main() -> None:
    """Meets the other ranks, measures, and has rank 0 write it down."""
    what, asked, report = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    ways: dict[str, Callable[[], object]] = {
        "calibrate": lambda: calibrate(asked),
        "measure": lambda: measure_steps(asked["cases"], asked["rounds"]),
    }
    found = ways[what]()
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
