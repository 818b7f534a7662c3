"""Shared helpers for the launcher's tests: a script that fails on demand, and checks of a job's leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodelaunch import JobError, TorchrunJob
from nodelaunch.backends.local import LocalNode
from nodelaunch.running import RunningJob
from nodelaunch.state import JobState

# Says "fault at <time>" and does what its first argument names; rank 1 is the one at fault. DDP only where it is tried,
# and once before the fault: the first one of a process imports for a second of a core.
TROUBLE = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import nodelaunch as launch

mode, faulty = sys.argv[1], int(os.environ["RANK"]) == 1
if mode == "once" and not faulty and os.path.exists(sys.argv[2]):
    time.sleep(1)  # the other rank is quicker, and must not call where this one listened before
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
value = torch.ones(1)
dist.all_reduce(value)
print("connected", flush=True)

def take_step(model, size=4):
    model(torch.ones(2, size)).sum().backward()

def fault():
    print(f"fault at {time.time()}", flush=True)

def hold_memory():
    return bytearray(os.urandom(1024) * 200 * 1024)

if mode == "ok":
    dist.barrier()
elif mode == "raise":
    if faulty:
        fault()
        raise ValueError("bad luck in batch 7")
    dist.all_reduce(value)
elif mode == "kill":
    if faulty:
        held = hold_memory()
        time.sleep(3)  # the supervisor looks every half second
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(value)
elif mode == "once":
    if faulty and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
elif mode == "hang":
    fault()
    if faulty:
        dist.recv(value, src=0)
    dist.all_reduce(value)
elif mode == "model":
    DDP(torch.nn.Linear(4, 4))
    fault()
    DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5 if faulty else 6)))
elif mode == "uneven":
    model = DDP(torch.nn.Linear(4, 4))
    for batch in range(3 if faulty else 4):
        if batch == 3:
            fault()
        take_step(model)
    dist.destroy_process_group()
    sys.exit()
elif mode in ("loop", "stubborn"):
    if mode == "stubborn" and faulty:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        dist.all_reduce(value)
        time.sleep(0.01)
launch.report({"rank": dist.get_rank()})
dist.destroy_process_group()
"""

# The same without torch: for a job that starts plain Pythons, where it is the launcher that is tried and not torchrun.
# Each import of torch takes seconds of a core, in each torchrun and in each rank.
PLAIN = """
import os, signal, sys, time
import nodelaunch as launch

mode, faulty = sys.argv[1], os.environ["RANK"] == "1"
print("connected")
if mode in ("raise", "exit") and faulty:
    print(f"fault at {time.time()}")
    if mode == "exit":
        sys.exit(3)
    raise ValueError("bad luck in batch 7")
if mode == "stubborn" and faulty:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while mode != "ok":
    time.sleep(0.05)
launch.report({"rank": int(os.environ["RANK"])})
"""
# Who listens, as address and port, by the processes that have this in their environment: $1.
LISTENERS = """
import glob, ipaddress, os, re, sys
mark, held, found = sys.argv[1].encode(), set(), set()
for folder in glob.glob("/proc/[0-9]*"):
    try:
        if mark in open(folder + "/environ", "rb").read().split(b"\\0"):
            held |= {os.readlink(link) for link in glob.glob(folder + "/fd/*")}
    except OSError:
        continue
for table in ("tcp", "tcp6"):
    for row in open("/proc/net/" + table).read().splitlines()[1:]:
        cells = row.split()
        if cells[3] == "0A" and f"socket:[{cells[9]}]" in held:
            address, port = cells[1].split(":")
            raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
            found.add((str(ipaddress.ip_address(raw)), int(port, 16)))
for address, port in sorted(found):
    print(address, port)
"""
PYTHON = {"program": ["python"]}
# Arguments that arrive unchanged, and of which none may make a file `canary`.
HOSTILE = ["-m", "--nnodes=9", "--", "two words", "$(touch canary)", "`touch canary`", "it's; touch canary", '"q" \\']
HOSTILE += ["a\nb", "*", "", "é✔", "-c"]


@dataclass(frozen=True)
class OddNode(LocalNode):
    """A node on this machine with settings of its own, or whose programs are run by others, such as ``sleep 60``."""

    env: dict = field(default_factory=dict)
    before: tuple = ()
    instead: tuple = ()
    cwd: str | None = None

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = self.instead or (*self.before, *argv)
        return subprocess.Popen(command, **pipes, start_new_session=True, env={**os.environ, **self.env}, cwd=self.cwd)


def make_odd(node: LocalNode, **settings: object) -> OddNode:
    """The same node, but odd."""
    return OddNode(**{**vars(node), **settings})


def hear(state: JobState, node: str, event: str, /, **facts: object) -> None:
    """Passes a node's event to a state."""
    state.read(node, f"\x1e{json.dumps({'event': event, **facts})}\n".encode())


class Launcher:
    """Another process that runs a job, in a session of its own as a kernel, and what it printed."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        args: Sequence[str],
        nodes: str,
        *,
        program: Sequence[str] = (),
        run: str = "job.run()",
    ) -> None:
        code = f"""
from nodelaunch import *
job = TorchrunJob({str(script)!r}, {list(args)}, program={list(program)}, nodes={nodes})
print('id', job.id, 'id', flush=True)
{run}
"""
        self.output = folder / "launcher.txt"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-uc", code], stdout=file, stderr=file, env=env, start_new_session=True
            )

    @property
    def job_id(self) -> str:
        return self.output.read_text().split(" id")[0].removeprefix("id ")

    def wait_for(self, text: str, count: int = 1) -> None:
        def look() -> bool:
            ended, printed = self.process.poll() is not None, self.output.read_text()
            assert not ended or printed.count(text) >= count, printed
            return printed.count(text) >= count

        wait_for(look)


@dataclass
class Heard:
    """A job's output, and actions when it prints something: {part of a line: function of the line}."""

    when: dict[str, Callable[[str], None]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        for part in [part for part in self.when if part in line]:
            self.when.pop(part)(line)

    @property
    def fault(self) -> float:
        """Time of the fault, as the script printed it."""
        return float(next(found[1] for line in self.lines if (found := re.search(r"fault at ([\d.]+)", line))))


def run_badly(
    job: TorchrunJob,
    heard: Heard,
    *,
    seconds: float,
    since: Callable[[], float] | None = None,
    gone: float = 5.0,
    **kwargs,
) -> JobError:
    """Runs a job that must fail within a given time after the fault, and checks the contract of all drills.

    One JobError: its first line short, with a fix and an existing log; none of its processes alive ``gone`` seconds
    later, on any host; its port free.
    """
    job_id = job.id
    with pytest.raises(JobError) as caught:
        job.run(show=heard, **kwargs)
    took = time.time() - (since() if since else heard.fault)
    error = caught.value
    print(f"the failure of {job_id} was told after {took:.1f} s")
    assert took < seconds, f"{took:.1f} s: {error}"
    assert_gone(job_id, gone)
    check_error(error)
    check_folder(error.result.folder)
    assert error.result.ok is False
    assert job.id == job_id != job._renew_launch().id, "the next launch must not meet what is left of this one"
    return error


def check_error(error: JobError) -> None:
    first = str(error).splitlines()[0]
    assert first == error.what
    assert len(first) <= 120, first
    assert error.fix and (error.cause or error.result.failure.traceback), str(error)
    assert "runpy" not in str(error) and "node/worker.py" not in str(error), str(error)


def check_folder(folder: Path) -> None:
    """Asserts that a job's logs exist and its port is free."""
    assert (folder / "output.log").stat().st_size > 0
    for script in folder.glob("node*.sh"):
        found = re.search(r"(?:rdzv-endpoint=|master-addr=)(127[\d.]+):?", script.read_text())
        if found:
            assert_port_free(found[1], find_port(script))


def find_port(script: Path) -> int:
    return int(re.search(r"rdzv-endpoint=[\d.]+:(\d+)|master-port=(\d+)", script.read_text()).expand(r"\1\2"))


def assert_port_free(address: str, port: int) -> None:
    def is_free() -> bool:
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what waits in TIME_WAIT is no holder
            trial.bind((address, port))
            return True
        return False

    wait_for(is_free, 2.0)  # a process that is killed closes its files a little after it has lost its environment


def list_processes(job_id: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yields process id, command line and environment of a job's processes, on this machine and its hosts."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            environ = (folder / "environ").read_bytes()
            if f"LAB_JOB_ID={job_id}".encode() in environ.split(b"\0"):
                pairs = [pair.partition("=") for pair in os.fsdecode(environ).split("\0")]
                command = os.fsdecode((folder / "cmdline").read_bytes()).replace("\0", " ")
                yield int(folder.name), command, {name: value for name, _, value in pairs}


def list_listeners(variable: str, enter: Sequence[str] = ()) -> set[tuple[str, int]]:
    """Returns address and port of each listener of the processes with a variable, as "name=value"."""
    command = [*enter, sys.executable, "-ISc", LISTENERS, variable]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return {(address, int(port)) for address, _, port in (row.partition(" ") for row in rows if row)}


@contextlib.contextmanager
def hear_listeners(variable: str) -> Iterator[set[tuple[str, int]]]:
    """Collects, while a block runs, the listeners of the processes with a variable in their environment."""
    heard, done = set(), threading.Event()

    def listen() -> None:
        while not done.wait(0.3):
            heard.update(list_listeners(variable))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield heard
    finally:
        done.set()
        thread.join()


def find_processes(job_id: str, part: str, node: int | None = None) -> list[int]:
    """Finds a job's processes by a part of their command: "node.supervisor", "node.agent", "node.worker"."""
    return [
        pid
        for pid, command, env in list_processes(job_id)
        if part in command and (part != "node.worker" or "node.agent" not in command)
        if node is None or env.get("LAB_NODE") == str(node)
    ]


def assert_gone(job_id: str, seconds: float) -> float:
    """Asserts that all processes of a job end within the given seconds; returns when they had."""
    start = time.monotonic()
    while left := [(pid, command) for pid, command, _ in list_processes(job_id)]:
        assert time.monotonic() - start < seconds, f"alive after {seconds} s: {left}"
        time.sleep(0.1)
    took = time.monotonic() - start
    print(f"nothing of {job_id} is alive after {took:.1f} s")
    return took


def wait_for(holds: Callable[[], object], seconds: float = 120.0) -> object:
    """Returns the result of ``holds`` as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return value


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Sends a signal to processes; ignores those that have already ended with the first of them."""
    first, *others = pids
    os.kill(first, number)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def when_connected(action: Callable[[], object]) -> tuple[Heard, Callable[[], float]]:
    """Runs an action once both ranks are connected; the second part returns when that was."""
    seen: list[str] = []
    times: list[float] = []

    def count(line):
        seen.append(line)
        if len(seen) == 2:
            times.append(time.time())
            action()

    heard = Heard()
    heard.when = {"[rank 0] connected": count, "[rank 1] connected": count}
    return heard, lambda: times[0]


def make_running(links: dict, state: JobState, folder: Path, say: Callable = lambda line: None, **spec) -> RunningJob:
    """A job whose supervisors are stand-ins."""
    given = {"join_timeout": 60, "limit": 60, "max_restarts": 0, "world_size": 1, "nodes": [], "program": ["python"]}
    launch, state.spec = SimpleNamespace(id="none", folder=folder), SimpleNamespace(**{**given, **spec})
    return RunningJob(launch, state, links, say=say, stop=threading.Event(), preflight=0.0)


def copy_code(job: TorchrunJob) -> None:
    """Copies the code as a launch does before it starts, for scripts that are started by hand."""
    job._copy(job._collect())
