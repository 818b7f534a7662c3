"""The exercises of lab 8: what each rank holds, two bandwidths, and an all-reduce by a ring and by a butterfly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from course.check.verdicts import Exercise, NotYetError, OpenError, expect
from course.exercises.lab8.reductions import LIMIT, verify_butterfly, verify_ring
from course.ranks import fork_ranks

RANKS, ROOT = 4, 1
NAMES = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter", "all_to_all")
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


def run_collectives(rank: int) -> dict[str, list[int] | None]:
    """Runs the eight calls of the lab; returns what this rank holds after each, None where that does not count."""
    held: dict[str, list[int] | None] = {}

    def mine() -> torch.Tensor:
        return 10 * rank + torch.arange(RANKS)

    x, root = mine(), rank == ROOT
    dist.broadcast(x, src=ROOT)
    held["broadcast"] = x.tolist()
    x, part = mine(), torch.empty(1, dtype=torch.int64)
    dist.scatter(part, list(x.chunk(RANKS)) if root else None, src=ROOT)
    held["scatter"] = part.tolist()
    parts = [torch.empty(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.gather(x[:1], parts if root else None, dst=ROOT)
    held["gather"] = torch.cat(parts).tolist() if root else None
    dist.all_gather(parts, x[:1])
    held["all_gather"] = torch.cat(parts).tolist()
    dist.reduce(x, dst=ROOT)
    held["reduce"] = x.tolist() if root else None
    x = mine()
    dist.all_reduce(x)
    held["all_reduce"] = x.tolist()
    dist.reduce_scatter(part, list(mine().chunk(RANKS)))
    held["reduce_scatter"] = part.tolist()
    whole = torch.empty(RANKS, dtype=torch.int64)
    dist.all_to_all_single(whole, mine())
    held["all_to_all"] = whole.tolist()
    return held


def verify_predictions(predict_tensors: Callable) -> str:
    """Compares with what four ranks hold after each call."""
    yours = predict_tensors()
    if not isinstance(yours, dict):
        form = 'a dictionary: {"broadcast": [four lists, by rank], …}'
        raise NotYetError("the table", yours=type(yours).__name__, expected=form, hint="return the dictionary")
    missing = [name for name in NAMES if yours.get(name) is None]
    if missing:
        fix = "give each of them four entries, one for each rank, and run the cell again"
        raise OpenError("✎ 8.1 is not filled in everywhere; this counts as no try.", where=", ".join(missing), fix=fix)
    held = [outcome.value for outcome in fork_ranks(run_collectives, None, RANKS, limit=LIMIT)]
    if None in held:
        fix = "run the cell again when the machine is less busy"
        raise OpenError("✘ The check's own ranks did not answer; this counts as no try.", fix=fix)
    for name in NAMES:
        _compare_table(name, yours[name], [one[name] for one in held])
    return f"what ranks 0 to 3 hold after {len(NAMES)} collectives, as four live ranks hold it"


def _compare_table(name: str, yours: object, held: list[list[int] | None]) -> None:
    yours = _as_list(yours)
    is_table = isinstance(yours, Sequence) and not isinstance(yours, str) and len(yours) == RANKS
    hint = "one entry for each rank, 0 to 3, in this order"
    expect(is_table, f"{name}: the entries", yours=yours, expected=f"{RANKS} lists", hint=hint)
    for rank, (mine, right) in enumerate(zip(yours, held, strict=True)):
        found = _read_numbers(mine)
        if right is None:
            hint = f"only rank {ROOT} gets a result that counts. For each other rank write None"
            expect(found in (None, []), f"{name}: rank {rank}", yours=mine, expected="None", hint=hint)
            continue
        readable = found is not None and all(type(number) in (int, float) for number in found)
        hint = "a list of numbers, such as [10, 11, 12, 13]"
        if name in ROOTED:
            hint += f"; rank {ROOT} is the root here, which has a result"
        expect(readable, f"{name}: rank {rank}", yours=mine, expected="a list of numbers", hint=hint)
        expect(found == right, f"{name}: rank {rank}", yours=found, expected=right, hint=WHAT[name])


def _read_numbers(entry: object) -> list | None:
    entry = _as_list(entry)
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return [entry]
    return [_as_list(number) for number in entry] if isinstance(entry, list | tuple | range) else None


def _as_list(entry: object) -> object:
    """A tensor, or an array or number of NumPy's, as Python's own; anything else as it is."""
    return entry.tolist() if isinstance(entry, torch.Tensor | np.ndarray | np.generic) else entry


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
        case = f"{collective} of {size:,} bytes in {seconds:.3g} s on {n} ranks"
        yours = _as_list(bandwidths(collective, size, seconds, n))
        if isinstance(yours, tuple | list):
            yours = [_as_list(value) for value in yours]
        is_pair = isinstance(yours, list) and len(yours) == 2
        is_pair = is_pair and all(isinstance(value, int | float) for value in yours)
        hint = "return algorithm, bus: two numbers, in bytes per second"
        expect(is_pair, case, yours=yours, expected="two numbers", hint=hint)
        algorithm, share = size / seconds, find_share(collective, n)
        for name, value, right in (("algorithm", yours[0], algorithm), ("bus", yours[1], share * algorithm)):
            expect(
                math.isclose(value, right, rel_tol=1e-6),
                f"{case}: {name} bandwidth",
                yours=f"{value:,.3g} B/s" if abs(value) < 1000 else f"{value:,.0f} B/s",
                expected=f"{right:,.0f} B/s",
                hint=_explain_bandwidth(name, value, collective, size, seconds, n),
            )
    return "both bandwidths of five collectives, and those of a published run on 32 GPUs"


def _explain_bandwidth(name: str, value: float, collective: str, size: int, seconds: float, n: int) -> str:
    """The hint that fits a wrong bandwidth."""
    algorithm, share = size / seconds, find_share(collective, n)

    def close(other: float) -> bool:
        return math.isclose(value, other, rel_tol=1e-6)

    if close(8 * algorithm) or close(8 * share * algorithm):
        return "these are bits per second: give bytes"
    if any(close(rate / unit) for unit in (1e6, 1e9) for rate in (algorithm, share * algorithm)):
        return "these are megabytes or gigabytes per second: give bytes"
    if close(seconds / size):
        return "this is seconds per byte: divide the bytes by the seconds"
    if name == "algorithm":
        if close(share * algorithm):
            return "this is the bus bandwidth: the algorithm bandwidth is the tensor's bytes ÷ seconds, whatever n is"
        return "the algorithm bandwidth is the tensor's bytes ÷ seconds, for each collective and any number of ranks"
    if close(algorithm):
        return f"this is the algorithm bandwidth: multiply by {share:.4g}, the tensors that the busiest rank must send"
    if close(algorithm * (n - 1) / n):
        needs = "two" if collective == "all_reduce" else "the whole tensor"
        return f"(n − 1)/n is for one pass; {collective} needs {needs}"
    if close(algorithm * 2 * (n - 1) / n):
        return f"2(n − 1)/n is all_reduce's, a reduce-scatter and an all-gather; {collective} is less"
    if close(algorithm / share):
        return "multiply by the factor, do not divide: the links carry the algorithm's rate times what a rank sends"
    return f"bus = algorithm × {share:.4g} for {collective} on {n} ranks"


EXERCISES = {
    "8.1": Exercise("What every rank holds", verify_predictions),
    "8.2": Exercise("Two bandwidths", verify_bandwidths),
    "8.3": Exercise("The ring", verify_ring),
    "8.4": Exercise("The butterfly", verify_butterfly),
}
