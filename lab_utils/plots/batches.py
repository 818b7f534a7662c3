"""Draws speed against the batch size: images per second, the crossover of two set-ups, and their ratio."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lab_utils.plots.style import COLOURS, choose_styles, mark_noise, new_axes
from lab_utils.timing import Timing, find_noise, find_speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOLID = ("-", "-.", ":")  # dashed lines are the learner's guesses


def group(timings: Iterable[Timing]) -> dict[str, dict[int, Timing]]:
    """Groups timings by set-up and batch size."""
    points: dict[str, dict[int, Timing]] = {}
    for timing in timings:
        points.setdefault(timing.name, {})[timing.images] = timing
    return points


def throughput(
    timings: Iterable[Timing],
    *,
    baseline: str | None = None,
    candidate: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws images per second against the batch size, the quartiles as a band.

    Args:
        timings: Timings of one or more set-ups at several batch sizes, in any order. One that ran out of memory becomes
            a cross on the axis.
        baseline: The set-up that ``candidate`` is compared with.
        candidate: Where it overtakes ``baseline`` for good, and no noise can be the cause, a dashed line marks the
            batch size.
        ax: Where to draw.
    """
    timings = list(timings)
    ax, points = ax or new_axes(), group(timings)
    styles = choose_styles(points)
    batches = sorted({batch for line in points.values() for batch in line})
    ax.set_xscale("log", base=2)
    for name, line in points.items():
        colour, dashes, marker = styles[name]
        known = sorted((batch, timing) for batch, timing in line.items() if not timing.out_of_memory)
        sizes = [batch for batch, _ in known]
        speeds = [timing.images_per_second for _, timing in known]
        ax.plot(sizes, speeds, linestyle=dashes, marker=marker, color=colour, label=name)
        slow, fast = ([timing.images / getattr(timing, end) for _, timing in known] for end in ("high", "low"))
        ax.fill_between(sizes, slow, fast, color=colour, alpha=0.2, linewidth=0)
        lost = [batch for batch, timing in line.items() if timing.out_of_memory]
        if lost:  # an empty line that is not clipped lies at the figure's corner, and the layout makes room for it
            label = f"{name}: out of memory"
            ax.plot(lost, [0] * len(lost), "x", color=colour, markersize=9, mew=2.5, clip_on=False, label=label)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.set(xlabel="batch size in images", ylabel="images per second", ylim=(0, None))
    mark_noise(ax, find_noise(timings))
    clear = {baseline, candidate} <= points.keys() and not find_noise(timings)
    batch = crossover(points[baseline], points[candidate]) if clear else None
    if batch is not None:
        text = f"{candidate} overtakes {baseline}\nat about {batch:.0f} images"
        ax.axvline(batch, color="#D55E00", linestyle="--", linewidth=1.5, label=text)
    ax.legend()
    return ax


def crossover(baseline: Mapping[int, Timing], candidate: Mapping[int, Timing]) -> float | None:
    """Finds the batch size from which the candidate stays ahead of the baseline.

    Between two measured batch sizes the logarithm of the ratio of speeds is taken to be linear in the logarithm of the
    batch size. Where no speed-up is proven, neither is ahead, and the batch size is left out.

    Args:
        baseline: Timings by batch size.
        candidate: The same; only batch sizes that both were measured at count.

    Returns:
        The batch size; None if the candidate is ahead at every size, not ahead at the largest, or ahead, behind and
        ahead again, which no crossover explains.
    """
    both = sorted(baseline.keys() & candidate.keys())
    gains = {batch: find_speed_up(baseline[batch], candidate[batch]) for batch in both}
    known = [batch for batch, gain in gains.items() if gain.rounds]
    ratios = [(batch, math.log(gains[batch].value)) for batch in known if gains[batch].proven]
    ahead = [ratio > 0 for _, ratio in ratios]
    if len(set(ahead)) < 2 or ahead != sorted(ahead) or ratios[-1][0] != known[-1]:
        return None
    (left, low), (right, high) = ratios[ahead.index(True) - 1 : ahead.index(True) + 1]
    return left * (right / left) ** (low / (low - high))


def speed_up(
    sweeps: Mapping[str, Iterable[Timing]],
    *,
    baseline: str,
    candidate: str,
    guess: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the candidate's speed-up over the baseline, with its 95 % interval, against the batch size.

    Where an error bar crosses the line at 1, or has too few rounds to be drawn, no speed-up is proven.

    Args:
        sweeps: For each line its timings, at several batch sizes, of ``baseline`` and ``candidate``.
        baseline: The set-up that has speed-up 1.
        candidate: The set-up that is compared with it, whose colour the lines have.
        guess: What the learner expected; a dashed line.
        ax: Where to draw.
    """
    ax, batches, shown = ax or new_axes(), set(), []
    for (label, timings), dashes in zip(sweeps.items(), itertools.cycle(SOLID), strict=False):
        points = group(timings)
        shown += [*points[baseline].values(), *points[candidate].values()]
        both = sorted(points[baseline].keys() & points[candidate].keys())
        gains = {batch: find_speed_up(points[baseline][batch], points[candidate][batch]) for batch in both}
        gains = {batch: gain for batch, gain in gains.items() if gain.rounds}
        colour = choose_styles([candidate])[candidate][0]
        middles = [gain.value for gain in gains.values()]
        below = [gain.value - gain.low for gain in gains.values()]
        above = [gain.high - gain.value for gain in gains.values()]
        ax.plot(gains.keys(), middles, linestyle=dashes, marker="o", color=colour, label=label)
        ax.errorbar(gains.keys(), middles, (below, above), fmt="none", ecolor=colour, capsize=4, elinewidth=1.2)
        batches |= gains.keys()
    mark_noise(ax, find_noise(shown))
    ax.axhline(1, color=COLOURS.get(baseline, "#7F7F7F"), linewidth=1.5)
    if guess is not None:
        ax.axhline(guess, color="black", linestyle="--", label="my guess")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(batches), [str(batch) for batch in sorted(batches)])
    ax.set(xlabel="batch size in images", ylabel=f"speed-up of {candidate} over {baseline}", ylim=(0, None))
    ax.set_ylim(top=1.05 * ax.get_ylim()[1])  # room above the highest point
    ax.legend()
    return ax
