"""Finds what other programs took of the processors while something was measured, and which of them took most."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from lab_common.text import clean_name

if TYPE_CHECKING:  # else only where it is used: each rank imports this module, and psutil takes some 10 ms of CPU
    import psutil


@dataclass(frozen=True)
class Usage:
    """CPU seconds until now: of all processors, of those that worked, of this process and its children, of each one."""

    total: float
    worked: float
    own: float
    processes: dict[psutil.Process, float]


def read_usage() -> Usage:
    """Reads what the processors have done until now; of the processes those that can be seen from here."""
    import psutil

    times = psutil.cpu_times()
    total = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)  # which are part of user and nice
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            processes[process] = sum(process.cpu_times()[:2])
    return Usage(total, total - times.idle - getattr(times, "iowait", 0), sum(os.times()[:4]), processes)


def find_others(before: Usage) -> tuple[float, str]:
    """The share that programs took which are not part of this measurement, as ranks on this machine are; and the one
    that took at least half of it, "" if none did or none can be seen.

    0 if a twentieth was idle, or if less than a second passed, of which the system's ticks tell little.
    """
    now = read_usage()
    ranks = [(platform.node(), os.getpid(), now.own - before.own)]
    if distributed.is_available() and distributed.is_initialized():
        ranks *= distributed.get_world_size()
        distributed.all_gather_object(ranks, ranks[0])
    ours = {pid: own for host, pid, own in ranks if host == platform.node()}
    total, worked = now.total - before.total, now.worked - before.worked
    took = worked - sum(ours.values())
    if total <= 1 or worked <= 0.95 * total or took <= 0:
        return 0.0, ""
    programs: Counter[str] = Counter()
    for process, seconds in now.processes.items():
        seconds -= before.processes.get(process, 0.0)
        if seconds > 0.01 * took and process.pid not in ours:
            programs[_describe(process)] += seconds
    name, seconds = max(programs.items(), key=lambda one: one[1], default=("", 0.0))
    return took / total, name if seconds >= took / 2 else ""


def _describe(process: psutil.Process) -> str:
    """Returns the notebook that a process was started from, which Jupyter notes in its settings; otherwise its name."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        notebook = process.environ().get("JPY_SESSION_NAME")
        if notebook and notebook != os.environ.get("JPY_SESSION_NAME"):
            return clean_name(f"the notebook {Path(notebook).name}", 60)
    with contextlib.suppress(psutil.Error):
        return clean_name(f"{process.name()} (process {process.pid})", 60)
    return "a program that has ended"
