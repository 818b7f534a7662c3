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
from nodelaunch.node.children import start_child
from nodelaunch.node.report import Events, open_output

# Seconds that the others have to end after one has failed, or after SIGTERM.
GRACE = 2.0


def main() -> int:
    """Runs the command's processes to their end; returns the exit status of the first that failed, or 0."""
    options = _read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    keep_bounds()
    processes: dict[int, subprocess.Popen] = {}
    folder = Path(os.environ["LAB_JOB_FOLDER"])
    try:
        for local_rank in range(options.nproc_per_node):
            rank = options.node_rank * options.nproc_per_node + local_rank
            processes[rank] = _start(options, rank, local_rank, folder)
        return _follow(processes, folder)
    finally:
        _end([process for process in processes.values() if process.poll() is None])


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nodelaunch.node.starter", allow_abbrev=False)
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _start(options: argparse.Namespace, rank: int, local_rank: int, folder: Path) -> subprocess.Popen:
    env = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(options.node_rank),
        "WORLD_SIZE": str(options.nnodes * options.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }
    output = open_output(folder, rank)
    events = Events(folder, rank)
    try:
        process = start_child(options.command, env=env, stdout=output, stderr=output)
    except OSError as error:
        events.introduce(pid=os.getpid(), local_rank=local_rank, processes=options.nproc_per_node)
        message = f"{options.command[0]} cannot be started: {error.strerror}"
        cause, fix = "this node has no such program, or not in its PATH", "give its path: program=['/path/to/it']"
        events.write("error", kind="exit", message=message, traceback="", location="", cause=cause, fix=fix)
        print(message, file=sys.stderr, flush=True)
        sys.exit(127)
    finally:
        if output is not None:
            os.close(output)
    events.introduce(pid=process.pid, local_rank=local_rank, processes=options.nproc_per_node)
    return process


def _follow(processes: dict[int, subprocess.Popen], folder: Path) -> int:
    """Waits until all have ended well, or one has failed; reports the end of each."""
    running = dict(processes)
    while running:
        for local_rank, (rank, process) in enumerate(processes.items()):
            if rank not in running or (code := process.poll()) is None:
                continue
            del running[rank]
            if code:
                print(f"failed (exitcode: {code}) local_rank: {local_rank} (pid: {process.pid})", flush=True)
                return code if code > 0 else 128 - code
            Events(folder, rank).write("done")
        time.sleep(0.02)
    return 0


def _end(processes: list[subprocess.Popen]) -> None:
    """Ends processes, by SIGTERM and then by SIGKILL; the supervisor ends what they started."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
