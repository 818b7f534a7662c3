"""How many cores a program may use here. Standard library alone: it is also sent to nodes as text."""

from __future__ import annotations

import os
from pathlib import Path


def count_cores() -> float:
    """Cores that this process may use; of a container with a quota its share, which need not be whole."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, read_quota())


def read_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Returns how many cores a container may use, infinity where there is no limit."""
    try:
        quota, period = file.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return float("inf")
