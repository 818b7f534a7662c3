"""Checks the values that a user gives a job or a node.

They end up in scripts that bash runs. A text is quoted there by ``shlex``, whatever is in it. So it is enough that a
number is a number, that a name is a name, and that no text has what no program can be given.
"""

from __future__ import annotations

import contextlib
import ipaddress
import numbers
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path, PurePath
from typing import Any

from lab_common import LabError
from lab_common.text import clean

Check = Callable[[Any], Any]  # returns a value as it is kept, or raises InvalidValue


class InvalidValue(ValueError):
    """A value that a field does not take: what it takes, an example, and the cause if that is not the value's type."""

    def __init__(self, wanted: str, example: str, cause: str = "") -> None:
        super().__init__(wanted)
        self.wanted, self.example, self.cause = wanted, example, cause


def checked(check: Check, **options: Any) -> Any:
    """Makes a field of a frozen dataclass; :func:`check_fields` passes its value through ``check``."""
    return field(metadata={"check": check}, **options)


def check_fields(instance: Any, owner: str) -> None:
    """Checks all such fields of a frozen dataclass, from its ``__post_init__``.

    Raises:
        LabError: A field does not take its value.
    """
    for each in fields(instance):
        if check := each.metadata.get("check"):
            value = check_value(owner, each.name, getattr(instance, each.name), check)
            object.__setattr__(instance, each.name, value)


def check_value(owner: str, name: str, value: object, check: Check) -> Any:
    """Returns what a check makes of the value of a field or argument; ``owner`` is what was called.

    Raises:
        LabError: The field does not take the value.
    """
    try:
        return check(value)
    except InvalidValue as error:
        words = f"{name} is {error.wanted}, not "
        shown = clean(" ".join(reprlib.repr(value).split()), 119 - len(words))
        cause = clean(error.cause or f"the value is of the type {type(value).__name__}", 300)
        fix = clean(f"{name}={error.example}", 300)
        raise LabError(f"{words}{shown}.", where=owner, cause=cause, fix=fix) from None


def rule(
    holds: Check, wanted: str, example: str, *, cause: str = "", first: Check | None = None, kept: Check | None = None
) -> Check:
    """Makes a check out of a condition; ``wanted`` completes "<field> is …", and ``example`` is typed as in Python.

    Another check may come ``first``, and ``kept`` converts the value at last. Without a ``cause`` the value's type is
    named.
    """

    def check(value: Any) -> Any:
        value = first(value) if first else value
        if not holds(value):
            raise InvalidValue(wanted, example, cause)
        return kept(value) if kept else value

    return check


def whole(low: int, high: int, example: int) -> Check:
    """Takes a whole number in a range, ends included; NumPy's, too."""
    wanted, text = f"a whole number from {low} to {high}", str(example)
    number = rule(lambda value: _is_a(value, numbers.Integral), wanted, text, kept=int)
    return rule(lambda value: low <= value <= high, wanted, text, cause="it is out of that range", first=number)


def optional(check: Check) -> Check:
    """Takes what the given check takes, or None."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, wanted: str = "a list of texts", example: str = "['one', 'two']") -> Check:
    """Takes a list, and returns a tuple; a text is not a list of its letters."""

    def check_each(value: Any) -> tuple:
        if isinstance(value, str | PurePath):
            raise InvalidValue(wanted, f"[{str(value)!r}]", "it is one; several are named in a list")
        if not isinstance(value, Sequence):
            raise InvalidValue(wanted, example)
        try:
            return tuple(map(check, value))
        except InvalidValue as error:
            types = ", ".join(sorted({type(element).__name__ for element in value}))
            raise InvalidValue(wanted, example, error.cause or f"its elements are of the types {types}") from None

    return check_each


def check_text(value: Any) -> str:
    """Takes a text that can be an argument, a variable or a path."""
    if not isinstance(value, str):
        raise InvalidValue("a text", "'text'")
    try:
        broken = b"\0" in value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        broken = True
    if broken:
        cause = "no program can be given a NUL byte or half a character: leave it out, or pass the data in a file"
        raise InvalidValue("a text", "'text'", cause)
    return value


def check_path(value: Any) -> Path:
    """Takes a path, and returns it absolute and without links; ``~`` is a home."""
    if not isinstance(value, str | PurePath):
        raise InvalidValue("a path", "'folder/file'")
    try:
        found = Path(NAME(str(value))).expanduser().resolve()
        with contextlib.suppress(PermissionError):
            found.exists()  # raises if it is longer than a path can be, as code in place of a file's name is
        return found
    except (OSError, RuntimeError) as error:
        raise InvalidValue("a path", "'folder/file'", f"the path leads nowhere: {error}") from error


def check_address(value: Any) -> str:
    """Takes an IPv4 address."""
    try:
        return str(ipaddress.IPv4Address(check_text(value)))
    except ipaddress.AddressValueError as error:
        raise InvalidValue("an IPv4 address", "'10.0.0.11'", str(error)) from error


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


NAME = rule(str.strip, "a text that is not empty", "'name'", cause="it is empty", first=check_text)
SEPARATES = "PYTHONPATH separates folders by ':'; choose another folder=, or another LAB_RUNS"
FOLDER = rule(lambda value: ":" not in value, "a path without ':'", "'/home/me/labs'", cause=SEPARATES, first=NAME)
FLAG = rule(lambda value: isinstance(value, bool), "True or False", "True")  # a text such as "no" would count as true
SECONDS = rule(
    lambda value: _is_a(value, numbers.Real) and 0.1 <= value <= 1e8,  # which NaN is not
    "a number of seconds from 0.1 to 1e+08",
    "60",
    kept=float,
)
PORT, PROCESSES = optional(whole(1, 65535, 29500)), whole(1, 256, 1)
