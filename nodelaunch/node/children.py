"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>


def set_process(option: int, value: int) -> None:
    """Sets an attribute of this process by prctl(2), which only Linux has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a command, in its own session, that Linux kills when this process ends, even by SIGKILL.

    The command's own children do not end with it.
    """
    parent = os.getpid()

    def die_with_me() -> None:
        # Not SIGTERM, which torchrun ignores while it waits, in C, for another node.
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_me, **options
    )
