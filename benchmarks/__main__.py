"""Defends the claims about speed: ``make bench``, or ``python -m benchmarks``; it takes about ten minutes.

Most claims are a ratio or a difference of CPU seconds, measured in one interleaved run on one thread, so that they mean
the same on a busy machine and on a quiet one; those about launches and kernels are wall-clock seconds. The exit status
is 1 if a bound is broken. ``python -m benchmarks launch`` measures one section alone; all of them together are
written into ``data/reference/bench.json`` and into docs/performance.md.
"""

from __future__ import annotations

import os

# Before torch is imported: the CPU seconds of threads that wait for each other would count as work.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks import batches, launch, loop, start
from benchmarks.claims import PAGE, Claim, print_table, save_claims, write_block, write_rows
from lab_common import checkout
from lab_common.files import write_atomically
from lab_utils import machine
from lab_utils.plots.style import COLOURS

SECTIONS = {
    "data": lambda folder: batches.check_all(folder / "images"),
    "training": lambda folder: loop.check_all(folder / "records"),
    "start": start.check_all,
    "launch": launch.check_all,
}
PICTURE = Path("notebooks", "figures", "bench_batches.png")


def keep(claims: Sequence[Claim], root: Path) -> None:
    """Writes the claims into a file and a page, with the machine and the date, and draws the rates."""
    here, now = machine.describe(), datetime.now(UTC)
    facts = {"machine": asdict(here) | {"label": here.label}, "torch": torch.__version__}
    save_claims(claims, root / "data" / "reference" / "bench.json", when=now.isoformat(timespec="seconds"), **facts)
    caption = f"Written by `make bench` on {now:%d %B %Y}; {here.label}, torch {torch.__version__}."
    write_block(root / PAGE, "make bench", f"{caption}\n\n{write_rows(claims)}")
    rates = next(claim.numbers for claim in claims if claim.numbers)
    with write_atomically(root / PICTURE) as file:
        draw_rates(rates).savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})


def draw_rates(rates: dict[str, float]) -> Figure:
    """Draws images per CPU second of each way to make batches as bars, the fastest last."""
    figure = Figure(figsize=(8, 2.6))
    ax = figure.subplots()
    names = sorted(rates, key=rates.get, reverse=True)
    colours = [COLOURS["DDP"] if name == "packed batches" else "0.7" for name in names]
    bars = ax.barh(names, [rates[name] for name in names], color=colours)
    ax.bar_label(bars, labels=[f"{rates[name]:,.0f}" for name in names], padding=3)
    ax.set(xscale="log", xlabel="images per CPU second (logarithmic)", title="one core makes training batches")
    ax.margins(x=0.15)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    """Measures the claims of the named sections, or of all; prints them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all where none is named"
    )
    wanted = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"there is no section {min(unknown)!r}; choose from {', '.join(SECTIONS)}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        # Jobs leave their logs there.
        os.environ["LAB_RUNS"] = folder
        claims = [claim for name in SECTIONS if name in wanted for claim in SECTIONS[name](Path(folder))]
    print_table(claims)
    print(f"load in the minute before: {load:.1f} on {os.cpu_count()} cores; the seconds of a launch grow with it")
    if set(wanted) == set(SECTIONS):
        keep(claims, checkout())
    return 1 if any(claim.holds is False for claim in claims) else 0


if __name__ == "__main__":
    sys.exit(main())
