"""Draws where a learner stands, and how good the guesses were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lab_utils.plots.style import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Face, text and mark of a square, by the first word of its state; the mark serves those who see no colour.
STATES = {
    "solved": ("#009E73", "#111111", "✔"),
    "tried": ("#F6D58A", "#111111", "…"),
    "open": ("#FFFFFF", "#555555", ""),
}


def progress(rows: Mapping[str, Mapping[str, str]], *, ax: Axes | None = None) -> Axes:
    """Draws a row for each lab and a square for each exercise.

    Args:
        rows: For each lab its exercises, each with its state: ``solved``, ``open``, or ``tried`` and what else to say.
        ax: Where to draw.
    """
    from matplotlib.patches import Rectangle

    columns = max((len(row) for row in rows.values()), default=1)
    ax = ax or new_axes(figsize=(1.2 * columns + 1.2, 0.55 * len(rows) + 0.4))
    for y, row in enumerate(rows.values()):
        for x, (number, state) in enumerate(row.items()):
            face, colour, mark = STATES[state.split()[0]]
            ax.add_patch(Rectangle((x - 0.46, y - 0.4), 0.92, 0.8, facecolor=face, edgecolor="#999999"))
            ax.text(x, y, f"{number} {mark}".strip(), ha="center", va="center", color=colour)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(len(rows) - 0.4, -0.6), xticks=[])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax


def certificate(title: str, lines: Sequence[str]) -> Figure:
    """Draws a page to keep: a title in a frame, and below it what was measured, a line each.

    Args:
        title: One sentence.
        lines: What stands below, at most 30 lines.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    height = 1.6 + 0.27 * min(len(lines), 30)
    figure = plt.figure(figsize=(9, height), facecolor="white")
    frame = FancyBboxPatch((0.02, 0.03), 0.96, 0.94, boxstyle="round,pad=0,rounding_size=0.02", linewidth=2)
    frame.set(transform=figure.transFigure, figure=figure, facecolor="none", edgecolor="#009E73")
    figure.add_artist(frame)
    figure.text(0.5, 1 - 0.55 / height, "Distributed Training Labs", ha="center", fontsize=17, color="#111111")
    figure.text(0.5, 1 - 0.95 / height, title.replace("$", r"\$"), ha="center", fontsize=12, color="#009E73")
    for number, line in enumerate(lines[:30]):
        place = 1 - (1.4 + 0.27 * number) / height
        figure.text(0.08, place, line.replace("$", r"\$"), fontsize=9.5, color="#333333")
    return figure


def ratios(factors: Mapping[str, float], *, ax: Axes | None = None) -> Axes:
    """Draws, for each guess, how many times the finding it was, on a logarithmic axis.

    Args:
        factors: For each question guess ÷ finding, above 0.
        ax: Where to draw.
    """
    ax = ax or new_axes(figsize=(7.5, 0.4 * len(factors) + 1.2))
    for y, factor in enumerate(factors.values()):
        ax.plot([1, factor], [y, y], color="#999999", linewidth=1.5)
        ax.plot(factor, y, "o", color="#0072B2")
        side = "left" if factor >= 1 else "right"
        offset = {"xytext": (7 if factor >= 1 else -7, 0), "textcoords": "offset points", "va": "center", "ha": side}
        ax.annotate(f"{factor:.2g}×", (factor, y), **offset)
    far = 2.0 * max(2.0, *factors.values(), *(1 / factor for factor in factors.values()))
    ax.axvline(1, color="black", linewidth=1)
    ax.set(xscale="log", xlim=(1 / far, far), ylim=(len(factors) - 0.5, -0.5), xlabel="my guess ÷ what was found")
    ax.set_yticks(range(len(factors)), list(factors))
    marks = [mark for mark in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if 1 / far < mark < far]
    ax.set_xticks(marks, [f"{mark:g}" for mark in marks])
    ax.minorticks_off()
    return ax
