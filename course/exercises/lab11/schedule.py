"""Exercise 11.2: the order in which a rank runs its forward and backward passes in the schedule 1F1B."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

from course.check.verdicts import expect
from course.pipelines import simulate

RANKS, MICRO = (2, 3, 4, 6, 1), (1, 2, 3, 4, 5, 8)
FORWARD, BACKWARD = 1, 2  # how long a pass takes
WORK = re.compile(r"([FB])(0|[1-9]\d{0,3})")
WARM_UP = "a rank begins with min(ranks − 1 − rank, micro) forward passes, then one forward and one backward in turn"


def verify_one_f_one_b(one_f_one_b: Callable) -> str:
    """Judges by what the orders of all ranks achieve together; any order is right that achieves it."""
    cases = list(product(RANKS, MICRO))
    for ranks, micro in cases:
        case = f"ranks: {ranks}, micro-batches: {micro}"
        orders = []
        for rank in range(ranks):
            yours = one_f_one_b(rank, ranks, micro)
            _expect_passes(yours, micro, f"{case}, rank {rank}")
            orders.append(list(yours))
        for rank, order in enumerate(orders):
            _expect_few_held(order, min(ranks - rank, micro), f"{case}, rank {rank}")
        _expect_time(orders, micro, case)
    held = "rank r never holds more than ranks − r micro-batches"
    return (
        f"{len(cases)} pipelines of 1 to {max(RANKS)} ranks take (micro + ranks − 1) · {FORWARD + BACKWARD}, and {held}"
    )


def _expect_passes(yours: object, micro: int, case: str) -> None:
    """Expects each forward and each backward pass once, in order, a backward after its forward."""
    expected = f'{2 * micro} strings such as "F0" and "B0"'
    shown = _format(yours)
    is_list = isinstance(yours, list | tuple)
    hint = 'return the order of this rank alone, one list: ["F0", "B0"] for one micro-batch'
    expect(
        is_list and not any(isinstance(one, list | tuple) for one in yours),
        case,
        yours=shown,
        expected=expected,
        hint=hint,
    )
    below = is_list and any(isinstance(work, str) and "-" in work for work in yours)
    hint = "a number below 0: there are no more warm-up passes than micro-batches, min(ranks − 1 − rank, micro)"
    expect(not below, case, yours=shown, expected=expected, hint=hint)
    well_formed = all(isinstance(work, str) and WORK.fullmatch(work) for work in yours)
    hint = 'write each pass as a letter and a number without a space: "F0" is forward, "B0" backward, of micro-batch 0'
    expect(well_formed, case, yours=shown, expected=expected, hint=hint)
    for letter, name in (("F", "forward"), ("B", "backward")):
        numbers = [int(work[1:]) for work in yours if work[0] == letter]
        expect(
            numbers == list(range(micro)),
            f"{case}: the {name} passes",
            yours=shown,
            expected=" ".join(f"{letter}{number}" for number in range(micro)),
            hint=_explain_numbers(numbers, micro, name),
        )
    early = [number for number in range(micro) if yours.index(f"B{number}") < yours.index(f"F{number}")]
    hint = "a micro-batch's backward comes after its forward on the same rank: begin each turn with the forward"
    expect(
        not early,
        f"{case}: a backward before its forward",
        yours=shown,
        expected=f"F{micro - 1} before B{micro - 1}",
        hint=hint,
    )


def _explain_numbers(numbers: list[int], micro: int, name: str) -> str:
    if numbers == list(range(1, micro + 1)):
        return "micro-batches count from 0"
    if sorted(numbers) == list(range(micro)):
        return f"the {name} passes run in the order of the micro-batches: 0 first"
    if any(number >= micro for number in numbers):
        return "there are only micro micro-batches: no more than micro forward passes at the beginning, min(…, micro)"
    if len(numbers) > len(set(numbers)):
        return f"a {name} pass comes twice: count forward and backward passes separately"
    if name == "backward":
        return "at the end come the backward passes that are left, one for each forward pass of the beginning"
    return "forward passes are missing: all micro of them, on each rank"


def _expect_few_held(order: list[str], most: int, case: str) -> None:
    held = peak = 0
    for work in order:
        held += 1 if work[0] == "F" else -1
        peak = max(peak, held)
    expect(
        peak <= most,
        f"{case}: micro-batches held at once",
        yours=f"{peak}: {_format(order)}",
        expected=f"at most {most}, min(ranks − rank, micro)",
        hint=f"too many forward passes before a backward: {WARM_UP}",
    )


def _expect_time(orders: Sequence[list[str]], micro: int, case: str) -> None:
    ranks = len(orders)
    rows, waiting = simulate(orders, forward=FORWARD, backward=BACKWARD)
    where = "; ".join(f"rank {rank}: {work}" for rank, work in waiting)
    hint = f"the ranks wait for each other: {WARM_UP}, on each rank"
    expect(not waiting, f"{case}: the pipeline", yours=f"stands: {where}", expected="ends", hint=hint)
    total, right = max(some[-1]["end"] for some in rows.values()), (micro + ranks - 1) * (FORWARD + BACKWARD)
    # How many forward passes come before the first backward; what is less than in 1F1B makes a rank wait.
    first = [order.index("B0") for order in orders]
    few = [rank for rank, count in enumerate(first) if count < min(ranks - rank, micro)]
    rank = few[0] if few else 0
    hint = f"a rank waits where it could work: {WARM_UP}"
    if few:
        hint = f"rank {rank} waits for its first backward, and could run a forward meanwhile: {WARM_UP}"
    expect(
        total <= right,
        f"{case}: the time of all, with {FORWARD} for a forward and {BACKWARD} for a backward",
        yours=f"{total:g}; rank {rank}: {_format(orders[rank])}",
        expected=f"{right}, (micro + ranks − 1) · {FORWARD + BACKWARD}",
        hint=hint,
    )


def _format(order: object) -> str:
    """An order in one line, without quotation marks, or what is there in its place."""
    if isinstance(order, list | tuple) and order and all(isinstance(work, str) for work in order):
        return f"[{', '.join(order[:18])}{', …' * (len(order) > 18)}]"
    return str(order)[:100]
