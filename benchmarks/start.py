"""Claims about starting: the cost of importing our package, and a learner's wait for the first plot."""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.claims import Claim
from lab_common import checkout

IMPORT_SCRIPT = """
import time
import torch
start = time.process_time()
import lab_utils
bare = time.process_time()
from lab_utils import data, machine, models, timing, training
print(bare - start, time.process_time() - start)
"""
FIRST_FIGURE = "first-plot"  # the cell of lab 0


def check_all(folder: Path) -> list[Claim]:
    """Measures all claims of this module."""
    return [check_import(), check_first_plot(folder)]


def check_import() -> Claim:
    """Measures what the package, and a torchrun script's part of it, add to ``import torch``, in CPU seconds."""
    command = [sys.executable, "-c", IMPORT_SCRIPT]
    # Else each run would compile the package anew, where a shell forbids to keep that.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=env) for _ in range(7)]
    seconds = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    bare, all_of_it = (1e3 * statistics.median(each) for each in seconds)
    text = "import lab_utils with data, machine, models, timing, training on top of import torch (CPU seconds)"
    return Claim(text, f"{all_of_it:.1f} ms (lab_utils alone: {bare:.1f})", "at most 30 ms", all_of_it <= 30)


def check_first_plot(folder: Path) -> Claim:
    """Times a fresh kernel up to lab 0's first figure of a measurement; the data set is packed.

    The kernel has as many threads as a learner's: it does not inherit the single thread of the other measurements.
    """
    path = checkout() / "notebooks" / "00_start_here.ipynb"
    notebook = nbformat.read(path, as_version=4)
    last = next(number for number, cell in enumerate(notebook.cells) if cell.id == FIRST_FIGURE)
    notebook.cells = notebook.cells[: last + 1]
    env = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    runs = []
    for number in range(3):
        client = NotebookClient(copy.deepcopy(notebook), resources={"metadata": {"path": path.parent}})
        parts, marks = {}, [time.monotonic()]

        def note(part: str, parts: dict = parts, marks: list = marks) -> None:
            marks.append(time.monotonic())
            parts[part] = marks[-1] - marks[-2]

        client.on_notebook_start = lambda note=note, **_: note("the kernel's start")
        client.on_cell_executed = lambda cell, note=note, **_: note(cell.id)
        client.execute(env=env | {"LAB_RUNS": str(folder / f"plot{number}")})
        runs.append({"all": sum(parts.values())} | parts)
    seconds = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
    typical, least, most = seconds["all"], min(run["all"] for run in runs), max(run["all"] for run in runs)
    slowest = sorted(seconds, key=seconds.get, reverse=True)[1:4]
    parts = ", ".join(f"{part} {seconds[part]:.1f}" for part in slowest)
    measured = f"{typical:.1f} s ({least:.1f} to {most:.1f}; by cell: {parts})"
    text = "cold kernel to the first measured figure of lab 0"
    return Claim(text, measured, "at most 10 s", typical <= 10, seconds)
