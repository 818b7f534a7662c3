"""How a program of ours ended where it could not say so itself: by a signal, or for want of room."""

from __future__ import annotations

import math
import signal
import time
from typing import TYPE_CHECKING

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.disks import advise_room
from nodelaunch.node.errors import FULL, name_full_disk

if TYPE_CHECKING:
    from nodelaunch.state import JobState


class EndError(LabError):
    """What is known for certain of the end of a node's program, where the node itself said nothing more.

    Attributes:
        number: The signal that ended it; 0 where none did.
        at: When this was found out, time.monotonic().
    """

    def __init__(self, what: str, *, number: int = 0, **hints: object) -> None:
        super().__init__(what, **hints)
        self.number, self.at = number, time.monotonic()


def explain_end(name: str, folder: str, returncode: int, stderr: str) -> LabError | None:
    """Says why a program of ours ended on a node: its disk is full, or a signal ended it; None for all else."""
    said = clean((stderr.strip().splitlines() or [""])[-1], 300)
    if FULL.search(stderr):
        path = name_full_disk(stderr) or folder
        what = clean(f"The disk of {name} is full at {path}", 118) + "."
        return EndError(what, where=clean(path), cause=said, fix=advise_room(path))
    if returncode < 0:
        cause, fix = explain_signal(-returncode)
        what = f"A program on {name[:60]} was ended by signal {-returncode} ({name_signal(-returncode)})."
        return EndError(what, number=-returncode, where=folder, cause=cause, fix=fix)
    return None


# Signals by which a program ends itself, or a limit ends it.
CRASHES = {
    signal.SIGABRT: ("C++ code gave up (an assertion or an exception that nobody caught)", "read its last lines"),
    signal.SIGBUS: (
        "it read memory whose file is gone or too short: a full /dev/shm, or a mapped file that was cut meanwhile",
        "num_workers=0, or more shared memory (--shm-size=2g); leave files alone that a job has mapped",
    ),
    signal.SIGSEGV: (
        "C code touched memory that is not its own: often a package built for another torch, or a recursion too deep",
        "import the packages one by one to find it; install those with C++ parts again for this torch",
    ),
    signal.SIGILL: (
        "the program has instructions that this processor lacks: it was built for a newer one",
        "install the ordinary build of the package that the traceback names",
    ),
    signal.SIGFPE: (
        "C code divided a whole number by zero",
        "look for a size or a count of 0 at the line where it stood",
    ),
    signal.SIGPIPE: (
        "it wrote to a program that had ended (`| head`)",
        "write to a file, or start it without the pipe",
    ),
    signal.SIGXCPU: ("it used up the CPU seconds that `ulimit -t` allows", "ulimit -t unlimited, or a batch system"),
    signal.SIGXFSZ: ("it wrote a file larger than `ulimit -f` allows", "ulimit -f unlimited, or smaller files"),
}


def explain_signal(number: int, last: str = "") -> tuple[str, str]:
    """The likely cause of a signal that ended a program, and what to do.

    Args:
        number: The signal.
        last: What the program printed last.
    """
    fix = "run the job again; a checkpoint lets the job go on where it was"
    if number == signal.SIGKILL:
        return "somebody sent it, or Linux did for want of memory (sudo dmesg | tail says so)", fix
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        return "somebody sent it: a kill, a batch system, or a machine that shuts down", fix
    if number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        cause = (
            "somebody sent it (Slurm's --signal before the time limit, a timer), and the script has no handler for it"
        )
        return cause, f"signal.signal(signal.{name_signal(number)}, …) in the script, before the training"
    cause, fix = CRASHES.get(number, ("it crashed in C code", "read the log: the last lines before the crash"))
    return f"{cause}; the last that it printed: {last}" if last else cause, fix


def name_signal(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def find_signalled(state: JobState, before: float = math.inf) -> tuple[str, str, int] | None:
    """The node, the program and the signal, where one of ours was ended by a signal: that of the first.

    What a signal ends at once says nothing; its end is heard of, and is certain. What is told to end says so itself,
    and may have been told because of the other: srun tells all when one has failed.

    Args:
        state: What was heard of the job.
        before: When a rank gave up waiting, time.monotonic(); who was told to end later was told because of that.
    """
    parts = [part for part in state.nodes.values() if not part.by_hand]
    lost = [part for part in parts if part.gone and part.ended is None]
    if certain := [part for part in lost if part.started and getattr(part.refusal, "number", 0)]:
        first = min(certain, key=lambda part: part.refusal.at)
        return first.name, "the supervisor", first.refusal.number
    if lost:
        return None
    for part in parts:
        if part.ended and part.ended["returncode"] < 0 and not part.ended["reason"]:
            return part.name, state.starter, -part.ended["returncode"]
    told = sorted((part.told[2], part.name, *part.told[:2]) for part in parts if part.told and part.told[2] < before)
    return told[0][1:] if told else None
