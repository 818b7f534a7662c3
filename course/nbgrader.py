"""Writes the labs as nbgrader keeps a course, for one that is graded: ``python -m course.nbgrader FOLDER``.

nbgrader strips the same solutions by the same markers, and wants to know which cell is the answer and which one gives
the points: an exercise's cell becomes its answer, its check (one point) and what follows. In FOLDER then run
``nbgrader generate_assignment lab1`` and, once the work is in, ``nbgrader autograde lab1``. nbgrader itself is not a
part of the pack; it belongs in an environment with this package and its requirements.

Metadata of cells: https://nbgrader.readthedocs.io/en/stable/contributor_guide/metadata.html
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from course.notebooks import BEGIN, read_notebook
from course.workspace import FOLDERS, STUB, make_script_stub, replace_guesses
from lab_common import LabError, checkout, read_path
from lab_common.commandline import run_command

CHECK = re.compile(r'^check\.exercise\("([\d.]+)".*$', re.MULTILINE)
CONFIG = """# Written by `python -m course.nbgrader`.
c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "distributed-training-labs"
c.ClearSolutions.code_stub = {{"python": {stub!r}}}
c.ExecutePreprocessor.timeout = 900
"""


def make_source(notebook: NotebookNode, *, name: str = "the notebook") -> NotebookNode:
    """Returns a notebook with nbgrader's metadata, its solutions still in it, and without outputs.

    Raises:
        LabError: A solution is in a cell without a check; names the notebook and the cell.
    """
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            cells.append(cell)
            continue
        found = CHECK.search(cell.source)
        if found is None:
            if BEGIN in cell.source:
                cause, fix = "every solution needs a cell that gives its point", "end the cell with check.exercise(...)"
                raise LabError("A solution is not checked.", where=f"{name}, cell {cell.id}", cause=cause, fix=fix)
            cells.append(_make_cell(cell, replace_guesses(cell.source), cell.id))
            continue
        number, source = found[1].replace(".", "-"), cell.source
        before, after = source[: found.start()].rstrip("\n"), source[found.end() :].strip("\n")
        if before:
            answer = {"solution": True, "grade": False, "locked": False} if BEGIN in before else None
            cells.append(_make_cell(cell, before, cell.id, f"answer-{number}", answer))
        points = {"solution": False, "grade": True, "locked": True, "points": 1}
        cells.append(_make_cell(cell, found[0], f"{cell.id}-check", f"check-{number}", points))
        if after:
            cells.append(_make_cell(cell, after, f"{cell.id}-rest"))
    source = nbformat.from_dict({**notebook, "cells": cells})
    nbformat.validate(source)
    return source


def _make_cell(
    cell: NotebookNode, source: str, cell_id: str, grade_id: str = "", roles: dict | None = None
) -> NotebookNode:
    made = new_code_cell(source, metadata={"tags": cell.metadata.get("tags", [])}, id=cell_id)
    if roles:
        common = {"schema_version": 3, "grade_id": grade_id, "task": False, "cell_type": "code"}
        made.metadata["nbgrader"] = common | roles
    return made


def write_course(notebooks: Path, folder: Path) -> list[str]:
    """Writes ``nbgrader_config.py`` and, for each lab, ``source/labN/`` with its notebook, figures and scripts.

    Scripts are written without their solutions, since nbgrader strips notebooks only.

    Returns:
        The names of the assignments.

    Raises:
        LabError: There are no labs, or the folder has something of these names already, which is left as it is.
    """
    paths = sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise LabError("There are no labs here.", where=notebooks, cause="another folder was meant", fix="git status")
    taken = [path for path in (folder / "nbgrader_config.py", folder / "source") if path.exists()]
    if taken:
        cause, fix = "a course was written there before, and may have been changed", "name another folder"
        raise LabError("Something is there already.", where=taken[0], cause=cause, fix=fix)
    sources = {f"lab{int(path.name[:2])}": (path, make_source(read_notebook(path), name=path.name)) for path in paths}
    for assignment, (path, source) in sources.items():
        _write_assignment(folder / "source" / assignment, path, source)
    (folder / "nbgrader_config.py").write_text(CONFIG.format(stub="\n".join(STUB)), encoding="utf-8")
    return list(sources)


def _write_assignment(target: Path, path: Path, source: NotebookNode) -> None:
    target.mkdir(parents=True)
    nbformat.write(source, target / path.name)
    for name in FOLDERS:
        shutil.copytree(path.parent / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for script in (target / "scripts").glob("*.py"):
        script.write_text(make_script_stub(script.read_text(encoding="utf-8"), name=script.name), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.nbgrader", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=read_path, help="the course's folder, which nbgrader is run in")
    parser.add_argument("--notebooks", type=read_path, default=checkout() / "notebooks", help="the labs with solutions")
    chosen = parser.parse_args(arguments)

    def run() -> None:
        names = write_course(chosen.notebooks, chosen.folder)
        print(f"{', '.join(names)}: in {chosen.folder / 'source'}; next: nbgrader generate_assignment {names[0]}")

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
