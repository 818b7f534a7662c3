"""Text that others wrote, made safe to print: names of files and hosts, what a node or a team answered."""

from __future__ import annotations

import re

COLOUR = re.compile(r"\x1b\[[0-9;:]*[mK]")  # as compilers, pip and torch write them into their messages


def clean(text: object, longest: int | None = None) -> str:
    """Replaces by U+FFFD what a terminal would obey rather than show; lines stay lines.

    That is control characters, those that turn the direction of the text around, and lone surrogates.

    Args:
        text: What somebody else wrote, or any object, by its ``str``.
        longest: The most characters that are kept; a cut is shown by an ellipsis.
    """
    shown = str(text)
    if longest is not None and len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)


def clean_message(text: object) -> str:
    """Makes a program's message safe to print: as :func:`clean`, but colours are left out and tabs become blanks."""
    return clean(COLOUR.sub("", str(text)).replace("\r\n", "\n").expandtabs(4))


def clean_name(name: object, longest: int | None = None) -> str:
    """Makes a name, or whatever else belongs on one line, safe to print: as :func:`clean`, and without line breaks."""
    return clean(name, longest).replace("\n", "\N{REPLACEMENT CHARACTER}")


def cut_lines(text: str, *, first: int = 20, last: int = 80, longest: int = 500) -> str:
    """Keeps the first and the last lines of a long text, such as a traceback, and at most ``longest`` characters each.

    The number of the lines that are left out stands between them.
    """
    lines = text.split("\n")
    left = len(lines) - first - last
    if left > 0:
        lines[first:-last] = [f"({left:,} lines are left out here)"]
    return "\n".join(line if len(line) <= longest else f"{line[: longest - 1]}…" for line in lines)
