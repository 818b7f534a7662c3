"""Prints a line of JSON at a time on how busy a node is; also runs on Python 3.9 (:mod:`nodelaunch.transfer`).

``sampler EVERY NODE FOLDER`` prints until its standard input ends. NODE is the number that the launcher gave to the
node, and FOLDER the node's folder, in which its jobs have theirs: the processes of jobs carry both in their
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
from nodelaunch.node.processes import read_environment

PROC = Path("/proc")
GPU_FIELDS = "index,uuid,utilization.gpu,memory.used,memory.total"


def main() -> None:
    """Samples until standard input ends."""
    every, node, folder = float(sys.argv[1]), sys.argv[2], sys.argv[3]
    cores, gpus = count_cores(), {}
    threading.Thread(target=follow_gpus, args=(every, gpus), daemon=True).start()
    then, (before, _) = time.monotonic(), read_jobs(node, folder)
    while not select.select([sys.stdin], [], [], every)[0] or os.read(0, 4096):
        now, (seconds, devices) = time.monotonic(), read_jobs(node, folder)
        # A process that is new brings all its time: it began after the last reading.
        spent = sum(used - before.get(process, 0.0) for process, used in seconds.items())
        sample = {"time": time.time(), "cores": cores, "busy": min(1.0, os.getloadavg()[0] / cores)}
        if PROC.joinpath("stat").exists():
            sample["job_busy"] = min(1.0, spent / (now - then) / cores)
            memory = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
            total, free = (int(memory[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
            sample.update(memory_bytes=total - free, memory_total=total)
        chosen = None if devices is None else {name.strip() for name in devices.split(",")}
        sample["gpus"] = [gpus[index][1] for index in sorted(gpus) if chosen is None or gpus[index][0] & chosen]
        print(json.dumps(sample), flush=True)
        then, before = now, seconds


def read_jobs(node: str, folder: str) -> tuple[dict, str | None]:
    """Returns the seconds of a core that each process of a node's jobs has used, and CUDA_VISIBLE_DEVICES of them."""
    seconds, devices = {}, None
    for place in PROC.glob("[0-9]*"):
        environment = read_environment(place.name)
        ours = environment.get("LAB_JOB_FOLDER", "").startswith(f"{folder.rstrip('/')}/")
        if ours and environment.get("LAB_NODE") == node:
            with contextlib.suppress(OSError, IndexError):  # it has ended
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                # With the time of its start: the system uses numbers of processes again.
                ticks = int(fields[11]) + int(fields[12])
                seconds[place.name, fields[19]] = ticks / os.sysconf("SC_CLK_TCK")
                devices = environment.get("CUDA_VISIBLE_DEVICES", devices)
    return seconds, devices


def follow_gpus(every: float, found: dict) -> None:
    """Runs nvidia-smi if there is one, and keeps by index the names and the last sample of each GPU."""
    if program := find_smi():
        # It ends at its next line if nobody reads that any more.
        command = [program, f"--query-gpu={GPU_FIELDS}", PLAIN_ROWS, f"-lms={round(every * 1000)}"]
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **quiet)
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]" on a device that does not say
                index, uuid, busy, used, total = split_row(line)
                memory = {"memory_bytes": int(used) * 2**20, "memory_total": int(total) * 2**20}
                found[int(index)] = ({index, uuid}, {"index": int(index), "busy": int(busy) / 100, **memory})


if __name__ == "__main__":
    main()
