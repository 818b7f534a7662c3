"""The end of a process that has imported torch: as Python's own, but for freeing what the system frees anyway."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Calls what is registered for the end, writes out what open files still hold, and ends.

    The interpreter's own end would free objects one by one, which takes long; and a thread of Gloo that then wants to
    call back into Python ends the process by SIGABRT ("terminate called without an active exception", tried with torch
    2.14).
    """
    atexit._run_exitfuncs()
    write_out()
    os._exit(code)


def write_out() -> None:
    """Writes out what open files still hold, as Python does when it frees them."""
    # By their types: a proxy's __class__ may import what it stands for. Text first: it writes into bytes.
    files = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    files.sort(key=lambda one: not isinstance(one, io.TextIOBase))
    for file in [*files, sys.stdout, sys.stderr]:
        try:
            if not file.closed:
                file.flush()
        except Exception as error:  # as Python does, which has nobody left to tell
            print(f"{file!r:.80}: {error}", file=sys.stderr)
