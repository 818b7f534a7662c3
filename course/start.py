"""Writes the first page of a learner's copy: the labs with their questions, what they take, and what is solved."""

from __future__ import annotations

import re
from pathlib import Path

from nbformat import NotebookNode

from course.check import attempts
from course.check.hints import SECOND_HINTS
from course.notebooks import read_notebook
from course.parts import PARTS
from lab_common.files import write_atomically

PAGE = "START.md"
HEAD = """# Distributed Training Labs

From one device to many nodes: in each lab you predict what a change will do, make it, and measure it on this machine.

{next}

Run a lab's cells from top to bottom with Shift+Enter. When a cell says *YOUR CODE HERE*, it is your turn: write, run
the cell again, and it answers. Stop for today whenever you like: measurements and solved exercises are kept.
"""
PART = """
## {part.title}

{part.promise}

| lab | question | minutes | memory | solved |
|---|---|---|---|---|
"""
TAIL = """
*minutes* are for reading, waiting for the cells, and the exercises. *memory* is the most that a lab took on a CPU,
together with the jobs that it starts. A kernel keeps its memory: shut it down before you begin another lab.

*Each `make lab` writes this page again. In a notebook, `check.progress()` shows at any time where you are.*
"""


def write_start(notebooks: Path, workspace: Path) -> None:
    """Writes the page; what stands in its place is ours and is replaced.

    Raises:
        LabError: A notebook cannot be read.
        OSError: The page cannot be written.
    """
    standings, rows, link = attempts.read_standings(), {}, ""
    for path in sorted(notebooks.glob("[0-9][0-9]_*.ipynb")):
        lab = int(path.name[:2])
        title, question, needs = _describe(read_notebook(path))
        numbers = [number for number in SECOND_HINTS if number.startswith(f"{lab}.")]
        solved = sum(standings.get(number, attempts.Standing()).solved for number in numbers)
        rows[lab] = f"| [{title}]({path.name}) | {question} | {needs} | {solved} of {len(numbers)} |\n"
        if not link and solved < len(numbers):
            link = f"**{'Continue' if any(standings) else 'Begin'} with [{title}]({path.name}).**"
    text = HEAD.format(next=link or "**You have solved all exercises.**")
    for part in PARTS:
        text += PART.format(part=part) + "".join(rows.get(lab, "") for lab in part.labs)
    with write_atomically(workspace / PAGE) as file:
        file.write((text + TAIL).encode())


def _describe(notebook: NotebookNode) -> tuple[str, str, str]:
    """Returns a lab's title, its question, and the cells for minutes and memory."""
    first, stored = notebook.cells[0].source, notebook.metadata.get("lab", {})
    minutes, memory = stored.get("minutes", "not known"), "not known"
    if "peak_gib" in stored:
        memory = f"{stored['peak_gib']:.1f} GiB"
    title, question = (
        found[1] if (found := re.search(pattern, first, re.MULTILINE)) else ""
        for pattern in (r"^# (.+)$", r"^\*\*(.+)\*\*$")
    )
    return title, question, f"{minutes} | {memory}"
