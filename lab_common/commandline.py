"""The end of a command line: what ended it, in a line that says so, and the exit status."""

from __future__ import annotations

import argparse
import getpass
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lab_common import LabError, read_path
from lab_common.text import clean


def run_command(main: Callable[[], int | None]) -> int:
    """Runs a command to its exit status. What ends it from outside is told in words: a traceback would help nobody.

    Returns:
        What ``main`` returned, None being 0; 130 after an interrupt; 1 after a LabError or an OSError, and if the
        reader of a pipe has gone, as with ``| head``.
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


def read_option(text: str) -> Path:
    """Reads an option that is a path, as :func:`lab_common.read_path`; argparse tells what is wrong with it."""
    try:
        return read_path(text)
    except LabError as error:
        raise argparse.ArgumentTypeError(f"{clean(text, 200)}: {error.cause}") from error


def find_user() -> str:
    """Returns the user's name; a container's user may have a number alone, and then it is ``user-1234``."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"
