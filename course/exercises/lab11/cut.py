"""Exercise 11.3: where to cut a network into stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise

from course.check.verdicts import expect

# Seconds of each layer, and how many stages. Common mistakes give different counts in the first.
CASES = (
    ((0.9, 0.9, 0.4, 0.1, 0.3, 0.2, 0.7, 0.8), 3),
    ((0.3, 0.1, 0.1, 0.1), 2),
    ((0.1, 0.1, 0.1, 0.3), 2),
    ((0.2, 0.2, 0.2), 1),
    ((0.1, 0.1, 0.6), 3),
    ((0.5, 0.9, 0.4, 0.5, 0.7), 3),
    ((0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2), 3),
    ((0.3, 0.2, 0.6, 0.3, 0.8, 0.2), 4),
)
CLOSE = 1 + 1e-9  # sums of seconds differ in their last digits
TRY_ALL = "try all places of the cuts, combinations(range(1, len(times)), stages − 1), and keep the best"


def verify_cut(cut: Callable) -> str:
    """Compares the slowest stage with that of the best cuts; where several are best, each is right."""
    for times, stages in CASES:
        case = f"cut({list(times)}, {stages})"
        counts = _read_counts(cut(list(times), stages), len(times), stages, case)
        best = min(_find_slowest(times, one) for one in _list_counts(len(times), stages))
        found = _find_slowest(times, counts)
        expect(
            found <= best * CLOSE,
            f"{case}: seconds of the slowest stage",
            yours=f"{found:.3f}, with {counts}",
            expected=f"{best:.3f}",
            hint=_explain(counts, times, stages),
        )
    return f"no other cuts have a faster slowest stage, for {len(CASES)} networks and 1 to 4 stages"


def _list_counts(layers: int, stages: int) -> list[list[int]]:
    """All ways to give each stage at least one layer."""
    places = combinations(range(1, layers), stages - 1)
    return [[end - begin for begin, end in pairwise((0, *some, layers))] for some in places]


def _find_stages(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    return [sum(times[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]


def _find_slowest(times: Sequence[float], counts: Sequence[int]) -> float:
    return max(_find_stages(times, counts))


def _read_counts(yours: object, layers: int, stages: int, case: str) -> list[int]:
    """Returns the answer if it is a whole number for each stage, and each layer belongs to one."""
    shown = str(yours)[:100]

    def demand(right: bool, hint: str) -> None:
        form = f"{stages} whole numbers of 1 or more, whose sum is {layers}"
        expect(right, case, yours=shown, expected=form, hint=hint)

    yours = yours.tolist() if hasattr(yours, "tolist") else yours
    hint = "return how many layers each stage gets, as a list: [1, 3] gives stage 0 one layer and stage 1 three"
    if isinstance(yours, numbers.Real):
        hint = "that is one number: return a list that says how many layers each stage gets"
    demand(isinstance(yours, list | tuple), hint)
    nested = any(isinstance(one, list | tuple) for one in yours)
    demand(not nested, "return how many layers each stage gets, and not the layers themselves: len() of each part")
    whole = all(isinstance(one, numbers.Integral) and not isinstance(one, bool) for one in yours)
    demand(whole, "return how many layers each stage gets: whole numbers, and no seconds")
    counts = [int(one) for one in yours]
    cuts = counts[1:] if counts[:1] == [0] else counts
    cuts = cuts[:-1] if cuts[-1:] == [layers] else cuts
    are_places = sum(counts) != layers and len(cuts) == stages - 1 and cuts == sorted(set(cuts))
    demand(not are_places, "these are the places of the cuts: return the differences between them")
    demand(len(counts) == stages, "return one number for each stage, so as many numbers as stages")
    demand(min(counts) > 0, "each stage needs at least one layer")
    demand(sum(counts) == layers, "each layer belongs to exactly one stage: the sum of the counts is len(times)")
    return counts


def _explain(counts: list[int], times: Sequence[float], stages: int) -> str:
    """The hint that fits counts whose slowest stage is too slow."""
    best = min(_find_slowest(times, one) for one in _list_counts(len(times), stages))
    each, more = divmod(len(times), stages)
    equal = [each + 1] * more + [each] * (stages - more)
    rest = [[one] * (stages - 1) + [len(times) - one * (stages - 1)] for one in (each, each + 1)]
    if counts in (equal, equal[::-1], *rest):
        return f"equal counts of layers do not take equal seconds: {TRY_ALL}"
    if _find_slowest(times, counts[::-1]) <= best * CLOSE:
        return "these counts are in reverse order: the first number belongs to the first layers"
    if any(_find_slowest(sorted(times, reverse=down), counts) <= best * CLOSE for down in (False, True)):
        return "the layers stay in their order: do not sort the times"
    if counts in _cut_at_mean(times, stages):
        return f"a stage that ends near the mean can leave too much for the others: {TRY_ALL}"
    return f"only the slowest stage counts, the one with the largest sum of seconds: {TRY_ALL}"


def _cut_at_mean(times: Sequence[float], stages: int) -> list[list[int]]:
    """Counts of layers where each stage ends at the mean: after it, before it, or where it is nearer."""
    mean, found = sum(times) / stages, []
    for share in (0.0, 0.5, 1.0):  # of the next layer, which has to fit into the mean for the stage to take it
        counts, seconds = [0], 0.0
        for time in times:
            if counts[-1] and len(counts) < stages and seconds + share * time > mean / CLOSE:
                counts.append(0)
                seconds = 0.0
            counts[-1] += 1
            seconds += time
        found.append(counts)
    return found
