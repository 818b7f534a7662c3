"""The exercises of lab 0: counting right answers, timing a step on a device that does not wait, counting bytes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence

import torch
from torch import nn

from course.check.verdicts import Exercise, expect, refusing

# Each row's class numbers, best first, of five images and five classes, and the class that each image is of.
RANKING = ((2, 0, 1, 3, 4), (1, 3, 0, 2, 4), (4, 1, 3, 2, 0), (0, 4, 2, 1, 3), (3, 2, 4, 0, 1))
LABELS = (2, 3, 3, 3, 1)
# Images, k, hits. The labels stand first, second, third, last and last, so that no two k of a batch hide a mistake.
TOPK_CASES = ((5, 1, 1), (5, 2, 2), (5, 3, 3), (3, 3, 3), (5, 4, 3), (2, 2, 2), (5, 5, 5), (1, 1, 1))


def verify_count_topk(count_topk: Callable) -> str:
    """Asks for counts over batches of several sizes and over several k."""
    for size, k, expected in TOPK_CASES:
        logits, labels = _rank_logits(RANKING[:size]), torch.tensor(LABELS[:size])
        case = f"{size} images, k={k}"
        with refusing(
            TypeError,
            RuntimeError,
            IndexError,
            AttributeError,
            case=case,
            expected=expected,
            hint="labels.unsqueeze(1), shape (N, 1), meets (N, k); stay in torch, and leave the logits as they are",
        ):
            yours = count_topk(logits, labels, k)
        wait = "leave the count on the device: .item(), int(...) and float(...) wait for it at every call"
        expect(
            isinstance(yours, torch.Tensor),
            f"{case}: what the function returns",
            yours=type(yours).__name__,
            expected="a tensor",
            hint=wait if isinstance(yours, numbers.Real) else "return the count, as a tensor of one number",
        )
        expect(
            yours.numel() == 1,
            f"{case}: the shape of what the function returns",
            yours=tuple(yours.shape),
            expected="one number, shape ()",
            hint="the hits of the whole batch are one number: .sum() over images and places",
        )
        count = yours.item()
        expect(count == expected, case, yours=f"{count:g}", expected=expected, hint=_explain_count(count, size, k))
    return f"{len(TOPK_CASES)} batches, from 1 to {len(LABELS)} images, from k=1 to k=5"


def _rank_logits(ranking: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits (N, 5) whose order is the ranking, all below zero as logits may be, and with a gradient as in training.

    That alone refuses what would fail in the loop or spoil it for the next k: ``.numpy()`` and changes in place.
    """
    logits = torch.empty(len(ranking), len(ranking[0]))
    for row, classes in enumerate(ranking):
        for place, label in enumerate(classes):
            logits[row, label] = -0.5 - place
    return logits.requires_grad_()


def _explain_count(count: float, size: int, k: int) -> str:
    """The hint that fits a wrong count, by comparing it with what typical mistakes give for the same batch."""
    right, first, last = (
        sum(label in places(row) for row, label in zip(RANKING[:size], LABELS[:size], strict=True))
        for places in (lambda row: row[:k], lambda row: row[:1], lambda row: row[-k:])
    )
    if not float(count).is_integer() or (size > 1 and count in (right / size, right / (size * k))):
        return "return a count, not a share: batches of different size cannot be averaged, their counts can be summed"
    if count == last and last != right:
        return "take the k highest logits, not the lowest: logits.topk(k) does"
    if k > 1 and count == first:
        return "look at all k best places, not at one: logits.topk(k).indices has shape (N, k)"
    if count == 0:
        return "compare the labels with topk's indices, which are class numbers, not with its values; rank along dim=1"
    if count == right * len(LABELS) / size:
        return "this batch is smaller than the first: the last one of an epoch often is. Count, without any fixed size"
    if count > size:
        return "each image counts once at most: compare labels.unsqueeze(1), shape (N, 1), with the k places of its row"
    return "compare each image's label with its own row: labels.unsqueeze(1) has shape (N, 1), the k places (N, k)"


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
    """Has three runs timed on a pretend device on which the right answer is known to the last digit."""
    # The works of the steps, warm-up first; how many of them are warm-up; and what an earlier cell left in the queue.
    for works, warmup, pending in (((1, 2, 4), 0, 0.0), ((32, 16, 1, 2, 4, 8), 2, 0.0), ((2, 1), 0, 64.0)):
        device, repeats = _Device(works, pending), len(works) - warmup
        left = f", {pending:g} s of earlier work still queued" if pending else ""
        case = f"repeats={repeats}, warmup={warmup}{left}"
        yours = time_step(device.step, device.synchronize, repeats, warmup, device.clock)
        expected = [work + _Device.LAUNCH for work in works[warmup:]]
        _expect_seconds(case, yours, expected, device, warmup)
    return "a queue that was not empty, slow first steps, and steps of different length"


def _expect_seconds(case: str, yours: object, expected: list[float], device: _Device, warmup: int) -> None:
    expect(
        isinstance(yours, list | tuple),
        f"{case}: what the function returns",
        yours=type(yours).__name__,
        expected=f"a list of {len(expected)} numbers",
        hint="return a list with the time of every repeat",
    )
    expect(
        all(isinstance(value, numbers.Real) for value in yours),
        f"{case}: what stands in the list",
        yours=sorted({type(value).__name__ for value in yours}),
        expected="numbers",
        hint="each time is one number: the closing reading minus the opening one",
    )
    shown = [float(f"{float(value):.3g}") for value in yours]
    expect(
        device.steps == warmup + len(expected),
        f"{case}: how often the step ran",
        yours=device.steps,
        expected=warmup + len(expected),
        hint="run the step `warmup` times without timing it, and then `repeats` times more with a clock",
    )
    expect(
        len(yours) == len(expected),
        f"{case}: how many times are returned",
        yours=f"{len(yours)}: {shown}",
        expected=f"{len(expected)}: {expected}",
        hint="the warm-up steps are run but not reported; the list holds the `repeats` that follow",
    )
    expect(
        device.reads > 0,
        f"{case}: the clock",
        yours="never read",
        expected="read around each step",
        hint="call the clock that is passed in, clock(): the check brings a clock of its own",
    )
    right = all(math.isclose(value, wanted, abs_tol=1e-9) for value, wanted in zip(yours, expected, strict=True))
    expect(right, f"{case}: the seconds", yours=shown, expected=expected, hint=_explain_seconds(yours, expected))


def _explain_seconds(yours: Sequence[float], expected: list[float]) -> str:
    """The hint that fits wrong seconds."""
    launch = _Device.LAUNCH
    if any(value < 0 for value in yours):
        return "a time is the closing reading minus the opening one; the other way round it is negative"
    if len(set(yours)) == 1 < len(set(expected)) and not math.isclose(yours[0], launch):
        return "one reading over all repeats hides the spread: read the clock before and after each step"
    if all(math.isclose(value, wanted * 1000) for value, wanted in zip(yours, expected, strict=True)):
        return "the answer is in seconds"
    if sorted(yours) == sorted(expected):
        return "these are the right times in another order: keep the order in which the steps ran"
    if yours[0] > expected[0] and all(map(math.isclose, yours[1:], expected[1:])):
        return "the first reading pays for work queued before it: synchronise before the first opening reading too"
    if all(math.isclose(value, launch) for value in yours):
        return "this is the time to queue the step only: call the argument, synchronize(), before each closing reading"
    if any(value < wanted for value, wanted in zip(yours, expected, strict=True)):
        return "a step was still running when its clock was stopped: synchronise before each closing reading"
    return "only the step and the wait for it belong between the two readings, for each repeat anew"


def _build_mixed() -> nn.Module:
    """A layer of float32 and one of bfloat16, the size of whose numbers differs."""
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).to(torch.bfloat16))


def _build_frozen() -> nn.Module:
    """A layer that is trained behind one that is not, as in fine-tuning."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    return model


# What is built, in words; the builder; the bytes as a sum that can be followed by hand; the hint.
STATE_CASES = (
    (
        "nn.Linear(3, 2), 8 parameters",
        lambda: nn.Linear(3, 2),
        8 * 4 * 3,
        "a float32 number has 4 bytes, and each parameter comes three times: itself, its gradient, its momentum",
    ),
    (
        "nn.Linear(3, 2) and nn.BatchNorm1d(2), 12 parameters",
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        12 * 4 * 3,
        "count all parameters and only those: BatchNorm's running averages are buffers, without gradient or momentum",
    ),
    (
        "8 float32 and 3 bfloat16 parameters",
        _build_mixed,
        (8 * 4 + 3 * 2) * 3,
        "not every number has 4 bytes: tensor.nbytes, or numel() * element_size(), asks the tensor itself",
    ),
    (
        "8 frozen and 3 trained parameters",
        _build_frozen,
        8 * 4 + 3 * 4 * 3,
        "a frozen parameter (requires_grad False) gets no gradient and so no momentum: it counts once",
    ),
)


def verify_count_state_bytes(count_state_bytes: Callable) -> str:
    """Asks for four small models whose bytes can be counted by hand."""
    for case, build, expected, hint in STATE_CASES:
        untrained = (
            "look at the error; .grad is None, as no step has been made yet: predict its size from the parameter"
        )
        with refusing(AttributeError, case=case, expected=expected, hint=untrained):
            yours = count_state_bytes(build())
        if expected == STATE_CASES[0][2]:
            hint = _explain_bytes(yours, hint)
        expect(isinstance(yours, numbers.Real) and yours == expected, case, yours=yours, expected=expected, hint=hint)
    return f"{len(STATE_CASES)} models, among them one with a frozen layer and one with bfloat16"


def _explain_bytes(yours: object, hint: str) -> str:
    """The hint that fits the wrong bytes of eight float32 parameters."""
    known = {
        8: "these are parameters, not bytes: a float32 number has 4",
        24: "these are numbers, not bytes: a float32 number has 4",
        32: "the parameters are one third: backward adds a gradient of the same size, SGD a momentum of the same size",
        64: "parameters and gradients are there; SGD with momentum keeps one number more for each parameter",
        128: "that is Adam, which keeps two numbers for each parameter; SGD with momentum keeps one",
    }
    return known.get(yours, hint) if isinstance(yours, numbers.Real) else "return the number of bytes, a plain number"


EXERCISES = {
    "0.1": Exercise("Counting right answers", verify_count_topk),
    "0.2": Exercise("An honest timer", verify_time_step),
    "0.3": Exercise("The bytes that training keeps", verify_count_state_bytes),
}
