"""The base of local, SSH and Slurm nodes, and the link to a supervisor that runs on one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from lab_common import LabError
from lab_common.text import clean
from nodelaunch import values
from nodelaunch.node.output import read_lines


@dataclass(frozen=True, kw_only=True)
class Node(values.Checked):
    """A machine, or a part of one, on which one torchrun of a job runs.

    Besides these attributes a node has ``python``, the interpreter there, and ``folder``, the absolute folder there for
    all that is ours (``jobs/<id>``, ``code/<hash>``, ``work``).
    """

    name: str = values.checked(values.NAME)  # unique in a job
    address: str | None = None  # IPv4, by which the other nodes reach it; None if the preflight has to find it
    interface: str | None = values.checked(values.optional(values.NAME), default=None)  # None follows the route
    data: str | None = values.checked(values.optional(values.NAME), default=None)  # LAB_DATA there, if it was given
    backend: ClassVar[str] = "nodelaunch.backends.direct"  # the module that launches there, see nodelaunch.backends
    # True for this machine, whose cores and GPUs its nodes share. Such a node also has its share, see LocalNode.
    here: ClassVar[bool] = False

    @property
    def data_folder(self) -> str:
        """``LAB_DATA`` of a job there."""
        return self.data or f"{self.folder}/data"

    def name_job_folder(self, job_id: str, index: int) -> str:
        """The folder of a job there: each node has its own, as several may share a home; not so on Slurm."""
        return f"{self.folder}/jobs/{job_id}/node{index}"

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        """Starts a program there, with three pipes of bytes; the arguments are data and never code."""
        pipe = subprocess.PIPE
        # With a session of its own, so that an interrupt in the terminal reaches only the launcher.
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def explain(self, returncode: int, stderr: str) -> LabError:
        """The error of a program that could not be run there."""
        last = clean((stderr.strip().splitlines() or [f"exit status {returncode}"])[-1], 300)
        what = f"A program could not be run on {self.name[:40]}."
        fix = "see that the folder can be written to and that the disk has room (df -h), then run the job again"
        return LabError(what, where=self.folder, cause=last, fix=fix)


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Node):
    """A node whose programs run on this machine, which is the node, or shares its folder."""

    folder: str = values.checked(values.FOLDER)
    python: str = values.checked(values.NAME, default=sys.executable)


class Link(Protocol):
    """The connection to the supervisor of one node."""

    lines: Callable[[], Iterator[bytes]]  # yields what it prints, line by line, until it has ended
    beat: Callable[[], None]  # sends a heartbeat of the launcher
    stop: Callable[[], None]  # asks it to end everything
    kill: Callable[[], None]  # ends it, or the way to it, if stop() did not help; on Slurm, cancels the job
    poll: Callable[[], int | None]  # its exit status, 0 if all went well; None while it runs
    explain: Callable[[], LabError | None]  # why the link ended before it had reported its end


class PipeLink:
    """A :class:`Link` by a pipe, on this machine or through the SSH client."""

    def __init__(self, node: Node, argv: Sequence[str]) -> None:
        self._owner = node
        self._process = node.popen(argv)
        # Without a reader a chatty stderr would fill its pipe and stop the node; only its end is needed.
        self._errors: deque[bytes] = deque(maxlen=50)
        lines = read_lines(self._process.stderr, 10_000)
        self._reader = threading.Thread(target=self._errors.extend, args=[lines], daemon=True)
        self._reader.start()
        os.set_blocking(self._process.stdin.fileno(), False)

    def lines(self) -> Iterator[bytes]:
        """Yields what the supervisor prints, line by line, until it has ended."""
        yield from read_lines(self._process.stdout)
        self._process.wait()

    def beat(self) -> None:
        """Sends a heartbeat of the launcher."""
        # A full pipe (the node is stuck, or the link is down) must not stop the launcher; its lease then runs out.
        with contextlib.suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), b".")

    def stop(self) -> None:
        """Closes the supervisor's standard input, upon which it ends everything."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kills the supervisor here, whose guard ends the rest, or ssh, upon which the supervisor ends by itself."""
        self._process.kill()

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        return self._process.poll()

    def explain(self) -> LabError:
        """The reason why the node was not reached, from what ssh or Python printed."""
        self._reader.join(1.0)
        return self._owner.explain(self._process.returncode, b"".join(self._errors).decode(errors="replace"))
