"""Measures a training step of ResNet-152 on a GPU in four arms that take turns: the last part of ``make gpu``.

The data are random uint8 images on the GPU. Before an arm is timed, the losses of its first steps have to lie within
2 % of those of float32, in each step. Results go to ``data/reference/gpu_speed.json`` and docs/performance.md, and the
kernels of one step of the fastest arm to ``runs/gpu/profile.txt``.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import PAGE, Claim, write_block, write_rows
from benchmarks.gpu.arms import ARMS, Batch, Training, build_reference
from benchmarks.gpu.roofline import find_sheet, predict
from course.reference import describe_machine
from lab_common import LabError, checkout
from lab_common.commandline import run_command
from lab_common.files import write_atomically
from lab_utils import machine, timing
from lab_utils.timing.records import encode

NET, STEM, BATCHES = "resnet152", "imagenet", (1024, 128)
ROUNDS, STEPS = 10, 20  # of all arms in turn, and training steps of one arm in a round
POOL = 2  # batches on the device, which steps take in turn
CURVE, MOST_OFF = 30, 0.02  # losses that are compared, and how far each of them may be from float32's
ROOFLINE_SHARE = 0.55
RECORD = Path("data", "reference", "gpu_speed.json")


def make_pool(batch: int, device: torch.device) -> list[Batch]:
    """Returns random uint8 images (batch, 3, 32, 32) and labels on the device, the same at each call."""
    generator = torch.Generator().manual_seed(23)
    images = torch.randint(0, 256, (POOL, batch, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, 10, (POOL, batch), generator=generator).to(device)
    return list(zip(images, labels, strict=True))


def run_steps(training: Training, pool: Sequence[Batch], count: int) -> torch.Tensor:
    """Trains on the batches in turn; returns the losses (count,), on the device."""
    # Cloned, because a graph writes each loss to the same place.
    return torch.stack([training.step(*pool[index % len(pool)]).clone() for index in range(count)])


def find_deviation(losses: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest relative difference of a step's loss; infinite if a loss is not finite."""
    off = float(((losses - expected) / expected).abs().max())
    return off if math.isfinite(off) else math.inf


def prepare(name: str, net: str, pool: Sequence[Batch], expected: torch.Tensor) -> tuple[Training, dict[str, Any]]:
    """Builds an arm, captures its graph, and compares its losses with float32's.

    Returns:
        The training, and as facts ``off`` (the largest relative difference of a loss) and ``peak_bytes`` (the most
        memory that the arm's tensors hold during a step, weights included; None on a CPU).

    Raises:
        RuntimeError: The arm cannot run here, or its losses are off by more than ``MOST_OFF``.
    """
    arm, device = ARMS[name], pool[0][0].device
    gc.collect()  # or what earlier arms left would be freed meanwhile, and be missing from the peak
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    training = arm.build(net, STEM, device)
    peak = training.capture(pool[0]) if arm.graph else None
    off = find_deviation(run_steps(training, pool, CURVE), expected)
    if off > MOST_OFF:
        raise RuntimeError(f"its losses are off by {off:.1%}, {MOST_OFF:.0%} is the most")
    if device.type == "cuda" and not arm.graph:
        torch.cuda.reset_peak_memory_stats()
        run_steps(training, pool, 1)
        peak = torch.cuda.max_memory_allocated()
    return training, {"off": off, "peak_bytes": peak and peak - before}


def measure_batch(
    batch: int, device: torch.device, *, net: str = NET, steps: int = STEPS
) -> tuple[list[dict[str, Any]], str]:
    """Measures all arms at one batch size, in turn.

    Returns:
        A row for each arm: ``arm``, ``batch`` and either ``error``, or ``timing`` (of blocks of steps) with the facts
        of ``prepare``. Then the profile of the fastest arm, as a text.
    """
    pool, rows, trainings = make_pool(batch, device), {}, {}
    expected = run_steps(build_reference(net, STEM, device), pool, CURVE)
    for name in ARMS:
        rows[name] = {"arm": name, "batch": batch}
        try:
            trainings[name], facts = prepare(name, net, pool, expected)
        except RuntimeError as error:
            rows[name]["error"] = (f"{error}".splitlines() or [type(error).__name__])[0][:200]
        else:
            rows[name] |= facts
    blocks = {name: partial(run_steps, training, pool, steps) for name, training in trainings.items()}
    timings = timing.interleave(blocks, images=batch * steps, repeats=ROUNDS, warmup=1, device=device)
    for one in timings:
        rows[one.name]["timing"] = one
    fastest = find_fastest(timings)
    return [*rows.values()], f"{fastest.name}, batch {batch:,}\n{profile(trainings[fastest.name], pool)}"


def find_fastest(timings: Iterable[timing.Timing]) -> timing.Timing:
    """Returns the timing with the most images per second."""
    return max((one for one in timings if not one.out_of_memory), key=lambda one: one.images_per_second)


def profile(training: Training, pool: Sequence[Batch]) -> str:
    """Returns the profiler's table of the kernels (on a CPU: the operators) of one step, the longest first."""
    device = pool[0][0].device
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profiler:
        run_steps(training, pool, 1)
        timing.synchronize(device)
    return profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=15)


def judge(record: dict[str, Any]) -> list[Claim]:
    """Returns the claims about the roofline, one for each batch size whose roofline is known."""
    claims = []
    for batch, limit in record["roofline"].items():
        timed = [row["timing"] for row in record["rows"] if f"{row['batch']}" == batch and "timing" in row]
        best = find_fastest(one for one in timed if one.name in ARMS)
        share = best.images_per_second / limit
        measured = f"{share:.0%} ({best.name} {best.images_per_second:,.0f} of {limit:,.0f} images/s)"
        bound = {"bound": f"at least {ROOFLINE_SHARE:.0%}", "holds": share >= ROOFLINE_SHARE} if batch == "1024" else {}
        claims.append(Claim(f"the fastest arm against the computed roofline, batch {int(batch):,}", measured, **bound))
    return claims


def write_report(record: dict[str, Any]) -> str:
    """Returns a record in Markdown: machine and date, the share of the roofline, a row for each arm."""
    rounds = max(len(row["timing"].seconds) for row in record["rows"] if "timing" in row)
    caption = (
        f"Measured on {datetime.fromisoformat(record['when']):%d %B %Y}; {record['machine']['label']}, torch "
        f"{record['machine']['torch'].partition('+')[0]}. Training steps of {record['net']}, {STEM} stem, on random "
        f"32×32 images that are on the GPU, in {rounds} rounds of all arms in turn. Images per second: medians, ± half "
        "of their range. The speed-up is the middle of the rounds' ratios, with its 95 % interval. *Losses off by*: "
        f"the largest distance from the losses of float32 in {CURVE} steps."
    )
    table = ["| batch | arm | images/s | speed-up over eager | peak memory | losses off by |"]
    table.append("|--:|---|--:|---|--:|--:|")
    for row in record["rows"]:
        cells = _write_cells(row, record["rows"]) if "timing" in row else [f"not measured: {row['error']}", "", "", ""]
        table.append(f"| {row['batch']:,} | {' | '.join([row['arm'], *cells])} |")
    return "\n\n".join([caption, write_rows(judge(record)), "\n".join(table)])


def _write_cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    one = row["timing"]
    if one.out_of_memory:
        return ["out of memory", "", "", ""]
    rates = [one.images / seconds for seconds in one.seconds]
    spread = (max(rates) - min(rates)) / 2 / one.images_per_second
    eager = [other.get("timing") for other in rows if (other["arm"], other["batch"]) == ("eager", row["batch"])]
    gain = str(timing.find_speed_up(eager[0], one)) if eager[0] and one.name != "eager" else ""
    peak, off = row["peak_bytes"], row["off"]
    return [
        f"{one.images_per_second:,.0f} ± {spread:.1%}",
        gain,
        f"{peak / 2**30:.1f} GiB" if peak else "",
        "" if off is None else f"{off:.2%}",
    ]


def keep(record: dict[str, Any], root: Path) -> None:
    """Writes a record and its report into a checkout."""
    with write_atomically(root / RECORD) as file:
        file.write(encode(record, indent=1) + b"\n")
    write_block(root / PAGE, "make gpu", write_report(record))


def main() -> int:
    """Measures all batch sizes; returns the exit status.

    Raises:
        LabError: There is no GPU.
    """
    device = machine.device()
    if device.type != "cuda":
        cause, fix = "torch sees none", "run this on a machine with a GPU, where nvidia-smi lists it"
        raise LabError("There is no GPU to measure.", cause=cause, fix=fix)
    torch.backends.cudnn.benchmark = True
    # The reference is float32; the arms' products are bfloat16 in any case.
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    here = describe_machine()
    sheet, rows, profiles = find_sheet(here["label"]), [], []
    for batch in BATCHES:
        measured, text = measure_batch(batch, device)
        rows += measured
        profiles.append(text)
    roofline = {f"{batch}": predict(NET, STEM, batch, sheet) for batch in BATCHES} if sheet else {}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"machine": here, "when": when, "net": NET, "rows": rows, "roofline": roofline}
    keep(record, checkout())
    folder = checkout() / "runs" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.txt").write_text("\n\n".join(profiles), encoding="utf-8")
    print(write_report(record))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
