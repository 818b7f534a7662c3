"""The report of the benchmark: its goals judged in words, and its table.

``python -m benchmarks.gpu.report`` writes the report of ``data/reference/gpu_speed.json`` into docs/performance.md.
"""

from __future__ import annotations

import json
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.claims import PAGE, Claim, write_block, write_rows
from benchmarks.gpu.arms import ARMS, KINDS
from lab_common import checkout
from lab_utils.timing import Timing, find_speed_up

BATCHES, STEM, ROOFLINE_SHARE = (1024, 128), "imagenet", 0.55
# Parts of the names of CUDA kernels, and what such kernels do.
WORK = {
    "batch_norm": "batch normalisation",
    "xmma": "convolutions",
    "gemm": "convolutions",
    "elementwise": "sums, ReLU and copies",
    "multi_tensor": "the optimizer",
    "triton": "what the compiler fused",
}


def list_timed(result: dict[str, Any], batch: int) -> list[dict[str, Any]]:
    """Returns the rows of a batch size that were timed in all rounds; older results do not name these and have five."""
    rounds = result["key"].get("rounds", 5)
    rows = [row for row in result["measurements"] if (row["stem"], row["batch"]) == (STEM, batch)]
    return [row for row in rows if len(row["seconds"]) >= rounds]


def find_rate(row: dict[str, Any]) -> float:
    """Returns images per second at the median."""
    return row["batch"] / statistics.median(row["seconds"])


def find_kind(row: dict[str, Any]) -> str:
    """Returns the kind of a row's arm; an arm of an older result that is not measured any more was eager."""
    return ARMS[row["arm"]].kind if row["arm"] in ARMS else "eager"


def compare_best(result: dict[str, Any], batch: int, kind: str) -> str:
    """Returns the speed-up of our best arm of a kind over the best peer of this kind, in words; "" without a pair."""
    rows = [row for row in list_timed(result, batch) if find_kind(row) == kind]
    ours, peers = ([row for row in rows if row["ours"] == own] for own in (True, False))
    if not ours or not peers:
        return ""
    our, peer = max(ours, key=find_rate), max(peers, key=find_rate)
    old, new = (Timing(row["arm"], tuple(row["seconds"]), images=batch) for row in (peer, our))
    rates = f"{our['arm']} {find_rate(our):,.0f} against {peer['arm']} {find_rate(peer):,.0f} images/s"
    return f"{find_speed_up(old, new)}; {rates}"


def judge(result: dict[str, Any]) -> list[Claim]:
    """Returns the goals of the benchmark, each with its measured value and whether it is met."""
    claims = []
    kinds = [kind for kind in KINDS if any(arm.kind == kind and not arm.ours for arm in ARMS.values())]
    for kind, batch in ((kind, batch) for kind in kinds for batch in BATCHES):
        measured = compare_best(result, batch, kind)
        text = f"ours, {kind}, against the best {kind} AMP peer, batch {batch:,}"
        claims.append(Claim(text, measured, holds=True if measured else None))
    limit = result.get("roofline", {}).get(STEM, {}).get("1024", {}).get("fused")
    best = max((row for row in list_timed(result, 1024) if row["ours"]), key=find_rate, default=None)
    text, bound = "ours against the computed roofline (fused), batch 1,024", f"at least {ROOFLINE_SHARE:.0%}"
    if not limit or not best:
        return [*claims, Claim(text, "", bound, None)]
    share, words = find_rate(best) / limit, f"{best['arm']} {find_rate(best):,.0f} of {limit:,.0f} images/s"
    return [*claims, Claim(text, f"{share:.0%} ({words})", bound, share >= ROOFLINE_SHARE)]


def write_table(result: dict[str, Any]) -> str:
    """Returns a Markdown table: an arm each row, images per second and their spread for each batch size.

    The spread is half the difference between the slowest and the fastest round, in per cent of the median.
    """
    batches = [batch for batch in sorted(BATCHES) if list_timed(result, batch)]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for batch in batches:
        for row in list_timed(result, batch):
            rows.setdefault(row["arm"], {})[batch] = row
    lines = [["images/s at batch", *(f"{batch:,}" for batch in batches), "peak memory", "losses off by"]]
    lines.append(["---", *("--:" for _ in batches), "--:", "--:"])
    for arm, found in sorted(rows.items(), key=lambda one: not next(iter(one[1].values()))["ours"]):
        largest = found[max(found)]
        finite = all(row.get("finite", True) for row in found.values())
        name = f"{'ours: ' if largest['ours'] else ''}{arm}{'' if finite else ' (its loss was not finite)'}"
        peak, off = largest.get("peak_bytes"), largest.get("fidelity")
        cells = [_write_rate(found[batch]) if batch in found else "" for batch in batches]
        lines.append([name, *cells, f"{peak / 2**30:.1f} GiB" if peak else "", "" if off is None else f"{off:.2%}"])
    if roofline := result.get("roofline", {}).get(STEM):
        known = (roofline.get(str(batch), {}).get("fused") for batch in batches)
        lines.append(["computed roofline", *(f"{rate:,.0f}" if rate else "" for rate in known), "", ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _write_rate(row: dict[str, Any]) -> str:
    rates = [row["batch"] / one for one in row["seconds"]]
    return f"{find_rate(row):,.0f} ± {(max(rates) - min(rates)) / 2 / find_rate(row):.1%}"


def describe_profile(profile: dict[str, Any]) -> str:
    """Describes what a profile's most expensive kernels do, with their shares of the step."""
    shares: dict[str, float] = {}
    for row in profile["top"]:
        kind = next((words for part, words in WORK.items() if part in row["name"]), "others")
        shares[kind] = shares.get(kind, 0.0) + row["share"]
    parts = [f"{kind} {share:.0%}" for kind, share in sorted(shares.items(), key=lambda one: -one[1])]
    return (
        f"Under the profiler, one step of {profile['arm']} at batch {profile['batch']:,} runs "
        f"{profile['calls']:,.0f} kernels in {profile['milliseconds']:.1f} ms. The {len(profile['top'])} most "
        f"expensive kernels account for {sum(shares.values()):.0%} of that (rounded): {', '.join(parts)}."
    )


def write_report(result: dict[str, Any]) -> str:
    """Returns the measurements in Markdown: where and when, the goals that could be judged, all arms, a profile."""
    claims, key = judge(result), result["key"]
    parts = [
        f"Measured on {datetime.fromisoformat(result['when']):%d %B %Y}; {result['machine']['label']}, torch "
        f"{key['versions']['torch']}. Training steps of {key['net']}, {STEM} stem, on random 32×32 images that are on "
        f"the GPU, in {key.get('rounds', 5)} rounds of all arms in turn. Against a peer: the speed-up in each round's "
        "pair, with its 95 % interval. Images per second: medians, ± half of their range. *losses off by*: the largest "
        "distance from those of float32 in 30 steps.",
        write_rows(claim for claim in claims if claim.measured),
        write_table(result),
    ]
    parts += [describe_profile(one) for one in result["profiles"] if one["stem"] == STEM and "top" in one]
    missing = [claim.text for claim in claims if not claim.measured]
    parts += [f"Not measured yet: {'; '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def keep(root: Path) -> None:
    """Writes the report of ``data/reference/gpu_speed.json`` into docs/performance.md of a checkout."""
    result = json.loads((root / "data" / "reference" / "gpu_speed.json").read_bytes())
    write_block(root / PAGE, "make gpu", write_report(result))


if __name__ == "__main__":
    keep(checkout())
