"""Checks a record that a stranger wrote: its types and ranges, its hash, and what follows from its own numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from course.race.leagues import LEAGUES
from course.race.records import FORMAT, MOST_SAMPLES, NOTHING, RECORD, RECORD_BYTES, SAMPLES, hash_record
from lab_common.files import read_bounded

Schema = dict[str, Any]
HASH = {"type": "string", "pattern": r"^[0-9a-f]{64}\Z"}
FILE = {"type": "string", "maxLength": 100, "pattern": r"^(?!\.\.?\Z)[^/\\\x00]+\Z"}  # no path
# A day; a lap ends after an hour in any case.
SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
POSITIVE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e12}
# Of numbers that are computed twice.
CLOSE = 1e-6


def _text(longest: int) -> Schema:
    return {"type": "string", "maxLength": longest}


def _count(most: int, *, least: int = 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(most: int, *items: Schema) -> Schema:
    """A list of rows; a row of several items has exactly these."""
    row = items[0] if len(items) == 1 else {"type": "array", "minItems": len(items), "maxItems": len(items)}
    # The length stands first: no time is spent on the rows of a list that is too long.
    return {"type": "array", "maxItems": most, "items": row | ({"prefixItems": items} if len(items) > 1 else {})}


def _object(**properties: Schema) -> Schema:
    """With these keys and no other: what a record holds is kept, and takes much more memory than its file has bytes."""
    rest = {"additionalProperties": False, "properties": properties}
    return {"type": "object", "required": sorted(properties)} | rest


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [{"type": "null"}, schema]}


DATA = {
    "name": _text(60),
    "source": _text(500),
    "train": _count(10**9),
    "valid": _count(10**9),
    "classes": _count(10_000),
    "sha256": HASH,
    "seed": _or_null(_count(2**64, least=0)),
    "mapping": _list(10_000, _count(10_000, least=0)),
}
PROPERTIES = dict(
    format={"const": FORMAT},
    lap=FILE,
    name=_text(60),
    began=_text(40),
    script=FILE,
    args=_list(200, _text(1000)),
    league={"enum": [*LEAGUES, ""]},
    threshold=_or_null(SHARE),
    within=_or_null(SECONDS),
    data=_object(**DATA),
    code={"type": "object", "minProperties": 1, "maxProperties": 50, "propertyNames": FILE}
    | {"additionalProperties": HASH},
    failed={"const": ""},
    weights=HASH,
    net=_text(100),
    seconds=SECONDS,
    top1=SHARE,
    reached={"type": "boolean"},
    curve=_list(1000, SECONDS, SHARE) | {"minItems": 1},
    nodes=_count(1000),
    processes=_count(100_000),
    device={"enum": ["cpu", "cuda"]},
    hardware=_text(2000),
    devices=_count(100_000),
    device_seconds=POSITIVE,
    busy=_or_null(SHARE),
    # A clock may lag behind a little.
    usage=_list(MOST_SAMPLES, {"type": "number", "minimum": -60, "maximum": 86_400}, _count(999, least=0), SHARE),
    one_node=_or_null(_object(seconds=SECONDS, top1=SHARE)),
    speed_up=_or_null(POSITIVE),
    efficiency=_or_null(POSITIVE),
    versions=_object(python=_text(100), torch=_text(100)),
    sealed={"type": "boolean"},
    previous={"anyOf": [{"const": ""}, HASH]},
    sha256=HASH,
    **{"class": _text(300)},
)
# Of a lap that did not end: nothing of what its end would tell.
FAILED = PROPERTIES | {key: {"const": value} for key, value in NOTHING.items()}
FAILED |= {"failed": _text(300), "data": _object(**DATA | {key: {"const": None} for key in ("sha256", "seed")})}


# JSON Schema counts 5.0 as an integer; the code that reads this does not.
TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=TYPES)


@cache
def _find_validator(ended: bool) -> jsonschema.protocols.Validator:
    return Validator(_object(**PROPERTIES if ended else FAILED))


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a lap and checks its format, its hash and that it lies in its own folder.

    Raises:
        OSError: There is no such file, or no regular one, or a larger one than a record.
        ValueError: It is no whole record; the message says what is wrong.
    """
    text = read_bounded(folder / RECORD, RECORD_BYTES, follow=False)
    try:
        record = json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("its record is nested too deeply") from error
    except ValueError as error:
        raise ValueError("its record is no valid JSON") from error
    if not isinstance(record, dict):
        raise ValueError("its record is no JSON object")
    if error := next(_find_validator(not record.get("failed")).iter_errors(record), None):
        key = next((str(part) for part in error.absolute_path), "")
        keys = "other keys are" if error.validator == "additionalProperties" else "keys are missing"
        what = f"{key!r} in its record is not valid" if key else f"{keys} in its record"
        raise ValueError(f"{what} (format {FORMAT})")
    if record["sha256"] != hash_record(record):
        raise ValueError("its record was changed: the hash is another one")
    if record["lap"] != folder.name:
        raise ValueError("its record is that of another lap")
    return record


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity, which Python reads though JSON has none."""
    raise ValueError(f"{name} is no JSON")


def check_numbers(record: dict[str, Any]) -> None:
    """Computes again what follows from other numbers of a record that has its format.

    Raises:
        ValueError: The record says otherwise; the message names the key.
    """
    for key, right in _compare(record):
        if not right:
            raise ValueError(f"{key!r} in its record contradicts its other values")


def _compare(record: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each key that follows from others, and whether it does."""
    seconds, top1, threshold, alone = (record[key] for key in ("seconds", "top1", "threshold", "one_node"))
    within, nodes, data, curve = (record[key] for key in ("within", "nodes", "data", "curve"))
    times = [time for time, _ in curve]
    yield "league", bool(record["league"]) == (threshold is not None) == (within is None)
    yield "mapping", sorted(data["mapping"]) == list(range(data["classes"]))
    yield "script", record["script"] in record["code"]
    if record["failed"]:
        return
    yield "seconds", within is None or seconds <= within
    yield "reached", record["reached"] == (threshold is None or top1 >= threshold)
    yield "device_seconds", _agree(record["device_seconds"], seconds * record["devices"])
    yield "one_node", alone is None or nodes > 1
    yield "speed_up", _agree(record["speed_up"], alone and alone["seconds"] / seconds)
    yield "efficiency", _agree(record["efficiency"], alone and alone["seconds"] / seconds / nodes)
    yield "curve", times == sorted(times) and curve[-1] == [seconds, top1]
    samples = Counter(node for _, node, _ in record["usage"])
    yield "usage", all(node < nodes and count <= SAMPLES for node, count in samples.items())


def _agree(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return math.isclose(said, found, rel_tol=CLOSE)
