"""Asks ``nvidia-smi``: the one place that starts it for an answer. Without the program there are no GPUs.

Also runs on nodes with Python 3.9 and nothing installed (:mod:`nodelaunch.transfer`).
"""

from __future__ import annotations

import shutil
import subprocess

# Behind a query: one line per GPU or process, with numbers alone.
PLAIN_ROWS = "--format=csv,noheader,nounits"


def find_smi() -> str | None:
    """Returns the path of ``nvidia-smi``; None if it is not installed."""
    return shutil.which("nvidia-smi")


def run_smi(*arguments: str, seconds: float = 30.0) -> list[str]:
    """Runs ``nvidia-smi`` and returns the lines of its output.

    Raises:
        OSError: There is no such program, it did not answer in time (TimeoutError), or it failed, with its first line.
    """
    if not (program := find_smi()):
        raise FileNotFoundError("there is no nvidia-smi")
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        child = subprocess.run([program, *arguments], text=True, errors="replace", timeout=seconds, **quiet)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"nvidia-smi did not answer within {seconds:g} s") from None
    if child.returncode:
        said = (child.stdout.strip() or child.stderr.strip()).splitlines()
        raise OSError(said[0] if said else f"nvidia-smi ended with {child.returncode}")
    return child.stdout.splitlines()


def query_smi(query: str, *, seconds: float = 30.0) -> list[list[str]]:
    """Returns the rows of a query such as ``gpu=index,uuid``, split into fields; raises as :func:`run_smi`."""
    return [split_row(line) for line in run_smi(f"--query-{query}", PLAIN_ROWS, seconds=seconds) if line.strip()]


def split_row(line: str) -> list[str]:
    """Returns the fields of one row."""
    return [field.strip() for field in line.split(",")]
