"""Reports from a rank to its node's supervisor: its result, its events (a line of JSON each), and all that it prints.

The end of the process belongs here, too: nothing that it has written may be lost.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from lab_common import LabError
from lab_common.files import write_atomically

# Behind it, on a line of its own, a program of ours sends the launcher one JSON object, which is no output of a job.
MARK = "\x1e"
# In a job's folder on a node: the ranks' events, where each rank stood when it was ended, what each has reported, and
# the socket at which the ranks hand over what they print.
EVENTS, STACKS, RESULTS, SOCKET = "events.jsonl", "stacks", "results", "ranks.sock"
# Each rank's result goes over the connection to its node in one line.
LONGEST = 8 * 2**20


def report(value: Any) -> None:
    """Hands this rank's result to the launcher, where it becomes ``JobResult.results[rank]``; the last call counts.

    Without the launcher (``python train.py``) it is printed, so that the script runs by itself too.

    Args:
        value: Numbers, strings, and lists and dictionaries of them.

    Raises:
        LabError: JSON cannot hold the value, or it is longer than 8 MiB.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        fix = "turn tensors into numbers with .item() or .tolist()"
        what = "This result cannot be reported."
        raise LabError(what, where="nodelaunch.report", cause=str(error), fix=fix) from error
    if len(text) > LONGEST:
        fix = "report the few numbers that you compare, and write the rest to a file"
        raise LabError("This result is too long to be reported.", where=f"{len(text):,} bytes as JSON", fix=fix)
    folder = os.environ.get("LAB_JOB_FOLDER")
    if not folder:
        print(f"result: {text}")
        return
    results = Path(folder) / RESULTS
    results.mkdir(parents=True, exist_ok=True)
    with write_atomically(results / f"rank{os.environ.get('RANK', '0')}.json") as file:
        file.write(text.encode())


class Events:
    """Lines of JSON in a file that all ranks of a node append to, each in one write; nodelaunch.state reads them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank, self._file = folder / EVENTS, rank, -1

    def write(self, event: str, **facts: object) -> None:
        """Adds a line."""
        line = json.dumps({"event": event, "rank": self._rank, **facts}) + "\n"
        if self._file < 0:  # kept open: a rank that has no file left to open has to report that
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._file, line.encode())

    def introduce(self, *, pid: int, local_rank: int, processes: int) -> None:
        """Reports who this rank is, and at which port it meets the others; ``processes`` is how many the node has."""
        who = {"pid": pid, "host": socket.gethostname(), "local_rank": local_rank, "processes": processes}
        self.write("worker", **who, port=os.environ.get("MASTER_PORT"))


def open_output(folder: Path, rank: int) -> int | None:
    """Returns a descriptor for the rank's output, which the node's supervisor reads and bounds; None without one.

    torchrun would write all of it to the disk first, at the disk's speed and without end.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
        with contextlib.chdir(folder):  # see Supervisor._open_socket
            link.connect(SOCKET)
        theirs, ours = os.pipe()
        try:
            socket.send_fds(link, [str(rank).encode()], [theirs])
            link.settimeout(10.0)
            if link.recv(1):
                return ours
        finally:
            os.close(theirs)
        os.close(ours)
    return None


def leave(code: int) -> NoReturn:
    """Ends a process that has imported torch: calls what is registered for the end, and writes out open files.

    The interpreter's own end would free objects one by one, which takes long; and a thread of Gloo that then wants to
    call back into Python ends the process by SIGABRT ("terminate called without an active exception", tried with torch
    2.14).
    """
    atexit._run_exitfuncs()
    write_out()
    os._exit(code)


def write_out() -> None:
    """Writes out what open files still hold, as Python does when it frees them."""
    for one in [*gc.get_objects(), sys.stdout, sys.stderr]:
        if issubclass(type(one), io.IOBase):  # by its type: a proxy's __class__ may import what it stands for
            with contextlib.suppress(Exception):  # it is closed, or its disk is full
                one.flush()
