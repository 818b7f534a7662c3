"""Exercise 13.4: how long a run takes whose nodes are lost now and then, what it costs, and how often it saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect, refusing

WITHIN = 1e-4  # relative


class Case(NamedTuple):
    """The arguments of ``plan_run``."""

    work: float
    nodes: int
    efficiency: float
    price: float
    checkpoint: float
    restart: float
    mtbf: float
    interval: float | None = None


# In the first cases as much as possible is 1 or nothing, so that a mistake shows by itself.
CASES = (
    Case(100, 1, 1.0, 1.0, 0.02, 0.1, 25),
    Case(100, 1, 1.0, 1.0, 0.02, 0.1, 25, 4),
    Case(100, 5, 0.8, 3.0, 0.02, 0.1, 125),
    Case(400, 8, 0.9, 2.5, 0.05, 0.2, 200),
    Case(400, 8, 0.9, 2.5, 0.05, 0.2, 200, 0.25),
    Case(5000, 16, 0.7, 12.0, 0.01, 0.5, 96, 6.0),
    Case(24, 2, 0.95, 0.5, 0.5, 0.0, 10),
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
        _judge_interval(yours[0], words, case)
        _judge_hours(yours[1], words, case)
        _judge_cost(yours[2], words, case)
    return f"{len(CASES)} runs on 1 to {max(case[1] for case in CASES)} nodes, with Young's interval and with others"


def _describe(case: Case) -> str:
    given = {name: value for name, value in case._asdict().items() if value is not None}
    return ", ".join(f"{name} {value:g}" for name, value in given.items())


def _as_numbers(found: object, words: str) -> tuple[float, ...]:
    found = found.tolist() if hasattr(found, "tolist") else found
    if isinstance(found, list | tuple):  # a NumPy number, or a tensor of one, is as good
        found = [one.item() if hasattr(one, "item") and not getattr(one, "ndim", 0) else one for one in found]
    good = isinstance(found, list) and len(found) == 3
    good = good and all(isinstance(one, Real) and math.isfinite(one) for one in found)
    shown = "None" if found is None else f"{type(found).__name__} {str(found)[:60]}"
    hint = "return three numbers: return interval, hours, cost"
    expect(good, words, yours=shown, expected="three numbers", hint=hint)
    return tuple(map(float, found))


def _judge_interval(yours: float, words: str, case: Case) -> None:
    mean, checkpoint = case.mtbf / case.nodes, case.checkpoint
    right = plan_run(*case)
    judge(
        yours,
        right=right[0],
        case=f"{words}: the interval",
        wrong={
            "return them in this order: interval, hours, cost": AnyOf(right[1:]),
            "an interval that is given is taken as it is: compute one only where it is None": AnyOf(
                () if case.interval is None else (math.sqrt(2 * checkpoint * mean),)
            ),
            "take the square root: √(2 · C · M)": 2 * checkpoint * mean,
            "the 2 belongs below the root: √(2 · C · M)": AnyOf(
                (math.sqrt(checkpoint * mean), 2 * math.sqrt(checkpoint * mean))
            ),
            "the run fails as soon as one of its nodes does: its M is mtbf / nodes": AnyOf(
                (math.sqrt(2 * checkpoint * case.mtbf), math.sqrt(2 * checkpoint * case.mtbf * case.nodes))
            ),
        },
        hint="the interval is √(2 · C · M), with C the checkpoint's hours and M = mtbf / nodes",
        within=WITHIN,
    )


def _judge_hours(yours: float, words: str, case: Case) -> None:
    nodes, efficiency, price, checkpoint, restart = case[1:6]
    mean, ideal = case.mtbf / nodes, case.work / (nodes * efficiency)
    interval, right, _ = plan_run(*case)
    late, length = math.exp(restart / mean), interval + checkpoint
    again = mean * math.expm1(length / mean)
    lost = (length / 2, interval / 2, interval / 2 + restart, length / 2 + restart)
    judge(
        yours,
        right=right,
        case=f"{words}: the hours",
        wrong={
            "nodes share the work: divide by nodes": AnyOf((right * nodes, right * nodes * efficiency)),
            "divide the work by the efficiency": AnyOf((right * efficiency, right * efficiency**2)),
            "the price comes last: return interval, hours, cost": AnyOf((right * price, right * price * nodes)),
            "the run fails as soon as one of its nodes does: M is mtbf / nodes, in the hours as well": plan_run(
                *case._replace(mtbf=case.mtbf * nodes, interval=interval)
            )[1],
            "the hours are of another interval than you return: use the one that is given": plan_run(
                *case._replace(interval=None)
            )[1],
            "the restart is missing: e^(R / M) is one of the factors": ideal / interval * again,
            "a failure can also hit a checkpoint: the exponent is (interval + checkpoint) / M": (
                ideal / interval * mean * late * math.expm1(interval / mean)
            ),
            "subtract 1 from the second power: (e^(…) − 1)": ideal / interval * mean * late * math.exp(length / mean),
            "this is the first-order form, which is too low where failures are frequent: take the one with e^(…)": (
                AnyOf(tuple(ideal * (1 + checkpoint / interval + each / mean) for each in lost))
            ),
        },
        hint="W / interval · M · e^(R / M) · (e^((interval + C) / M) − 1), with W = work / (nodes · efficiency)",
        within=WITHIN,
    )


def _judge_cost(yours: float, words: str, case: Case) -> None:
    nodes, efficiency, price = case[1:4]
    _, hours, right = plan_run(*case)
    judge(
        yours,
        right=right,
        case=f"{words}: the price",
        wrong={
            "these are the hours: multiply by the price and by nodes": hours,
            "each node is paid for: multiply by nodes, too": hours * price,
            "multiply by the price of a node and hour": hours * nodes,
            "the hours have the efficiency already: use it once": AnyOf((right / efficiency, right * efficiency)),
        },
        hint="cost = hours · nodes · price; the work that failures repeat is paid for, too",
        within=WITHIN,
    )
