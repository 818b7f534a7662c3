"""The claims about starting: what an import of ours costs, and how long a learner waits for the first plot."""

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
    """What the package, and what a torchrun script takes of it, add to ``import torch``, in CPU seconds."""
    command = [sys.executable, "-c", IMPORT_SCRIPT]
    # Else each run would compile the package anew, where a shell forbids to keep that.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=env) for _ in range(7)]
    seconds = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    bare, all_of_it = (1e3 * statistics.median(each) for each in seconds)
    text = "import lab_utils with data, machine, models, timing, training on top of import torch (CPU seconds)"
    return Claim(text, f"{all_of_it:.1f} ms (lab_utils alone: {bare:.1f})", "at most 30 ms", all_of_it <= 30)


def check_first_plot(folder: Path) -> Claim:
    """From a kernel that is not there yet to lab 0's first figure of a measurement; the data set is packed."""
    path = checkout() / "notebooks" / "00_start_here.ipynb"
    notebook = nbformat.read(path, as_version=4)
    last = next(number for number, cell in enumerate(notebook.cells) if cell.id == FIRST_FIGURE)
    notebook.cells = notebook.cells[: last + 1]
    seconds, slowest = [], []
    for number in range(3):
        parts: dict[str, float] = {}
        start = mark = time.monotonic()

        def note(cell: nbformat.NotebookNode, parts: dict[str, float] = parts, **_: object) -> None:
            nonlocal mark
            parts[cell.id], mark = time.monotonic() - mark, time.monotonic()

        client = NotebookClient(copy.deepcopy(notebook), resources={"metadata": {"path": path.parent}})
        client.on_cell_executed = note
        client.execute(env=os.environ | {"LAB_RUNS": str(folder / f"plot{number}")})
        seconds.append(time.monotonic() - start)
        slowest.append(max(parts, key=parts.get))
    typical = statistics.median(seconds)
    measured = f"{typical:.1f} s ({min(seconds):.1f} to {max(seconds):.1f}; most in the cell {slowest[-1]!r})"
    return Claim("cold kernel to the first measured figure of lab 0", measured, "at most 10 s", typical <= 10)
