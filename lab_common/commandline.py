"""The end of a command line: what ended it, in a line that says so, and the exit status."""

from __future__ import annotations

import getpass
import io
import os
import sys
from collections.abc import Callable

from lab_common import LabError
from lab_common.text import clean


def run_command(main: Callable[[], int | None]) -> int:
    """Runs a command, and returns its exit status: 130 after an interrupt, 1 after a LabError or an OSError, in words.

    It is also 1 if the reader of a pipe has gone, as with ``| head``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows what it can
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except LabError as error:
        print(clean(error), file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be written goes nowhere
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(clean(f"{where}{error.strerror or error}"), file=sys.stderr)
    return 1


def find_user() -> str:
    """Returns the user's name; a container's user may have a number alone, and then it is ``user-1234``."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"
