"""The exercises of lab 5: a DDP script, its two commands, set_epoch, and accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from torch.utils.data import DistributedSampler

from course.check.verdicts import Exercise, NotYetError, expect, refusing
from course.exercises.lab5.accumulation import verify_accumulation
from course.exercises.lab5.commands import verify_commands
from course.exercises.lab5.ddp_script import verify_ddp_script


def _hand_out(epochs: Sequence[int | None], *, images: int = 12, ranks: int = 2, seed: int = 0) -> list[list[int]]:
    """Returns rank 0's images from torch's own sampler in each epoch; None leaves out ``set_epoch``."""
    sampler = DistributedSampler(range(images), num_replicas=ranks, rank=0, seed=seed)
    orders = []
    for epoch in epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def _find_alike(*places: int, images: int = 12, ranks: int = 2) -> list[list[int]]:
    """Returns two different epochs, both with set_epoch, that happen to have the same images at these places."""
    tried = (_hand_out((0, 1), images=images, ranks=ranks, seed=seed) for seed in itertools.count())
    return next((a, b) for a, b in tried if a != b and all(a[place] == b[place] for place in places))


WHOLE = "one place, or a part, may agree by chance: compare whole orders"
ALL = "two orders may be the same for another reason: compare all epochs with the first, however many there are"
DIFFERENT = "the orders differ: compare the lists themselves, of one process the images are the same in every epoch"


def _list_orders() -> tuple[tuple[str, list, bool, str], ...]:
    """Lists the cases: description, orders of the epochs, True if ``set_epoch`` was forgotten, hint."""
    longer = _hand_out((None,) * 2, images=30, ranks=4)
    return (
        ("3 epochs without set_epoch", _hand_out((None,) * 3), True, "every epoch has the same order"),
        ("3 epochs with set_epoch", _hand_out((0, 1, 2)), False, DIFFERENT),
        ("2 epochs of one process, with set_epoch", _hand_out((0, 1), ranks=1), False, DIFFERENT),
        ("2 epochs whose first image is the same by chance", _find_alike(0), False, WHOLE),
        ("2 epochs that differ only at their end", _find_alike(0, 1, 2, images=5, ranks=1), False, WHOLE),
        ("2 epochs that differ only in the middle", _find_alike(0, 3, images=4, ranks=1), False, WHOLE),
        ("epoch 0, epoch 0 again after a restart, epoch 1", _hand_out((0, 0, 1)), False, ALL),
        ("epochs 0, 1 and 1 again", _hand_out((0, 1, 1)), False, ALL),
        ("epochs 0, 1 and 0 again", _hand_out((0, 1, 0)), False, ALL),
        ("1 epoch", _hand_out((None,)), False, "one epoch is not enough to decide: nothing to compare it with"),
        ("epochs 0, 0, 1 and 0", _hand_out((0, 0, 1, 0)), False, ALL),
        ("epochs 0, 0, 0 and 1", _hand_out((0, 0, 0, 1)), False, ALL),
        ("2 longer epochs without set_epoch", longer, True, "any number of images, any number of ranks"),
    )


def verify_find_forgotten(find_forgotten: Callable) -> str:
    """Asks about orders of torch's DistributedSampler with and without ``set_epoch``."""
    cases = _list_orders()
    for case, orders, expected, hint in cases:
        with refusing(IndexError, TypeError, case=case, expected=expected, hint=hint):
            yours = find_forgotten(orders)
        if not isinstance(yours, bool | np.bool_):
            hint = "return True or False; bool(...) converts a tensor"
            raise NotYetError(case, yours=repr(yours)[:60], expected="True or False", hint=hint)
        expect(bool(yours) == expected, case, yours=yours, expected=expected, hint=hint)
    return f"{len(cases)} runs of torch's DistributedSampler, with and without set_epoch"


EXERCISES = {
    "5.1": Exercise("The DDP script", verify_ddp_script),
    "5.2": Exercise("Two commands", verify_commands),
    "5.3": Exercise("A forgotten set_epoch", verify_find_forgotten),
    "5.4": Exercise("Accumulation", verify_accumulation),
}
