"""The small networks on which the checks of lab 9 try an answer, and what they compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from course.check.verdicts import expect

CLOSE = 1e-9
SIZES = (6, 8, 8, 8, 4)


class Stack(nn.Module):
    """Four linear layers in float64, the same on every rank; with ``unused``, a fifth that forward leaves out.

    Forward runs the first ``depth`` layers.
    """

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.depth = len(SIZES) - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pairs = pairwise(SIZES)
            self.layers = nn.ModuleList(nn.Linear(width, height, dtype=torch.float64) for width, height in pairs)
            if unused:
                self.spare = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps (N, 6) to (N, 4); to (N, 8) where ``depth`` is less."""
        for layer in self.layers[: self.depth]:
            inputs = torch.tanh(layer(inputs))
        return inputs


def draw(rank: int, step: int, shape: Sequence[int] = (5, 6)) -> torch.Tensor:
    """A rank's inputs of a step, float64; no two alike."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + rank


def find_loss(outputs: torch.Tensor) -> torch.Tensor:
    """Any loss that has a gradient everywhere: the mean of squares around 1."""
    return F.mse_loss(outputs, torch.ones_like(outputs))


def find_gradients(net: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor | None]:
    """One rank's own gradients, by autograd alone; None if a parameter takes no part."""
    gradients = torch.autograd.grad(find_loss(net(inputs)), list(net.parameters()), allow_unused=True)
    return [None if gradient is None else gradient.detach() for gradient in gradients]


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to rounding, and of one shape."""
    return one.shape == other.shape and bool(torch.allclose(one.double(), other.double(), rtol=CLOSE, atol=CLOSE))


def are_close(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """The same for lists."""
    return len(some) == len(others) and all(is_close(*pair) for pair in zip(some, others, strict=True))


@contextmanager
def expecting_works(case: str) -> Iterator[None]:
    """Refuses an answer that asks None for what a Work has: its all-reduce was not asynchronous."""
    try:
        yield
    except AttributeError as error:
        asked = str(error) in [f"'NoneType' object has no attribute '{name}'" for name in ("wait", "get_future")]
        hint = "only dist.all_reduce(…, async_op=True) returns a Work; without async_op it waits, and returns None"
        expect(not asked, f"{case}: what dist.all_reduce returned", yours="None", expected="a Work", hint=hint)
        raise


def format_norm(tensors: Sequence[torch.Tensor]) -> str:
    """The length of several tensors as one vector."""
    return f"{float(torch.cat([tensor.flatten() for tensor in tensors]).norm()):.6f}"
