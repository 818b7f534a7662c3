"""Processes that end with the one that started them, and the guard, which ends what is left of a job on a node.

The supervisor starts ``python guard.py LAB_JOB_ID=… LAB_NODE=…``, and sends heartbeats to its standard input. The
parent-death signal ends torchrun and its ranks when the supervisor is killed, but not what a rank has started. The
guard is no part of the job: it is started by its path, with an empty environment, and imports nothing of ours. Part of
the probe (:mod:`nodelaunch.node.probe`), so it runs on Python 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
# Seconds of silence after which the supervisor counts as stopped, and its word for a normal end.
SILENCE, QUIT = 15.0, b"q"


def main(identity: list[str]) -> int:
    """Waits for the supervisor's end; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while select.select([0], [], [], SILENCE)[0]:
        said = os.read(0, 4096)
        if QUIT in said:
            return 0
        if not said:
            break
    if identity:
        carried = dict(word.split("=", 1) for word in identity).items()
        kill_all(lambda: [pid for pid, _, _ in list_processes() if carried <= read_environment(pid).items()])
    return 1


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

    options.update(stdin=subprocess.DEVNULL, start_new_session=True)
    return subprocess.Popen(command, preexec_fn=die_with_me, **options)


def list_processes() -> list[tuple[int, int, str]]:
    """Process id, parent and state of every process."""
    found = []
    if Path("/proc/self").is_dir():
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                found.append((int(folder.name), int(parent), state))
        return found
    # macOS has no /proc. `ps` lists itself, too.
    lister = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,state="], stdout=subprocess.PIPE, text=True)
    rows = [line.split() for line in lister.communicate()[0].splitlines()]
    return [(int(pid), int(parent), state) for pid, parent, state, *_ in rows if int(pid) != lister.pid]


def read_environment(pid: int | str) -> dict[str, str]:
    """The variables with which a process was started; {} if it has ended, is somebody else's, or there is no /proc."""
    try:
        text = Path("/proc", str(pid), "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kills what is found, until nothing is left."""
    while left := find():
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
