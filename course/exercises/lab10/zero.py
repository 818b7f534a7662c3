"""Exercise 10.3: a step of ZeRO-1, in which each rank keeps only the optimizer of its own part of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect, refusing
from course.exercises.ranks import NAMES, run_on_ranks
from course.exercises.witness import note_collectives

STEPS, SIZE, RATE = 3, 12, 0.1
LATE = 0.1  # seconds that the last rank is late in the first step, so that a collective without its end shows
LISTS = (
    "dist.reduce_scatter takes (shard.grad, list of parts), dist.all_gather (list of parts, shard.data); a list is "
    "list(….chunk(world_size)): as many parts as ranks, each as large as shard, in the dtype of weights"
)
MISTAKES = {
    "got <class 'NoneType'>": "make room for the gradient first: shard.grad = torch.empty_like(shard)",
    "assign": "shard.grad has the size and the dtype of shard: it is the mean of part `rank` alone",
    "in-place operation": "autograd follows what is done with shard: let optimizer.step() change it",
    "Expected parameter": LISTS,
    "size": LISTS,
    "different dtypes": LISTS,
}


def _draw(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def verify_zero_step(zero_step: Callable) -> str:
    """Takes three steps on two and on three ranks, and compares with Adam on the mean of all gradients."""
    # Three ranks: what divides by two is no mean.
    for count in (2, 3):
        _verify(zero_step, count)
    return f"{STEPS} steps of Adam on 2 and on 3 ranks: all weights equal, each rank stepped its own part alone"


def _take_steps(zero_step: Callable, rank: int, count: int) -> list[dict[str, Any]]:
    """Does a rank's work; returns the state after each step, and what the optimizer saw in it."""
    weights, found, seen = _draw(99, 0), [], []
    # What the shard is a part of, even where `weights.data` becomes another tensor.
    memory = weights.view(-1)
    shard = nn.Parameter(weights.chunk(count)[rank])
    optimizer = torch.optim.Adam([shard], lr=RATE)
    names = note_collectives()

    def be_late() -> None:
        if rank == count - 1 and not found:
            time.sleep(LATE)

    def note_gradient(*_: Any) -> None:
        seen.append((None if shard.grad is None else shard.grad.detach().clone(), len(names)))
        be_late()

    optimizer.register_step_pre_hook(note_gradient)
    for step in range(STEPS):
        seen.clear()
        names.clear()
        be_late()
        zero_step(weights, _draw(rank, step), shard, optimizer)
        grad, first = seen[0] if seen else (None, 0)
        kept = sum(one.numel() for state in optimizer.state.values() for one in state.values() if one.dim())
        state = {"weights": memory.clone(), "grad": grad, "steps": len(seen), "kept": kept}
        found.append(state | {"before": names[:first], "after": names[first:]})
    return found


def _verify(zero_step: Callable, count: int) -> None:
    case = f"{STEPS} steps on {count} ranks"
    expected = "a gradient of its part on each rank, then all weights"
    errors = (IndexError, NameError, RuntimeError, TypeError, ValueError)
    with refusing(*errors, case=case, expected=expected, hints=NAMES | MISTAKES):
        ranks = run_on_ranks(lambda rank: _take_steps(zero_step, rank, count), zero_step, case=case, count=count)
    whole = nn.Parameter(_draw(99, 0))
    optimizer = torch.optim.Adam([whole], lr=RATE)
    for step in range(STEPS):
        found, case = [rank[step] for rank in ranks], f"step {step + 1} on {count} ranks"
        own = torch.stack([_draw(rank, step) for rank in range(count)])
        before = whole.detach().clone()
        whole.grad = own.mean(0)
        optimizer.step()
        hint = "each rank steps its own part, once: optimizer.step(), with the optimizer that it was given"
        judge(
            [rank["steps"] for rank in found], right=[1] * count, case=f"{case}: calls of optimizer.step()", hint=hint
        )
        most, kept = 2 * SIZE // count, max(rank["kept"] for rank in found)
        expect(
            kept <= most,
            f"{case}: numbers in the optimizer's state",
            yours=kept,
            expected=f"{most}, two for each number of the shard",
            hint="each rank keeps the optimizer of its own part alone: leave shard what it is, a part of the weights",
        )
        for rank in range(count):
            _judge_step(found[rank], own, (whole.detach(), before), rank, f"{case}, rank {rank}")
        _expect_few_bytes(found[0], case)


def _judge_step(found: dict[str, Any], own: torch.Tensor, weights: tuple, rank: int, case: str) -> None:
    """Compares with the mean of the ranks' ``own`` gradients, and with the weights, right ones and those before."""
    count, (right, before) = len(own), weights
    mean, mine = own.mean(0).chunk(count)[rank], [one.chunk(count)[place] for place, one in enumerate(own)]
    judge(
        found["grad"],
        right=mean,
        case=f"{case}: shard.grad at optimizer.step()",
        wrong={
            "the optimizer steps shard by shard.grad: set that before optimizer.step()": None,
            "this is the sum of the ranks' gradients; DDP takes the mean: divide by dist.get_world_size()": count
            * mean,
            "each rank gave its own part to the sum: give dist.reduce_scatter the list of all parts": sum(mine) / count,
            "these are this rank's own gradients: sum them over all ranks, dist.reduce_scatter(…), and wait for it": (
                AnyOf((mine[rank], mine[rank] / count))
            ),
        },
        hint="reduce-scatter the ranks' gradients into shard.grad, wait for it, and divide by the number of ranks",
    )
    hint = "the parts of the others are old: all-gather the parts into weights itself, list(weights.chunk(n)), and wait"
    old = torch.where(torch.arange(SIZE) * count // SIZE == rank, right, before)
    general = "after optimizer.step() copy each part from its own rank, in its own dtype, and change nothing else"
    judge(found["weights"], right=right, case=f"{case}: all weights", wrong={hint: old}, hint=general)


def _expect_few_bytes(found: dict[str, Any], case: str) -> None:
    """Expects no collective that sends a rank more than its own part, or takes more than that from it."""
    fitting = "reduce", "_reduce", "alltoall", "all_to_all"
    large = [name for name in found["before"] if not name.startswith(fitting)]
    hint = "each rank needs the sum of part r alone: dist.reduce_scatter gives it that, and goes through no single rank"
    expected = "a reduce-scatter"
    expect(not large, f"{case}: the gradients", yours=", ".join(large), expected=expected, hint=hint)
    large = [name for name in found["after"] if name.startswith("allreduce")]
    hint = "no sum is needed here: each rank has its part, and dist.all_gather copies the parts"
    expect(not large, f"{case}: the weights", yours=", ".join(large), expected="an all-gather", hint=hint)
