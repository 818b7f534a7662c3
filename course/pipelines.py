"""Tools for lab 11's pipelines: who worked when, watched from outside, and a schedule run in a given order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

Rows = list[dict[str, Any]]


class Embedding(nn.Module):
    """The first layer of ``scripts/gpt.py``: (batch, tokens) bytes to (batch, tokens, width)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.tokens, self.places = net.tokens, net.places

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds the embeddings of each byte and of its position."""
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]


def list_layers(net: nn.Module) -> nn.Sequential:
    """Returns the layers of a torchvision ResNet, or of the GPT in ``scripts/gpt.py``, between which to cut.

    They are the network's own modules. A slice of the result is a stage.
    """
    if hasattr(net, "blocks"):
        return nn.Sequential(Embedding(net), *net.blocks, nn.Sequential(net.norm, net.head))
    # Not cut inside: ReLU works in place, which autograd forbids on what a stage receives.
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    last = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return nn.Sequential(first, *net.layer1, *net.layer2, *net.layer3, *net.layer4, last)


def simulate(
    orders: Sequence[Sequence[str]], *, forward: float = 1.0, backward: float = 2.0
) -> tuple[dict[int, Rows], list[tuple[int, str]]]:
    """Finds when each rank of a pipeline works, if messages took no time.

    A forward pass needs the previous rank's forward pass, a backward pass the next rank's backward pass.

    Args:
        orders: For each rank its work in order: ``F0``, ``B0`` … for forward and backward of each micro-batch.
        forward: Seconds of a forward pass on each rank.
        backward: Seconds of a backward pass on each rank.

    Returns:
        Rows for ``plots.timeline``, by rank; and each rank that waits forever, with the work that it waits for.
    """
    ended: dict[tuple[int, str], float] = {}
    rows: dict[int, Rows] = {rank: [] for rank in range(len(orders))}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for work in order[len(rows[rank]) :]:
                ahead = work[0] == "F"
                source = rank - 1 if ahead else rank + 1
                if 0 <= source < len(orders) and (source, work) not in ended:
                    break
                free = rows[rank][-1]["end"] if rows[rank] else 0.0
                start = max(free, ended.get((source, work), 0.0))
                ended[rank, work] = end = start + (forward if ahead else backward)
                rows[rank].append({"phase": "forward" if ahead else "backward", "start": start, "end": end})
                moved = True
    waiting = [(rank, order[len(rows[rank])]) for rank, order in enumerate(orders) if len(rows[rank]) < len(order)]
    return rows, waiting


@contextlib.contextmanager
def watch(*stages: nn.Module) -> Iterator[Rows]:
    """Notes when this rank runs forward and backward, whatever code does so.

    Args:
        stages: The rank's stages, whose forward passes count; all backward passes count.

    Returns:
        Rows for ``plots.timeline``: ``phase``, and ``start`` and ``end`` in seconds of a clock that all processes of
        the machine share.
    """
    rows: Rows = []
    begun: list[float] = []
    backward = torch.autograd.backward

    def note_backward(*arguments: Any, **options: Any) -> None:
        start = time.monotonic()
        backward(*arguments, **options)
        rows.append({"phase": "backward", "start": start, "end": time.monotonic()})

    def note_forward(*_: Any) -> None:
        rows.append({"phase": "forward", "start": begun.pop(), "end": time.monotonic()})

    hooks = [stage.register_forward_pre_hook(lambda *_: begun.append(time.monotonic())) for stage in stages]
    hooks += [stage.register_forward_hook(note_forward) for stage in stages]
    try:
        with mock.patch.object(torch.autograd, "backward", note_backward):
            yield rows
    finally:
        for hook in hooks:
            hook.remove()


def time_layers(layers: nn.Sequential, inputs: torch.Tensor, *, repeats: int) -> list[float]:
    """Measures each layer alone, forward and backward.

    Args:
        layers: The layers, which run one after the other.
        inputs: Input of the first layer.
        repeats: Rounds; the fastest of each layer counts, since noise only adds.

    Returns:
        Seconds of each layer.
    """
    found: list[list[float]] = []
    for _ in range(repeats):
        x, seconds = inputs, []
        for number, layer in enumerate(layers):
            x = x.detach().requires_grad_(number > 0)  # the first stage sends no gradient back
            start = time.monotonic()
            output = layer(x)
            output.backward(torch.ones_like(output))
            seconds.append(time.monotonic() - start)
            x = output
        found.append(seconds)
    return [min(column) for column in zip(*found, strict=True)]


def find_idle(rows_by_rank: Mapping[int, Rows]) -> float:
    """Returns the idle share of all ranks' time, from the first row's start to the last one's end."""
    rows = [row for some in rows_by_rank.values() for row in some]
    span = max(row["end"] for row in rows) - min(row["start"] for row in rows)
    return 1 - sum(row["end"] - row["start"] for row in rows) / (span * len(rows_by_rank))


def count_held(rows: Rows) -> int:
    """Returns the most micro-batches that were between their forward and their backward pass."""
    held = most = 0
    for row in sorted(rows, key=lambda row: row["start"]):
        held += 1 if row["phase"] == "forward" else -1
        most = max(most, held)
    return most


def run_order(
    order: Sequence[str],
    stage: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    find_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    shape: Sequence[int],
) -> None:
    """Runs a training step of a pipeline on this rank, in a given order.

    Messages are sent without waiting: in a schedule such as 1F1B two neighbours send to each other at the same time.

    Args:
        order: ``F0``, ``B0`` … for forward and backward of each micro-batch.
        stage: This rank's stage.
        inputs: The micro-batches; used by the first rank.
        targets: Their targets; used by the last rank.
        find_loss: Returns the mean loss of a micro-batch.
        shape: Shape of a stage's output for one micro-batch, float32.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received, outputs, sent = {}, {}, []
    for work in order:
        number = int(work[1:])
        if work[0] == "F":
            x = inputs[number]
            if rank > 0:
                dist.recv(x := torch.empty(shape), rank - 1)
                x.requires_grad_()
            output = stage(x)
            if rank < last:
                sent.append((message := output.detach(), dist.isend(message, rank + 1)))
            else:
                output = find_loss(output, targets[number]) / len(inputs)
            received[number], outputs[number] = x, output
        else:
            gradient = None
            if rank < last:
                dist.recv(gradient := torch.empty(shape), rank + 1)
            outputs.pop(number).backward(gradient)
            x = received.pop(number)
            if rank > 0:
                sent.append((x.grad, dist.isend(x.grad, rank - 1)))
    for _, message in sent:
        message.wait()
