"""A Weights & Biases run, assembled from the records that ``wandb leet inspect --json`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    if not all(type(row.get("_step")) is int for row in rows):
        raise ValueError("a row without its step")
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
