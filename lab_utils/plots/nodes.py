"""Draws what several ranks and nodes did: the phases of their steps, how busy they were, and how fast they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab_utils.plots.style import choose_styles, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The phases of a step, in its order; the same colours in all labs, and none that DP or DDP has beside them.
PHASES = {"data": "#CC79A7", "forward": "#56B4E9", "backward": "#D55E00", "step": "#8C6D1F"}
LABELS = {"backward": "backward, with communication"}  # of ranks, which talk to each other meanwhile
OTHER_PHASE = "#999999"
GIB = 2**30


def timeline(
    rows_by_rank: Mapping[int, Iterable[Mapping[str, Any]]], ax: Axes | None = None, *, lane: str = "rank"
) -> Axes:
    """Draws one lane per rank with the phases of its steps.

    Args:
        rows_by_rank: For each rank the result of ``timing.Timeline.as_rows``: phase, step, start and end in seconds.
        ax: Where to draw.
        lane: Name for a lane.

    Returns:
        The Axes; x is in milliseconds since the first phase of all began.
    """
    lanes = {rank: list(rows) for rank, rows in sorted(rows_by_rank.items())}
    ax = ax or new_axes(figsize=(7.5, 1.4 + 0.6 * len(lanes)))
    first = min((row["start"] for rows in lanes.values() for row in rows), default=0.0)
    found = {row["phase"] for rows in lanes.values() for row in rows}
    names = [name for name in PHASES if name in found] + sorted(found - PHASES.keys())
    for name in names:
        label = LABELS.get(name, name) if lane == "rank" else name
        for row_number, rows in enumerate(lanes.values()):
            spans = [
                (1e3 * (row["start"] - first), 1e3 * (row["end"] - row["start"]))
                for row in rows
                if row["phase"] == name
            ]
            colour = PHASES.get(name, OTHER_PHASE)
            ax.broken_barh(spans, (row_number - 0.35, 0.7), facecolors=colour, linewidth=0, label=label)
            label = None  # one entry in the legend for all lanes
    ax.set_yticks(range(len(lanes)), [f"{lane} {number}" for number in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time in ms since the first phase began")
    if names:
        ax.legend(ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9, handlelength=1)
    return ax


def utilisation(samples: Iterable[Any], ax: Axes | None = None, *, span: Sequence[float] = ()) -> Axes:
    """Draws how busy each node was over time: its GPUs if it has any, otherwise its cores.

    For cores, it draws the share of the job's own processes if that is known: with two nodes on one machine only
    this distinguishes them. The legend says which it is, and the most memory that was in use.

    Args:
        samples: Samples of ``nodelaunch.watch``: objects with the attributes of its ``Usage``.
        ax: Where to draw.
        span: When the training began and ended, in the samples' seconds: shaded, and the legend gives its mean.

    Returns:
        The Axes; x is in seconds since the first sample, y in per cent.
    """
    ax = ax or new_axes()
    nodes: dict[str, list[Any]] = {}
    for sample in samples:
        nodes.setdefault(sample.node, []).append(sample)
    first = min((sample.time for seen in nodes.values() for sample in seen), default=0.0)
    styles = choose_styles(sorted(nodes))  # whichever answered first
    for name, seen in sorted(nodes.items()):
        seconds = [sample.time - first for sample in seen]
        busy = [100 * _choose_busy(sample) for sample in seen]
        colour, dashes, _ = styles[name]
        label = f"{name}: {_describe(seen)}"
        during = [value for sample, value in zip(seen, busy, strict=True) if span and span[0] <= sample.time <= span[1]]
        if during:
            label += f"; {sum(during) / len(during):.0f} % in training"
        ax.plot(seconds, busy, color=colour, linestyle=dashes, label=label)
    if span and nodes:
        ax.axvspan(span[0] - first, span[1] - first, color="black", alpha=0.08, linewidth=0, label="training")
    ax.set(xlabel="time in s", ylabel="busy in %", ylim=(0, 105), xlim=(0, None))
    if nodes:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax


def _choose_busy(sample: Any) -> float:
    if sample.gpus:
        return sum(gpu.busy for gpu in sample.gpus) / len(sample.gpus)
    return sample.busy if sample.job_busy is None else sample.job_busy


def _describe(seen: Sequence[Any]) -> str:
    """Describes what a node's line shows, and its memory."""
    last = seen[-1]
    if last.gpus:
        used = max(sum(gpu.memory_bytes for gpu in sample.gpus) for sample in seen) / GIB
        total = sum(gpu.memory_total for gpu in last.gpus) / GIB
        what = f"{len(last.gpus)} GPU{'s' if len(last.gpus) > 1 else ''}"
        return f"{what}, memory up to {used:.1f} of {total:.0f} GiB"
    whose = "all programs" if last.job_busy is None else "the job's share"
    what = f"{last.cores:g} cores, {whose}"
    if last.memory_bytes is None:
        return f"{what} (load average)"
    used = max(sample.memory_bytes for sample in seen) / GIB
    return f"{what}; the machine's memory up to {used:.1f} of {last.memory_total / GIB:.0f} GiB"


def scaling(
    speeds: Mapping[str, Sequence[float]],
    labels: Sequence[str] = ("1 node", "2 nodes"),
    *,
    predicted: Mapping[str, Sequence[float | None]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws images per second on one node and on two, a group of bars for each case, and what was predicted.

    Each bar except a group's first has its speed relative to the first at its foot: there no line of a prediction or
    of a guess crosses the number.

    Args:
        speeds: For each case, such as a stem, images per second for each of ``labels``.
        labels: Names of the bars of a group.
        predicted: The prediction for each case, likewise; a dashed mark. None if there was no prediction.
        ax: Where to draw.
    """
    ax = ax or new_axes()
    width = 0.8 / len(labels)
    colours = ("#7F7F7F", "#009E73", "#5E3C99", "#8C6D1F")  # one process is grey and DDP green, as in all labs
    mark = "predicted"
    for column, label in enumerate(labels):
        places = [group + (column - (len(labels) - 1) / 2) * width for group in range(len(speeds))]
        heights = [values[column] for values in speeds.values()]
        ax.bar(places, heights, 0.92 * width, color=colours[column % len(colours)], label=label)
        for place, height, (case, values) in zip(places, heights, speeds.items(), strict=True):
            guess = (predicted or {}).get(case, [None] * len(labels))[column]
            if column:
                offset = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "color": "white"}
                ax.annotate(f"{height / values[0]:.2f}×", (place, 0), **offset)
            if guess is not None:
                ends = (place - 0.48 * width, place + 0.48 * width)
                ax.hlines(guess, *ends, colors="black", linestyles="--", linewidth=1.8, label=mark)
                mark = None
    ax.set_xticks(range(len(speeds)), list(speeds))
    ax.grid(axis="x", visible=False)
    ax.set(ylabel="images per second, all ranks together", ylim=(0, None))
    ax.margins(y=0.12)
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax
