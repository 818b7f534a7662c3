"""Exercise 9.1: gradients sent in buckets while backward still runs, with one rank that is late."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.distributed as dist

from course.check.verdicts import expect, refusing
from course.exercises.lab9.nets import Stack, draw, expecting_works, find_gradients, find_loss, format_norm, is_close
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

# A weight of 8×8 and its bias have 576 bytes in float64, all gradients 1,888: with the first limit two buckets are full
# during backward, with the second one is, and the last bucket is not. Two steps, because what the first leaves behind
# shows in the second.
LIMITS, STEPS, LATE = (500, 1000), 2, 3.0


class _Watched:
    """A Work that notes whether it was used: its wait, its future, or its completion."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.asked = work, False

    def __getattr__(self, name: str) -> Any:
        self.asked = True
        return getattr(self.work, name)


def _watch_all_reduce() -> list[_Watched]:
    """Makes this process's ``dist.all_reduce`` return watched Works, and lists them."""
    started: list[_Watched] = []
    original = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        work = original(*arguments, **options)
        if work is None:
            return None
        started.append(_Watched(work))
        return started[-1]

    dist.all_reduce = all_reduce
    return started


def verify_overlap(overlap: Callable) -> str:
    """Takes two steps with and without an unused parameter, and compares with the mean of the ranks."""
    # Fewer all-reduces than the eight parameters; with the larger limit at most one full bucket and the rest.
    _verify(overlap, False, 2, LIMITS[0], 7, "a net of four layers")
    # Three ranks: what divides by two is no mean.
    _verify(overlap, True, 3, LIMITS[1], 2, "a net with an unused layer, on three ranks")
    return "both steps' gradients equal the ranks' mean, in buckets that are sent while the other rank is still late"


def _take_steps(overlap: Callable, unused: bool, limit: int, through: Event, rank: int) -> dict:
    """Does a rank's work; the first rank's ``through`` is set when its first backward has ended."""
    net, found, started = Stack(unused=unused), [], _watch_all_reduce()
    finish = overlap(net, limit)
    if not callable(finish):
        return {"kind": type(finish).__name__}
    for step in range(STEPS):
        net.zero_grad()
        before = count_collectives()
        # Where rank 0 waits for rank 1 in its backward, this wait takes its whole time.
        late = rank == 1 and not step and not through.wait(LATE)
        find_loss(net(draw(rank, step))).backward()
        during = count_collectives() - before
        if rank == 0:
            through.set()
        finish()
        gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        calls = count_collectives() - before
        ignored = sum(not work.asked for work in started)
        found.append({"blocked": late, "during": during, "calls": calls, "ignored": ignored, "gradients": gradients})
    # The gradients of the last layer stay zero in a step without it, unless those of the step before come back.
    net.zero_grad(set_to_none=False)
    net.depth -= 1
    find_loss(net(draw(rank, STEPS))).backward()
    finish()
    return {"steps": found, "old": float(net.layers[-1].weight.grad.norm())}


def _verify(overlap: Callable, unused: bool, count: int, limit: int, most: int, case: str) -> None:
    through = multiprocessing.get_context("fork").Event()
    work = partial(_take_steps, overlap, unused, limit, through)
    hint = "a flat tensor goes back into the gradients of its own bucket: keep list(bucket), a copy that clear() leaves"
    refusing_mix_ups = refusing(RuntimeError, ValueError, case=case, expected="a mean for each gradient", hint=hint)
    with refusing_mix_ups, expecting_works(case):
        ranks = run_on_ranks(work, overlap, case=case, count=count)
    first = ranks[0]
    kind = first.get("kind")
    hint = "return finish, the function itself, without calling it"
    expect(not kind, f"{case}: what overlap returned", yours=kind, expected="a function", hint=hint)
    for step in range(STEPS):
        found = [rank["steps"][step] for rank in ranks]
        _verify_step(found, step, unused, f"{case}, limit {limit}, step {step + 1}", most)
    calls = [step["calls"] for step in first["steps"]]
    hint = "something of the first step is left for the second: empty the bucket, and the list of what was sent"
    expect(calls[1] == calls[0], f"{case}: all-reduces of step 2", yours=calls[1], expected=calls[0], hint=hint)
    hint = "finish() has put a mean of the step before into a gradient once more: at its end, sent.clear()"
    expect(
        not first["old"],
        f"{case}, a third step without the last layer: the length of that layer's gradient",
        yours=f"{first['old']:.6f}",
        expected="0.000000",
        hint=hint,
    )


def _verify_step(ranks: list[dict], step: int, unused: bool, case: str, most: int) -> None:
    net = Stack(unused=unused)
    own = [find_gradients(net, draw(rank, step)) for rank in range(len(ranks))]
    used = [index for index, gradient in enumerate(own[0]) if gradient is not None]
    expect(
        not ranks[1]["blocked"],
        f"{case}: rank 0's backward, while rank 1 is late",
        yours="waits for rank 1",
        expected="goes on, and sends meanwhile",
        hint="all_reduce(…, async_op=True) returns at once; work.wait() belongs into finish(), and not into send()",
    )
    ignored = ranks[0]["ignored"]
    hint = "call work.wait() for each Work, and not for the last alone: messages may arrive in another order"
    expect(not ignored, f"{case}: rank 0's Works without a wait()", yours=ignored, expected=0, hint=hint)
    made = all(rank["gradients"][index] is not None for rank in ranks for index in used)
    hint = "the gradients have to be in parameter.grad after finish()"
    expect(made, f"{case}: gradients", yours="None", expected="tensors", hint=hint)
    for rank, report in enumerate(ranks):
        yours = [report["gradients"][index] for index in used]
        mine = [own[rank][index] for index in used]
        others = [sum(gradients[index] for gradients in own) - own[rank][index] for index in used]
        right = [(one + other) / len(ranks) for one, other in zip(mine, others, strict=True)]
        wrong = [index for index, pair in enumerate(zip(yours, right, strict=True)) if not is_close(*pair)]
        expect(
            not wrong,
            f"{case}: the length of rank {rank}'s gradients",
            yours=format_norm(yours),
            expected=format_norm(right),
            hint=_explain(yours, mine, others, wrong, len(ranks)) if wrong else "",
        )
    calls = ranks[0]["calls"]
    case = f"{case}: all-reduces of rank 0"
    hint = "one for each parameter is version 2: send() once for each full bucket, which is empty after that"
    if calls < len(used):
        hint = "buckets of other sizes than limit demands: hand it on, fill_buckets(net, limit, send)"
    expect(calls <= most, case, yours=calls, expected=f"at most {most}", hint=hint)
    hint = "call send() as soon as the gradients in the bucket have limit bytes together; finish() sends only the rest"
    expect(ranks[0]["during"] > 0, f"{case} during backward", yours=0, expected="one or more", hint=hint)


def _explain(
    yours: list[torch.Tensor], mine: list[torch.Tensor], others: list[torch.Tensor], wrong: list[int], count: int
) -> str:
    """Returns the hint for wrong gradients, by what they consist of."""

    def are(weight: float, weight_of_others: float) -> bool:
        rows = [(yours[index], weight * mine[index] + weight_of_others * others[index]) for index in wrong]
        return all(is_close(*row) for row in rows)

    if are(1, 1):
        return "this is the sum: divide by dist.get_world_size()"
    if are(1 / count**2, 1 / count**2):
        return "divided twice: divide by dist.get_world_size() once"
    if are(0.5, 0.5):
        return "divided by two, whatever the number of ranks: it is dist.get_world_size()"
    if are(1 / count, 0):
        return "these are a rank's own gradients, divided: call work.wait() before you read flat"
    if are(1, 0) and len(wrong) == len(yours):
        return "the mean did not come back: after work.wait(), unpack flat / dist.get_world_size() into the gradients"
    if are(1, 0) and wrong[-1] - wrong[0] == len(wrong) - 1 and wrong[0] == 0:
        return "the last bucket is not full when backward ends: finish() has to send it, too: flush()"
    if are(1, 0):
        return "some buckets did not come back: unpack each one, after its work.wait()"
    return "for each bucket: work.wait(), then unpack flat / dist.get_world_size() into the same gradients, in order"
