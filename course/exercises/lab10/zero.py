"""Exercise 10.3: a step of ZeRO-1, in which each rank keeps only the optimizer of its own part of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.check.verdicts import expect
from course.exercises.lab8.witness import note_collectives
from course.exercises.lab10.mistakes import refusing_mistakes
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

STEPS, SIZE, RATE = 3, 12, 0.1
LATE = 0.1  # seconds that the last rank is late in the first step, so that a collective without its end shows
MISTAKES = {
    "got <class 'NoneType'>": "make room for the gradient first: shard.grad = torch.empty_like(shard)",
    "assign": "shard.grad has the size and the dtype of shard: it is the mean of part `rank` alone",
    "in-place operation": "autograd follows what is done with shard: let optimizer.step() change it",
    "Expected parameter": "dist.reduce_scatter takes (shard.grad, list of parts), dist.all_gather (list of parts, "
    "shard.data); a list is list(….chunk(world_size))",
    "size": "as many parts as ranks, each as large as shard: gradient.chunk(world_size), weights.chunk(world_size)",
    "different dtypes": "all tensors have the dtype of weights: torch.empty_like(shard)",
}


def _draw(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _build() -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def verify_zero_step(zero_step: Callable) -> str:
    """Takes three steps on two and on three ranks, and compares with Adam on the mean of all gradients."""
    # Three ranks: what divides by two is no mean.
    for count in (2, 3):
        _verify(zero_step, count)
    return f"{STEPS} steps of Adam on 2 and on 3 ranks: all weights equal, each rank stepped its own part alone"


def _take_steps(zero_step: Callable, rank: int, count: int) -> list[dict[str, Any]]:
    """Does a rank's work; returns the state after each step, and what the optimizer saw in it."""
    weights, found, seen = _build(), [], []
    # What the shard is a part of, even where `weights.data` becomes another tensor.
    memory = weights.view(-1)
    shard = nn.Parameter(weights.chunk(count)[rank])
    optimizer = torch.optim.Adam([shard], lr=RATE)
    names = note_collectives()

    def be_late() -> None:
        if rank == count - 1 and not found:
            time.sleep(LATE)

    def note_gradient(*_: Any) -> None:
        grad = None if shard.grad is None else shard.grad.detach().clone()
        seen.append((grad, count_collectives(), len(names)))
        be_late()

    optimizer.register_step_pre_hook(note_gradient)
    for step in range(STEPS):
        seen.clear()
        names.clear()
        be_late()
        zero_step(weights, _draw(rank, step), shard, optimizer)
        grad, before, first = seen[0] if seen else (None, 0, 0)
        kept = sum(one.numel() for state in optimizer.state.values() for one in state.values() if one.dim())
        found.append(
            {
                "weights": memory.clone(),
                "steps": len(seen),
                "grad": grad,
                "gathers": count_collectives() - before,
                "kept": kept,
                "before": names[:first],
                "after": names[first:],
            }
        )
    return found


def _verify(zero_step: Callable, count: int) -> None:
    case = f"{STEPS} steps on {count} ranks"
    with refusing_mistakes(case, "a gradient of its part on each rank, then all weights", MISTAKES):
        ranks = run_on_ranks(lambda rank: _take_steps(zero_step, rank, count), zero_step, case=case, count=count)
    whole = nn.Parameter(_build())
    optimizer = torch.optim.Adam([whole], lr=RATE)
    mean = torch.zeros_like(whole)
    for step in range(STEPS):
        own, found = [_draw(rank, step) for rank in range(count)], [rank[step] for rank in ranks]
        before, last = whole.detach().clone(), mean
        whole.grad = mean = torch.stack(own).mean(0)
        optimizer.step()
        cases = [f"step {step + 1}, rank {rank} of {count}" for rank in range(count)]
        for rank in range(count):
            _expect_steps(found[rank], 2 * SIZE // count, cases[rank])
        for rank in range(count):
            _expect_gradient(found[rank]["grad"], own, last, rank, cases[rank])
        for rank in range(count):
            _expect_weights(found[rank], whole.detach(), before, rank, count, cases[rank])
        for rank in range(count):
            _expect_few_bytes(found[rank], cases[rank])


def _expect_steps(found: dict[str, Any], most: int, case: str) -> None:
    hint = "each rank steps its own part, once: optimizer.step(), with the optimizer that it was given"
    expect(found["steps"] == 1, f"{case}: calls of optimizer.step()", yours=found["steps"], expected=1, hint=hint)
    expect(
        found["kept"] <= most,
        f"{case}: numbers in the optimizer's state",
        yours=found["kept"],
        expected=f"{most}, two for each number of the shard",
        hint="each rank keeps the optimizer of its own part alone: leave shard what it is, a part of the weights",
    )


def _expect_gradient(
    yours: torch.Tensor | None, own: list[torch.Tensor], last: torch.Tensor, rank: int, case: str
) -> None:
    count, total = len(own), torch.stack(own).sum(0)
    sums, mine = total.chunk(count), own[rank].chunk(count)[rank]
    right = sums[rank] / count

    def is_like(*candidates: torch.Tensor) -> bool:
        return yours is not None and any(_is_close(yours, one) for one in candidates)

    hint = "reduce-scatter the gradients of all ranks into shard.grad, wait for it, and divide by the number of ranks"
    if yours is None:
        hint = "the optimizer steps shard by shard.grad: set that before optimizer.step()"
    elif is_like(sums[rank]):
        hint = "this is the sum of the ranks' gradients; DDP takes the mean: divide by dist.get_world_size()"
    elif is_like(sums[rank] / 2):
        hint = "divided by two, whatever the number of ranks: it is dist.get_world_size()"
    elif is_like(right / count):
        hint = "divided twice: divide by dist.get_world_size() once"
    elif is_like(*(sum(one.chunk(count)[place] for place, one in enumerate(own)) / by for by in (1, count))):
        hint = (
            "each rank gave its own part to the sum: part 0 of one and part 1 of another do not belong together. Give "
        )
        hint += "dist.reduce_scatter the list of all parts"
    elif is_like(mine, mine / count):
        hint = "these are this rank's own gradients: sum them over all ranks, dist.reduce_scatter(…), and wait for it"
    elif is_like(*sums, *(one / count for one in sums)):
        hint = "the part of another rank: rank r steps part r of gradient.chunk(world_size)"
    elif is_like(right + last.chunk(count)[rank], last.chunk(count)[rank]):
        hint = "the gradient of the step before is still in shard.grad: replace it, before optimizer.step()"
    expect(
        is_like(right),
        f"{case}: shard.grad at optimizer.step()",
        yours="None" if yours is None else _format(yours),
        expected=_format(right),
        hint=hint,
    )


def _expect_weights(
    found: dict[str, Any], right: torch.Tensor, before: torch.Tensor, rank: int, count: int, case: str
) -> None:
    yours = found["weights"]
    parts, wanted, old = (one.chunk(count) for one in (yours, right, before))
    others = [one for one in range(count) if one != rank]
    hint = "after optimizer.step() each part is right on its own rank: copy it from there, and change nothing else"
    if torch.allclose(yours, right, rtol=1e-5, atol=1e-5):
        hint = "the weights are rounded on the way: send them in their own dtype"
    elif all(torch.equal(parts[one], old[one]) for one in others):
        hint = "the parts of the others are old: gather into weights itself, list(weights.chunk(n)), and wait for it"
        if not found["gathers"]:
            hint = "the parts of the others are old: all-gather the parts after optimizer.step()"
    elif all(any(_is_close(part, one) for one in wanted) for part in parts):
        hint = "part r has to come from rank r: dist.all_gather(list(weights.chunk(world_size)), shard.data)"
    expect(
        _is_close(yours, right),
        f"{case}: all weights, their length",
        yours=f"{float(yours.norm()):.9f}",
        expected=f"{float(right.norm()):.9f}",
        hint=hint,
    )


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


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other, rtol=1e-9, atol=1e-9)


def _format(numbers: torch.Tensor) -> str:
    return f"{numbers.numel()} numbers, [{', '.join(f'{value:.3f}' for value in numbers.flatten().tolist())}]"
