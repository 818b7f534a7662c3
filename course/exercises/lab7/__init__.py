"""The exercises of lab 7: a Dataset over files, the indices of a rank, an exact accuracy, a seed for each worker."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.utils.data import DistributedSampler

from course.check.verdicts import Exercise, expect
from course.exercises.lab7.exact_accuracy import verify_count_share
from course.exercises.lab7.image_files import verify_image_files
from course.exercises.lab7.worker_seeds import verify_seed_worker

# Images, ranks.
SHARE_CASES = ((10, 4), (8, 4), (7, 2), (12, 1), (9, 6), (3, 5), (2, 7), (1, 9))


def verify_share_indices(share_indices: Callable) -> str:
    """Compares with torch's DistributedSampler, and without padding with every world size-th index."""
    for images, ranks in SHARE_CASES:
        order = torch.randperm(images, generator=torch.Generator().manual_seed(images)).add(100).tolist()
        for pad in (False, True):
            wanted = [_hand_out(order, rank, ranks, pad) for rank in range(ranks)]
            for rank, expected in enumerate(wanted):
                given = list(order)
                yours = share_indices(given, rank, ranks, pad)
                case = f"rank {rank} of {ranks}, pad={pad}, order {order}"
                expect(
                    isinstance(yours, list),
                    f"{case}: what the function returns",
                    yours=type(yours).__name__,
                    expected="a list",
                    hint="return a list of indices: a slice of a list is one",
                )
                hint = "return the indices themselves, whole numbers: a slice of a list is a list already"
                single = all(map(_is_index, yours))
                expect(single, f"{case}: what stands in the list", yours=yours, expected="whole numbers", hint=hint)
                hint = "leave `order` as it is: all ranks, and the next epoch, may read it; make a new list"
                expect(given == order, f"{case}: the order", yours=given, expected="unchanged", hint=hint)
                if yours != expected:
                    hint = _explain_share(yours, expected, order=order, rank=rank, ranks=ranks, pad=pad)
                    expect(False, case, yours=yours, expected=expected, hint=hint)
    return f"{len(SHARE_CASES)} pairs of images and ranks; padded, the same as torch's DistributedSampler"


def _is_index(value: object) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _hand_out(order: Sequence[int], rank: int, ranks: int, pad: bool) -> list[int]:
    if not pad:
        return list(order[rank::ranks])
    sampler = DistributedSampler(range(len(order)), num_replicas=ranks, rank=rank, shuffle=False)
    return [order[place] for place in sampler]


def _explain_share(yours: list, expected: list, *, order: list[int], rank: int, ranks: int, pad: bool) -> str:
    """The hint that fits a wrong share."""
    count, even = len(order), len(order) // ranks
    each = -(-count // ranks)
    if not set(yours) <= set(order):
        return "these are places in `order`; return the indices that stand there: order[place]"
    if not pad and yours == _hand_out(order, rank, ranks, True):
        return "with pad=False nothing is repeated: some ranks have one index less"
    if pad and count < ranks and len(yours) < len(expected):
        return "with more ranks than images the order is repeated more than once: order * world_size is long enough"
    if pad and yours == _hand_out(order, rank, ranks, False):
        return "with pad=True all ranks need equally many: repeat the order from its start until the ranks divide it"
    if count > ranks and yours in (order[rank * each : (rank + 1) * each], order[rank * even : (rank + 1) * even]):
        return "take every world_size-th index, order[rank::world_size], not a block of neighbours"
    if yours == expected[:even] and len(yours) < len(expected):
        return "the last indices are lost: nothing may be dropped, the ranks need not have equally many"
    if pad and len(yours) > len(expected):
        return "too many: world_size has to divide the padded length, and the shortest such length is enough"
    if pad and yours[:-1] == expected[:-1]:
        return "padding repeats the order from its start: what follows the last index is the first one, then the second"
    if Counter(yours) == Counter(expected):
        return "the indices are right, their order is not: leave it as it is, shuffled already"
    return "order[rank::world_size], of an order that was made longer first where pad is True"


EXERCISES = {
    "7.1": Exercise("A Dataset over files", verify_image_files),
    "7.2": Exercise("The indices of a rank", verify_share_indices),
    "7.3": Exercise("An exact accuracy", verify_count_share),
    "7.4": Exercise("A seed for each worker", verify_seed_worker),
}
