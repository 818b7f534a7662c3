"""Forked processes with a Gloo group, which end within a time limit whatever their work does.

A fork has the learner's function with everything that it refers to. A deadlock or an abort affects only the fork: the
notebook's kernel and its live ranks stay as they are.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from course.check import attempts
from lab_common import LabError
from lab_utils.calls import count_collectives
from nodelaunch.node.processes import PR_SET_PDEATHSIG, set_process

# Seconds that the ranks have to find each other on a machine that does other things; and that the others have to say
# what they know once one rank has failed.
START, GRACE = 60.0, 1.0
LONG = 300.0  # seconds that a collective waits if the limit of the ranks is to come first
SENT = 2**16  # characters of a rank's own print() that are sent


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank.

    Attributes:
        value: The return value of its work; None if it did not return.
        error: A copy of the exception that it raised.
        line: The learner's own line that raised the error, or in which the rank was at the time limit.
        stuck: True if it had not returned at the time limit, or when it was ended because another had failed.
        number: The signal that killed it before we did; 0 if there was none.
        calls: The collectives that it had started; None if it could not report them.
        printed: Its output.
    """

    value: Any = None
    error: Exception | None = None
    line: str = ""
    stuck: bool = False
    number: int = 0
    calls: int | None = None
    printed: str = ""


def fork_ranks(
    work: Callable[[int], Any], answer: Callable | None, count: int, *, limit: float, timeout: float = LONG
) -> list[Outcome]:
    """Runs a function on ranks that are forked for it, ends them, and returns their outcomes, by rank.

    Args:
        work: Called on each rank with the rank's number; there is a Gloo group of ``count`` ranks. Its return value
            must be picklable.
        answer: The learner's function, which ``work`` calls: if it fails, the outcome has its line. None if the ranks
            run none of the learner's code.
        count: The number of ranks.
        limit: Seconds that the work may take on a rank, once the group is made.
        timeout: Seconds that a collective waits for the other ranks.

    Raises:
        LabError: A process group is open in this process.
    """
    if dist.is_initialized():
        fix = "dist.destroy_process_group(), then run the cell again"
        raise LabError("A process group is open here.", where="this kernel", fix=fix)
    ranks: list[tuple[int, Connection]] = []
    said: list[Outcome | None] = [None] * count
    with tempfile.TemporaryDirectory(prefix="lab-ranks-") as folder:
        group = {"world_size": count, "timeout": timeout}
        try:
            for rank in range(count):
                ranks.append(_fork(rank, work, answer, limit, {**group, "store": f"{folder}/store"}))
            said = _gather([pipe for _, pipe in ranks], time.monotonic() + START + limit)
        finally:
            # Those that died by themselves have a signal to tell; the others are ended.
            numbers = [_reap(pid, one) for (pid, _), one in zip(ranks, said, strict=False)]
            for _, pipe in ranks:
                pipe.close()
    return [one or Outcome(number=number, stuck=not number) for one, number in zip(said, numbers, strict=True)]


def _fork(rank: int, work: Callable, answer: Callable | None, limit: float, group: dict) -> tuple[int, Connection]:
    """Starts a rank; returns its process id and the end of the pipe on which it reports."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads. A child that hangs in a lock is ended at the limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _run_rank(rank, work, answer, limit, group, theirs)
    finally:
        os._exit(0)  # nothing of the kernel is finished here: its files, threads and sockets are the parent's


def _run_rank(rank: int, work: Callable, answer: Callable | None, limit: float, group: dict, pipe: Connection) -> None:
    # The kernel is interrupted as a group; it ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Gloo writes there, at a mismatch, what the check says in words; pytest has a traceback written.
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sys.stdout = printed = io.StringIO()
    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    lock, main = threading.Lock(), threading.get_ident()

    def say(**what: Any) -> None:
        calls = None
        with suppress(Exception):  # the group was not made
            calls = count_collectives()
        report = pickle.dumps(Outcome(**what, calls=calls, printed=printed.getvalue()[:SENT]))
        lock.acquire()  # for ever: one word is enough
        pipe.send_bytes(report)

    def watch() -> None:
        time.sleep(limit)
        stack = traceback.extract_stack(sys._current_frames()[main])
        say(line=attempts.find_own(stack, answer), stuck=True)

    try:
        _join(rank, **group)
        threading.Thread(target=watch, daemon=True).start()
        say(value=work(rank))
    except BaseException as error:
        say(error=_copy_error(error), line=attempts.find_line(error, answer))
    # Until it is ended: a rank that is gone closes its connections, while another may still be opening them.
    time.sleep(START + limit)


def _join(rank: int, world_size: int, store: str, timeout: float) -> None:
    """Makes the group; on a busy machine ranks may be late for that, but not for a collective."""
    try:
        files, start = dist.FileStore(store, world_size), timedelta(seconds=START)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=files, timeout=start)
    except RuntimeError:
        what, fix = (
            "The ranks of this check did not find each other.",
            "end what else runs here, then run the cell again",
        )
        raise LabError(what, where="this machine", fix=fix) from None
    # `dist.set_timeout` does this from torch 2.14 on.
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout))


def _copy_error(error: BaseException) -> Exception:
    """Returns the error, or one with the same text if it cannot be pickled."""
    with suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if isinstance(copied, Exception):
            return copied
    return RuntimeError(f"{type(error).__name__}: {error}")


def _gather(pipes: list[Connection], end: float) -> list[Outcome | None]:
    """Waits for each rank's report; once one has failed, only briefly for the others."""
    said: dict[Connection, Outcome | None] = dict.fromkeys(pipes)
    silent = set(pipes)
    while silent and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(silent), timeout=left):
            silent.discard(pipe)
            with suppress(EOFError, ConnectionError):  # the rank died without a word
                said[pipe] = pickle.loads(pipe.recv_bytes())
            if (outcome := said[pipe]) is None or outcome.error or outcome.stuck:
                end = min(end, time.monotonic() + GRACE)
    return list(said.values())


def _reap(pid: int, said: Outcome | None) -> int:
    """Ends and reaps a fork; returns the signal that had killed it before, or 0."""
    if not said:
        time.sleep(0.02)  # one that dies closes its pipe a moment before
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else 0
