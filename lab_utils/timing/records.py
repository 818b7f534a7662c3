"""Keeps results as JSON lines under ``LAB_RUNS``, and reads them whatever has become of the file."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lab_common import LabError, env_folder, read_path
from lab_utils import machine
from lab_utils.timing.measure import Timing, find_noise

FIELDS = ("lab", "kind", "settings", "machine", "torch", "when", "result")


class UnreadableWarning(UserWarning):
    """Lines of a file under ``LAB_RUNS`` cannot be read and were skipped; they stay where they are."""


class Records:
    """The results of one lab, kept so that a later lab can read them and a finished long run is not repeated.

    ``note`` says in one sentence where the last result of ``once`` came from; it is empty before.

    Args:
        lab: The lab, such as ``lab1``, which names the file ``<lab>.jsonl``.
        root: The folder; ``LAB_RUNS`` or ``runs/`` if None.
    """

    def __init__(self, lab: str, root: str | Path | None = None) -> None:
        self.lab = lab
        self.path = (read_path(root) if root else env_folder("LAB_RUNS", "runs")) / f"{lab}.jsonl"
        self.note = ""

    def once(self, kind: str, function: Callable[[], object], *, again: bool = False, **settings: object) -> Any:
        """Returns the newest stored result of the same settings, machine and torch, or calls the function and stores.

        A stored measurement that ``find_noise`` calls no finding is measured again.

        Args:
            kind: What was done, such as ``sweep``.
            function: Called without arguments if nothing fitting is stored; returns what ``add`` can store.
            again: Calls the function in any case.
            settings: All that the result depends on besides the machine: what JSON can hold, and functions, such as
                the step that is measured, which count as changed when their source is.

        Returns:
            The result as it was stored: Timings stay Timings, tuples become lists, keys of dictionaries strings.
        """
        stored = None
        if not again:
            wanted = (decode(encode(_plain(settings))), machine.describe().label, torch.__version__)
            stored = next((one for one in reversed(self.read(kind)) if circumstances(one) == wanted), None)
        if stored is not None and not find_noise(_list_timings(stored["result"])):
            self.note = f"stored result of {stored['when']}, not measured again (again=True measures again)"
            return stored["result"]
        record = self.add(kind, function(), **settings)
        self.note = f"measured now, {record['when']}"
        return record["result"]

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
            line = encode(dict(zip(FIELDS, values, strict=True)))
        except (TypeError, ValueError, RecursionError) as error:
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
        return decode(line)

    def read(self, kind: str | None = None, *, fits: Callable[[Any], bool] | None = None) -> list[dict[str, Any]]:
        """Returns the records of a kind, or all, oldest first; warns of lines that cannot be read.

        Args:
            kind: What was done.
            fits: Says whether a result of this kind has the form that the caller needs; others are skipped.
        """
        if not self.path.exists():
            return []
        *lines, _ = self.path.read_bytes().split(b"\n")  # what follows the last newline was torn off with its writer
        found, skipped = [], 0
        for line in filter(bytes.strip, lines):
            try:
                check_record(record := decode(line))
            except ValueError:
                skipped += 1
                continue
            if kind not in (None, record["kind"]):
                continue
            if fits is None or fits(record["result"]):
                found.append(record)
            else:
                skipped += 1
        if skipped:
            words = f"{skipped} unreadable lines of {self.path.name} were skipped"
            warnings.warn(words, UnreadableWarning, stacklevel=2)
        return found


def check_record(record: Any) -> None:
    """Raises ValueError where something that JSON held is no record."""
    if not isinstance(record, dict) or not record.keys() >= set(FIELDS) or not isinstance(record["settings"], dict):
        raise ValueError("it is no record")
    if not all(isinstance(record[name], str) for name in ("lab", "kind", "machine", "torch", "when")):
        raise ValueError("a field that is a text in all records is none")


def _list_timings(result: object) -> Iterator[Timing]:
    if isinstance(result, Timing):
        yield result
    elif isinstance(result, dict | list):
        for part in result.values() if isinstance(result, dict) else result:
            yield from _list_timings(part)


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


def circumstances(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Settings, machine and torch of a record."""
    return record["settings"], record["machine"], record["torch"]


def encode(value: object, *, indent: int | None = None) -> bytes:
    """Returns Timings and what JSON can hold as JSON."""

    def tag(other: object) -> object:
        if isinstance(other, Timing):
            return {"Timing": other.as_record()}
        raise TypeError(f"{type(other).__name__} is neither a Timing nor something that JSON can hold")

    return json.dumps(value, default=tag, sort_keys=True, ensure_ascii=False, indent=indent).encode()


def decode(text: bytes) -> Any:
    """Returns what ``encode`` was given.

    Raises:
        ValueError: It is not JSON, or contains something else as a Timing.
    """

    def untag(found: dict[str, Any]) -> object:
        return Timing.from_record(found["Timing"]) if found.keys() == {"Timing"} else found

    try:
        return json.loads(text, object_hook=untag)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
