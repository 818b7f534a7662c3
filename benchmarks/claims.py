"""Claims of a benchmark: their table of results, the file and the page that keep them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab_common.files import write_atomically

VERDICTS = {True: "ok", False: "BROKEN", None: "NOT MEASURED"}
KEPT = {True: "", False: ": **not kept**", None: ""}
PAGE = Path("docs", "performance.md")


@dataclass(frozen=True)
class Claim:
    """A claim with its measured result and, in the same unit, the bound that it has to keep.

    Attributes:
        text: What was compared or timed.
        measured: The result.
        bound: The bound to keep; "" if the result is stated alone.
        holds: True if the bound is kept; None if it cannot be measured on this machine.
        numbers: What the result was computed from, for the file.
    """

    text: str
    measured: str
    bound: str = ""
    holds: bool | None = True
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Describes in words whether the claim holds; empty if it has no bound."""
        return VERDICTS[self.holds] if self.bound or self.holds is None else ""


def print_table(claims: Iterable[Claim]) -> None:
    """Prints one line per claim."""
    rows = [("claim", "measured", "bound", "verdict")]
    rows += [(claim.text, claim.measured, claim.bound, claim.verdict) for claim in claims]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def save_claims(claims: Sequence[Claim], path: Path, **circumstances: object) -> None:
    """Writes claims as JSON, with the circumstances in which they were measured."""
    content = {**circumstances, "claims": [asdict(claim) | {"verdict": claim.verdict} for claim in claims]}
    with write_atomically(path) as file:
        # A number of NumPy, or its True, is written as Python's.
        text = json.dumps(content, indent=1, ensure_ascii=False, default=lambda value: value.item())
        file.write(f"{text}\n".encode())


def write_rows(claims: Iterable[Claim]) -> str:
    """Returns the claims as a table in Markdown."""
    rows = [f"| {claim.text} | {claim.measured} | {claim.bound}{KEPT[claim.holds]} |" for claim in claims]
    return "\n".join(["| what | measured | bound |", "|---|---|---|", *rows])


def write_block(page: Path, command: str, text: str) -> None:
    """Writes a command's results into a page, in place of its earlier ones.

    Raises:
        ValueError: The page lacks the two lines between which the results go.
    """
    begin, end = f"<!-- BEGIN: {command} -->", f"<!-- END: {command} -->"
    block = "\n".join((begin, text, end))
    before = page.read_text(encoding="utf-8")
    changed, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page.name} has no place for the table: the lines {begin} and {end}")
    with write_atomically(page, mode=page.stat().st_mode & 0o777) as file:
        file.write(changed.encode())
