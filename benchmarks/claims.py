"""What a benchmark claims, the table that says whether it holds, and what is kept: a file and a page."""

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
    """A claim with what was measured and, in the same unit, the bound that it has to keep.

    Attributes:
        text: What was compared or timed.
        measured: The result.
        bound: What it has to keep; "" where the result is stated alone.
        holds: Whether it does; None where it cannot be measured on this machine.
        numbers: What the result was computed from, for the file.
    """

    text: str
    measured: str
    bound: str = ""
    holds: bool | None = True
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether it holds, in words; empty where there is nothing to keep."""
        return VERDICTS[self.holds] if self.bound or self.holds is None else ""


def print_table(claims: Iterable[Claim]) -> None:
    """Prints one line per claim."""
    rows = [("claim", "measured", "bound", "verdict")]
    rows += [(claim.text, claim.measured, claim.bound, claim.verdict) for claim in claims]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def save_claims(claims: Sequence[Claim], path: Path, **circumstances: object) -> None:
    """Writes claims as JSON, with the circumstances that they were measured in."""
    content = {**circumstances, "claims": [asdict(claim) | {"verdict": claim.verdict} for claim in claims]}
    with write_atomically(path) as file:
        file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def write_rows(claims: Iterable[Claim]) -> str:
    """Returns the claims as a table in Markdown."""
    rows = [f"| {claim.text} | {claim.measured} | {claim.bound}{KEPT[claim.holds]} |" for claim in claims]
    return "\n".join(["| what | measured | bound |", "|---|---|---|", *rows])


def write_block(page: Path, command: str, text: str) -> None:
    """Writes what a command measured into a page, in place of what it measured before.

    Raises:
        ValueError: The page has no two lines that say where it stands.
    """
    begin, end = f"<!-- BEGIN: {command} -->", f"<!-- END: {command} -->"
    block = "\n".join((begin, text, end))
    before = page.read_text(encoding="utf-8")
    changed, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page.name} has no place for the table: the lines {begin} and {end}")
    with write_atomically(page, mode=page.stat().st_mode & 0o777) as file:
        file.write(changed.encode())
