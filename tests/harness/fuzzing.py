"""Shared helpers of the fuzz tests: the seeds to try, and mutations of bytes and of JSON.

`make test` tries a few fixed seeds. `make fuzz` tries many, from a new seed each time; a failure names its seed, and
``make fuzz SEED=…`` repeats it.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from pathlib import Path

FUZZ = "LAB_FUZZ"


def choose_seeds(many: int, few: int) -> range:
    """Returns a test's seeds: ``few`` fixed ones, or in `make fuzz` ``many`` starting at ``LAB_FUZZ``."""
    start = os.environ.get(FUZZ)
    return range(int(start), int(start) + many) if start else range(few)


def mutate_bytes(content: bytes, dice: random.Random) -> bytes:
    """Returns a damaged copy: truncated, or with flipped bits, or bytes overwritten, removed, doubled or moved."""
    data = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        if not data:
            return bytes(data)
        at, size = dice.randrange(len(data)), dice.choice((1, 2, 8, 64, 512))
        match dice.randrange(7):
            case 0:
                del data[at:]
            case 1:
                data[at] ^= 1 << dice.randrange(8)
            case 2:
                data[at : at + size] = dice.randbytes(size)
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = data[at : at + size]
            case 5:
                data[at : at + size] = bytes([dice.choice((0, 255, 32, 10))]) * size
            case 6:
                other = dice.randrange(len(data))
                data[at : at + size] = data[other : other + size]
    return bytes(data)


# What a JSON file of somebody else may hold where something else was meant.
ODD_VALUES = (None, True, [], {}, "", -1, 0, 1e308, float("nan"), 10**400, "text", [1, "2", None], [[[[[]]]]])
ODD_VALUES += ({"a": {"b": {}}}, "x" * 100_000, "\ud800", "\x1b[2J\x1b]0;x\x07", "<script>x()</script>", "../../passwd")


def mutate_json(value: object, dice: random.Random, odd: Sequence[object] = ODD_VALUES) -> object:
    """Returns a copy in which one or a few places hold something odd, or are missing."""
    value = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 2, 4))):
        value = _change(value, dice, odd)
    return value


def _change(value: object, dice: random.Random, odd: Sequence[object]) -> object:
    if not isinstance(value, dict | list) or not value or dice.random() < 0.2:
        return copy.deepcopy(dice.choice(odd))
    key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
    if dice.random() < 0.2:
        del value[key]
    else:
        value[key] = _change(value[key], dice, odd)
    return value


def make_odd_file(path: Path, kind: str, beginning: bytes = b"") -> None:
    """Replaces a file by something that is not a regular file, or by a sparse one of 3 GB; the pipe has no writer."""
    match kind:
        case "a link to nothing":
            path.symlink_to(path.with_name("there is no such file"))
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "3 GB":
            with path.open("wb") as file:
                file.write(beginning)
                file.truncate(3 * 2**30)
        case _:
            raise ValueError(kind)
