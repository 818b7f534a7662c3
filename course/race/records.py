"""The records of laps. Each lap has a folder with its record, its code and its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from course.race.leagues import LEAGUES
from lab_common import LabError, env_folder
from lab_common.files import hold_lock, read_bounded, write_atomically
from lab_common.text import clean

FORMAT = 3
RECORD, WEIGHTS, CODE = "record.json", "weights.pt", "code"
RECORD_BYTES, CODE_BYTES = 2**20, 16 * 2**10
# The results of a lap that did not end.
NOTHING = dict.fromkeys(
    ("weights", "net", "seconds", "top1", "device_seconds", "busy", "one_node", "speed_up", "efficiency")
) | {"reached": False, "curve": []}

COUNT = {"type": "integer", "minimum": 0, "maximum": 10**9}
SHARE = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
POSITIVE = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1e9}
POINT = [POSITIVE | {"type": "number"}, SHARE | {"type": "number"}]
TEXT = {"type": ["string", "null"], "maxLength": 2000}
LONG = {"type": "string", "maxLength": 2000}
FILE = {"type": "string", "maxLength": 100, "pattern": r"^(?!\.\.?$)[^/\\\x00\n]+$"}  # a name, not a path
PROPERTIES = {
    "format": {"const": FORMAT},
    "lap": FILE,
    "script": FILE,
    "args": {"type": "array", "items": {"type": "string"}, "maxItems": 200},
    "league": {"enum": [*LEAGUES, ""]},
    "data": {
        "type": "object",
        "required": ["name", "source", "train", "valid", "classes", "seed", "mapping"],
        "properties": {
            "name": {"type": "string"},
            "source": {"type": "string"},
            "mapping": {"type": "array", "items": COUNT},
        }
        | dict.fromkeys(("train", "valid", "classes"), COUNT)
        | {"seed": {"type": ["integer", "null"], "minimum": 0}},
    },
    "code": {"type": "object", "propertyNames": FILE, "additionalProperties": {"type": "string"}, "maxProperties": 50},
    "curve": {"type": "array", "items": {"type": "array", "prefixItems": POINT, "minItems": 2, "maxItems": 2}},
    "one_node": {"type": ["object", "null"], "properties": {"seconds": POSITIVE, "top1": SHARE}},
    "versions": {"type": "object", "required": ["python", "torch"]},
    "reached": {"type": "boolean"},
    **dict.fromkeys(("name", "began", "failed", "class", "hardware"), LONG),
    **dict.fromkeys(("weights", "net"), TEXT),
    **dict.fromkeys(("threshold", "top1", "busy"), SHARE),
    **dict.fromkeys(("within", "seconds", "device_seconds", "speed_up", "efficiency"), POSITIVE),
    **dict.fromkeys(("nodes", "processes", "devices"), COUNT),
}
VALIDATOR = jsonschema.Draft202012Validator({"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES})


def find_home() -> Path:
    """Returns the race folder: ``race`` in LAB_RUNS or ``runs``."""
    return env_folder("LAB_RUNS", "runs") / "race"


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def hold_race(home: Path) -> Iterator[Path]:
    """Locks a race folder for one lap: two at once would slow each other down.

    Raises:
        LabError: Another lap runs, or the folder cannot be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fix = "export LAB_RUNS=/another/folder"
        raise LabError(f"No lap can be kept here: {error.strerror}.", where=clean(home), fix=fix) from error
    try:
        try:
            hold_lock(lock)
        except BlockingIOError:
            cause, fix = "two laps at once would slow each other", "wait for its end, or interrupt it"
            raise LabError("Another lap is running.", where=clean(home), cause=cause, fix=fix) from None
        yield home
    finally:
        os.close(lock)


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
        record = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError("its record is not valid JSON") from error
    if error := next(VALIDATOR.iter_errors(record), None):
        keys = " in ".join(repr(str(part)) for part in reversed(error.absolute_path))
        raise ValueError(f"{keys or 'a key'} in its record is missing or not valid (format {FORMAT})")
    if record["lap"] != folder.name:
        raise ValueError("its record belongs to another lap")
    if not record["failed"] and None in (record["seconds"], record["top1"], record["device_seconds"]):
        raise ValueError("its record has no result")
    return record


def _refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python reads although JSON has neither."""
    raise ValueError(name)


def read_laps(home: Path) -> list[dict[str, Any]]:
    """Returns all records of a race folder, oldest first, except unreadable ones."""
    found = []
    for path in home.glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_record(path.parent))
    return sorted(found, key=lambda record: (record["began"], record["lap"]))
