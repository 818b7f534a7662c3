"""Keeps results as JSON lines under ``LAB_RUNS``, and the reference runs of named hardware under ``data/reference``."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lab_utils import LabError, checkout, env_folder, machine
from lab_utils.files import write_atomically
from lab_utils.timing.measure import Timing

FIELDS = ("lab", "kind", "settings", "machine", "torch", "when", "result")


class Records:
    """The results of one lab, kept so that a later lab can read them and a finished long run is not repeated.

    ``note`` says in one sentence where the last result of ``once`` came from; it is empty before.

    Args:
        lab: The lab, such as ``lab1``, which names the file ``<lab>.jsonl``.
        root: The folder; ``LAB_RUNS`` or ``runs/`` where None.
    """

    def __init__(self, lab: str, root: str | Path | None = None) -> None:
        self.lab = lab
        self.path = Path(root or env_folder("LAB_RUNS", "runs")) / f"{lab}.jsonl"
        self.note = ""

    def once(self, kind: str, function: Callable[[], object], *, again: bool = False, **settings: object) -> Any:
        """Returns the newest stored result of the same settings, machine and torch, or calls the function and stores.

        Args:
            kind: What was done, such as ``sweep``.
            function: Called without arguments where nothing fitting is stored; returns what ``add`` can store.
            again: Calls the function in any case.
            settings: All that the result depends on besides the machine: what JSON can hold, and functions, such as
                the step that is measured, which count as changed when their source is.

        Returns:
            The result as it was stored: Timings stay Timings, tuples become lists, keys of dictionaries strings.
        """
        stored = None if again else self.newest(kind, **settings)
        if stored is not None:
            self.note = f"stored result of {stored['when']}, not measured again (again=True measures anew)"
            return stored["result"]
        record = self.add(kind, function(), **settings)
        self.note = f"measured now, {record['when']}"
        return record["result"]

    def newest(self, kind: str, **settings: object) -> dict[str, Any] | None:
        """Returns the newest record of this kind and these settings, measured on this machine with this torch."""
        wanted = (_decode(_encode(_plain(settings))), machine.describe().label, torch.__version__)
        fitting = [record for record in self.read(kind) if _circumstances(record) == wanted]
        return fitting[-1] if fitting else None

    def add(self, kind: str, result: object, **settings: object) -> dict[str, Any]:
        """Appends one record and returns it as it will be read.

        Args:
            kind: What was done.
            result: Timings and what JSON can hold, nested as you like.
            settings: As in ``once``.

        Raises:
            LabError: The result is not JSON-able, or the file cannot be written.
        """
        when = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            values = (self.lab, kind, _plain(settings), machine.describe().label, torch.__version__, when, result)
            line = _encode(dict(zip(FIELDS, values, strict=True)))
        except (TypeError, ValueError) as error:
            fix = "return Timings, numbers, strings, and lists or dictionaries of them"
            raise LabError(f"The result {kind!r} cannot be stored.", cause=str(error), fix=fix) from error
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, line)
        except OSError as error:
            fix = "free some space, or point LAB_RUNS at a folder that you may write to"
            raise LabError(
                f"The result {kind!r} could not be stored.", where=self.path, cause=str(error), fix=fix
            ) from error
        return _decode(line)

    def read(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the records of a kind, or all, oldest first; warns with the count of lines that cannot be read."""
        try:
            *lines, rest = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        # What follows the last newline was torn off when its writer was killed: nobody has relied on it yet.
        del rest
        records, unreadable = [], 0
        for line in lines:
            try:
                record = _decode(line)
                if record.keys() >= set(FIELDS):
                    records.append(record)
                    continue
            except (ValueError, TypeError, AttributeError):
                pass
            unreadable += bool(line.strip())
        if unreadable:
            warnings.warn(f"{unreadable} unreadable lines of {self.path.name} were skipped", stacklevel=2)
        return [record for record in records if kind in (None, record["kind"])]


def reference(lab: str) -> dict[str, Any] | None:
    """Returns the recorded reference run of a lab, or None where none has been recorded.

    Returns:
        ``lab``, ``machine`` (the facts of the machine card, with ``label``), ``when`` (UTC) and ``records``, whose
        results hold Timings.
    """
    path = _reference_path(lab)
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LabError(
            "The reference run cannot be read.", where=path, cause=str(error), fix="make reference"
        ) from error


def save_reference(lab: str, *, allow_cpu: bool = False) -> Path:
    """Writes this machine's newest record per kind and settings to ``data/reference/<lab>.json``.

    Args:
        lab: The lab, such as ``lab1``.
        allow_cpu: Accepts a machine without a GPU.

    Raises:
        LabError: There is no GPU, or no record of this machine and this version of torch.
    """
    here, records = machine.describe(), Records(lab)
    if not here.gpus and not allow_cpu:
        raise LabError(
            "A reference run is recorded on a GPU, and this machine has none.",
            where=here.label,
            fix="run `make reference` on a machine with a GPU (or add --allow-cpu)",
        )
    newest = {
        _encode([record["kind"], record["settings"]]): record
        for record in records.read()
        if _circumstances(record)[1:] == (here.label, torch.__version__)
    }
    if not newest:
        raise LabError(
            f"There are no records of {lab} from this machine.",
            where=records.path.name,
            cause="the lab has not been run here with this version of torch",
            fix="run the lab's notebook first, or `make reference`, which does both",
        )
    content = {
        "lab": lab,
        "machine": asdict(here) | {"label": here.label},
        "when": max(record["when"] for record in newest.values()),
        "records": list(newest.values()),
    }
    path = _reference_path(lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(_encode(content, indent=1) + b"\n")
    return path


def _append(path: Path, line: bytes) -> None:
    """Appends a line in one write, which other processes that append cannot split."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" * torn + line + b"\n"
        if os.write(descriptor, data) != len(data):
            raise OSError("only a part of the line was written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(settings: dict[str, object]) -> dict[str, object]:
    """Puts the digest of its source in the place of a function."""

    def digest(function: Callable) -> str:
        return "source " + hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]

    return {key: digest(value) if inspect.isfunction(value) else value for key, value in settings.items()}


def _circumstances(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    return record["settings"], record["machine"], record["torch"]


def _reference_path(lab: str) -> Path:
    return checkout() / "data" / "reference" / f"{lab}.json"


def _encode(value: object, *, indent: int | None = None) -> bytes:
    def tag(other: object) -> object:
        if isinstance(other, Timing):
            return {"Timing": other.as_record()}
        raise TypeError(f"{type(other).__name__} is neither a Timing nor something that JSON can hold")

    return json.dumps(value, default=tag, sort_keys=True, ensure_ascii=False, indent=indent).encode()


def _decode(text: bytes) -> Any:
    def untag(found: dict[str, Any]) -> object:
        return Timing.from_record(found["Timing"]) if found.keys() == {"Timing"} else found

    return json.loads(text, object_hook=untag)
