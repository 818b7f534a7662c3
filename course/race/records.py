"""The records of laps: each has a folder with record, code and weights, and names the record before it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab_common import LabError, env_folder
from lab_common.files import hold_lock, read_bounded, write_atomically
from lab_common.text import clean

FORMAT = 2
RECORD, WEIGHTS, CODE = "record.json", "weights.pt", "code"
# What a lap has that did not end.
NOTHING = dict.fromkeys(
    ("weights", "net", "seconds", "top1", "device_seconds", "busy", "one_node", "speed_up", "efficiency")
) | {"reached": False, "curve": [], "usage": []}
# Of the devices' usage: what a record keeps of each node, and in all.
SAMPLES, MOST_SAMPLES = 200, 3200
RECORD_BYTES, WEIGHTS_BYTES, CODE_BYTES = 2**20, 512 * 2**20, 16 * 2**10


def find_home() -> Path:
    """Returns the race folder: ``race`` in LAB_RUNS or ``runs``."""
    return env_folder("LAB_RUNS", "runs") / "race"


def hash_record(record: Mapping[str, Any]) -> str:
    """Returns the SHA-256 over a record without its own hash."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_file(path: Path, most: int = WEIGHTS_BYTES) -> str:
    """Returns the SHA-256 of a regular file of at most ``most`` bytes.

    Raises:
        OSError: It is not a regular file, or larger.
    """
    return hashlib.sha256(read_bounded(path, most)).hexdigest()


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


def read_laps(home: Path) -> list[dict[str, Any]]:
    """Returns all records of a race folder, oldest first, except unreadable ones."""
    found = []
    for path in home.glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            record = json.loads(read_bounded(path, RECORD_BYTES))
            if isinstance(record, dict) and record.get("sha256") == hash_record(record):
                found.append(record)
    return sorted(found, key=lambda record: (str(record.get("began")), str(record.get("lap"))))


def find_newest(home: Path) -> str:
    """Returns the hash of the record that no other one names; "" in a folder without laps."""
    laps = read_laps(home)
    named = {str(record.get("previous")) for record in laps}
    ends = [record["sha256"] for record in laps if record["sha256"] not in named]
    return ends[-1] if ends else ""


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the record of a lap, with its hash, and returns it."""
    text = json.dumps({**record, "sha256": hash_record(record)}, indent=1)
    with write_atomically(folder / RECORD) as file:
        file.write(text.encode())
    return json.loads(text)
