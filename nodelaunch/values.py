"""Checks the values that a user gives a job or a node: that no number is a text, and that a program can be given it."""

from __future__ import annotations

import contextlib
import numbers
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path, PurePath
from typing import Any, ClassVar

from lab_common import LabError
from lab_common.text import clean

Check = Callable[[Any], Any]  # returns a value as it is kept, or raises InvalidValue
NOT_SENT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # a NUL byte ends an argument; the rest is half a character


class InvalidValue(ValueError):
    """A value that a field does not take: what it takes, an example, and the cause if the value does not show it."""

    def __init__(self, wanted: str, example: str, cause: str = "its type or its range does not fit") -> None:
        self.wanted, self.example, self.cause = wanted, example, cause


def checked(check: Check, **options: Any) -> Any:
    """Makes a field of a frozen dataclass, such as a :class:`Checked`, which passes its value through ``check``."""
    return field(metadata={"check": check}, **options)


class Checked:
    """The base of frozen dataclasses whose fields are checked."""

    maker: ClassVar[str]  # what the user called, for errors

    def __post_init__(self) -> None:
        """Checks the fields, or raises a LabError."""
        for each in fields(self):
            if check := each.metadata.get("check"):
                value = check_value(self.maker, each.name, getattr(self, each.name), check)
                object.__setattr__(self, each.name, value)


def check_value(owner: str, name: str, value: object, check: Check) -> Any:
    """Returns what a check makes of the value of a field or argument of ``owner``, or raises a LabError."""
    try:
        return check(value)
    except InvalidValue as error:
        words = f"{name} is {error.wanted}, not "
        shown = clean(" ".join(reprlib.repr(value).split()), 119 - len(words))
        cause, fix = clean(error.cause, 300), clean(f"{name}={error.example}", 300)
        raise LabError(f"{words}{shown}.", where=owner, cause=cause, fix=fix) from None


def rule(holds: Check, wanted: str, example: str, kept: Check = lambda value: value) -> Check:
    """Makes a check out of a condition; ``wanted`` completes "<field> is …", and ``kept`` converts the value."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise InvalidValue(wanted, example)
        return kept(value)

    return check


def whole(low: int, high: int, example: int) -> Check:
    """Takes a whole number in a range, ends included; NumPy's, too."""
    wanted = f"a whole number from {low} to {high}"
    return rule(lambda value: _is_a(value, numbers.Integral) and low <= value <= high, wanted, str(example), kept=int)


def optional(check: Check) -> Check:
    """Takes what the given check takes, or None."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, wanted: str = "a list of texts", example: str = "['one', 'two']") -> Check:
    """Takes a list, and returns a tuple; a text is not a list of its letters."""

    def check_each(value: Any) -> tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidValue(wanted, example)
        try:
            return tuple(map(check, value))
        except InvalidValue as error:
            raise InvalidValue(wanted, example, error.cause) from None

    return check_each


def check_path(value: Any) -> Path:
    """Takes a path, and returns it absolute and without links; ``~`` is a home."""
    if not isinstance(value, str | PurePath):
        raise InvalidValue("a path", "'folder/file'")
    try:
        path = Path(NAME(str(value))).expanduser().resolve()
        with contextlib.suppress(PermissionError):
            path.exists()  # raises if it is longer than a path can be, as code in place of a file's name is
        return path
    except (OSError, RuntimeError) as error:
        raise InvalidValue("a path", "'folder/file'", f"the path leads nowhere: {error}") from error


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not NOT_SENT.search(value)


TEXT = rule(_is_text, "a text without NUL bytes", "'text'")
NAME = rule(lambda value: _is_text(value) and value.strip(), "a text that is not empty", "'name'")
# PYTHONPATH separates folders by ':'.
FOLDER = rule(lambda value: _is_text(value) and value and ":" not in value, "a path without ':'", "'/home/me/labs'")
FLAG = rule(lambda value: isinstance(value, bool), "True or False", "True")  # a text such as "no" would count as true
SECONDS = rule(
    lambda value: _is_a(value, numbers.Real) and 0.1 <= value <= 1e8,  # which NaN is not
    "a number of seconds from 0.1 to 1e+08",
    "60",
    kept=float,
)
PORT, PROCESSES = optional(whole(1, 65535, 29500)), whole(1, 256, 1)
