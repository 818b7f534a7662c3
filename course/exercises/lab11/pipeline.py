"""A small pipeline for the check of 11.1: stages that note their inputs, on ranks whose messages are watched."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course.exercises.lab8.witness import MisuseError, Witness

BATCH, WIDTH = 2, 4  # rows of a micro-batch, and numbers in each row that a stage sends
SHAPE = (BATCH, WIDTH)
EARLIER = 0.5  # the gradient that each parameter has before the step
# Seconds that a stage's last pass waits for its neighbour's first one, which in a pipeline has begun long ago.
PATIENCE = 5.0
ONE_EACH = "one message of the given shape for each micro-batch, float32: receive it into torch.empty(shape)"
ENDS = "rank 0 has no rank before it, and the last rank, world_size − 1, none after it"
NEIGHBOURS = "rank r receives from r − 1 and sends to r + 1, and the gradients go the other way"


@dataclass(frozen=True)
class Case:
    """One test case; ``width`` is the width of the inputs."""

    ranks: int
    micro: int
    width: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.micro} micro-batches"

    def draw(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns inputs and targets of all micro-batches, float32, the same on every rank."""
        generator = torch.Generator().manual_seed(self.ranks)
        inputs = torch.randn(self.micro, BATCH, self.width, generator=generator)
        return list(inputs), list(torch.randn(self.micro, *SHAPE, generator=generator))

    def build(self, rank: int) -> nn.Linear:
        """Returns the layer of a rank's stage."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            return nn.Linear(WIDTH if rank else self.width, WIDTH)


@dataclass
class Report:
    """The work that a rank did, or should have done.

    Attributes:
        gradients: The gradients of its parameters; None for a missing one.
        given: The stage's input in each forward pass.
        found: The gradient of each output, by forward pass.
        passes: ``F`` and ``B`` in the order in which the passes began.
        late: Kinds of passes, ``F`` or ``B``, that the neighbour began only after this rank's last one.
    """

    gradients: list[torch.Tensor | None]
    given: list[torch.Tensor]
    found: dict[int, torch.Tensor]
    passes: str = ""
    late: str = ""


class Counters:
    """Counts the passes that each rank has begun, in memory shared by the forks, so that a stuck rank counts, too."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._bytes = ranks, mmap.mmap(-1, 2 * ranks)

    def add(self, kind: str, rank: int) -> None:
        """Counts a pass, ``F`` or ``B``."""
        place = self._place(kind, rank)
        self._bytes[place] = min(self._bytes[place] + 1, 255)

    def read(self, kind: str) -> list[int]:
        """Returns the number of passes of each rank."""
        return [self._bytes[self._place(kind, rank)] for rank in range(self._ranks)]

    def wait(self, kind: str, rank: int) -> bool:
        """Waits until a rank has begun its first pass; returns whether it has. For a missing rank it does not wait."""
        end = time.monotonic() + PATIENCE
        while 0 <= rank < self._ranks and not self._bytes[self._place(kind, rank)]:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def _place(self, kind: str, rank: int) -> int:
        return rank + self._ranks * (kind == "B")


class Stage(nn.Module):
    """A layer and tanh; notes its passes."""

    def __init__(self, case: Case, rank: int, counters: Counters) -> None:
        super().__init__()
        self.layer = case.build(rank)
        self._case, self._rank, self._counters = case, rank, counters
        self.report = Report([], [], {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (2, width) to (2, 4)."""
        number = len(self.report.given)
        self.report.given.append(x.detach().clone())
        self._note("F", self._rank + 1)
        output = torch.tanh(self.layer(x))
        if output.requires_grad:
            output.register_hook(partial(self._note_gradient, number))
        return output

    def _note_gradient(self, number: int, gradient: torch.Tensor) -> None:
        self.report.found[number] = gradient.detach().clone()
        self._note("B", self._rank - 1)

    def _note(self, kind: str, neighbour: int) -> None:
        self.report.passes += kind
        self._counters.add(kind, self._rank)
        if self.report.passes.count(kind) == self._case.micro and not self._counters.wait(kind, neighbour):
            self.report.late += kind


def watch_messages(rank: int, ranks: int) -> Witness:
    """Watches the messages of this process, and refuses those that no pipeline sends; see :class:`Witness`."""
    witness, group = Witness(), dist.ProcessGroup
    send, receive, receive_any = group.send, group.recv, group.recv_anysource

    def inspect(tensors: list[torch.Tensor], peer: int) -> list[torch.Tensor]:
        if not 0 <= peer < ranks:
            raise MisuseError(ENDS)
        if abs(peer - rank) != 1:
            raise MisuseError(NEIGHBOURS)
        if tensors[0].nbytes != 4 * math.prod(SHAPE):
            raise MisuseError(ONE_EACH)
        # The witness fills a tensor, which autograd forbids where the tensor already asks for a gradient.
        return [tensors[0].detach()]

    def send_inspected(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        return send(group, inspect(tensors, peer), peer, tag)

    def receive_inspected(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        return receive(group, inspect(tensors, peer), peer, tag)

    def receive_from_any(group: dist.ProcessGroup, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return receive_any(group, inspect(tensors, rank - 1 if rank else 1), tag)

    group.send, group.recv, group.recv_anysource = send_inspected, receive_inspected, receive_from_any
    return witness


def find_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a micro-batch, from its output and its target in this order."""
    if target.requires_grad:
        raise MisuseError("find_loss takes the output first, and then the target")
    return F.mse_loss(output, target)


def take_step(gpipe_step: Callable, case: Case, counters: Counters, rank: int) -> Report:
    """Takes one step on a rank; returns its report."""
    witness, stage = watch_messages(rank, case.ranks), Stage(case, rank, counters)
    for one in stage.parameters():  # of an earlier step, to which this one adds
        one.grad = torch.full_like(one, EARLIER)
    inputs, targets = case.draw()
    gpipe_step(stage, inputs, targets, find_loss, SHAPE)
    if any(one.requires_grad for one in inputs):
        raise MisuseError(
            "requires_grad_() only on what was received: inputs can be whole numbers, such as the GPT's bytes, with no "
            "gradient"
        )
    if witness.count_open():
        raise MisuseError("wait() for every isend and irecv before you return: else it may not have ended")
    stage.report.gradients = [one.grad for one in stage.parameters()]
    return stage.report


def find_right(case: Case) -> list[Report]:
    """Returns the right report of each rank, from the whole network in one process."""
    layers = [case.build(rank) for rank in range(case.ranks)]
    reports = [Report([], [], {}) for _ in layers]
    for number, (x, y) in enumerate(zip(*case.draw(), strict=True)):
        for layer, report in zip(layers, reports, strict=True):
            report.given.append(x.detach())
            x = torch.tanh(layer(x))
            x.register_hook(partial(report.found.__setitem__, number))
        (find_loss(x, y) / case.micro).backward()
    for layer, report in zip(layers, reports, strict=True):
        report.gradients = [one.grad + EARLIER for one in layer.parameters()]
    return reports
