"""Exercises 12.2 and 12.4: the accuracies that Lightning logs, and how often it calls ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect

Ranks = Sequence[Sequence[Sequence[tuple[int, int]]]]
CLOSE = 1e-6  # float32
NAMES = ("rank 0 without sync_dist", "with sync_dist=True", "every image once")


def _deal(hits: str, ranks: int, batch_size: int) -> list[list[list[tuple[int, int]]]]:
    """Deals images as a DistributedSampler without shuffling: each rank's batches, where "1" means a hit."""
    images, share = [(image, int(hit)) for image, hit in enumerate(hits)], -(-len(hits) // ranks)
    orders = [(images * ranks)[rank : share * ranks : ranks] for rank in range(ranks)]
    return [[order[begin : begin + batch_size] for begin in range(0, share, batch_size)] for order in orders]


# What is tried, in words, and the batches of each rank.
LOGGED: tuple[tuple[str, Ranks], ...] = (
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

# Images, batch size, ranks, accumulate, epochs. Each place where it is rounded is the only one in some case.
COUNTED = (
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


def read_logs(ranks: Ranks) -> tuple[float, float, float]:
    """Returns the accuracy logged by rank 0 alone, the one with ``sync_dist=True``, and the true one.

    Lightning sums value times batch size, and batch sizes, over batches and ranks, and divides at the epoch's end.
    Source: ``_ResultMetric`` in lightning/pytorch/trainer/connectors/logger_connector/result.py, version 2.6.6. With
    Gloo it averages both sums over the ranks, the batch sizes as an integer: so the number of pairs must be a multiple
    of the ranks, as it is with its own sampler.
    """
    pairs = [_join(batches) for batches in ranks]
    return _mean(pairs[0]), _mean(_join(pairs)), _mean([*dict(_join(pairs)).items()])


def verify_read_logs(answer: Callable) -> str:
    """Asks for the three accuracies of each case."""
    for case, ranks in LOGGED:
        yours = answer([[[*batch] for batch in batches] for batches in ranks])
        yours = yours.tolist() if hasattr(yours, "tolist") else yours
        expect(
            isinstance(yours, list | tuple) and len(yours) == 3,
            case,
            yours=str(yours)[:60],
            expected="three numbers",
            hint="return three numbers: what rank 0 logs alone, what is logged with sync_dist=True, the accuracy",
        )
        first, synced, once = read_logs(ranks)
        shares = [_join(batches) for batches in ranks]
        batches = [[_mean(batch) for batch in some] for some in ranks]
        weigh = "batches differ in size, and Lightning weighs each by its size: add up hits, add up images, then divide"
        judged = (
            (
                first,
                "rank 0 logs what it has seen: all pairs of ranks[0], also an image that comes twice",
                {weigh: _average(batches[0]), "only rank 0's own pairs, and no other rank's": synced},
            ),
            (
                synced,
                "all pairs of all ranks, also an image that comes twice: hits of all ranks / pairs of all ranks",
                {
                    "this is rank 0's own: sync_dist=True adds up over the ranks": first,
                    "ranks differ in their images, too: hits of all / images of all, and no mean of ranks": (
                        _average([_mean(share) for share in shares])
                    ),
                    weigh: AnyOf((_average(_join(batches)), _average([_average(some) for some in batches]))),
                },
            ),
            (
                once,
                "each image counts once, whichever ranks have it, and however often: a dictionary of hits by image",
                {
                    "an image that comes twice, on one rank or on two, counts twice in yours: count it once": AnyOf(
                        (synced, _mean(_join([*dict(share).items()] for share in shares)))
                    )
                },
            ),
        )
        for name, found, (right, hint, wrong) in zip(NAMES, yours, judged, strict=True):
            judge(found, right=right, case=f"{case}: {name}", hint=hint, wrong=wrong, within=CLOSE)
    return f"{len(LOGGED)} cases of 1 to 4 ranks, with images that come twice and batches of unequal size"


def _join(lists: Sequence) -> list:
    return [one for some in lists for one in some]


def _mean(pairs: Sequence[tuple[int, int]]) -> float:
    return _average([hit for _, hit in pairs])


def _average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


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
    return epochs * ceil(ceil(ceil(images / ranks) / batch_size) / accumulate)


def verify_count_steps(answer: Callable) -> str:
    """Asks for the steps of each case."""
    for images, batch_size, ranks, accumulate, epochs in COUNTED:
        right, share = count_steps(images, batch_size, ranks, accumulate, epochs), ceil(images / ranks)
        batches = ceil(share / batch_size)
        judge(
            answer(images, batch_size, ranks, accumulate, epochs),
            right=right,
            case=f"{images:,} images, batch size {batch_size}, {ranks} ranks, accumulate {accumulate}, {epochs} epochs",
            hint="a whole number, of all epochs: the images of a rank, its batches, its steps, each rounded up",
            wrong={
                "these are of one epoch: times epochs": right / epochs,
                "all ranks take a step together: count it once, and not for each rank": ranks * right,
                "the gradients of accumulate batches are added up for one step: divide by accumulate": epochs * batches,
                "each rank has its share of the images: images / ranks": count_steps(
                    images, batch_size, 1, accumulate, epochs
                ),
                "an epoch ends with a step, also where fewer batches have been added up: round up in each epoch": AnyOf(
                    (
                        epochs * (batches // accumulate),
                        ceil(epochs * batches / accumulate),
                        epochs * batches // accumulate,
                    )
                ),
                "the sampler repeats images so that all ranks have as many: round up where you divide by ranks": (
                    epochs * ceil(ceil(floor(images / ranks) / batch_size) / accumulate)
                ),
                "the loader keeps the last batch, also where it is not full: round up where you divide by batch_size": (
                    epochs * ceil(floor(share / batch_size) / accumulate)
                ),
            },
        )
    most = max(ranks for _, _, ranks, _, _ in COUNTED)
    return f"{len(COUNTED)} trainings on 1 to {most} ranks, with what is left over at each place"
