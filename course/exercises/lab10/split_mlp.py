"""Exercise 10.4: an MLP whose hidden units are divided over the ranks, with one all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from course.check.verdicts import expect
from course.exercises.lab8.witness import note_collectives
from course.exercises.lab10.mistakes import refusing_mistakes
from course.exercises.ranks import run_on_ranks
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
        y = y.detach().clone() if isinstance(y, torch.Tensor) else type(y).__name__
        return {"y": y, "calls": count_collectives() - before, "names": names}

    case = f"an MLP with {HIDDEN} hidden units on {count} ranks"
    with refusing_mistakes(case, "the result of the whole MLP", MISTAKES):
        ranks = run_on_ranks(work, split_mlp, case=case, count=count)
    for rank, found in enumerate(ranks):
        _expect_result(found["y"], rank, count, case)
    hint = "one all-reduce is enough: all-reduce what the second layer gives, after which each rank has the sum"
    yours = ranks[0]["calls"]
    expect(yours == 1, f"{case}: collectives", yours=yours, expected=1, hint=hint)
    others = [name for name in ranks[0]["names"] if not name.startswith("allreduce")]
    hint = f"an all-gather fetches {count} results to add up: dist.all_reduce adds them on the way, in place"
    expect(not others, f"{case}: the collective", yours=", ".join(others), expected="an all-reduce", hint=hint)


def _expect_result(yours: torch.Tensor | str, rank: int, count: int, case: str) -> None:
    x, up, up_bias, down, down_bias = _draw()
    right = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
    shape = yours if isinstance(yours, str) else tuple(yours.shape)
    hint = f"the result has a row for each row of x and {WIDTH} columns: all ranks compute all rows of x"
    if isinstance(yours, str):
        hint = "return the tensor: dist.all_reduce works in place, and returns no tensor"
    expect(shape == tuple(right.shape), f"{case}: the result", yours=shape, expected=tuple(right.shape), hint=hint)
    expect(
        _is_close(yours, right),
        f"{case}: rank {rank}'s result, first row",
        yours=_format(yours),
        expected=_format(right),
        hint=_explain(yours, rank, count),
    )


def _explain(yours: torch.Tensor, rank: int, count: int) -> str:
    """The hint that fits a wrong result."""
    if yours.isnan().any():
        return "NaN marks what this rank does not hold: use only part `rank` of the hidden units, .chunk(n)[rank]"
    x, up, up_bias, down, bias = _draw()
    mine = torch.arange(HIDDEN).chunk(count)[rank]
    first = F.linear(x, up, up_bias)
    part, whole = F.linear(F.gelu(first[:, mine]), down[:, mine]), F.linear(F.gelu(first), down)
    if torch.allclose(yours.double(), whole + bias, rtol=1e-5, atol=1e-5):
        return "the result is rounded: keep the dtype of x, which is float64 here"
    units = F.gelu(sum(first.chunk(count, dim=1)))
    summed, twice = F.linear(units, down[:, mine]), F.linear(units, sum(down.chunk(count, dim=1)))
    wrong = {
        "the hidden units of two ranks are not the same ones: all-reduce what the second layer gives": (
            summed,
            summed + bias,
            twice,
            twice + bias,
        ),
        "that is this rank's part of the sum: all-reduce it, and wait for it": (part, part + bias, part + bias / count),
        **{
            f"the second bias came {times:g} times: add it once, after the all-reduce": (whole + times * bias,)
            for times in (count, count + 1, count / 2)
        },
        "the second bias is missing: add it on every rank, after the all-reduce": (whole,),
        "the first bias is missing: each rank adds its part of it, before GELU": (
            F.linear(F.gelu(F.linear(x, up)), down, bias),
        ),
        "the hidden units are summed: do not divide by the number of ranks": (
            *(total / divisor + rest for divisor in (count, 2) for total, rest in ((whole, bias), (whole, 0 * bias))),
            *((whole + bias) / divisor for divisor in (count, 2)),
        ),
        "between the two layers stands F.gelu, without an approximation": tuple(
            F.linear(between(first), down, bias)
            for between in (torch.clone, F.relu, F.silu, torch.tanh, lambda one: F.gelu(one, approximate="tanh"))
        ),
        "GELU stands between the layers, and not after them": (
            F.gelu(F.linear(first, down, bias)),
            F.gelu(F.linear(first, down)) + bias,
        ),
    }
    for hint, candidates in wrong.items():
        if any(_is_close(yours, candidate) for candidate in candidates):
            return hint
    return "rank 0 has the sum, this rank does not: dist.all_reduce gives it to every rank" if rank else PARTS


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other, rtol=1e-9, atol=1e-9)


def _format(result: torch.Tensor) -> str:
    kind = "" if result.dtype == torch.float64 else f", {result.dtype}"
    return f"[{', '.join(f'{value:.4f}' for value in result[0].tolist())}]{kind}"
