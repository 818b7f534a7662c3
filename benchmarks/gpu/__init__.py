"""What is run on a machine with a GPU, each part in a process of its own: ``python -m benchmarks.gpu``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from nodelaunch.node.children import start_child

GRACE = 8.0  # seconds after an interrupt, in which pytest still writes its report
TIME_IS_UP = 75  # sysexits.h: EX_TEMPFAIL, "the user is invited to retry the operation"


def run_capped(
    command: Sequence[str], *, seconds: float, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> int | None:
    """Runs a command in a session of its own, and ends all that it started when it ends or its time is up.

    Args:
        command: The program and its arguments.
        seconds: How long it may run.
        log: Takes what it prints; what an earlier call left there stays.
        env: Set in addition to this process's environment.
        cwd: Its folder; this process's where None.

    Returns:
        The exit status, negative for a signal; None where its time was up.

    Raises:
        OSError: The program cannot be started, or the log not be written.
        KeyboardInterrupt: The user's, once all that was started has ended.
    """
    with log.open("ab") as file:
        more = {"env": {**os.environ, **(env or {})}, "cwd": cwd, "stdout": file, "stderr": subprocess.STDOUT}
        child = start_child(command, **more)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_family(child)


def end_family(child: subprocess.Popen) -> None:
    """Interrupts a command that runs, waits a little, and kills what is left of its session and of its descendants.

    A process that left the session, and whose parent has ended before, cannot be told from others; it stays.
    """
    family: set[psutil.Process] = set()
    try:
        if child.poll() is None:
            family |= _list_family(child.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            family |= _list_family(child.pid)
    finally:  # also where the user does not wait so long, and interrupts us
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil kills no other process that has this number by now
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _list_family(pid: int) -> set[psutil.Process]:
    try:
        head = psutil.Process(pid)
        return {head, *head.children(recursive=True)}
    except psutil.Error:
        return set()
