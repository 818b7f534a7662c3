"""Exercise 10.4: an MLP whose hidden units are divided over the ranks, with one all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from course.check.judge import AnyOf, judge
from course.check.verdicts import refusing
from course.exercises.ranks import NAMES, run_on_ranks
from course.exercises.witness import note_collectives
from lab_utils.calls import count_collectives

BATCH, WIDTH, HIDDEN = 6, 4, 12
LATE = 0.1  # seconds that the last rank is late, so that a result without its part shows
PARTS = "rows of up, and columns of down: up.chunk(n)[rank], up_bias.chunk(n)[rank], down.chunk(n, dim=1)[rank]"
MISTAKES = {
    "NoneType": "dist.all_reduce works in place, and returns no tensor: go on with the tensor that you gave it",
    "shape": PARTS,
    "size": PARTS,
    "out of range": "as many parts as ranks: .chunk(dist.get_world_size())",
}


def _draw() -> tuple[torch.Tensor, ...]:
    """Inputs (6, 4), and weight and bias of both layers; float64, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = (BATCH, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def _hide(rank: int, count: int, *weights: torch.Tensor) -> list[torch.Tensor]:
    """Copies of ``up``, its bias and ``down``, in which NaN stands for all that another rank holds."""
    up, up_bias, down = (one.clone() for one in weights)
    others = torch.ones(HIDDEN, dtype=torch.bool)
    others[torch.arange(HIDDEN).chunk(count)[rank]] = False
    up[others], up_bias[others], down[:, others] = (torch.nan,) * 3
    return [up, up_bias, down]


def verify_split_mlp(split_mlp: Callable) -> str:
    """Compares with the whole MLP on two and on three ranks; the other ranks' weights are NaN."""
    for count in (2, 3):
        _verify(split_mlp, count)
    return "equal to the whole MLP on 2 and on 3 ranks, each from its own weights alone, with one all-reduce"


def _verify(split_mlp: Callable, count: int) -> None:
    x, *weights, down_bias = _draw()

    def work(rank: int) -> dict[str, Any]:
        names, hidden, before = note_collectives(), _hide(rank, count, *weights), count_collectives()
        if rank == count - 1:
            time.sleep(LATE)
        y = split_mlp(x.clone(), *hidden, down_bias.clone())
        y = y.detach().clone() if isinstance(y, torch.Tensor) else None
        return {"y": y, "calls": count_collectives() - before, "names": names}

    case = f"an MLP with {HIDDEN} hidden units on {count} ranks"
    errors = (IndexError, NameError, RuntimeError, TypeError, ValueError)
    with refusing(*errors, case=case, expected="the result of the whole MLP", hints=NAMES | MISTAKES):
        ranks = run_on_ranks(work, split_mlp, case=case, count=count)
    for rank, found in enumerate(ranks):
        _judge_result(found["y"], rank, count, f"{case}: rank {rank}'s result")
    hint = "one all-reduce is enough: all-reduce what the second layer gives, after which each rank has the sum"
    judge(ranks[0]["calls"], right=1, case=f"{case}: collectives", hint=hint)
    hint = f"an all-gather fetches {count} results to add up: dist.all_reduce adds them on the way, in place"
    judge(ranks[0]["names"][0].startswith("allreduce"), right=True, case=f"{case}: it is an all-reduce", hint=hint)


def _judge_result(yours: torch.Tensor | None, rank: int, count: int, case: str) -> None:
    x, up, up_bias, down, bias = _draw()
    first = F.linear(x, up, up_bias)
    whole = F.linear(F.gelu(first), down)
    part = F.linear(F.gelu(first.chunk(count, dim=1)[rank]), down.chunk(count, dim=1)[rank])
    judge(
        yours,
        right=whole + bias,
        case=case,
        wrong={
            "NaN marks what this rank does not hold: use only part `rank` of the hidden units, .chunk(n)[rank]": (
                torch.full_like(whole, torch.nan)
            ),
            "return the tensor: dist.all_reduce works in place, and returns no tensor": None,
            "that is this rank's part of the sum: all-reduce it, and wait for it": part + bias,
            "the second bias came once for each rank: add it once, after the all-reduce": AnyOf(
                (whole + count * bias, whole + (count + 1) * bias)
            ),
            "the second bias is missing: add it on every rank, after the all-reduce": whole,
            "between the two layers stands F.gelu, without an approximation": AnyOf(
                (F.linear(first, down, bias), F.linear(F.gelu(first, approximate="tanh"), down, bias))
            ),
        },
        hint=f"{PARTS}; then all-reduce what the second layer gives",
    )
