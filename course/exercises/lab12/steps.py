"""Exercise 12.4: how often Lightning calls ``optimizer.step()``."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from course.check.verdicts import expect, refusing
from course.exercises.lab10.formulas import as_number

# Images, batch size, ranks, accumulate, epochs. Each place where it is rounded is the only one in some case.
CASES = (
    (1010, 50, 2, 1, 1),
    (1000, 50, 2, 1, 3),
    (1001, 100, 1, 1, 1),
    (801, 100, 2, 1, 2),
    (1000, 50, 2, 4, 1),
    (1000, 50, 2, 4, 3),
    (1001, 50, 2, 2, 1),
    (50_000, 64, 8, 4, 10),
    (10_000, 64, 2, 8, 90),
    (5, 4, 8, 1, 2),
    (30, 64, 2, 4, 5),
    (1, 1, 1, 1, 1),
    (97, 7, 3, 5, 4),
)


def count_steps(images: int, batch_size: int, ranks: int, accumulate: int, epochs: int) -> int:
    """The steps in all: each epoch rounds up three times.

    DistributedSampler repeats images until all shares are equal, the loader keeps a last batch that is not full, and
    Lightning takes a step at the end of an epoch also where fewer batches have been added up.

    Args:
        images: Of the data set.
        batch_size: Images per rank and batch.
        ranks: How many.
        accumulate: Lightning's ``accumulate_grad_batches``.
        epochs: How many.
    """
    return epochs * _divide_up(_divide_up(_divide_up(images, ranks), batch_size), accumulate)


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)


def verify_count_steps(answer: Callable) -> str:
    """Asks for the steps of each case."""
    for case in CASES:
        images, batch_size, ranks, accumulate, epochs = case
        words = f"{images:,} images, batch size {batch_size}, {ranks} ranks, accumulate {accumulate}, {epochs} epochs"
        hint = "each number is 1 or more: divide by what is rounded up, which is never 0"
        with refusing(ZeroDivisionError, case=words, expected="a number of steps", hint=hint):
            yours = as_number(answer(*case))
        expect(
            isinstance(yours, Real) and not isinstance(yours, bool) and math.isfinite(yours),
            words,
            yours=f"{type(yours).__name__} {str(yours)[:60]}",
            expected="a number of steps",
            hint="return one number, the steps of all epochs together",
        )
        expect(
            yours == count_steps(*case),
            f"{words}: steps in all",
            yours=f"{float(yours):,.10g}",
            expected=f"{count_steps(*case):,}",
            hint=_explain(float(yours), *case),
        )
    return (
        f"{len(CASES)} trainings on 1 to {max(case[2] for case in CASES)} ranks, with what is left over at each place"
    )


def _explain(yours: float, images: int, batch_size: int, ranks: int, accumulate: int, epochs: int) -> str:
    """The hint that fits a wrong number."""
    share, each = _divide_up(images, ranks), count_steps(images, batch_size, ranks, accumulate, 1)
    batches = _divide_up(share, batch_size)
    at_end = "an epoch ends with a step, also where fewer batches have been added up: round up in each epoch"
    known = (
        (each, "these are of one epoch: times epochs"),
        (ranks * epochs * each, "all ranks take a step together: count it once, and not for each rank"),
        (epochs * batches, "the gradients of accumulate batches are added up for one step: divide by accumulate"),
        (epochs * batches * accumulate, "accumulate makes the steps fewer: divide by it"),
        (
            count_steps(images, batch_size, 1, accumulate, epochs),
            "each rank has its share of the images: images / ranks",
        ),
        (count_steps(images, batch_size, 1, 1, epochs), "divide by ranks, and by accumulate"),
        (epochs * (batches // accumulate), at_end),
        (_divide_up(epochs * batches, accumulate), at_end),
        (epochs * batches // accumulate, at_end),
        (
            epochs * _divide_up(_divide_up(images // ranks, batch_size), accumulate),
            "the sampler repeats images so that all ranks have as many: round up where you divide by ranks",
        ),
        (
            epochs * _divide_up(share // batch_size, accumulate),
            "the loader keeps the last batch, also where it is not full: round up where you divide by batch_size",
        ),
    )
    if yours != int(yours):
        return "steps are whole: round up at each division, by ranks, by batch_size, by accumulate"
    general = "of an epoch: the images of a rank, of these its batches, of these its steps, each rounded up"
    return next((hint for number, hint in known if yours == number), general)
