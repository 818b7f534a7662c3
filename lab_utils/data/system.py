"""What this package asks of the system: the command that starts this Python, and paths as a shell takes them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lab_common import LabError, checkout, env_folder, read_folder
from lab_common.text import clean_name


def quote(path: object) -> str:
    """Returns a path as one word of a shell's command, in quotes and safe to print."""
    return "'" + clean_name(path).replace("'", "'\\''") + "'"


def find_target(path: Path | str) -> str:
    """Returns where a symbolic link leads, safe to print; "" where there is none, or nobody can tell."""
    try:
        return clean_name(Path(path).readlink(), 300)
    except OSError:
        return ""


def choose_root(root: Path | str | None) -> Path:
    """Returns the folder that holds data sets: a named one, else ``LAB_DATA``, else the repository's ``data/``.

    Raises:
        LabError: It begins with the home of a user that is not known, leads in a circle, or is a file.
    """
    try:
        return read_folder(root or env_folder("LAB_DATA", "data")).resolve()
    except (OSError, RuntimeError) as error:  # Python before 3.13: RuntimeError
        cause, fix = f"its links lead in a circle ({clean_name(error, 200)})", "name another folder"
        raise LabError("The path leads nowhere.", where=clean_name(root, 300), cause=cause, fix=fix) from error


def make_command(arguments: str) -> str:
    """Returns the line that runs a command of this package with this Python, typed in the repository's root."""
    python = Path(sys.executable or "python")
    if python.is_absolute():
        python = python.parent.resolve() / python.name  # the file itself is a link that leads out of the environment
        if python.is_relative_to(checkout()):
            python = python.relative_to(checkout())
    return f"{shlex.quote(os.fspath(python))} -m lab_utils.data {arguments}".rstrip()
