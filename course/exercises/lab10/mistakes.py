"""What torch says at typical mistakes of lab 10, and the hint for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from course.check.verdicts import NotYetError

# A %%px cell has these names, and a function of the notebook has not.
NAMES = {f"name '{name}' is not defined": f"{name} is dist.get_{name}()" for name in ("rank", "world_size")}


@contextmanager
def refusing_mistakes(case: str, expected: str, hints: dict[str, str]) -> Iterator[None]:
    """Refuses an answer at which torch raises one of the messages; all other errors stay as they are.

    Args:
        case: What is tried, in a few words.
        expected: What the answer should have done.
        hints: Words of a message, and the hint for it; the first that fits counts.
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
