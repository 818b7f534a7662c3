"""What this package asks of the system: a lock that ends with the process, and the command that starts this Python."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lab_common import checkout
from lab_common.text import clean_name


def hold_lock(descriptor: int) -> bool:
    """Locks an open file or folder for this process alone, and returns False where the file system has no locks.

    Raises:
        BlockingIOError: Another process holds it.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # ENOLCK, EBADF, ENOTSUP: as some network file systems answer
        return False
    return True


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
