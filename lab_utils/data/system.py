"""What this package asks of the system: the command that starts this Python, and paths as a shell takes them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lab_common import LabError, checkout, env_folder
from lab_common.text import clean_name


def quote(path: object) -> str:
    """Returns a path as one word of a shell's command, in quotes and safe to print."""
    return "'" + clean_name(path).replace("'", "'\\''") + "'"


def expand(path: Path | str) -> Path:
    """Returns a path with a user's home in place of ``~``.

    Raises:
        LabError: There is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        cause, fix = f"there is no such user ({clean_name(error, 200)})", "write the path in full: /home/you/..."
        raise LabError("The path leads nowhere.", where=clean_name(path, 300), cause=cause, fix=fix) from error


def choose_root(root: Path | str | None) -> Path:
    """Returns the folder that holds data sets: a named one, else ``LAB_DATA``, else the repository's ``data/``.

    Raises:
        LabError: It begins with the home of a user that is not known, or leads in a circle.
    """
    if not root:
        return env_folder("LAB_DATA", "data")
    try:
        return expand(root).resolve()
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
