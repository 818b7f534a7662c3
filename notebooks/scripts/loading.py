"""Lab 7's figures and measurements of its loaders: speed, a profile as a timeline, memory of processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab_utils.plots.style import COLOURS, OTHER_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.profiler import profile

# What the profiler calls the wait for a batch, with the iterator's class behind it.
WAITING = "enumerate(DataLoader)"


def draw_speed(
    ax: Axes, speed: Mapping[tuple[str, int], Sequence[float]], *, used: float, rules: Mapping[str, int]
) -> None:
    """Draws the median of each loader's rounds, with a bar from the lowest to the highest.

    Args:
        ax: Where to draw.
        speed: Images per second of each round, by kind and number of workers.
        used: Images per second that the training step uses.
        rules: Numbers of workers that rules of thumb recommend, by the rule.
    """
    tried = sorted({workers for _, workers in speed})
    colours = (OTHER_COLOURS[2], OTHER_COLOURS[1], OTHER_COLOURS[3])
    for kind, colour in zip(dict.fromkeys(kind for kind, _ in speed), colours, strict=False):
        rates = np.array([speed[kind, workers] for workers in tried])
        middle = np.median(rates, axis=1)
        bars = np.abs([rates.min(axis=1) - middle, rates.max(axis=1) - middle])
        ax.errorbar(tried, middle, yerr=bars, marker="o", capsize=4, color=colour, label=kind)
    ax.axhline(used, color=COLOURS["device"], linestyle="--", label="what a training step uses")
    for workers, style in zip(sorted(set(rules.values())), (":", "-.", "--"), strict=False):
        label = "\n".join(f'rule "{rule}"' for rule, number in rules.items() if number == workers)
        ax.axvline(workers, color="black", linestyle=style, linewidth=1.2, label=label)
    ax.set(xlabel="workers", ylabel="images per second", yscale="log", xticks=tried)
    for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:,.0f}" if f"{value:.0e}"[0] in "1235" else "")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_profiles(ax: Axes, profiles: Mapping[str, profile], *, name: str = "train") -> None:
    """Draws when each profiled loop worked (grey) and when it waited for its DataLoader (orange), a row for each.

    Rows start at their first work. The axis ends after six rounds of the slowest, so that single rounds are visible.

    Args:
        ax: Where to draw.
        profiles: Finished profiles, by the name of their row.
        name: The loop's name for its work, in ``record_function``.
    """
    longest = 0.0
    for row, prof in enumerate(profiles.values()):
        work, waits = (
            [one.time_range for one in prof.events() if one.name.partition("#")[0] == wanted]
            for wanted in (name, WAITING)
        )
        begin = min(span.start for span in work)
        for spans, colour in ((work, COLOURS["device"]), (waits, OTHER_COLOURS[0])):
            shown = [span for span in spans if span.start >= begin]
            lengths = [span.elapsed_us() / 1e3 for span in shown]
            ax.barh([row] * len(shown), lengths, 0.6, [(span.start - begin) / 1e3 for span in shown], color=colour)
        longest = max(longest, (max(span.end for span in work) - begin) / 1e3 / len(work))
    ax.set_yticks(range(len(profiles)), list(profiles))
    ax.set(xlabel="ms since the first step began", xlim=(0, 6 * longest), ylim=(len(profiles) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)


def sum_pss(processes: Iterable[int | str]) -> float:
    """Returns the MiB that processes use together: each page once, however many of them share it.

    Args:
        processes: Their numbers, or ``"self"``.

    Returns:
        The sum of Linux's proportional set sizes; NaN if there is no ``/proc``, or a process has ended.
    """
    total = 0.0
    for process in processes:
        text = ""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii", errors="replace")
        found = text.partition("\nPss:")[2].split()
        total += int(found[0]) / 1024 if found else math.nan
    return total
