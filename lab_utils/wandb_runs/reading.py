"""Reads back what a Weights & Biases run left on the disk, through the command that the SDK has for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_common import LabError, read_path

SETTLE_SECONDS, TRIES = 1.5, 5  # a record that does not end, and was written to just now, is read again
HEADER_BYTES = 7  # how a .wandb file begins
# What it raises when something else is printed than in the version that this was written for.
OTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, OSError, subprocess.TimeoutExpired)
# JSON has no words for these numbers; the SDK writes them as text.
NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True)
class Recorded:
    """A run as recorded on the disk.

    Args:
        file: The ``.wandb`` file.
        id: The run's id; segments of a resumed run share it.
        name: The run's name.
        group: Its group, or "".
        job_type: Its job type, or "".
        tags: Its tags.
        config: Its settings by name.
        rows: The logged values, one dictionary per step, with ``_step``; numbers are exactly those logged.
        summary: The last values, or the best if ``define_metric`` says so: ``{"valid/acc1": {"max": 0.7}}``.
        artifacts: Name, type, aliases, digest and metadata of each artifact that the run logged, the run's id, and
            ``files``: the MD5 digest, in base 64, of each file by its name.
        alerts: Title, text and level of each alert.
        finished: True if the run recorded its end; a killed run did not.
    """

    file: Path
    id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    artifacts: tuple[dict[str, Any], ...]
    alerts: tuple[dict[str, str], ...]
    finished: bool

    @property
    def last_step(self) -> int:
        """The last step that has a row; -1 before the first."""
        return max((row["_step"] for row in self.rows), default=-1)

    def curve(self, name: str) -> dict[int, Any]:
        """Returns the values logged under a name, by step."""
        return {row["_step"]: row[name] for row in self.rows if name in row}


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


def collect(records: Iterable[Mapping[str, Any]], file: Path) -> Recorded:
    """Assembles a run from its records.

    Raises:
        KeyError: A record is not as in wandb 0.31.
        ValueError: There are rows, but no record that opens the run.
    """
    run, config, summary = None, {}, {}
    rows, artifacts, alerts, finished = [], [], [], False
    for record in records:
        kind = record["type"]
        content = record.get(kind, {})
        if kind == "run":
            run = content
            config |= content.get("config", {}).get("update", {})
        elif kind == "config":
            config |= content.get("update", {})
        elif kind == "history":
            rows.append(_read_numbers(content["item"]))
        elif kind == "summary":
            summary |= _read_numbers(content.get("update", {}))
        elif kind == "artifact":
            artifacts.append(_read_artifact(content))
        elif kind == "alert":
            alerts.append({key: content.get(key, "") for key in ("title", "text", "level")})
        elif kind == "exit":
            finished = True
    if rows and run is None:
        raise ValueError("no record opens the run")
    if run is None:  # killed before anything had reached the disk
        run = {"run_id": file.stem.removeprefix("run-")}
    return Recorded(
        file,
        run["run_id"],
        run.get("display_name", ""),
        run.get("run_group", ""),
        run.get("job_type", ""),
        tuple(run.get("tags", ())),
        {name: value for name, value in config.items() if name != "_wandb"},
        tuple(rows),
        {name: value for name, value in summary.items() if not name.startswith("_")},
        tuple(artifacts),
        tuple(alerts),
        finished,
    )


def _read_numbers(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in item.items()}


def _read_artifact(content: Mapping[str, Any]) -> dict[str, Any]:
    files = content.get("manifest", {}).get("contents", ())
    artifact = {key: content[key] for key in ("name", "type", "digest", "run_id")}
    return artifact | {
        "aliases": tuple(content.get("aliases", ())),
        "metadata": json.loads(content.get("metadata") or "{}"),
        "files": {one["path"]: one["digest"] for one in files},
    }
