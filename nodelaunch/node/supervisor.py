"""Runs a command on a node and ends it, with all its descendants, as soon as the launcher is gone.

``python -m nodelaunch.node.supervisor OPTIONS -- bash node0.sh`` stops everything when its standard input closes, when
no heartbeat has come for ``--lease`` seconds, on a signal, after ``--limit`` seconds, and when the command has ended
and left processes behind: by SIGTERM, and ``--grace`` seconds later by SIGKILL. torchrun starts every worker in a
session of its own, so that no process group holds them all: the supervisor is the "subreaper" of its descendants
(prctl(2)), to which orphans return, and walks the tree. The guard, a second process, ends them if it is killed itself.

It prints the command's and the ranks' lines within bounds (``output.py``), a rank's behind "[rank N] ", and its own as
one JSON object behind the byte 0x1e.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from nodelaunch.node import processes
from nodelaunch.node.errors import StopReason, measure_room
from nodelaunch.node.output import CHUNK, EVENT_BYTES, Lines, Output
from nodelaunch.node.processes import PR_SET_CHILD_SUBREAPER, kill_all, list_processes, set_process, start_child
from nodelaunch.node.report import EVENTS, MARK, RESULTS, SOCKET, STACKS

STOPPED_STATUS = 124


class Supervisor:
    """One command under supervision."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._options = arguments
        self._folder = Path(arguments.job_folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._guard = _start_guard()
        self._pumps: list[threading.Thread] = []
        self._events: BinaryIO | None = None  # the workers' file, once it is there
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._muted = False
        self._stopped: dict = {}  # the first reason to stop
        self._started = self._beat = time.monotonic()
        self._touched = 0
        self._passing, self._noted = threading.Lock(), Lines(EVENT_BYTES)
        self._workers: dict[int, int] = {}  # pid -> rank
        self._memory: dict[int, int] = {}  # rank -> largest resident set, bytes
        self._halted: set[int] = set()  # ranks that are stopped by a signal
        self._family: list[int] = []  # elsewhere than on Linux: what ran when the end began

    def run(self) -> int:
        """Runs the command to its end, or to a reason to stop; returns the exit status."""
        set_process(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._stop(StopReason.SIGNAL, f"signal {number}"))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        listener = self._open_socket()
        # Should the supervisor be killed, torchrun goes with it, and with torchrun its workers, which ask for the same.
        process = start_child(self._options.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._say("started")  # before the threads that pass on what the command says
        threading.Thread(target=self._live, daemon=True).start()
        self._follow(process.stdout.fileno())
        if listener:
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        while process.poll() is None and not self._stopped:
            time.sleep(0.05)
            self._pass_events()
            self._check_bounds()
            self._sample_workers()
        self._end(process)
        for pump in list(self._pumps):
            self._wait_for(pump)
        self._pass_events()
        self._hand_over()
        facts = {"reason": None, "why": "", **self._stopped, "memory": self._memory, "folder": str(self._folder)}
        self._say("ended", returncode=process.returncode, room=measure_room(self._folder), **facts)
        self._out.put(None)
        self._wait_for(writer)
        if self._stopped:
            return STOPPED_STATUS
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _wait_for(self, thread: threading.Thread) -> None:
        """Waits as long as there is something to write and somebody who reads it; not for long where it has to end."""
        end = time.monotonic() + 2.0
        while thread.is_alive() and time.monotonic() < end:
            thread.join(0.05)
            self._check_bounds()
            if self._out.qsize() and not self._stopped:
                end = time.monotonic() + 2.0

    def _stop(self, reason: StopReason, why: str) -> None:
        self._stopped = self._stopped or {"reason": reason, "why": why}

    def _check_bounds(self) -> None:
        now, lease, limit = time.monotonic(), self._options.lease, self._options.limit
        try:
            if self._is_touched() if self._options.lease_file else self._is_beaten():
                self._beat = now
        except OSError:  # the launcher has closed the connection, or taken the lease file away
            self._stop(StopReason.RELEASE, "the launcher let go")
        if now - self._beat > lease:
            self._stop(StopReason.SILENCE, f"no heartbeat of the launcher for {lease:g} s")
        if now - self._started > limit:
            self._stop(StopReason.LIMIT, f"time limit of {limit:g} s")

    def _is_touched(self) -> bool:
        """True if the lease file has changed; its clock may be another machine's."""
        # Opened, since a shared file system may answer for an unopened file from its memory.
        with Path(self._options.lease_file).open() as file:
            before, self._touched = self._touched, os.fstat(file.fileno()).st_mtime_ns
        return self._touched != before

    def _is_beaten(self) -> bool:
        """True if the launcher has sent a heartbeat to the standard input."""
        beaten = bool(select.select([0], [], [], 0)[0])
        if beaten and not os.read(0, 4096):
            raise BrokenPipeError
        return beaten

    def _live(self) -> None:
        """Signals the guard that this process is alive, from a thread that does nothing else."""
        with contextlib.suppress(OSError):
            while True:
                os.write(self._guard.stdin.fileno(), b".")
                time.sleep(1.0)

    def _open_socket(self) -> socket.socket | None:
        """Makes the socket at which ranks hand over their output; None if the file system has no sockets."""
        # Within the folder: a socket's path has to fit into some 100 bytes, which that of a job may not.
        with contextlib.suppress(OSError), contextlib.chdir(self._folder):
            listener = socket.socket(socket.AF_UNIX)
            Path(SOCKET).unlink(missing_ok=True)
            listener.bind(SOCKET)
            listener.listen()
            return listener
        return None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError, IndexError), listener.accept()[0] as link:
                said, descriptors, _, _ = socket.recv_fds(link, 100, 1)
                self._follow(descriptors[0], f"[rank {int(said)}] ".encode())
                link.send(b".")

    def _follow(self, descriptor: int, prefix: bytes = b"") -> None:
        pump = threading.Thread(target=self._pump, args=[descriptor, Output(self._pass_on, prefix)], daemon=True)
        self._pumps.append(pump)
        pump.start()

    def _pump(self, descriptor: int, output: Output) -> None:
        while True:
            piece = b""
            if select.select([descriptor], [], [], 0.5)[0]:
                piece = os.read(descriptor, CHUNK)
                if not piece:
                    break
                self._pass_events()  # what a rank noted before it printed is heard before: an error, then its traceback
            output.feed(piece)
        output.end()

    def _pass_on(self, line: bytes) -> None:
        # A job that prints faster than the launcher reads waits, as it would in a terminal.
        while self._out.qsize() > 1000 and not (self._stopped or self._muted):
            time.sleep(0.01)
        self._put(line)

    def _write(self) -> None:
        """Alone writes to the launcher: where the connection is stuck, nothing waits but this thread."""
        while line := self._out.get():
            try:
                while line:
                    line = line[os.write(1, line) :]
            except OSError:  # it is dead; the lease decides when the job ends
                self._muted = True
                return

    def _put(self, line: bytes) -> None:
        if not self._muted:
            self._out.put(line)

    def _say(self, event: str, **facts: object) -> None:
        self._put(f"{MARK}{json.dumps({'event': event, **facts})}\n".encode())

    def _pass_events(self) -> None:
        """Passes on the whole lines that the workers have added to their events file."""
        with self._passing, contextlib.suppress(FileNotFoundError):
            self._events = self._events or (self._folder / EVENTS).open("rb", buffering=0)
            while piece := self._events.read(CHUNK):
                for line in self._noted.feed(piece):
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a full disk has torn
                        facts = json.loads(line)
                        if facts["event"] == "worker":
                            self._workers[facts["pid"]] = facts["rank"]
                        self._put(MARK.encode() + line)

    def _sample_workers(self) -> None:
        """Notes how much memory each worker has, and tells when it is stopped, of which it can say nothing."""
        for pid, rank in list(self._workers.items()):  # a copy: another thread may hear of a worker meanwhile
            with contextlib.suppress(OSError, IndexError):  # gone, or a zombie, which has no memory
                status = Path(f"/proc/{pid}/status").read_text()
                halted = "\nState:\tT" in status
                if halted != (rank in self._halted):
                    self._halted ^= {rank}
                    self._say("halted", rank=rank, halted=halted)
                peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
                self._memory[rank] = max(peak, self._memory.get(rank, 0))

    def _hand_over(self) -> None:
        """Passes on each rank's stack, where it was told to end, and its result."""
        for path in sorted((self._folder / STACKS).glob("rank*.txt")):
            if text := path.read_text(errors="replace")[-20000:].strip():
                self._say("stack", rank=int(path.stem[4:]), text=text)
        for path in sorted((self._folder / RESULTS).glob("rank*.json")):
            with contextlib.suppress(ValueError):
                self._say("result", rank=int(path.stem[4:]), value=json.loads(path.read_bytes()))

    def _end(self, process: subprocess.Popen) -> None:
        """Ends all descendants: first politely, then for certain."""
        if not sys.platform.startswith("linux"):  # orphans do not return to this process there
            self._family = self._find_processes()
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + (self._options.grace if self._stopped else 1.0)
        while (process.poll() is None or self._find_processes()) and time.monotonic() < deadline:
            self._pass_events()
            time.sleep(0.02)
        kill_all(self._find_processes)
        self._family = []  # later those numbers may be another's
        process.wait()

    def _find_processes(self) -> list[int]:
        return [pid for pid in _find_descendants(self._family) if pid != self._guard.pid]

    def close(self) -> None:
        """Ends all that is left, and then the guard."""
        kill_all(self._find_processes)
        with contextlib.suppress(OSError):
            os.write(self._guard.stdin.fileno(), processes.QUIT)
        self._guard.wait()


def _start_guard() -> subprocess.Popen:
    """Starts the guard of this process's job; its environment is empty, so that it is no part of the job."""
    # The node, too: other nodes of the job may be on this machine.
    identity = [f"{name}={os.environ[name]}" for name in ("LAB_JOB_ID", "LAB_NODE") if name in os.environ]
    program = [sys.executable, "-I", "-S", processes.__file__, *identity]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, start_new_session=True)


def _find_descendants(family: Sequence[int] = ()) -> list[int]:
    """Process ids of all living descendants of this process, of the living of ``family`` and of their descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in list_processes():
        if not state.startswith("Z"):
            children.setdefault(os.getpid() if pid in family else parent, []).append(pid)
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job-folder", required=True)
    parser.add_argument("--lease-file", help="a file that the launcher touches, in place of standard input")
    for name in ("--lease", "--grace", "--limit"):
        parser.add_argument(name, type=float, required=True, help="seconds")
    parser.add_argument("command", nargs="+")
    supervisor = Supervisor(parser.parse_args())
    try:
        return supervisor.run()
    finally:
        supervisor.close()  # whatever went wrong in here, nothing of the job stays


if __name__ == "__main__":
    sys.exit(main())
