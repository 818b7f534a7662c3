"""Benchmarks and tests for a machine with a GPU, each in its own process: ``python -m benchmarks.gpu``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from nodelaunch.node.guard import start_child

GRACE = 8.0  # seconds after an interrupt, in which pytest still writes its report
TIME_IS_UP = 75  # sysexits.h: EX_TEMPFAIL, "the user is invited to retry the operation"


def run_capped(
    command: Sequence[str], *, seconds: float, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> int | None:
    """Runs a command in its own session, and ends all its descendants when it ends or its time is up.

    Args:
        command: The program and its arguments.
        seconds: How long it may run.
        log: Receives its output, after that of earlier calls.
        env: Set in addition to this process's environment.
        cwd: Its folder; this process's if None.

    Returns:
        The exit status, negative for a signal; None if its time was up.

    Raises:
        OSError: The program cannot be started, or the log cannot be written.
        KeyboardInterrupt: The user interrupted; everything that was started has ended by then.
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
    """Interrupts a running command, waits briefly, and kills the rest of its session and of its descendants.

    A process that left the session and whose parent has already ended cannot be identified; it survives.
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
