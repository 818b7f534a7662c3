"""Prints a line of JSON at a time on how busy this machine is; also runs on Python 3.9 (:mod:`nodelaunch.program`).

``sampler EVERY NODE FOLDER`` prints until its standard input ends. NODE is the number that the launcher gave
to the node, and FOLDER the node's folder, in which its jobs have theirs: the processes of jobs carry both in their
environment, and so several nodes on one machine can be told apart, and another notebook's from this one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from lab_common.cores import count_cores
from lab_common.nvidia import PLAIN_ROWS, find_smi, split_row

PROC = Path("/proc")
ALL = "all"
GPU_FIELDS = "index,uuid,utilization.gpu,memory.used,memory.total"


def main() -> None:
    """Samples until standard input ends."""
    every, node, folder = float(sys.argv[1]), sys.argv[2], sys.argv[3]
    read = Linux(node, folder).read if (PROC / "stat").exists() else read_load
    gpus = Gpus(every)
    read()  # what counts is the difference to the reading before
    wake = time.monotonic()
    try:
        while True:
            wake = max(wake + every, time.monotonic())
            if select.select([sys.stdin], [], [], max(0.0, wake - time.monotonic()))[0] and not os.read(0, 4096):
                return
            print(json.dumps({"time": time.time(), **read(), "gpus": gpus.latest}), flush=True)
    finally:
        gpus.close()


class Linux:
    """Reads /proc: the cores that this process may use, and what of them the jobs of one node take."""

    def __init__(self, node: str, folder: str) -> None:
        self._node, self._folder = node, f"{folder.rstrip('/')}/"
        self._cores = sorted(os.sched_getaffinity(0))
        self._limit = count_cores()
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._before: tuple[float, float, dict[str, int]] = (time.monotonic(), 0.0, {})
        self._ours: dict[tuple[str, str, str], str | None] = {}

    def read(self) -> dict:
        """Returns shares of the cores, from 0 to 1, since the last reading, and memory in bytes."""
        now, busy = time.monotonic(), self._read_busy()
        ours, devices = self._read_ours()
        then, busy_then, ours_then = self._before
        self._before = (now, busy, ours)
        # A process that is new brings all its time: it began after the last reading.
        spent = sum(ticks - ours_then.get(pid, 0) for pid, ticks in ours.items())
        cores_seconds = max(now - then, 1e-3) * self._limit
        memory = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
        total, free = (int(memory[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return {
            "how": "/proc/stat",
            "cores": self._limit,
            "busy": min(1.0, (busy - busy_then) / self._ticks / cores_seconds),
            "job_busy": min(1.0, spent / self._ticks / cores_seconds),
            "memory": total - free,
            "memory_total": total,
            "devices": devices,
        }

    def _read_busy(self) -> float:
        busy = 0
        for line in (PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, (fields + ["0"] * 8)[:8])
                busy += user + nice + system + irq + softirq + steal
        return busy

    def _read_ours(self) -> tuple[dict[str, int], str | None]:
        """Returns the ticks that each process of this node's jobs has used, and the GPUs that they may see."""
        ticks, devices, known = {}, None, {}
        for folder in PROC.iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or is somebody else's
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                # exec puts the environment elsewhere in memory: with the same number, start and place it is known.
                key = (folder.name, fields[19], fields[47])
                known[key] = self._ours[key] if key in self._ours else self._find_devices(folder)
                if known[key] is not None:
                    ticks[folder.name] = int(fields[11]) + int(fields[12])
                    devices = devices if known[key] == ALL else known[key]
        self._ours = known
        return ticks, devices

    def _find_devices(self, folder: Path) -> str | None:
        """Returns CUDA_VISIBLE_DEVICES of a process of this node's jobs; None for a process that is not one."""
        text = (folder / "environ").read_bytes().decode(errors="replace")
        environment = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
        ours = environment.get("LAB_JOB_FOLDER", "").startswith(self._folder)
        if not ours or environment.get("LAB_NODE") != self._node:
            return None
        return environment.get("CUDA_VISIBLE_DEVICES", ALL)


def read_load() -> dict:
    """Returns, where there is no /proc (macOS), the load of the last minute, which is rough and comes late."""
    cores = os.cpu_count() or 1
    return {"how": "load average of the last minute", "cores": cores, "busy": min(1.0, os.getloadavg()[0] / cores)}


class Gpus:
    """The last line per GPU of an nvidia-smi that runs beside; none where there is no nvidia-smi."""

    def __init__(self, every: float) -> None:
        self._found: dict[int, dict] = {}
        self._process = None
        if program := find_smi():
            query = [f"--query-gpu={GPU_FIELDS}", PLAIN_ROWS, f"-lms={round(every * 1000)}"]
            quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen([program, *query], stdout=subprocess.PIPE, text=True, **quiet)
            threading.Thread(target=self._read, daemon=True).start()

    @property
    def latest(self) -> list[dict]:
        """Per GPU: index, uuid, busy from 0 to 1 (the share of time with any kernel running), memory in bytes."""
        return [self._found[index] for index in sorted(self._found)]

    def _read(self) -> None:
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]" on a device that does not say
                index, uuid, busy, used, total = split_row(line)
                memory = {"memory": int(used) * 2**20, "memory_total": int(total) * 2**20}
                self._found[int(index)] = {"index": int(index), "uuid": uuid, "busy": int(busy) / 100, **memory}

    def close(self) -> None:
        """Ends nvidia-smi; should we be killed before, it ends at its next line, which nobody takes."""
        if self._process:
            self._process.kill()


if __name__ == "__main__":
    main()
