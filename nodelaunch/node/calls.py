"""The call that a frame is in, by its source and the frame's variables: a function in C has no frame of its own."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import re
import types
from types import FrameType
from typing import Any

# Methods that wait for a tensor, of an object that is not known.
WAITING = ("item", "tolist", "cpu", "synchronize")


def read_call(frame: FrameType) -> str:
    """The source text of the call that a frame is in; of one that spans several lines the first."""
    return "".join(_read_lines(frame)[:1]).strip()


def calls_torch(frame: FrameType) -> bool:
    """Returns True if a frame is in a call of torch, or of one of its tensors: time.sleep(x) and others are none."""
    node = _parse(frame)
    return node is not None and _is_torchs(node, frame)


def calls_lock(frame: FrameType) -> bool:
    """Returns True if a frame waits for a lock or a SimpleQueue of Python's own, which another thread has to serve."""
    node = _parse(frame)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = None if any(one.arg == "timeout" for one in node.keywords) else node.func.value
    return node is not None and type(_find_value(node, frame)).__module__ in ("_thread", "_queue")


def _read_lines(frame: FrameType) -> list[str]:
    line, last, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or last is None:
        return []
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return [text.decode(errors="replace") for text in lines]


def _parse(frame: FrameType) -> ast.expr | None:
    try:
        return ast.parse(f"({''.join(_read_lines(frame))})", mode="eval").body
    except (SyntaxError, ValueError):  # a statement, or a script that is gone
        return None


def _is_torchs(node: ast.expr, frame: FrameType) -> bool:
    """Returns True if what an expression calls, or is, belongs to torch; what is only handed over does not count."""
    if isinstance(node, ast.Call):
        function, value = node.func, _find_value(node.func, frame)
        if isinstance(function, ast.Attribute):
            unknown = _find_value(function.value, frame) is None
            return (unknown and function.attr in WAITING) or _is_torchs(function.value, frame)
        if getattr(value, "__module__", "") == "builtins":  # float(loss)
            return any(_is_torchs(one, frame) for one in node.args)
        return _is_torchs(function, frame)
    if (value := _find_value(node, frame)) is not None:
        return _is_of_torch(value)
    return any(_is_torchs(one, frame) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))


def _find_value(node: ast.expr, frame: FrameType) -> Any:
    """The object that a name or a chain of attributes stands for, without running any code; None if not known."""
    if isinstance(node, ast.Name):
        places = (frame.f_locals, frame.f_globals, frame.f_builtins)
        return next((place[node.id] for place in places if node.id in place), None)
    if isinstance(node, ast.Attribute):
        value = inspect.getattr_static(_find_value(node.value, frame), node.attr, None)
        return None if isinstance(value, property) else value
    return None


def _is_of_torch(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        parts = value.values() if type(value) is dict else value
        return any(_is_of_torch(one) for one in itertools.islice(parts, 100))
    if isinstance(value, types.BuiltinFunctionType):  # its __self__ is a module or a class
        value = value.__self__
    if isinstance(value, types.ModuleType):
        names = [value.__name__]
    else:
        kind = value if isinstance(value, type) else type(value)
        names = [str(one.__module__) for one in kind.__mro__]
    return any(re.match(r"torch\b", name) for name in names)
