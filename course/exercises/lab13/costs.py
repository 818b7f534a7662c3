"""Exercise 13.4: how long a run takes whose nodes are lost now and then, what it costs, and how often it saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from course.check.verdicts import expect, refusing
from course.exercises.lab10.formulas import as_number

PARTS = ("the interval", "the hours", "the price")
# Work, nodes, efficiency, price, checkpoint, restart, mean time between failures of a node, and the interval, where it
# is given. In the first cases as much as possible is 1 or nothing, so that a mistake shows by itself.
CASES = (
    (100, 1, 1.0, 1.0, 0.02, 0.1, 25, None),
    (100, 1, 1.0, 1.0, 0.02, 0.1, 25, 4),
    (100, 5, 0.8, 3.0, 0.02, 0.1, 125, None),
    (400, 8, 0.9, 2.5, 0.05, 0.2, 200, None),
    (400, 8, 0.9, 2.5, 0.05, 0.2, 200, 0.25),
    (5000, 16, 0.7, 12.0, 0.01, 0.5, 96, 6.0),
    (24, 2, 0.95, 0.5, 0.5, 0.0, 10, None),
)


def plan_run(
    work: float,
    nodes: int,
    efficiency: float,
    price: float,
    checkpoint: float,
    restart: float,
    mtbf: float,
    interval: float | None = None,
) -> tuple[float, float, float]:
    """The interval between checkpoints, the expected hours until the run ends, and what it costs.

    Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974),
    doi:10.1145/361147.361115, for the interval; J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps" (2006), doi:10.1016/j.future.2004.11.016, for the time.

    Args:
        work: Hours that one node would take without a failure.
        nodes: How many there are. One that is lost ends the attempt of all.
        efficiency: Speed-up divided by the number of nodes.
        price: Of a node and hour.
        checkpoint: Hours to save one.
        restart: Hours from a failure until the run continues from the checkpoint.
        mtbf: Mean hours until a given node fails.
        interval: Hours of work between two checkpoints; None takes Young's.
    """
    mean = mtbf / nodes
    interval = interval or math.sqrt(2 * checkpoint * mean)
    each = mean * math.exp(restart / mean) * math.expm1((interval + checkpoint) / mean)
    hours = work / (nodes * efficiency) / interval * each
    return interval, hours, hours * nodes * price


def verify_plan_run(answer: Callable) -> str:
    """Asks for each case, and compares the interval, the hours and the price one after the other."""
    for case in CASES:
        words = _describe(case)
        hint = "no number is 0 that you divide by, and no power is large: e^(hours / M), with M in hours"
        with refusing(ZeroDivisionError, OverflowError, case=words, expected="three numbers", hint=hint):
            found = answer(*case)
        yours = _as_numbers(found, words)
        for place, right in enumerate(plan_run(*case)):
            expect(
                math.isclose(yours[place], right, rel_tol=1e-4),
                f"{words}: {PARTS[place]}",
                yours=f"{yours[place]:,.6g}",
                expected=f"{right:,.6g}",
                hint=_explain(yours, place, case),
            )
    return f"{len(CASES)} runs on 1 to {max(case[1] for case in CASES)} nodes, with Young's interval and with others"


def _describe(case: tuple) -> str:
    work, nodes, efficiency, price, checkpoint, restart, mtbf, interval = case
    words = f"work {work:g}, nodes {nodes}, efficiency {efficiency:g}, price {price:g}, checkpoint {checkpoint:g}, "
    words += f"restart {restart:g}, mtbf {mtbf:g}"
    return words if interval is None else f"{words}, interval {interval:g}"


def _as_numbers(found: object, words: str) -> tuple[float, ...]:
    found = found.tolist() if hasattr(found, "tolist") else found
    found = [as_number(one) for one in found] if isinstance(found, tuple | list) else found
    good = isinstance(found, list) and len(found) == 3
    good = good and all(isinstance(one, Real) and math.isfinite(one) for one in found)
    shown = "None" if found is None else f"{type(found).__name__} {str(found)[:60]}"
    hint = "return three numbers: return interval, hours, cost"
    expect(good, words, yours=shown, expected="three numbers", hint=hint)
    return tuple(map(float, found))


def _explain(yours: tuple[float, ...], place: int, case: tuple) -> str:
    """The hint that fits what is wrong first."""
    return (_explain_interval, _explain_hours, _explain_cost)[place](yours, *case)


def _is_like(yours: float, *numbers: float) -> bool:
    return any(math.isclose(yours, number, rel_tol=1e-4) for number in numbers)


def _explain_interval(
    yours: tuple, work: float, nodes: int, efficiency: float, price: float, checkpoint: float, restart: float,
    mtbf: float, interval: float | None,
) -> str:  # fmt: skip
    mean, own = mtbf / nodes, yours[0]
    right = plan_run(work, nodes, efficiency, price, checkpoint, restart, mtbf, interval)
    if _is_like(own, right[1], right[2]):
        return "return them in this order: interval, hours, cost"
    if interval is not None:
        return "an interval that is given is taken as it is: compute one only where it is None"
    if _is_like(own, 2 * checkpoint * mean):
        return "take the square root: √(2 · C · M)"
    if _is_like(own, math.sqrt(checkpoint * mean)):
        return "there is a 2 below the root: √(2 · C · M)"
    if _is_like(own, 2 * math.sqrt(checkpoint * mean)):
        return "the 2 belongs below the root: √(2 · C · M)"
    if nodes > 1 and _is_like(own, math.sqrt(2 * checkpoint * mtbf)):
        return "the run fails as soon as one of its nodes does: its M is mtbf / nodes"
    if nodes > 1 and _is_like(own, math.sqrt(2 * checkpoint * mtbf * nodes)):
        return "more nodes fail more often: M is mtbf divided by nodes"
    if _is_like(own, math.sqrt(2 * (checkpoint + restart) * mean), math.sqrt(2 * restart * mean)):
        return "C is the time of a checkpoint alone: the restart does not belong below the root"
    if _is_like(own, math.sqrt(2 * checkpoint * mean) - checkpoint):
        return "Young's interval as it is, √(2 · C · M): do not subtract the checkpoint"
    return "the interval is √(2 · C · M), with C the checkpoint's hours and M = mtbf / nodes"


def _explain_hours(
    yours: tuple, work: float, nodes: int, efficiency: float, price: float, checkpoint: float, restart: float,
    mtbf: float, interval: float | None,
) -> str:  # fmt: skip
    mean, own, gap = mtbf / nodes, yours[1], yours[0]
    ideal = work / (nodes * efficiency)
    right = ideal * plan_run(1, 1, 1, 1, checkpoint, restart, mean, gap)[1]
    known = (
        ((ideal,), "this is the time without a failure and without checkpoints: multiply by what both cost"),
        ((ideal * (1 + checkpoint / gap),), "checkpoints are there, failures are not: each repeats a part of the work"),
        ((right * nodes, right * nodes * efficiency), "nodes share the work: divide by nodes"),
        ((right * efficiency, right * efficiency**2), "divide the work by the efficiency"),
        ((right * price, right * price * nodes), "return interval, hours, cost: the price comes last"),
        (
            (plan_run(work, nodes, efficiency, price, checkpoint, restart, mtbf * nodes, gap)[1],),
            "the run fails as soon as one of its nodes does: M is mtbf / nodes, in the hours as well",
        ),
        (
            (plan_run(work, nodes, efficiency, price, checkpoint, restart, mtbf)[1],),
            "the hours are of another interval than you return: use the one that is given",
        ),
        *_list_factors(ideal, gap, checkpoint, restart, mean),
    )
    general = "W / interval · M · e^(R / M) · (e^((interval + C) / M) − 1), with W = work / (nodes · efficiency)"
    return next((hint for numbers, hint in known if _is_like(own, *numbers)), general)


def _list_factors(
    ideal: float, gap: float, checkpoint: float, restart: float, mean: float
) -> list[tuple[tuple[float, ...], str]]:
    """The hours that other formulas give, each with its hint."""
    length, late = gap + checkpoint, math.exp(restart / mean)
    again = mean * math.expm1(length / mean)
    lost = (length / 2, gap / 2, gap / 2 + restart, length / 2 + restart)
    return [
        ((ideal / gap * again,), "the restart is missing: e^(R / M) is one of the factors"),
        ((ideal / gap * again + restart,), "each failure costs a restart, and not one in all: e^(R / M)"),
        (
            (ideal / gap * mean * late * math.expm1(gap / mean),),
            "a failure can also hit a checkpoint: the exponent is (interval + checkpoint) / M",
        ),
        ((ideal / gap * mean * late * math.exp(length / mean),), "subtract 1 from the second power: (e^(…) − 1)"),
        ((ideal / gap * late * again / mean,), "multiply by M, too: M · e^(R / M) · (e^(…) − 1)"),
        ((late * again,), "this is one interval: the run has W / interval of them"),
        ((ideal / length * late * again,), "the interval is work alone: divide W by it, without the checkpoint"),
        (
            tuple(ideal * (1 + checkpoint / gap + each / mean) for each in lost),
            "this is the first-order form, which is too low where failures are frequent: take the one with e^(…)",
        ),
    ]


def _explain_cost(
    yours: tuple, work: float, nodes: int, efficiency: float, price: float, checkpoint: float, restart: float,
    mtbf: float, interval: float | None,
) -> str:  # fmt: skip
    hours, own = yours[1], yours[2]
    if _is_like(own, hours):
        return "these are the hours: multiply by the price and by nodes"
    if _is_like(own, hours * price):
        return "each node is paid for: multiply by nodes, too"
    if _is_like(own, hours * nodes):
        return "multiply by the price of a node and hour"
    if _is_like(own, hours * nodes * price / efficiency, hours * nodes * price * efficiency):
        return "the hours have the efficiency already: use it once"
    if _is_like(own, work * price, work * price / efficiency):
        return "the work that failures repeat is paid for, too: begin with the hours"
    return "cost = hours · nodes · price"
