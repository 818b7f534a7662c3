"""Writes the first page of a learner's copy: the labs with their questions, what they take, and what is solved."""

from __future__ import annotations

import re
from pathlib import Path

from course.check import LABS, attempts
from course.check.hints import SECOND_HINTS
from course.notebooks import read_notebook
from lab_common.files import write_atomically

PAGE = "START.md"
HEAD = """# Distributed Training Labs

{next}

| lab | question | minutes | memory | solved |
|---|---|---|---|---|
"""
TAIL = """
*minutes* are for reading, for waiting until the cells have run, and for the exercises. *memory* is the most that a lab
took on a CPU, together with the jobs that it starts. A kernel keeps its memory: shut it down before you begin another
lab.

Run a lab's cells from top to bottom with Shift+Enter. Where a cell says *YOUR CODE HERE*, it is your turn: write, run
the cell again, and it answers. Stop for today whenever you like: measurements and solved exercises are kept.

*This page is written anew by each `make lab`; `check.progress()` in a notebook says at any time where you stand.*
"""


def write_start(notebooks: Path, workspace: Path) -> None:
    """Writes the page; what stands in its place is ours and is replaced.

    Raises:
        LabError: A notebook cannot be read.
        OSError: The page cannot be written.
    """
    standings, rows, link = attempts.read_standings(), [], ""
    for lab, path in zip(LABS, sorted(notebooks.glob("[0-9]*.ipynb")), strict=False):
        notebook = read_notebook(path)
        first, stored = notebook.cells[0].source, notebook.metadata.get("lab", {})
        needs = f"{stored.get('minutes', 'not known')} | "
        needs += f"{stored['peak_gib']:.1f} GiB" if "peak_gib" in stored else "not known"
        title, question = (
            found[1] if (found := re.search(pattern, first, re.MULTILINE)) else ""
            for pattern in (r"^# (.+)$", r"^\*\*(.+)\*\*$")
        )
        numbers = [number for number in SECOND_HINTS if number.startswith(f"{lab}.")]
        solved = sum(standings.get(number, attempts.Standing()).solved for number in numbers)
        rows.append(f"| [{title}]({path.name}) | {question} | {needs} | {solved} of {len(numbers)} |")
        if not link and solved < len(numbers):
            link = f"**{'Go on' if any(standings) else 'Begin'} with [{title}]({path.name}).**"
    text = HEAD.format(next=link or "**All exercises are solved.**") + "\n".join(rows) + "\n" + TAIL
    with write_atomically(workspace / PAGE) as file:
        file.write(text.encode())
