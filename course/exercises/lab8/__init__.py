"""The exercises of lab 8: what each rank holds, two bandwidths, and an all-reduce by a ring and by a butterfly."""

from __future__ import annotations

from collections.abc import Callable

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, NotYetError, OpenError
from course.exercises.lab8.reductions import verify_butterfly, verify_ring

RANKS, ROOT = 4, 1
ROOTED = ("gather", "reduce")  # where the others get nothing
WHAT = {
    "broadcast": "rank 1's x goes to every rank",
    "scatter": "rank 1 cuts its x into four parts, and rank r gets part r; the others' x are not used",
    "gather": "rank 1 gets the first element of each rank, in the order of the ranks; the others get nothing",
    "all_gather": "every rank gets what gather gives to one",
    "reduce": "rank 1 gets the sum over the ranks, element by element; what the others hold then does not count: None",
    "all_reduce": "every rank gets the sum that reduce gives to one",
    "reduce_scatter": "the sum over the ranks is cut into four parts, and rank r gets part r",
    "all_to_all": "each rank cuts its x into four parts and sends part r to rank r: rank r gets part r of all, by rank",
}


# Before each call rank r has the numbers from 10 r to 10 r + 3.
BEFORE = [[10 * rank + place for place in range(RANKS)] for rank in range(RANKS)]
SUMS = [sum(column) for column in zip(*BEFORE, strict=True)]
FIRSTS = [numbers[0] for numbers in BEFORE]


def at_root(numbers: list[int]) -> list[list[int] | None]:
    """The ranks' results if only the root gets one: None for the ranks that do not count."""
    return [numbers if rank == ROOT else None for rank in range(RANKS)]


HELD = {
    "broadcast": [BEFORE[ROOT]] * RANKS,
    "scatter": [[number] for number in BEFORE[ROOT]],
    "gather": at_root(FIRSTS),
    "all_gather": [FIRSTS] * RANKS,
    "reduce": at_root(SUMS),
    "all_reduce": [SUMS] * RANKS,
    "reduce_scatter": [[number] for number in SUMS],
    "all_to_all": [list(column) for column in zip(*BEFORE, strict=True)],
}


def verify_predictions(predict_tensors: Callable) -> str:
    """Compares with what the four ranks of the lab hold after each call."""
    yours = predict_tensors()
    if not isinstance(yours, dict):
        form = 'a dictionary: {"broadcast": [four lists, by rank], …}'
        raise NotYetError("the table", yours=type(yours).__name__, expected=form, hint="return the dictionary")
    missing = [name for name in HELD if yours.get(name) is None]
    if missing:
        fix = "give each of them four entries, one for each rank, and run the cell again"
        raise OpenError("✎ 8.1 is not filled in everywhere; this counts as no try.", where=", ".join(missing), fix=fix)
    for name, held in HELD.items():
        table = _as_list(yours[name])
        everywhere = AnyOf((HELD["all_gather"], HELD["all_reduce"]))
        wrong = {"only rank 1 gets a result that counts. For each other rank write None": everywhere}
        judge(
            [_read_numbers(entry) for entry in table] if isinstance(table, list | tuple) else table,
            right=held,
            case=f"{name}: what ranks 0 to {RANKS - 1} hold",
            wrong=wrong if name in ROOTED else {},
            hint=WHAT[name],
        )
    return f"what ranks 0 to 3 hold after {len(HELD)} collectives"


def _read_numbers(entry: object) -> object:
    """One rank's numbers as a list, also a bare one; None if there are none."""
    entry = _as_list(entry)
    return [entry] if isinstance(entry, int | float) else entry or None


def _as_list(entry: object) -> object:
    """A tensor, or an array or number of NumPy's, as Python's own; anything else as it is."""
    return entry.tolist() if hasattr(entry, "tolist") else entry


# Collective, bytes, seconds, ranks. The third is a published run: 1 GiB on 32 B200 GPUs.
MEASURED = (
    ("all_reduce", 1_000_000, 0.01, 2),
    ("all_reduce", 4_000_000, 0.5, 4),
    ("all_reduce", 2**30, 2**30 / 188.90e9, 32),
    ("all_gather", 8_000_000, 0.2, 4),
    ("reduce_scatter", 8_000_000, 0.2, 8),
    ("all_to_all", 6_000_000, 0.3, 3),
    ("broadcast", 5_000_000, 0.25, 4),
)


def find_share(collective: str, n: int) -> float:
    """The bytes that a rank has to send at least, over those of the tensor: bus over algorithm bandwidth."""
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(collective, (n - 1) / n)


def verify_bandwidths(bandwidths: Callable) -> str:
    """Compares with the definitions of nccl-tests."""
    for collective, size, seconds, n in MEASURED:
        share, rate = find_share(collective, n), size / seconds

        def give(factor: float, rate: float = rate) -> list[float]:
            """Both bandwidths, with a bus bandwidth of ``factor`` times the other."""
            return [rate, factor * rate]

        judge(
            _as_list(bandwidths(collective, size, seconds, n)),
            right=give(share),
            case=f"{collective} of {size:,} bytes in {seconds:.3g} s on {n} ranks: algorithm, bus",
            within=1e-6,
            wrong={
                "first the algorithm bandwidth: the tensor's bytes ÷ seconds, whatever n is; then the bus bandwidth": (
                    give(share)[::-1]
                ),
                "both are the algorithm bandwidth: the bus carries that times what the busiest rank sends": give(1),
                "(n − 1)/n is for one pass: all_reduce needs two, and broadcast the whole tensor": give((n - 1) / n),
                "2(n − 1)/n is all_reduce's, a reduce-scatter and an all-gather: the others are less": (
                    give(2 * (n - 1) / n)
                ),
                "multiply by the factor, do not divide: the links carry the algorithm's rate times what a rank sends": (
                    give(1 / share)
                ),
                "give bytes per second: not bits, kilobytes, megabytes or gigabytes": AnyOf(
                    tuple(give(share, rate * unit) for unit in (8, 1e-3, 1e-6, 1e-9))
                ),
            },
            hint=f"two numbers, bytes per second: size ÷ seconds, and that × {share:.4g} for {collective} on {n} ranks",
        )
    return "both bandwidths of five collectives, and those of a published run on 32 GPUs"


EXERCISES = {
    "8.1": Exercise("What every rank holds", verify_predictions),
    "8.2": Exercise("Two bandwidths", verify_bandwidths),
    "8.3": Exercise("The ring", verify_ring),
    "8.4": Exercise("The butterfly", verify_butterfly),
}
