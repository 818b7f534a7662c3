"""Starts the processes of a job without torchrun on one node, and ends all of them when one fails.

``python -m nodelaunch.node.starter OPTIONS -- COMMAND`` starts COMMAND ``--nproc-per-node`` times, each with the
variables that torchrun sets: RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Ranks are numbered in the order of the nodes. It reports to the supervisor as torchrun's workers do, and needs no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nodelaunch.node.agent import keep_bounds
from nodelaunch.node.processes import start_child
from nodelaunch.node.report import Events, open_output

# Seconds that the others have to end after one has failed, or after SIGTERM.
GRACE = 2.0


def main() -> int:
    """Runs the command's processes to their end; returns the exit status of the first that failed, or 0."""
    parser = argparse.ArgumentParser(prog="nodelaunch.node.starter", allow_abbrev=False)
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    keep_bounds()
    processes: list[subprocess.Popen] = []
    try:
        for local_rank in range(options.nproc_per_node):
            processes.append(_start(options, local_rank))
        return _follow(processes, options.node_rank * options.nproc_per_node)
    finally:
        _end(processes)


def _start(options: argparse.Namespace, local_rank: int) -> subprocess.Popen:
    rank, folder = options.node_rank * options.nproc_per_node + local_rank, Path(os.environ["LAB_JOB_FOLDER"])
    told = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": options.node_rank,
        "WORLD_SIZE": options.nnodes * options.nproc_per_node,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
    }
    env = os.environ | {name: str(value) for name, value in told.items()}
    env.pop("PYTHONSAFEPATH", None)
    output, events = open_output(folder, rank), Events(folder, rank)
    who = {"local_rank": local_rank, "processes": options.nproc_per_node}
    try:
        process = start_child(options.command, env=env, stdout=output, stderr=output)
    except OSError as error:
        events.introduce(pid=os.getpid(), **who)
        message = f"{options.command[0]} cannot be started: {error.strerror}"
        cause, fix = "this node has no such program, or not in its PATH", "give its path: program=['/path/to/it']"
        events.write("error", kind="exit", message=message, traceback="", location="", cause=cause, fix=fix)
        sys.exit(message)
    if output is not None:
        os.close(output)
    events.introduce(pid=process.pid, **who)
    return process


def _follow(processes: list[subprocess.Popen], first: int) -> int:
    """Waits until all have ended well, or one has failed; reports the end of each, by the rank of the first one."""
    running = list(enumerate(processes))
    while running:
        for local_rank, process in list(running):
            if process.poll() is None:
                continue
            running.remove((local_rank, process))
            if code := process.returncode:
                print(f"failed (exitcode: {code}) local_rank: {local_rank} (pid: {process.pid})", flush=True)
                return code if code > 0 else 128 - code
            Events(Path(os.environ["LAB_JOB_FOLDER"]), first + local_rank).write("done")
        time.sleep(0.02)
    return 0


def _end(processes: list[subprocess.Popen]) -> None:
    """Ends processes, by SIGTERM and then by SIGKILL; the supervisor ends what they started."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + GRACE
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
