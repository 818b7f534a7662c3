"""Says whether an exercise is solved: yours against expected, one hint, and a stable tick line when it is right.

A notebook calls ``check.exercise("1.1", answer)`` in the cell of the exercise. A right answer prints one line that says
what was proven. A wrong one stops the cell with a message in place of a traceback, so that "Run all" never goes on to
measure with it. ``NotImplementedError`` from an untouched stub, and errors of the learner's own code, pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from lab_utils import LabError


class NotYetError(LabError):
    """An answer that is not right yet: the smallest failing case, yours, expected, one hint."""

    def __init__(self, case: str, *, yours: object, expected: object, hint: str) -> None:
        super().__init__(f"✘ {case}")
        self.yours, self.expected, self.hint = str(yours), str(expected), hint

    def __str__(self) -> str:
        """The message as a learner sees it, one line each."""
        return f"{self.what}\n  yours:    {self.yours}\n  expected: {self.expected}\n  hint:     {self.hint}"


@dataclass(frozen=True)
class Exercise:
    """One exercise: its title, and the function that takes the answer and returns the sentence that it proved."""

    title: str
    verify: Callable[[Callable], str]


def expect(right: bool, case: str, *, yours: object, expected: object, hint: str) -> None:
    """Raises :class:`NotYetError` unless ``right``; ``case`` says what was tried, in a few words."""
    if not right:
        raise NotYetError(case, yours=yours, expected=expected, hint=hint)


@contextmanager
def refusing(*errors: type[Exception], case: str, expected: object, hint: str) -> Iterator[None]:
    """Turns the ``errors`` that a library raises at a typical mistake into a :class:`NotYetError` with a hint."""
    try:
        yield
    except NotImplementedError:  # a RuntimeError by birth, and here the word of an untouched stub
        raise
    except errors as error:
        yours = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise NotYetError(case, yours=yours, expected=expected, hint=hint) from error


def exercise(number: str, answer: Callable | str) -> None:
    """Checks the answer to an exercise and prints its tick line.

    Args:
        number: The exercise as the notebook counts it, for example ``"1.1"``.
        answer: What the exercise asks for: a function, or the path of a script.

    Raises:
        NotYetError: The answer is not right yet; the message shows yours, expected and one hint.
        LabError: There is no such exercise.
    """
    lab, _, _ = number.partition(".")
    try:
        exercises = import_module(f"lab_utils.check.lab{lab}").EXERCISES
        title, verify = exercises[number].title, exercises[number].verify
    except (ImportError, KeyError) as error:
        raise LabError(f"There is no exercise {number!r}.", fix="use the number in the exercise's heading") from error
    print(f"✔ {number} {title}: {verify(answer)}")
