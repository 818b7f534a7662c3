"""What a benchmark claims, and the table that says whether it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

VERDICTS = {True: "ok", False: "BROKEN", None: "NOT MEASURED"}


@dataclass(frozen=True)
class Claim:
    """A claim with what was measured and, in the same unit, the bound that it has to keep.

    Attributes:
        text: What was compared or timed.
        measured: The result.
        bound: What it has to keep.
        holds: Whether it does; None where it cannot be measured on this machine.
    """

    text: str
    measured: str
    bound: str
    holds: bool | None


def print_table(claims: Iterable[Claim]) -> None:
    """Prints one line per claim."""
    rows = [("claim", "measured", "bound", "verdict")]
    rows += [(claim.text, claim.measured, claim.bound, VERDICTS[claim.holds]) for claim in claims]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
