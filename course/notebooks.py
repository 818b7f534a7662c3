"""Reads notebooks, whatever has become of their files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab_common import LabError
from lab_common.files import read_bounded

if TYPE_CHECKING:
    from nbformat import NotebookNode

# What stands around a solution; nbgrader knows the same markers.
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
# The labs' notebooks have less than 1 MB each.
NOTEBOOK_BYTES = 64 * 2**20


def load_notebook(path: Path) -> dict[str, Any]:
    """Returns a notebook as its JSON has it: a dictionary with the list ``cells``, and nothing else is certain.

    nbformat would take minutes to validate a large one, which a figure in it is not worth.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than ``NOTEBOOK_BYTES``.
        ValueError: It is no notebook of nbformat 4.
    """
    try:
        notebook = json.loads(read_bounded(path, NOTEBOOK_BYTES))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise ValueError("it is no notebook of nbformat 4")
    return notebook


def read_notebook(path: Path) -> NotebookNode:
    """Returns one of the pack's own notebooks, which is valid and whose cells have ids.

    Cells had none before nbformat 4.5; they get their numbers, so that the same file makes the same notebook.

    Raises:
        LabError: It cannot be read, or is not valid.
    """
    import nbformat

    try:
        content = load_notebook(path)
        if type(content.get("nbformat_minor")) is int:
            content["nbformat_minor"] = max(5, content["nbformat_minor"])
        for number, cell in enumerate(content["cells"], start=1):
            cell.setdefault("id", f"cell-{number}")
        if len({cell["id"] for cell in content["cells"]}) < len(content["cells"]):
            raise ValueError("two cells have the same id")  # nbformat would give them others at each reading
        text = json.dumps(content, ensure_ascii=False)
        text.encode()  # refuses half a character, which no file can hold
        notebook = nbformat.v4.reads(text)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat has no one exception for what is no notebook
        cause = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0][:200]
        # This file alone: the others may hold edits that are nowhere else.
        fix = f"git checkout -- {shlex.quote(str(path))}"
        raise LabError(f"{path.name} cannot be read.", where=path, cause=cause, fix=fix) from error
    return notebook
