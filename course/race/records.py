"""The leagues, and the records of laps: each lap has a folder with its record, its script and its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from lab_common import LabError, env_folder
from lab_common.files import read_bounded, write_atomically
from lab_common.text import clean
from lab_utils import data

LEAGUES = ("sprint", "distance")
THRESHOLDS = Path(__file__).with_name("thresholds.json")
# Images that the baseline trains on in each league, all epochs together.
PASSES = {"sprint": 20_000, "distance": 100_000}
RECORD, WEIGHTS, CODE = "record.json", "weights.pt", "code"
RECORD_BYTES, CODE_BYTES = 2**20, 16 * 2**10
# The results of a lap that did not end.
NO_RESULT = dict.fromkeys(("weights", "net", "seconds", "top1", "device_seconds", "busy", "one_node", "speed_up")) | {
    "reached": False,
    "curve": [],
}

COUNT = {"type": "integer", "minimum": 0, "maximum": 10**9}
SHARE = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
POSITIVE = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1e9}
TEXT = {"type": "string", "maxLength": 2000}
NAME = {"type": "string", "maxLength": 100, "pattern": r"^(?!\.\.?$)[^/\\\x00\n]+$"}  # of a file, not a path
DATA = {"name": TEXT, "train": COUNT, "valid": COUNT}
VERSIONS = {"python": TEXT, "torch": TEXT}
# What the leaderboard shows; a lap's own `curve`, `one_node`, `weights`, `seed` and `mapping` are for its owner.
PROPERTIES = {
    "lap": NAME,
    "script": NAME,
    "args": {"type": "array", "items": {"type": "string"}, "maxItems": 200},
    "league": {"enum": LEAGUES},
    "data": {"type": "object", "required": [*DATA], "properties": DATA},
    "versions": {"type": "object", "required": [*VERSIONS], "properties": VERSIONS},
    "reached": {"type": "boolean"},
    "net": {"type": ["string", "null"], "maxLength": 2000},
    "threshold": SHARE | {"type": "number"},
    **dict.fromkeys(("name", "began", "failed", "class", "code"), TEXT),
    **dict.fromkeys(("top1", "busy"), SHARE),
    **dict.fromkeys(("seconds", "device_seconds", "speed_up"), POSITIVE),
    **dict.fromkeys(("nodes", "processes", "devices"), COUNT),
}
VALIDATOR = jsonschema.Draft202012Validator({"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES})


def check_record(record: Mapping[str, Any]) -> None:
    """Checks a lap's record before the lap is run, because :func:`read_laps` skips what does not fit the schema.

    Raises:
        LabError: A value does not fit.
    """
    if error := next(VALIDATOR.iter_errors(record), None):
        where, cause = error.json_path.removeprefix("$."), f"its value does not fit: {clean(error.message, 200)}"
        fix = "threshold= is a share such as 0.52; at most 200 arguments, and 100 characters in the script's name"
        raise LabError("The leaderboard could not read the record of this lap.", where=where, cause=cause, fix=fix)


def read_thresholds() -> list[dict]:
    """The thresholds that were set: data set, its number of training images, league, top-1, and from which laps."""
    return json.loads(THRESHOLDS.read_text())


def find_threshold(dataset: data.Dataset, league: str) -> float:
    """The top-1 of a league.

    Raises:
        LabError: Nobody has set it for this data set.
    """
    for one in read_thresholds():
        if (one["data"], one["train"], one["league"]) == (dataset.name, len(dataset.train), league):
            return one["top1"]
    raise LabError(
        f"No threshold is set for {dataset.name} with {len(dataset.train):,} training images.",
        where=f"league {league!r}",
        cause="it comes from five laps of the baseline, which nobody has run on this data set",
        fix="race on shapes10, `--data shapes10`, or add a row to course/race/thresholds.json",
    )


def count_epochs(league: str, images: int) -> int:
    """Returns the epochs of the baseline on a data set with that many training images in a lap."""
    return max(1, round(PASSES[league] / images))


def find_home() -> Path:
    """Returns the race folder: ``race`` in LAB_RUNS or ``runs``."""
    return env_folder("LAB_RUNS", "runs") / "race"


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the record of a lap, and returns it as it will be read."""
    text = json.dumps(record, indent=1)
    with write_atomically(folder / RECORD) as file:
        file.write(text.encode())
    return json.loads(text)


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a lap that somebody else may have written.

    Raises:
        OSError: There is no such file, or it is not a regular one, or too large.
        ValueError: It is not a record; the message says why.
    """
    text = read_bounded(folder / RECORD, RECORD_BYTES, follow=False)
    try:
        record = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("its record is not valid JSON") from error
    if error := next(VALIDATOR.iter_errors(record), None):
        keys = " in ".join(repr(str(part)) for part in reversed(error.absolute_path))
        raise ValueError(f"{keys or 'a key'} in its record is missing or not valid")
    if record["lap"] != folder.name:
        raise ValueError("its record belongs to another lap")
    if not record["failed"] and None in (record["seconds"], record["top1"], record["device_seconds"]):
        raise ValueError("its record has no result")
    return record


def read_laps(home: Path) -> list[dict[str, Any]]:
    """Returns all records of a race folder, oldest first, except unreadable ones."""
    found = []
    for path in home.glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_record(path.parent))
    return sorted(found, key=lambda record: (record["began"], record["lap"]))
