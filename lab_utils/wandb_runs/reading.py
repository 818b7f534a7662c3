"""Reads back what a Weights & Biases run left on the disk, through the command that the SDK has for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab_common import LabError, read_path
from lab_utils.wandb_runs.records import Recorded, collect

SETTLE_SECONDS, TRIES = 1.5, 5  # a record that does not end, and was written to just now, is read again
FILE_BYTES = 2**28  # the labs' runs have less than 1 MB; as JSON, a record is some times larger
HEADER_BYTES = 7  # how a .wandb file begins
# What it raises when something else is printed than in the version that this was written for.
OTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, subprocess.TimeoutExpired)


def read_run(path: Path | str) -> Recorded:
    """Reads back what a run recorded on the disk, whether or not it ended in order.

    ``wandb leet inspect --json`` is the way that the SDK offers for it; it needs neither an account nor a network.

    Args:
        path: The run's folder, a folder within it (``run.dir``), or the ``.wandb`` file.

    Returns:
        The run; without rows if the process died before anything had reached the disk.

    Raises:
        LabError: There is no record, or the installed SDK cannot read it or shows it in another form.
    """
    file = _find_record(read_path(path))
    if file.stat().st_size > FILE_BYTES:
        cause, fix = f"it has {file.stat().st_size / 1e9:.1f} GB", "look at the run with: wandb sync"
        raise LabError("The record is larger than any run of the labs.", where=file, cause=cause, fix=fix)
    try:
        for _ in range(TRIES):
            recorded = collect(_inspect(file), file)
            # run.finish() can return a moment before the last records are in the file.
            if recorded.finished or time.time() - file.stat().st_mtime > SETTLE_SECONDS:
                break
            time.sleep(SETTLE_SECONDS / TRIES)
    except OTHER_FORM as error:
        raise LabError(
            "The run's record could not be read back with this version of wandb.",
            where=file,
            cause=f"`wandb leet inspect --json` is another than in 0.31 ({type(error).__name__}: {str(error)[:200]})",
            fix="pip install -r requirements.lock, or take `wandb sync` and the server's own pages",
        ) from error
    return recorded


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """Makes the SDK print a run's records, one by one; none if only the header had reached the disk."""
    return _inspect(_find_record(read_path(path)))


def _inspect(file: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    if child.returncode or (not child.stdout and file.stat().st_size > HEADER_BYTES):
        raise ValueError((child.stderr.strip() or "it printed nothing").splitlines()[-1])
    return [json.loads(line) for line in child.stdout.split("\n") if line]


def _find_record(path: Path) -> Path:
    for folder in (path, path.parent):
        found = [folder] if folder.suffix == ".wandb" else sorted(folder.glob("*.wandb"))
        if found and found[0].is_file():
            return found[0]
    raise LabError(
        "There is no record of a run here.",
        where=path,
        cause="the run was never started, or its folder was removed",
        fix="run the cell that opens the run, then this one",
    )


def list_runs(folder: Path | str) -> list[Path]:
    """Returns the folders of all runs recorded under a folder, by name, which has the second of the start."""
    return sorted(path for path in read_path(folder).glob("wandb/*run-*") if any(path.glob("*.wandb")))
