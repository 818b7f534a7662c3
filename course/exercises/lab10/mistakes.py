"""Torch's messages for typical mistakes in lab 10, and the hint for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from course.check.verdicts import NotYetError

# A %%px cell has these names, and a function of the notebook has not.
NAMES = {f"name '{name}' is not defined": f"{name} is dist.get_{name}()" for name in ("rank", "world_size")}


@contextmanager
def refusing_mistakes(case: str, expected: str, hints: dict[str, str]) -> Iterator[None]:
    """Refuses an answer for which torch raises one of the messages; passes all other errors on.

    Args:
        case: The test case, in a few words.
        expected: The expected behaviour of the answer.
        hints: Words of a message, and the hint for it; the first match counts.
    """
    try:
        yield
    except (IndexError, NameError, RuntimeError, TypeError, ValueError) as error:
        hint = next((hint for words, hint in (NAMES | hints).items() if words in str(error)), "")
        if not hint:
            raise
        line = getattr(error, "line_of_answer", "")
        yours = f"{' '.join(str(error).split())[:150]}{f' ({line})' if line else ''}"
        raise NotYetError(case, yours=yours, expected=expected, hint=hint) from error
