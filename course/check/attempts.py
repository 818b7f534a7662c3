"""The learner's attempts, kept beside the measurements under ``LAB_RUNS``; they never leave the machine."""

from __future__ import annotations

import ast
import contextlib
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lab_common import LabError
from lab_common.files import read_bounded
from lab_utils.timing import Records

SOURCE_BYTES = 2**20  # of a script or a card
CHECKS = "checks"  # the file of attempts and guesses of all labs, checks.jsonl


class HasPath(Protocol):
    """An answer whose source is a file, such as a fault card."""

    path: Path


Answer = Callable | str | HasPath


@dataclass(frozen=True)
class Standing:
    """A learner's standing in one exercise.

    Attributes:
        solved: True if an answer was right, now or earlier.
        wrong: Wrong answers since the last right one.
        tries: All wrong answers.
        asked: Number of times that the solution was asked for.
        answer: The source of the newest answer; "" where it is not known.
    """

    solved: bool = False
    wrong: int = 0
    tries: int = 0
    asked: int = 0
    answer: str = ""


def read_standings() -> dict[str, Standing]:
    """Returns the standing of every exercise that was tried or asked for, by its number."""
    standings: dict[str, Standing] = {}
    for record in Records(CHECKS).read("exercise", fits=_is_attempt):
        number, what, answer = record["result"]
        old = standings.get(number, Standing())
        standings[number] = {
            "right": replace(old, solved=True, wrong=0, answer=answer),
            "wrong": replace(old, wrong=old.wrong + 1, tries=old.tries + 1, answer=answer),
            "asked": replace(old, asked=old.asked + 1),
        }.get(what, old)
    return standings


def _is_attempt(result: object) -> bool:
    return isinstance(result, list) and len(result) == 3 and all(isinstance(part, str) for part in result)


def note(number: str, what: str, answer: str = "") -> None:
    """Keeps that an answer was ``right`` or ``wrong``, or that its solution was ``asked`` for.

    Lab 6 keeps ``card N`` and ``card N cause`` as numbers, too; there ``asked`` counts hints.

    A disk that is full, or not ours, must not stand between a learner and the word on the answer.
    """
    with contextlib.suppress(LabError):
        Records(CHECKS).add("exercise", [number, what, answer])


def read_source(answer: Answer) -> str:
    """Returns the source of an answer, a function, a card or the path of a script; "" where it cannot be read."""
    try:
        if isinstance(answer, type):
            return _read_class(answer)
        if callable(answer):
            return inspect.getsource(answer)
        return read_bounded(Path(getattr(answer, "path", answer)), SOURCE_BYTES).decode()
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""


def _read_class(answer: type) -> str:
    """The source of a class; ``inspect`` does not find one that a notebook's cell defines, but its methods."""
    method = _find_method(answer)
    source = "".join(inspect.findsource(method)[0]) if method else ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == answer.__name__:
            return ast.get_source_segment(source, node) or ""
    return ""


def _find_method(answer: type) -> Callable | None:
    """A function that the class itself defines."""
    return next((one for one in vars(answer).values() if inspect.isfunction(one)), None)


def find_line(error: BaseException, answer: Answer | None) -> str:
    """Returns the last line of the learner's own that an error went through; "" where it went through none.

    The cells of a notebook are files of one folder, so that a helper in another cell is the learner's, too. An error
    that came from another process has no traceback; ``course.exercises`` (ranks, messages, lab13.stopping) gives it
    its line.
    """
    if line := getattr(error, "line_of_answer", ""):
        return line
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name}, line {error.lineno}: {(error.text or '').strip()}"
    return find_own(traceback.extract_tb(error.__traceback__), answer)


def find_own(stack: traceback.StackSummary, answer: Answer | None) -> str:
    """Returns the innermost line of a stack that is the learner's own; "" where none is."""
    function = _find_method(answer) if isinstance(answer, type) else answer
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    own = Path(code.co_filename).parent if code else None
    frames = [frame for frame in stack if Path(frame.filename).parent == own]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
