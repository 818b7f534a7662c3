"""Kinds of values that a field may hold: numbers in a range, texts, paths, and lists of them."""

from __future__ import annotations

import contextlib
import json
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from lab_common import LabError
from lab_common.text import clean

# Linux takes no longer argument or variable (MAX_ARG_STRLEN in <linux/binfmts.h>, less the NUL and a name).
LONGEST, MOST = 131_000, 10_000


class UnfitError(ValueError):
    """A value that a field cannot hold: the likely cause, and what to give in its place."""

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(cause)
        self.cause, self.fix = cause, fix


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Attributes:
        words: It in words, which complete "<field> is …".
        example: A value that it may hold, as it is typed.
        read: Returns the value in Python's own type; any exception of it means that the field cannot hold the value.
    """

    words: str
    example: str
    read: Callable[[Any], object]


def check_value(owner: str, name: str, value: object, kind: Kind) -> object:
    """Returns a value as its field keeps it.

    Args:
        owner: What was called, such as "TorchrunJob".
        name: The field.
        value: What it was given.
        kind: What it may hold.

    Raises:
        LabError: The field cannot hold the value.
    """
    try:
        return kind.read(value)
    except LabError:
        raise
    except Exception as error:  # an object of somebody else may raise anything when it is looked at
        cause = getattr(error, "cause", "") or f"the value is of the type {type(value).__name__[:60]}"
        fix = getattr(error, "fix", "") or f"{name}={kind.example}"
        words = f"{name} is {kind.words}, not "
        what = f"{words}{show(value, 119 - len(words))}."
        raise LabError(what, where=owner, cause=clean(cause, 300), fix=clean(fix, 300)) from error


def check_values(owner: str, kinds: Mapping[str, Kind], values: Mapping[str, object]) -> dict[str, Any]:
    """Does the same for several fields, by their names.

    Raises:
        LabError: A field cannot hold its value.
    """
    return {name: check_value(owner, name, values[name], kind) for name, kind in kinds.items()}


def settle(instance: object, kinds: Mapping[str, Kind], *, owner: str) -> None:
    """Does the same for a frozen dataclass, from its ``__post_init__``.

    Raises:
        LabError: A field cannot hold its value.
    """
    for name, value in check_values(owner, kinds, vars(instance)).items():
        object.__setattr__(instance, name, value)


def show(value: object, longest: int) -> str:
    """Returns a value in one line of at most so many characters, whatever the value is."""
    try:
        shown = repr(value[:200] if isinstance(value, str | bytes) else value)
    except Exception:  # an object that cannot be shown, or a number of thousands of digits
        shown = f"this {type(value).__name__}"
    return clean(" ".join(shown.split()), longest)


def read_whole(value: object, low: int, high: int) -> int:
    """Returns a whole number of any type as Python's own."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a whole number")
    number = operator.index(value)
    if not low <= number <= high:
        raise UnfitError(f"it is {'larger' if number > high else 'smaller'} than that")
    return number


def read_seconds(value: object, low: float, high: float) -> float:
    """Returns a number of seconds of any type as Python's own."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a number")
    number = float(value)
    if not low <= number <= high:  # nor is NaN
        raise UnfitError("it is outside of that range")
    return number


def read_flag(value: object) -> bool:
    """Returns a truth value; a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise UnfitError(f"it is of the type {type(value).__name__}")
    return value


def read_text(value: object) -> str:
    """Returns a text as it may be an argument, a variable or a path.

    Raises:
        UnfitError: It is no text, or longer than Linux takes.
        LabError: It holds what no program can be given.
    """
    if not isinstance(value, str):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a text")
    text = str.__str__(value)  # an exact str, whatever the subclass says of itself
    with contextlib.suppress(UnicodeEncodeError):  # half a character, which only Python's own strings can hold
        data = text.encode(errors="surrogateescape")
        if len(data) > LONGEST:
            raise UnfitError(f"it is {len(data):,} bytes long; a program takes {LONGEST:,}", "pass it in a file")
        if b"\0" not in data:
            return text
    raise LabError(
        "A NUL byte or half a character cannot be part of an argument or a path.",
        where=json.dumps(text[:80])[:80],
        cause="no program can be given one: in C, NUL ends the text",
        fix="leave it out, or pass the data in a file",
    )


def read_name(value: object) -> str:
    """Returns a text that is not empty."""
    text = read_text(value)
    if not text.strip():
        raise UnfitError("it is empty")
    return text


def read_path(value: object) -> Path:
    """Returns a path that may be a file's."""
    if not isinstance(value, str | PurePath):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a path")
    text = read_name(str(value) if isinstance(value, PurePath) else value)
    parts = [len(part.encode(errors="surrogateescape")) for part in (*text.split("/"), text)]
    if max(parts[:-1]) > 255 or parts[-1] > 4095:  # NAME_MAX, and PATH_MAX less the NUL, in <linux/limits.h>
        raise UnfitError("it is longer than a path can be")
    return Path(text)


def read_place(value: object) -> Path:
    """Returns an absolute path; ``~`` is a home."""
    try:
        return resolve(read_path(value).expanduser())
    except RuntimeError as error:
        raise UnfitError(str(error)) from error


def resolve(path: Path) -> Path:
    """Returns an absolute path without links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # it leads in a circle, or the current folder is gone
        raise UnfitError(f"the path leads nowhere: {error}") from error


def read_sequence(value: object, read: Callable[[object], object]) -> tuple:
    """Returns what the elements of a list are read as; a text is no list of its letters."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a list")
    if len(value) > MOST:
        raise UnfitError(f"it has {len(value):,} elements; the most are {MOST:,}", "pass them in a file")
    return tuple(read(element) for element in value)


def whole(low: int, high: int, example: int, noun: str = "whole number") -> Kind:
    """A whole number in a range, its ends included."""
    return Kind(f"a {noun} from {low} to {high}", str(example), lambda value: read_whole(value, low, high))


def choice(*words: str) -> Kind:
    """One of several words."""

    def read(value: object) -> str:
        return {word: word for word in words}[read_text(value)]

    return Kind(" or ".join(repr(word) for word in words), repr(words[0]), read)


def optional(kind: Kind) -> Kind:
    """The same kind, or None."""
    words, example = f"{kind.words} or None", f"{kind.example}, or None"
    return Kind(words, example, lambda value: None if value is None else kind.read(value))
