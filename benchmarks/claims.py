"""What a benchmark claims, the table that says whether it holds, and what is kept: a file and the README's table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab_common.files import write_atomically

VERDICTS = {True: "ok", False: "BROKEN", None: "NOT MEASURED"}
# Between these two lines of the README stands what was measured last.
BEGIN, END = "<!-- BEGIN: make bench -->", "<!-- END: make bench -->"


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


def write_table(claims: Iterable[Claim], readme: Path, caption: str) -> None:
    """Writes the claims into the README, in the place of those that stand there.

    Raises:
        ValueError: The README has no two lines that say where they stand.
    """
    lines = ["| what | measured | bound |", "|---|---|---|"]
    kept = {True: "", False: ": **not kept**", None: ""}
    lines += [f"| {claim.text} | {claim.measured} | {claim.bound}{kept[claim.holds]} |" for claim in claims]
    text = readme.read_text(encoding="utf-8")
    block = "\n".join((BEGIN, caption, "", *lines, END))
    changed, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{readme.name} has no place for the table: the lines {BEGIN} and {END}")
    with write_atomically(readme, mode=readme.stat().st_mode & 0o777) as file:
        file.write(changed.encode())
