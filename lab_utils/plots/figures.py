"""Draws images, bars, lines and bands in one style, with the same colour for the same set-up.

Colours: Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lab_utils.timing import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "fp32": "#7F7F7F",
    "tf32": "#262626",
    "bf16": "#0072B2",
    "AMP": "#0072B2",
    "fp16": "#56B4E9",
    "DP": "#E69F00",
    "DDP": "#009E73",
}
OTHER_COLOURS = ("#D55E00", "#CC79A7", "#8C6D1F", "#5E3C99")
# Set-ups of one colour (bf16, bf16 channels_last) differ in line; markers serve those who see no colour.
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
STYLE = {
    "figure.figsize": (7.5, 4.2),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": "#DDDDDD",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.0,
}


def use_style() -> None:
    """Makes the labs' style the default of this session's figures."""
    import matplotlib as mpl

    mpl.rcParams.update(STYLE)


def image_grid(
    images: torch.Tensor, titles: Sequence[str] | None = None, *, columns: int = 10, ax: Axes | None = None
) -> Axes:
    """Shows images in rows, each under its title.

    Args:
        images: uint8 (N, 3, H, W).
        titles: N short texts.
        columns: Images per row.
        ax: Where to draw.
    """
    count, _, height, width = images.shape
    rows = math.ceil(count / columns)
    above, gap = (round(0.42 * height) if titles else 2), 2
    canvas = torch.full((rows * (height + above), columns * (width + gap), 3), 255, dtype=torch.uint8)
    if ax is None:
        ax = _new_axes(figsize=(7.5, 7.5 * canvas.shape[0] / canvas.shape[1]))
    for index, image in enumerate(images):
        top, left = index // columns * (height + above) + above, index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image.permute(1, 2, 0).cpu()
        if titles:
            ax.text(left + width / 2, top - 2, titles[index], ha="center", va="bottom", fontsize=8)
    ax.imshow(canvas.numpy(), interpolation="nearest")
    ax.set_axis_off()
    return ax


def step_times(timings: Sequence[Timing], *, ax: Axes | None = None) -> Axes:
    """Draws one bar per set-up: median milliseconds per step, with the quartiles as a line across its end."""
    timings = list(timings)
    if ax is None:
        ax = _new_axes(figsize=(7.5, 1.1 + 0.5 * len(timings)))
    styles = _styles([timing.name for timing in timings])
    for row, timing in enumerate(timings):
        if timing.out_of_memory:
            ax.text(0, row, " out of memory", va="center", color="#555555")
            continue
        low, middle, high = (1e3 * seconds for seconds in (timing.low, timing.median, timing.high))
        ax.barh(row, middle, height=0.6, color=styles[timing.name][0])
        ax.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="black", capsize=4, linewidth=1.2)
        ax.annotate(f"{middle:,.3g}", (high, row), xytext=(6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(timings)), [timing.name for timing in timings])
    ax.set_ylim(len(timings) - 0.5, -0.5)
    ax.set_xlim(0, 1.12 * max((1e3 * timing.high for timing in timings if not timing.out_of_memory), default=1))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time per step in ms (median; line: quartiles)")
    return ax


def throughput(
    points: Mapping[str, Mapping[int | str, Timing]],
    *,
    baseline: str | None = None,
    candidate: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws images per second against the batch size, the quartiles as a band.

    Args:
        points: The timings by set-up and batch size; batch sizes may be strings, as JSON keeps keys. A Timing that ran
            out of memory becomes a cross on the axis.
        baseline: The set-up that ``candidate`` is compared with.
        candidate: Where it overtakes ``baseline`` for good, a dashed line marks the batch size.
        ax: Where to draw.
    """
    ax = ax or _new_axes()
    styles = _styles(points)
    batches = sorted({int(batch) for line in points.values() for batch in line})
    ax.set_xscale("log", base=2)
    for name, line in points.items():
        colour, dashes, marker = styles[name]
        known = sorted((int(batch), timing) for batch, timing in line.items() if not timing.out_of_memory)
        sizes = [batch for batch, _ in known]
        speeds = [timing.images_per_second for _, timing in known]
        ax.plot(sizes, speeds, linestyle=dashes, marker=marker, color=colour, label=name)
        slow, fast = ([timing.images / getattr(timing, end) for _, timing in known] for end in ("high", "low"))
        ax.fill_between(sizes, slow, fast, color=colour, alpha=0.2, linewidth=0)
        lost = [int(batch) for batch, timing in line.items() if timing.out_of_memory]
        if lost:  # an empty line that is not clipped lies at the figure's corner, and the layout makes room for it
            label = f"{name}: out of memory"
            ax.plot(lost, [0] * len(lost), "x", color=colour, markersize=9, mew=2.5, clip_on=False, label=label)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("batch size in images")
    ax.set_ylabel("images per second")
    batch = crossover(points[baseline], points[candidate]) if baseline in points and candidate in points else None
    if batch is not None:
        text = f"{candidate} overtakes {baseline}\nat about {batch:.0f} images"
        ax.axvline(batch, color="#D55E00", linestyle="--", linewidth=1.5, label=text)
    ax.legend()
    return ax


def crossover(
    baseline: Mapping[int | str, Timing | float], candidate: Mapping[int | str, Timing | float]
) -> float | None:
    """Finds the batch size from which the candidate stays ahead of the baseline.

    Between two measured batch sizes the logarithm of the ratio of speeds is taken to be linear in the logarithm of the
    batch size.

    Args:
        baseline: Timings, or images per second, by batch size.
        candidate: The same; only batch sizes that both were measured at count.

    Returns:
        The batch size; None where the candidate is ahead at every size, or behind at the largest.
    """
    base, other = _speeds(baseline), _speeds(candidate)
    ratios = [(batch, math.log(other[batch] / base[batch])) for batch in sorted(base.keys() & other.keys())]
    behind = [index for index, (_, ratio) in enumerate(ratios) if ratio <= 0]
    if not behind or behind[-1] == len(ratios) - 1:
        return None
    (left, low), (right, high) = ratios[behind[-1] : behind[-1] + 2]
    return left * (right / left) ** (low / (low - high))


def curves(
    lines: Mapping[str, Sequence[Sequence[float]]],
    x: Sequence[float],
    *,
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
) -> Axes:
    """Draws the mean over seeds as a line and their range, lowest to highest, as a band.

    Args:
        lines: For each set-up a list with, per seed, one y for every x.
        x: The positions, such as images seen.
        xlabel: What x is, with its unit.
        ylabel: What y is, with its unit.
        ax: Where to draw.
    """
    ax = ax or _new_axes()
    styles = _styles(lines)
    for name, seeds in lines.items():
        colour, dashes, marker = styles[name]
        values = torch.tensor([list(seed) for seed in seeds], dtype=torch.float64)
        ax.fill_between(x, values.amin(0), values.amax(0), color=colour, alpha=0.2, linewidth=0)
        label = f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name
        ax.plot(x, values.mean(0), linestyle=dashes, marker=marker, color=colour, label=label)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.legend()
    return ax


def _new_axes(**options: object) -> Axes:
    from matplotlib import pyplot as plt

    return plt.subplots(**options)[1]


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Returns colour, line and marker for each name: a known set-up's colour where its word is part of the name."""
    styles: dict[str, tuple[str, str, str]] = {}
    used: dict[str, int] = {}
    spare = itertools.cycle(OTHER_COLOURS)
    for index, name in enumerate(names):
        words = re.findall(r"\w+", name.lower())
        colour = next((value for key, value in COLOURS.items() if key.lower() in words), None) or next(spare)
        turn = used[colour] = used.get(colour, -1) + 1
        styles[name] = (colour, LINES[turn % len(LINES)], MARKERS[index % len(MARKERS)])
    return styles


def _speeds(line: Mapping[int | str, Timing | float]) -> dict[int, float]:
    speeds = {int(key): one.images_per_second if isinstance(one, Timing) else one for key, one in line.items()}
    return {batch: speed for batch, speed in speeds.items() if not math.isnan(speed)}
