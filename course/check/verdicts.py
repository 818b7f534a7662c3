"""The verdict on an answer, as the checks of all exercises give it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lab_common import LabError
from lab_common.text import clean_message


class NotYetError(LabError):
    """An answer that is not right yet: the smallest failing case, yours, expected, one hint, and more after a while."""

    def __init__(self, case: str, *, yours: object, expected: object, hint: str) -> None:
        self.yours, self.expected, self.hint, self.more = clean_message(yours), clean_message(expected), hint, ""
        super().__init__(f"✘ {case}")

    def list_hints(self) -> list[tuple[str, str]]:
        """Returns the lines below the case."""
        return [("yours", self.yours), ("expected", self.expected), ("hint", self.hint), ("more", self.more)]

    def __str__(self) -> str:
        """The message as a learner sees it: one line each, and more where a hint is longer than one."""
        texts = {name: [text] if name in ("yours", "expected") else _wrap(text) for name, text in self.list_hints()}
        shown = [(f"{name}:", "\n".ljust(13).join(text)) for name, text in texts.items() if any(text)]
        return "\n".join([self.what, *(f"  {name:<9} {text}" for name, text in shown)])


def _wrap(text: str) -> list[str]:
    """The lines of a hint: JupyterLab would break it in mid-word."""
    return textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False)


class OpenError(LabError):
    """There is nothing to check yet: a stub was not touched, or the answer stops with an error of its own."""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        title: A few words.
        verify: Takes the answer and returns the sentence that it proved.
        solve: Returns the solution for an answer's source; None where the notebooks hold it.
    """

    title: str
    verify: Callable[[Callable], str]
    solve: Callable[[str], str] | None = None


def expect(right: bool, case: str, *, yours: object, expected: object, hint: str) -> None:
    """Raises :class:`NotYetError` unless ``right``; ``case`` says what was tried, in a few words."""
    if not right:
        raise NotYetError(case, yours=yours, expected=expected, hint=hint)


@contextmanager
def refusing(
    *errors: type[Exception],
    case: str,
    expected: object,
    hint: str = "",
    hints: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Turns the ``errors`` that a library raises at a typical mistake into a :class:`NotYetError` with a hint.

    Two errors stay as they are, since they say nothing of the answer's idea: the NotImplementedError of an untouched
    stub, which is a RuntimeError, too, and a misspelt attribute. An attribute that was asked of ``None`` is refused.

    Args:
        errors: Types; without any, every Exception.
        case: What was tried, in a few words.
        expected: The expected behaviour.
        hint: For every error of these types; without it, an error that ``hints`` does not know passes.
        hints: For words of the error's message a hint of their own; the first that match count.
    """
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        if errors and not isinstance(error, errors):
            raise
        found = next((one for words, one in (hints or {}).items() if words in str(error)), hint)
        if not found or isinstance(error, NotImplementedError) or getattr(error, "obj", None) is not None:
            raise
        line = getattr(error, "line_of_answer", "")
        message = " ".join(str(error).split())[:150]
        yours = f"{type(error).__name__}: {message}{f' ({line})' if line else ''}"
        raise NotYetError(case, yours=yours, expected=expected, hint=found) from error
