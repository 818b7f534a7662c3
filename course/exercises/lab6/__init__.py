"""The exercises of lab 6: a card of each pile, whose mended job is run and looked at."""

from __future__ import annotations

import re
from functools import partial

import nodelaunch as launch
from course.check import Exercise, expect
from course.exercises.lab6.cards import Card, ddp_job, dp_job
from course.exercises.lab6.cards.faults import read_job
from lab_common import LabError

CLOSE = 1e-9
# Seconds to prepare the data, besides those that who mends a race by sleeping reckons with.
SLOW = 4


def verify_card(card: Card, *, pile: str) -> str:
    """Runs the job as the learner has mended it, under harder conditions than those that showed the fault."""
    if not isinstance(card, Card) or card.pile != pile:
        fix = f'card = cards.draw("{pile}")'
        cause = "an answer of another exercise"
        raise LabError("This is no card of the right pile.", where="check.exercise", cause=cause, fix=fix)
    expect(
        card.named,
        f"card {card.number}",
        yours="no cause named yet",
        expected="first the cause, then the mend",
        hint="card.name(...) with the letter of the cause",
    )
    if not card.path.exists():
        fix = "draw the card again: it writes the job anew"
        raise LabError(f"There is no {card.path}.", where=card.path, cause="it was deleted or renamed", fix=fix)
    text, parallel = card.read(), card.fault.job == "ddp"
    if text == card.fault.break_job():
        cause, fix = "not mended yet, or not saved", "mend it in the editor, save it, and run this cell again"
        raise LabError("The job is still as it was drawn.", where=card.path, cause=cause, fix=fix)
    sizes = next(line for line in read_job(card.fault.job).splitlines() if line.startswith("POINTS, "))
    hint = "mend the cause: with other sizes it would be back"
    expect(sizes in text, "the sizes of the job", yours="changed", expected=sizes, hint=hint)
    for layout in card.fault.layouts:
        result = card.start(layout=layout, prepare=SLOW + _find_nap(text))
        _expect_end(card, result)
        try:
            if parallel:
                _expect_training(card, result.results, processes=layout[1])
            else:
                _expect_replicas(card, result.results)
        except (KeyError, TypeError, IndexError) as error:
            cause, fix = repr(error), "leave launch.report(...) as it was"
            raise LabError("The job no longer reports what it did.", where=card.path, cause=cause, fix=fix) from error
    card.note_solved()
    return f"card {card.number}, mended, runs and is right" + (" on a slow disk, too" if parallel else "")


def _find_nap(text: str) -> float:
    """The longest sleep in a job, in seconds; no more than leaves the ranks' patience whole."""
    naps = [float(nap) for nap in re.findall(r"\bsleep\((\d+(?:\.\d+)?)\)", text)]
    return min(max(naps, default=0.0), 12.0)


def _expect_end(card: Card, result: launch.JobResult) -> None:
    """Every process came to its end and reported."""
    failure = result.failure
    expected = "a job that ends well"
    if failure:
        last = (failure.message.strip().splitlines() or [failure.what])[0]
        rank = "the job" if failure.rank is None else f"rank {failure.rank}"
        case = f"card {card.number}, with {len(result.results)} processes"
        expect(False, case, yours=f"{rank}: {last[:160]}", expected=expected, hint=card.fault.mend)
    silent = [str(rank) for rank, report in enumerate(result.results) if report is None]
    hint = "leave launch.report(...) at the end of main() as it was, on every rank"
    expect(not silent, "what is reported", yours=f"nothing from {', '.join(silent)}", expected=expected, hint=hint)


def _expect_training(card: Card, results: tuple, *, processes: int) -> None:
    """Shares without doubles, new orders, one model, one accuracy, and each process on its own device of its node."""
    for epoch in range(ddp_job.EPOCHS):
        handed_out = [index for result in results for index in result["orders"][epoch]]
        batch = len(results) * ddp_job.BATCH_SIZE
        expect(
            len(handed_out) == len(set(handed_out)) and len(handed_out) >= ddp_job.POINTS - batch,
            f"the points of epoch {epoch}, over all ranks",
            yours=f"{len(handed_out)}, {len(set(handed_out))} of them different",
            expected=f"each at most once, and no more than {batch} of {ddp_job.POINTS} left out",
            hint=card.fault.mend,
        )
    orders = [tuple(order) for order in results[0]["orders"]]
    expect(
        len(set(orders)) == ddp_job.EPOCHS,
        "the orders of rank 0's points",
        yours=f"{len(set(orders))} different in {ddp_job.EPOCHS} epochs",
        expected="a new one in every epoch",
        hint=card.fault.mend,
    )
    _expect_one_result(card, results)
    devices = [re.sub(r"\D", "", result["device"]) for result in results]
    expected = [str(rank % processes) for rank in range(len(results))]
    expect(
        devices == expected,
        f"the devices of {len(results)} ranks, {processes} on a node",
        yours=", ".join(devices),
        expected=", ".join(expected),
        hint=card.fault.mend,
    )


def _expect_one_result(card: Card, results: tuple) -> None:
    """One model, one accuracy, one checkpoint, and no rank with more work than the others."""
    digests = {result["weights"] for result in results}
    expect(len(digests) == 1, "the weights", yours=f"{len(digests)} models", expected="one model", hint=card.fault.mend)
    for epoch in range(ddp_job.EPOCHS):
        hits, seen = (sum(result["own"][epoch][place] for result in results) for place in (0, 1))
        yours = [result["accuracies"][epoch] for result in results]
        expect(
            seen in (ddp_job.POINTS, len(results) * ddp_job.POINTS)  # each point once, or once on each rank
            and all(abs(one - hits / seen) < CLOSE for one in yours),
            f"the accuracy after epoch {epoch}, on each rank",
            yours=f"{', '.join(f'{one:.6f}' for one in yours)} of {seen} points",
            expected=f"{hits / max(seen, 1):.6f} of {ddp_job.POINTS} points, on each rank",
            hint=card.fault.mend,
        )
    # If one rank did it all: each point once to train, and once to look at the accuracy.
    most, passed = 2 * ddp_job.EPOCHS * ddp_job.POINTS, [result["passed"] for result in results]
    expect(
        max(passed) <= most,
        "the points that went through the network, on each rank",
        yours=", ".join(map(str, passed)),
        expected=f"no more than {most}",
        hint=card.fault.mend,
    )
    saved = any(result["saved"] for result in results)
    expect(saved, "the checkpoint model.pt", yours="not there", expected="written once", hint=card.fault.mend)


def _expect_replicas(card: Card, results: tuple) -> None:
    """The gradients of one device, and every point counted."""
    gap, seen = results[0]["gap"], results[0]["seen"]
    expect(
        gap < CLOSE,
        "the gradients beside one device's",
        yours=f"{gap:.1e} apart",
        expected=f"less than {CLOSE:.0e} apart",
        hint=card.fault.mend,
    )
    expect(seen == dp_job.POINTS, "points seen", yours=seen, expected=dp_job.POINTS, hint=card.fault.mend)


def _find_right(answer: str) -> str:
    """The job without a fault, by the first line of what the learner made of it."""
    return next(
        (text for text in map(read_job, ("ddp", "dp")) if text.splitlines()[0] == answer.split("\n")[0]), answer
    )


EXERCISES = {
    "6.1": Exercise("A job that stops", partial(verify_card, pile="stops"), _find_right),
    "6.2": Exercise("Calls that do not match", partial(verify_card, pile="unmatched"), _find_right),
    "6.3": Exercise("Numbers that are wrong", partial(verify_card, pile="wrong"), _find_right),
}
