"""Finds what a state holds that no checkpoint may hold, and says what to save in its place."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import random
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath

import numpy as np
import torch

# Containers of which the entries are looked at, and values that need no look.
DICTS, LISTS = (dict, collections.OrderedDict, collections.Counter), (list, tuple, set)
PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, str, bool, complex, bytes, type(None))
# What to save in place of a value of these types: the first that fits. {} is the value as it is written.
INSTEAD: tuple[tuple[tuple[type, ...], str], ...] = (
    ((np.random.Generator,), "{}.bit_generator.state"),
    ((random.Random,), "{}.getstate()"),
    ((torch.Generator,), "{}.get_state()"),
    ((enum.Enum,), "{}.value"),
    ((argparse.Namespace, types.SimpleNamespace), "vars({})"),
    ((datetime.date, datetime.time), "{}.isoformat()"),
    ((datetime.timedelta,), "{}.total_seconds()"),
    ((decimal.Decimal, fractions.Fraction), "float({})"),
    ((PurePath, uuid.UUID, BaseException, torch.device), "str({})"),
    ((bytearray, memoryview), "bytes({})"),
    ((Mapping,), "dict({})"),
    ((str,), "str({})"),
    ((int,), "int({})"),
    ((float,), "float({})"),
    ((tuple,), "tuple({})"),
    ((Sequence, Set, collections.deque, array.array, collections.abc.ValuesView), "list({})"),
)


def find_shard(state: object, place: str = "state") -> str:
    """Returns the place of a DTensor of which this rank holds only its part; "" if there is none."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return ""
    if isinstance(state, tensors.DTensor):
        return place if state.device_mesh.size() > 1 else ""
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return next((found for key, value in entries if (found := find_shard(value, f"{place}[{key!r}]"))), "")


def find_unfit(state: object, is_fit: Callable[[bytes], bool]) -> list[tuple[str, str, str]]:
    """Returns the entries of a state that cannot be saved or loaded: their place, type, and what to save instead.

    Args:
        state: What was to be saved.
        is_fit: Says whether a file with these bytes, of torch.save, may be loaded.
    """
    try:
        found = [*_walk(state, "state", set(), is_fit)]
    except RecursionError:
        return []
    return [(place, _name_type(value), _advise(place, value)) for place, value in found]


def _walk(value: object, place: str, seen: set[int], is_fit: Callable[[bytes], bool]) -> Iterator[tuple[str, object]]:
    if type(value) in PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in DICTS:
        for key, entry in value.items():
            shown = json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)
            if _is_unfit(key, is_fit):
                yield f"a key of {place}, {shown[:40]},", key
            yield from _walk(entry, f"{place}[{shown}]", seen, is_fit)
    elif type(value) in LISTS:
        for index, entry in enumerate(value):
            yield from _walk(entry, f"{place}[{index}]", seen, is_fit)
    elif _is_unfit(value, is_fit):
        yield place, value


def _is_unfit(value: object, is_fit: Callable[[bytes], bool]) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, np.ndarray):  # known, and perhaps large
        return True
    file = io.BytesIO()
    try:
        torch.save({"value": value}, file)
    except Exception:  # whatever its __reduce__ raises
        return True
    return not is_fit(file.getvalue())


def _name_type(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _advise(place: str, value: object) -> str:
    """What to save in its place, as code; "" where it can only be left out."""
    if place.startswith("a key of"):
        place = "key"
    if isinstance(value, type):
        return f"{place}.__name__"
    if isinstance(value, np.ndarray):
        return f"torch.from_numpy({place})" if value.dtype.kind in "biufc" else f"{place}.tolist()"
    if isinstance(value, np.generic):
        plain = type(value.item())
        return f"{plain.__name__ if plain in PLAIN else 'str'}({place})"
    if dataclasses.is_dataclass(value):
        return f"dataclasses.asdict({place})"
    if callable(getattr(value, "state_dict", None)):
        return f"{place}.state_dict()"
    if callable(value) or type(value) is tuple or isinstance(value, types.ModuleType | io.IOBase):
        return ""
    fitting = (instead.format(place) for kinds, instead in INSTEAD if isinstance(value, kinds))
    return next(fitting, f"vars({place})" if hasattr(value, "__dict__") else "")
