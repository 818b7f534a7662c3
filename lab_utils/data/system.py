"""What this package asks of the system: the command that starts this Python, and paths as a shell takes them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lab_common import checkout
from lab_common.text import clean_name


def quote(path: object) -> str:
    """Returns a path as one word of a shell's command, in quotes and safe to print."""
    return "'" + clean_name(path).replace("'", "'\\''") + "'"


def make_command(arguments: str) -> str:
    """Returns the line that runs a command of this package with this Python, typed in the repository's root."""
    python = Path(sys.executable or "python")
    if python.is_absolute():
        python = python.parent.resolve() / python.name  # the file itself is a link that leads out of the environment
        if python.is_relative_to(checkout()):
            python = python.relative_to(checkout())
    return f"{shlex.quote(os.fspath(python))} -m lab_utils.data {arguments}".rstrip()
