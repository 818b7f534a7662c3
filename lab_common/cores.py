"""Counts the cores that a program may use here. It also runs on nodes with Python 3.9 (:mod:`nodelaunch.transfer`)."""

from __future__ import annotations

import os
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def count_cores() -> float:
    """Cores that this process may use; of a container with a quota its share, which need not be whole."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_cpu_quota()
    return cores if quota is None else min(cores, quota)


def read_cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Returns the lowest processor quota of this process's control groups, in processors; None without one."""
    found = [text.split() for text in read_cgroup_files(root, own, "", "cpu.max")]
    # Version 1 has a file for each of the two numbers; -1 is no quota. Python 3.9's zip has no `strict`.
    quotas, periods = (read_cgroup_files(root, own, "cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    found += zip(quotas, periods)  # noqa: B905
    return min((int(quota) / int(period) for quota, period in found if quota.isdigit()), default=None)


def read_cgroup_files(root: Path, own: Path, controller: str, name: str) -> list[str]:
    """Returns the texts of a control file in this process's group and each group above it; controller "" is v2."""
    groups = {Path()}
    if own.exists():
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                group = Path(path.lstrip("/"))
                groups |= {group, *group.parents}
    # A container sees its own group as the root, and not the path that the host gives it.
    files = [root / controller / group / name for group in sorted(groups)]
    return [file.read_text().strip() for file in files if file.is_file()]
