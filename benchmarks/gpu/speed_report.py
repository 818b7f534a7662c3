"""Report of the benchmark's result: its goals judged in words, its table, its figure.

``python -m benchmarks.gpu.speed_report`` writes the report of ``data/reference/gpu_speed.json`` to docs/performance.md.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.claims import PAGE, Claim, write_block, write_rows
from benchmarks.gpu.worker import ARMS
from lab_common import checkout
from lab_utils.timing import SpeedUp, Timing, find_speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHES = (128, 1024)
EAGER = {"compiled": False, "graph": False}
COMPILED_TIMES, ROOFLINE_SHARE = 1.1, 0.55
ROUNDS = 6  # as few as a comparison needs
# Parts of the names of CUDA kernels, and what such kernels do.
KINDS = {
    "batch_norm": "batch normalisation",
    "xmma": "convolutions",
    "gemm": "convolutions",
    "elementwise": "sums, ReLU and copies",
    "multi_tensor": "the optimizer",
}


def count_rounds(result: dict[str, Any]) -> int:
    """Returns the number of rounds of a result; older results do not name it and have five."""
    return result.get("key", {}).get("rounds", 5)


def list_timings(result: dict[str, Any], stem: str, batch: int, group: str) -> dict[str, Timing]:
    """Returns the timings, by arm, of those timed in all rounds of one interleaved group."""
    return {
        one["arm"]: Timing(one["arm"], tuple(one["seconds"]), images=batch)
        for one in result["measurements"]
        if (one["stem"], one["batch"], one["group"]) == (stem, batch, group)
        and len(one["seconds"]) >= count_rounds(result)
    }


def list_rates(result: dict[str, Any], stem: str, batch: int, group: str) -> dict[str, float]:
    """Returns images per second at the median, by arm, of those timed in all rounds of one interleaved group."""
    return {arm: one.images_per_second for arm, one in list_timings(result, stem, batch, group).items()}


def find_best(rates: dict[str, float], **wanted: bool) -> tuple[float, str] | None:
    """Returns rate and name of the fastest arm with the attributes of ``wanted``; None if there is none."""
    fitting = [(rate, arm) for arm, rate in rates.items() if all(getattr(ARMS[arm], k) == v for k, v in wanted.items())]
    return max(fitting, default=None)


def list_groups(result: dict[str, Any], stem: str, batch: int) -> list[str]:
    """Returns the groups of a batch size, in the order in which they were measured."""
    found = [one["group"] for one in result["measurements"] if (one["stem"], one["batch"]) == (stem, batch)]
    return list(dict.fromkeys(found))


def compare_best(
    result: dict[str, Any], stem: str, batch: int, own: dict[str, bool], peer: dict[str, bool]
) -> tuple[SpeedUp, str] | None:
    """Returns the speed-up of our best arm of a kind over the best peer of a kind, and the rates of the two in words.

    Both are from one interleaved group; of several groups, the one with the higher speed-up. None without such a pair.
    """
    pairs = []
    for group in list_groups(result, stem, batch):
        timings, rates = list_timings(result, stem, batch, group), list_rates(result, stem, batch, group)
        ours, other = find_best(rates, ours=True, **own), find_best(rates, ours=False, **peer)
        if ours and other:
            words = f"{ours[1]} {ours[0]:,.0f} against {other[1]} {other[0]:,.0f} images/s"
            pairs.append((find_speed_up(timings[other[1]], timings[ours[1]]), words))
    return max(pairs, key=lambda pair: pair[0].value, default=None)


def judge(result: dict[str, Any], stem: str = "imagenet") -> list[Claim]:
    """Returns the goals of the benchmark for one stem, each with its measured value and whether it is met.

    Args:
        result: Result of ``benchmarks.gpu.speed``.
        stem: The network's stem.
    """
    claims = []
    for batch in BATCHES:
        pair = compare_best(result, stem, batch, EAGER, EAGER | {"amp": True})
        claims.append(_claim_speed_up(f"ours, eager, against the best eager AMP peer, batch {batch:,}", pair))
    for batch in BATCHES:
        pair = compare_best(result, stem, batch, {}, {"compiled": True})
        text = f"ours, graph or compiled, against the best compiled peer, batch {batch:,}"
        claims.append(_claim_speed_up(text, pair, COMPILED_TIMES))
    limit = result.get("roofline", {}).get(stem, {}).get("1024", {}).get("fused")
    rates = [list_rates(result, stem, 1024, group) for group in list_groups(result, stem, 1024)]
    best = max((one for one in (find_best(some, ours=True) for some in rates) if one), default=None)
    text, bound = "ours against the computed roofline (fused), batch 1,024", f"at least {ROOFLINE_SHARE:.0%}"
    if not limit or not best:
        return [*claims, Claim(text, "", bound, None)]
    share, words = best[0] / limit, f"{best[1]} {best[0]:,.0f} of {limit:,.0f} images/s"
    return [*claims, Claim(text, f"{share:.0%} ({words})", bound, share >= ROOFLINE_SHARE)]


def _claim_speed_up(text: str, found: tuple[SpeedUp, str] | None, least: float | None = None) -> Claim:
    """Makes a claim from a pair; with too few rounds, or without a bound, it neither holds nor fails."""
    bound = f"speed-up of at least {least:g}" if least else ""
    if found is None:
        return Claim(text, "", bound, None)
    gain, words = found
    return Claim(text, f"{gain}; {words}", bound, None if math.isnan(gain.low) else not least or gain.value >= least)


def list_rows(result: dict[str, Any], stem: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns each timed arm's measurement by batch size; the last one if it was in several groups."""
    rows: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in ARMS}
    for one in result["measurements"]:
        if one["stem"] == stem and len(one["seconds"]) >= count_rounds(result):
            rows[one["arm"]][one["batch"]] = one
    return {arm: row for arm, row in rows.items() if row}


def write_table(result: dict[str, Any], stem: str = "imagenet") -> str:
    """Returns a Markdown table: an arm each row, images per second and their spread for each batch size.

    The spread is half the difference between the slowest and the fastest round, in per cent of the median.
    """
    rows = list_rows(result, stem)
    batches = sorted({batch for row in rows.values() for batch in row})
    lines = [["images/s at batch", *(f"{batch:,}" for batch in batches), "peak memory", "losses off by"]]
    lines.append(["---", *("--:" for _ in batches), "--:", "--:"])
    for arm, row in rows.items():
        finite = all(one.get("finite", True) for one in row.values())
        cells = [f"{'ours: ' if ARMS[arm].ours else ''}{arm}{'' if finite else ' (its loss was not finite)'}"]
        for batch in batches:
            cells.append(_write_cell(batch, row[batch]["seconds"]) if batch in row else "")
        largest = row[max(row)]
        peak, off = largest.get("peak_bytes"), largest.get("fidelity")
        cells += [f"{peak / 2**30:.1f} GiB" if peak else "", "" if off is None else f"{off:.2%}"]
        lines.append(cells)
    roofline = result.get("roofline", {}).get(stem, {})
    if roofline:
        known = (roofline.get(str(batch), {}).get("fused") for batch in batches)
        lines.append(["computed roofline", *(f"{rate:,.0f}" if rate else "" for rate in known), "", ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe_profile(profile: dict[str, Any]) -> str:
    """Describes what a profile's most expensive kernels do, with their shares of the step."""
    shares: dict[str, float] = {}
    for row in profile["top"]:
        kind = next((words for part, words in KINDS.items() if part in row["name"]), "others")
        shares[kind] = shares.get(kind, 0.0) + row["share"]
    parts = [f"{kind} {share:.0%}" for kind, share in sorted(shares.items(), key=lambda one: -one[1])]
    return (
        f"Under the profiler, one step of {profile['arm']} at batch {profile['batch']:,} runs "
        f"{profile['calls']:,.0f} kernels in {profile['milliseconds']:.1f} ms. The {len(profile['top'])} most "
        f"expensive kernels account for {sum(shares.values()):.0%} of that (rounded): {', '.join(parts)}."
    )


def write_report(result: dict[str, Any], stem: str = "imagenet") -> str:
    """Returns the measurements in Markdown: where and when, the goals that could be judged, all arms, a profile."""
    here, when, claims = result["machine"], datetime.fromisoformat(result["when"]), judge(result, stem)
    torch = result["key"]["versions"]["torch"]
    parts = [
        f"Measured on {when:%d %B %Y}; {here['label']}, torch {torch}. Training steps of {result['key']['net']}, "
        f"{stem} stem, on random 32×32 images that are on the GPU, in {count_rounds(result)} rounds of all arms in "
        "turn. Against a peer: the speed-up in each round's pair, with its 95 % interval. Images per second: medians, "
        "± half of their range. *losses off by*: the largest distance from those of float32 in 30 steps.",
        write_rows(claim for claim in claims if claim.measured),
        write_table(result, stem),
    ]
    parts += [describe_profile(one) for one in result["profiles"] if one["stem"] == stem and "top" in one]
    missing = [claim.text for claim in claims if not claim.measured]
    parts += [f"Not measured yet: {'; '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def keep(root: Path) -> None:
    """Writes the report of ``data/reference/gpu_speed.json`` into docs/performance.md of a checkout."""
    result = json.loads((root / "data" / "reference" / "gpu_speed.json").read_bytes())
    write_block(root / PAGE, "make gpu", write_report(result))


def _write_cell(batch: int, seconds: list[float]) -> str:
    rates = [batch / one for one in seconds]
    middle = batch / statistics.median(seconds)
    return f"{middle:,.0f} ± {(max(rates) - min(rates)) / 2 / middle:.1%}"


def draw(result: dict[str, Any], stem: str = "imagenet", ax: Axes | None = None) -> Axes:
    """Draws images per second as bars by batch size, with the slowest and the fastest round; peers are grey.

    Args:
        result: Result of ``benchmarks.gpu.speed``.
        stem: The network's stem.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.
    """
    from matplotlib import colormaps

    from lab_utils.plots.style import new_axes

    rows = list_rows(result, stem)
    batches = sorted({batch for row in rows.values() for batch in row})
    ax = ax or new_axes(figsize=(11, 5))
    arms = sorted(rows, key=lambda arm: ARMS[arm].ours)
    width = 0.86 / max(1, len(arms))
    ours = [arm for arm in arms if ARMS[arm].ours]
    for index, arm in enumerate(arms):
        mine = ARMS[arm].ours
        place = (ours.index(arm) + 1) / len(ours) if mine else 0.25 + 0.4 * index / max(1, len(arms) - len(ours))
        colour = colormaps["viridis"](0.9 * place) if mine else colormaps["Greys"](place)
        found = [(at, batch, rows[arm][batch]["seconds"]) for at, batch in enumerate(batches) if batch in rows[arm]]
        middle = [batch / statistics.median(seconds) for _, batch, seconds in found]
        low = [rate - batch / max(seconds) for rate, (_, batch, seconds) in zip(middle, found, strict=True)]
        high = [batch / min(seconds) - rate for rate, (_, batch, seconds) in zip(middle, found, strict=True)]
        places = [at - 0.43 + (index + 0.5) * width for at, *_ in found]
        label = f"ours: {arm}" if mine else arm
        ax.bar(places, middle, width, color=colour, yerr=(low, high), capsize=2, label=label)
    _draw_roofline(ax, result.get("roofline", {}).get(stem, {}), batches)
    ax.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    ax.set_xlabel("batch size")
    ax.set_ylabel("images per second")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_title(f"{result['key']['net']}, {stem} stem, 32×32, training steps: {result['key']['machine']}")
    ax.legend(fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def _draw_roofline(ax: Axes, roofline: dict[str, dict[str, float]], batches: Iterable[int]) -> None:
    label = "roofline, fused"
    for at, batch in enumerate(batches):
        if rate := roofline.get(str(batch), {}).get("fused"):
            ax.hlines(rate, at - 0.45, at + 0.45, color="#D55E00", linestyle="--", label=label)
            label = None


if __name__ == "__main__":
    keep(checkout())
