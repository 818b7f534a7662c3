"""Draws images, bars, and lines with their range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lab_utils.plots.style import choose_styles, mark_noise, new_axes
from lab_utils.timing import Timing, find_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def image_grid(images: torch.Tensor, titles: Sequence[str] | None = None, *, columns: int = 10) -> Axes:
    """Shows images in rows, each under its title.

    Args:
        images: uint8 (N, 3, H, W).
        titles: N short texts.
        columns: Images per row.
    """
    count, _, height, width = images.shape
    rows = max(1, math.ceil(count / columns))  # one empty row where there are no images
    above, gap = (round(0.42 * height) if titles else 2), 2
    canvas = torch.full((rows * (height + above), columns * (width + gap), 3), 255, dtype=torch.uint8)
    ax = new_axes(figsize=(7.5, 7.5 * canvas.shape[0] / canvas.shape[1]))
    for index, image in enumerate(images):
        top, left = index // columns * (height + above) + above, index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image.permute(1, 2, 0).cpu()
        if titles:
            ax.text(left + width / 2, top - 2, titles[index], ha="center", va="bottom", fontsize=8, parse_math=False)
    ax.imshow(canvas.numpy(), interpolation="nearest")
    ax.set_axis_off()
    return ax


def step_times(timings: Sequence[Timing], *, ax: Axes | None = None) -> Axes:
    """Draws one bar per set-up: median milliseconds per step, with the quartiles as a line across its end."""
    timings = list(timings)
    if ax is None:
        ax = new_axes(figsize=(7.5, 1.1 + 0.5 * len(timings)))
    styles = choose_styles([timing.name for timing in timings])
    for row, timing in enumerate(timings):
        if timing.out_of_memory:
            ax.text(0, row, " out of memory", va="center", color="#555555")
            continue
        low, middle, high = (1e3 * seconds for seconds in (timing.low, timing.median, timing.high))
        ax.barh(row, middle, height=0.6, color=styles[timing.name][0])
        ax.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="black", capsize=4, linewidth=1.2)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        # On white: a learner's guess is drawn as a line, and may run through it.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.annotate(f"{middle:,.3g}", (high, row), bbox=box, **place)
    ax.set_yticks(range(len(timings)), [timing.name for timing in timings])
    ax.set_ylim(len(timings) - 0.5, -0.5)
    ax.set_xlim(0, 1.12 * max((1e3 * timing.high for timing in timings if not timing.out_of_memory), default=1))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time per step in ms (median; line: quartiles)")
    mark_noise(ax, find_noise(timings))
    return ax


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
    ax = ax or new_axes()
    styles = choose_styles(lines)
    for name, seeds in lines.items():
        colour, dashes, marker = styles[name]
        values = torch.tensor([list(seed) for seed in seeds], dtype=torch.float64)
        ax.fill_between(x, values.amin(0), values.amax(0), color=colour, alpha=0.2, linewidth=0)
        label = f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name
        ax.plot(x, values.mean(0), linestyle=dashes, marker=marker, color=colour, label=label)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if lines:
        ax.legend()
    return ax
