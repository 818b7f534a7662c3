"""Exercise 12.2: the accuracy that Lightning logs, with and without ``sync_dist``, and the true accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Real

from course.check.verdicts import expect, refusing
from course.exercises.lab10.formulas import as_number

Ranks = Sequence[Sequence[Sequence[tuple[int, int]]]]
CLOSE = 1e-6  # float32
NAMES = ("rank 0 without sync_dist", "with sync_dist=True", "every image once")


def _deal(hits: str, ranks: int, batch_size: int) -> list[list[list[tuple[int, int]]]]:
    """Deals images as a DistributedSampler without shuffling: each rank's batches, where "1" means a hit."""
    images, share = [(image, int(hit)) for image, hit in enumerate(hits)], -(-len(hits) // ranks)
    orders = [(images * ranks)[rank : share * ranks : ranks] for rank in range(ranks)]
    return [[order[begin : begin + batch_size] for begin in range(0, share, batch_size)] for order in orders]


# What is tried, in words, and the batches of each rank.
CASES: tuple[tuple[str, Ranks], ...] = (
    ("12 images on 2 ranks, batches of 4 and 2", _deal("101110001101", 2, 4)),
    ("7 images on 2 ranks, of which one comes twice", _deal("1011010", 2, 3)),
    ("5 images on 4 ranks, of which three come twice", _deal("11100", 4, 2)),
    ("6 images on 1 rank, batches of 4 and 2", _deal("111100", 1, 4)),
    ("2 images on 3 ranks", _deal("01", 3, 2)),
    ("9 images on 2 ranks, no hit", _deal("000000000", 2, 4)),
    ("9 images on 2 ranks, all hits", _deal("111111111", 2, 4)),
    ("8 images on 2 ranks, all hits on rank 1", _deal("01010101", 2, 2)),
    (
        "a sampler of one's own: 6 images on rank 0, 2 on rank 1",
        [[[(4, 1), (0, 0), (6, 1), (7, 1)], [(2, 1), (1, 1)]], [[(5, 0)], [(3, 0)]]],
    ),
    (
        "a sampler that repeats an image within a rank",
        [[[(3, 1), (3, 1)], [(1, 0), (4, 1)]], [[(0, 0), (2, 1)], [(0, 0), (5, 0)]]],
    ),
    (
        "True and False for the hits, and images in any order",
        [[[(907, False), (12, True)], [(55, True)]], [[(12, True), (3, False)], [(1000, True)]]],
    ),
)


def read_logs(ranks: Ranks) -> tuple[float, float, float]:
    """Returns the accuracy logged by rank 0 alone, the one with ``sync_dist=True``, and the true one.

    Lightning sums value times batch size, and batch sizes, over batches and ranks, and divides at the epoch's end.
    Source: ``_ResultMetric`` in lightning/pytorch/trainer/connectors/logger_connector/result.py, version 2.6.6. With
    Gloo it averages both sums over the ranks, the batch sizes as an integer: so the number of pairs must be a multiple
    of the ranks, as it is with its own sampler.
    """
    first = [hit for batch in ranks[0] for _, hit in batch]
    pairs = [pair for batches in ranks for batch in batches for pair in batch]
    once = dict(pairs)
    return sum(first) / len(first), sum(hit for _, hit in pairs) / len(pairs), sum(once.values()) / len(once)


def verify_read_logs(answer: Callable) -> str:
    """Asks for the three accuracies of each case."""
    for case, ranks in CASES:
        given = [[[*batch] for batch in batches] for batches in ranks]
        with refusing(
            ZeroDivisionError,
            case=case,
            expected="three accuracies",
            hint="no rank and no batch is empty here: divide by what was counted",
        ):
            yours = _read(answer(given), case)
        for place, (found, right) in enumerate(zip(yours, read_logs(ranks), strict=True)):
            expect(
                abs(found - right) <= CLOSE,
                f"{case}: {NAMES[place]}",
                yours=f"{found:.4f}",
                expected=f"{right:.4f}",
                hint=_explain(place, yours, ranks),
            )
    return f"{len(CASES)} cases of 1 to 4 ranks, with images that come twice and batches of unequal size"


def _read(yours: object, case: str) -> list[float]:
    yours = yours.tolist() if hasattr(yours, "tolist") else yours
    numbers = [as_number(one) for one in yours] if isinstance(yours, tuple | list) else []
    shown = "None" if yours is None else f"{type(yours).__name__} {str(yours)[:60]}"
    hint = "return three numbers: what rank 0 logs alone, what is logged with sync_dist=True, the accuracy"
    good = len(numbers) == 3 and all(isinstance(one, Real) and not isinstance(one, bool) for one in numbers)
    expect(good, case, yours=shown, expected="three numbers", hint=hint)
    return [float(one) for one in numbers]


def _explain(place: int, yours: Sequence[float], ranks: Ranks) -> str:
    """Returns the hint for a wrong accuracy at one place."""
    right, found = read_logs(ranks), yours[place]
    shares = [[pair for batch in batches for pair in batch] for batches in ranks]
    means = [[_mean(batch) for batch in batches] for batches in ranks]
    pairs = [pair for share in shares for pair in share]
    counted = (shares[0], pairs, [*dict(pairs).items()])[place]

    def is_like(*numbers: float) -> bool:
        return any(abs(found - number) <= CLOSE for number in numbers)

    if all(abs(one - other) <= CLOSE for one, other in zip(sorted(yours), sorted(right), strict=True)):
        return f"the order of the three: {', '.join(NAMES)}"
    if is_like(100 * right[place]):
        return "an accuracy from 0 to 1, and no per cent"
    if is_like(sum(hit for _, hit in counted), round(right[place]), int(right[place])):
        return "the hits divided by the number of images, with / and not with //"
    of_batches = [_average(means[0]), _average([_average(some) for some in means]), _average([*chain(*means)])]
    if is_like(*of_batches[: 1 if place == 0 else 3]):
        return "batches differ in size, and Lightning weighs each by its size: add up hits, add up images, then divide"
    if place == 0:
        return (
            "rank 0 logs what it has seen: all pairs of ranks[0], also an image that comes twice, and no other rank's"
        )
    if place == 1:
        if is_like(right[0]):
            return "this is rank 0's own: sync_dist=True adds up over the ranks"
        if is_like(_average([_mean(share) for share in shares])):
            return "ranks differ in their images, too: hits of all ranks / images of all ranks, and no mean of ranks"
        return "all pairs of all ranks, also an image that comes twice: hits of all ranks / pairs of all ranks"
    if is_like(right[1]):
        return "an image that comes twice, on one rank or on two, counts twice in yours: count it once"
    return "each image counts once, whichever ranks have it, and however often: a dictionary of hits by image"


def _mean(pairs: Sequence[tuple[int, int]]) -> float:
    return sum(hit for _, hit in pairs) / len(pairs)


def _average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
