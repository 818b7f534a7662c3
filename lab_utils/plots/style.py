"""The one style of all figures, and the same colour for the same set-up in every lab.

Colours: Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "fp32": "#7F7F7F",
    "device": "#7F7F7F",  # one device, which others are compared with
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


def new_axes(**options: object) -> Axes:
    """Returns the Axes of a new figure."""
    from matplotlib import pyplot as plt

    return plt.subplots(**options)[1]


def mark_noise(ax: Axes, noise: str) -> None:
    """Writes below the x label why a figure is too noisy to trust, if it is: the text of ``timing.find_noise``."""
    box = {"facecolor": "white", "edgecolor": "#D55E00", "boxstyle": "round"}
    text = noise.replace(", ", ",\n").replace(": ", ":\n")
    if noise:
        settings = {"ha": "center", "va": "top", "color": "#D55E00", "bbox": box, "parse_math": False}
        place = {"xycoords": "axes fraction", "xytext": (0, -42), "textcoords": "offset points"}
        ax.annotate(text, (0.5, 0), fontsize=9, zorder=6, **place, **settings)


def choose_styles(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
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
