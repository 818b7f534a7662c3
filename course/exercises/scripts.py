"""Shared by the checks of a learner's script: it is there, and what it says."""

from __future__ import annotations

import ast
from pathlib import Path

from course.check import attempts
from course.check.verdicts import OpenError
from lab_common import LabError
from lab_common.files import read_bounded


def expect_scripts(*scripts: Path) -> None:
    """Checks that the files exist.

    Raises:
        LabError: One is missing.
    """
    for script in scripts:
        if not script.is_file():
            cause, fix = "a slip in the path, or the script was deleted", "make workspace writes the scripts again"
            raise LabError(f"There is no script {script.name!r}.", where=script, cause=cause, fix=fix)


def read_script(script: Path, shown: str | Path) -> ast.Module:
    """Returns the script as a tree; a SyntaxError passes through, so that the learner sees its line.

    Args:
        script: Path of the script.
        shown: The learner's name for it.

    Raises:
        OpenError: It has gaps that were not filled in.
        LabError: It cannot be read.
        SyntaxError: It is not valid Python.
    """
    try:
        text = read_bounded(script, attempts.SOURCE_BYTES).decode()
        if "\0" in text:
            raise ValueError("it holds zero bytes")
        tree = ast.parse(text, filename=str(script))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        fix = "save it as plain text in UTF-8, or rename it and run: make workspace"
        raise LabError(f"{script.name} cannot be read.", where=script, cause=cause, fix=fix) from error
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    gaps = sorted(node.lineno for node in raises if "NotImplementedError" in ast.dump(node))
    if gaps:
        fix = "put your code where it says YOUR CODE HERE, save the file, then run this cell again"
        what = f"✎ {shown} has {len(gaps)} place{'s' if len(gaps) > 1 else ''} left to fill in."
        raise OpenError(what, where=f"line {', '.join(map(str, gaps))}", fix=fix)
    return tree
