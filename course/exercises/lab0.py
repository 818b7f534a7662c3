"""The exercises of lab 0: counting right answers, timing a step on a device that does not wait, counting bytes."""

from __future__ import annotations

import numbers
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect, refusing

# Each row's class numbers, best first, of five images and five classes, and the class that each image is of.
RANKING = ((2, 0, 1, 3, 4), (1, 3, 0, 2, 4), (4, 1, 3, 2, 0), (0, 4, 2, 1, 3), (3, 2, 4, 0, 1))
LABELS = (2, 3, 3, 3, 1)
# Images and k. The labels stand first, second, third, last and last, so that no two k of a batch hide a mistake.
TOPK_CASES = ((5, 1), (5, 2), (5, 3), (3, 3), (5, 4), (2, 2), (5, 5), (1, 1))


def verify_count_topk(count_topk: Callable) -> str:
    """Asks for counts over batches of several sizes and over several k."""
    for size, k in TOPK_CASES:
        case, ranking, labels = f"{size} images, k={k}", torch.tensor(RANKING[:size]), torch.tensor(LABELS[:size])
        hits = ranking == labels[:, None]
        right, first = int(hits[:, :k].sum()), int(hits[:, 0].sum())
        hint = "labels.unsqueeze(1), shape (N, 1), meets (N, k); stay in torch, and leave the logits as they are"
        errors = (TypeError, RuntimeError, IndexError, AttributeError)
        with refusing(*errors, case=case, expected=right, hint=hint):
            yours = count_topk(_rank_logits(ranking), labels, k)
        hint = "return the count as a tensor, which stays on the device: .item() and int(...) wait for it at every call"
        expect(isinstance(yours, torch.Tensor), case, yours=type(yours).__name__, expected="a tensor", hint=hint)
        wrong = {
            "return a count, not a share: batches may differ in size": AnyOf((right / size, right / (size * k))),
            "look at all k best places, not at one: logits.topk(k).indices has shape (N, k)": first,
            "the hits of the whole batch are one number: .sum() over images and places": hits[:, :k].sum(1),
        }
        hint = "compare each image's label, labels.unsqueeze(1), with the k indices of its own row: topk along dim=1"
        judge(yours.squeeze(), right=right, case=case, wrong=wrong, hint=hint)
    return f"{len(TOPK_CASES)} batches, from 1 to {len(LABELS)} images, from k=1 to k=5"


def _rank_logits(ranking: torch.Tensor) -> torch.Tensor:
    """Logits (N, 5) whose order is the ranking, all below zero as logits may be, and with a gradient as in training.

    That alone refuses what would fail in the loop or spoil it for the next k: ``.numpy()`` and changes in place.
    """
    places = torch.arange(5.0).expand(len(ranking), 5)
    return torch.empty(len(ranking), 5).scatter(1, ranking, -0.5 - places).requires_grad_()


class _Device:
    """A pretend accelerator with its own clock: ``step`` queues work and returns, ``synchronize`` waits for it.

    Times are in seconds of the pretend clock, exact and the same on every machine.
    """

    LAUNCH = 0.25

    def __init__(self, works: Sequence[float], pending: float = 0.0) -> None:
        self.works, self.steps, self.reads = works, 0, 0
        self.now, self.busy_until = 0.0, pending

    def step(self) -> None:
        work = self.works[min(self.steps, len(self.works) - 1)]
        self.steps += 1
        self.now += self.LAUNCH
        self.busy_until = max(self.busy_until, self.now) + work

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)

    def clock(self) -> float:
        self.reads += 1
        return self.now


def verify_time_step(time_step: Callable) -> str:
    """Times three runs on a pretend device on which the right answer is known to the last digit."""
    # The works of the steps, warm-up first; how many of them are warm-up; and what an earlier cell left in the queue.
    for works, warmup, pending in (((1, 2, 4), 0, 0.0), ((32, 16, 1, 2, 4, 8), 2, 0.0), ((2, 1), 0, 64.0)):
        device, repeats = _Device(works, pending), len(works) - warmup
        left = f", {pending:g} s of earlier work still queued" if pending else ""
        yours = time_step(device.step, device.synchronize, repeats, warmup, device.clock)
        seconds = [work + device.LAUNCH for work in works]
        right, mean = seconds[warmup:], statistics.fmean(seconds[warmup:])
        queued = pending or sum(works[:warmup])  # of which a part is done while the steps of the warm-up are queued
        late = [queued - device.LAUNCH * max(0, warmup - 1) + right[0] - device.LAUNCH * bool(queued), *right[1:]]
        wrong = {
            "one reading over all repeats hides the spread: return a list, a time for each": AnyOf(
                ([mean] * repeats, mean)
            ),
            "run the step `warmup` times without timing it, and then `repeats` times with a clock": seconds[:repeats],
            "the warm-up steps are run but not reported; the list holds the `repeats` that follow": seconds,
            "this is the time to queue the step only: call synchronize() before each closing reading": [device.LAUNCH]
            * repeats,
            "the first reading pays for work queued before it: synchronise before the first opening reading too": late,
        }
        hint = "only the step and the wait for it belong between the two readings of clock(), for each repeat anew"
        if not device.reads:
            hint = "call the clock that is passed in, clock(): the check brings its own"
        case = f"repeats={repeats}, warmup={warmup}{left}: the seconds"
        judge(yours, right=right, case=case, wrong=wrong, hint=hint)
    return "a queue that was not empty, slow first steps, and steps of different length"


def _build_mixed() -> nn.Module:
    """A layer of float32 and one of bfloat16, the size of whose numbers differs."""
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).to(torch.bfloat16))


def _build_frozen() -> nn.Module:
    """A layer that is trained behind one that is not, as in fine-tuning."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    return model


# The builder, and the bytes as a sum that can be followed by hand.
STATE_CASES = {
    "nn.Linear(3, 2), 8 parameters": (lambda: nn.Linear(3, 2), 8 * 4 * 3),
    "nn.Linear(3, 2) and nn.BatchNorm1d(2), 12 parameters": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        12 * 4 * 3,
    ),
    "8 float32 and 3 bfloat16 parameters": (_build_mixed, (8 * 4 + 3 * 2) * 3),
    "8 frozen and 3 trained parameters": (_build_frozen, 8 * 4 + 3 * 4 * 3),
}


def verify_count_state_bytes(count_state_bytes: Callable) -> str:
    """Asks for four small models whose bytes can be counted by hand."""
    for case, (build, right) in STATE_CASES.items():
        hint = "look at the error; .grad is None, as no step has been made yet: predict its size from the parameter"
        with refusing(AttributeError, case=case, expected=right, hint=hint):
            yours = count_state_bytes(build())
        hint = "return the number of bytes, a plain number"
        expect(isinstance(yours, numbers.Real), case, yours=yours, expected=right, hint=hint)
        parameters, buffers = list(build().parameters()), list(build().buffers())
        count, size = sum(one.numel() for one in parameters), sum(one.nbytes for one in parameters)
        with_buffers = size + sum(one.nbytes for one in buffers)
        wrong = {
            "these are numbers, not bytes: a float32 number has 4": AnyOf((count, 3 * count)),
            "backward adds a gradient as large as the parameter, and SGD a momentum: one number more each": AnyOf(
                (size, 2 * size)
            ),
            "a frozen parameter (requires_grad False) gets no gradient and so no momentum: it counts once": 3 * size,
            "BatchNorm's running averages are buffers, without gradient or momentum": 3 * with_buffers,
        }
        hint = "three times the bytes of each trained parameter: itself, its gradient, its momentum. Not every number "
        judge(yours, right=right, case=case, wrong=wrong, hint=hint + "has 4 bytes: tensor.nbytes asks the tensor")
    return f"{len(STATE_CASES)} models, among them one with a frozen layer and one with bfloat16"


EXERCISES = {
    "0.1": Exercise("Counting right answers", verify_count_topk),
    "0.2": Exercise("An honest timer", verify_time_step),
    "0.3": Exercise("The bytes that training keeps", verify_count_state_bytes),
}
