"""Ranks of a check's own: forks of this process that join a Gloo group, run an answer, and are ended by a time limit.

A fork has the learner's function with all that it refers to. What goes wrong there, a deadlock or an abort, ends with
the fork: the notebook's kernel and its live ranks stay as they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nodelaunch.node.children import PR_SET_PDEATHSIG, set_process

# Seconds that the ranks have for what takes milliseconds, and for their start, on a machine that does other things.
LIMIT, START = 6.0, 60.0
LONG = timedelta(minutes=5)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: What the task returned; None where it did not.
        error: The exception that it raised; a plain copy that can be sent between processes.
        line: The learner's own line that the error went through, or in which the rank stood at the limit.
        stuck: Whether it had not returned at the limit.
        number: The signal that ended it, 0 where none did.
    """

    value: Any = None
    error: Exception | None = None
    line: str = ""
    stuck: bool = False
    number: int = 0


def run_ranks(n: int, task: Callable[[int], Any], *, own: str = "", limit: float | None = None) -> list[Outcome]:
    """Runs ``task(rank)`` in ``n`` forks that are one Gloo process group; returns their outcomes by rank.

    Args:
        n: How many ranks.
        task: Runs in each of them. What it returns has to be picklable.
        own: The file of the learner's function, whose lines are named.
        limit: Seconds that the task may take, after the group was made; 6 where None.
    """
    limit = limit or LIMIT
    folder, ranks = Path(tempfile.mkdtemp(prefix="check-")), {}
    try:
        for rank in range(n):
            reader, writer = os.pipe()
            # Signals to end what this process does must not reach a fork before it is one.
            if not (pid := os.fork()):
                os.close(reader)
                _be_rank(rank, n, task, own, limit, folder, writer)
            os.close(writer)
            ranks[reader] = pid
        contents = _read_all(list(ranks), time.monotonic() + START + limit)
    finally:
        statuses = [_bury(pid) for pid in ranks.values()]
        for reader in ranks:
            os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)
    return [_read_outcome(*pair) for pair in zip(contents, statuses, strict=True)]


def _read_all(readers: list[int], deadline: float) -> list[bytes]:
    """What each of the pipes gives until its end, or the deadline."""
    contents, open_ones = dict.fromkeys(readers, b""), set(readers)
    while open_ones and (left := deadline - time.monotonic()) > 0:
        for reader in select.select(list(open_ones), [], [], left)[0]:
            if part := os.read(reader, 2**16):
                contents[reader] += part
            else:
                open_ones.discard(reader)
    return list(contents.values())


def _bury(pid: int) -> int:
    """Ends a fork that is still there, waits for its end, and returns the signal that ended it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        time.sleep(0.02)  # it has closed its pipe, and ends by itself
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _read_outcome(content: bytes, number: int) -> Outcome:
    try:
        return pickle.loads(content)
    except Exception:  # it was ended before it could write
        return Outcome(number=number or signal.SIGKILL)


def _be_rank(rank: int, n: int, task: Callable[[int], Any], own: str, limit: float, folder: Path, writer: int) -> None:
    """What a fork does; never returns."""
    try:
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook's interrupt ends the check, which ends this
        faulthandler.disable()  # an abort is an answer here
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the end of the process
        torch.set_num_threads(1)  # the threads of the process that was forked are not here
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        store = dist.FileStore(str(folder / "store"), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=LONG)
        lock, main = threading.Lock(), threading.get_ident()

        def say(outcome: Outcome) -> None:
            lock.acquire()  # for ever: one word is enough
            content = pickle.dumps(outcome)
            while content:
                content = content[os.write(writer, content) :]
            os._exit(0)

        def watch() -> None:
            time.sleep(limit)
            stack = traceback.extract_stack(sys._current_frames()[main])
            say(Outcome(line=_find_line(stack, own), stuck=True))

        threading.Thread(target=watch, daemon=True).start()
        dist.barrier()
        try:
            outcome = Outcome(value=task(rank))
            pickle.dumps(outcome)
            dist.barrier()  # who ends first must not cut the others off
        except BaseException as error:
            outcome = Outcome(error=_copy_error(error), line=_find_line(traceback.extract_tb(error.__traceback__), own))
        say(outcome)
    finally:
        os._exit(1)


def _find_line(stack: traceback.StackSummary, own: str) -> str:
    """The innermost line of the learner's own file; "" where the stack has none."""
    frames = [frame for frame in stack if own and Path(frame.filename).parent == Path(own).parent]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _copy_error(error: BaseException) -> Exception:
    with contextlib.suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if isinstance(copied, Exception):
            return copied
    return RuntimeError(f"{type(error).__name__}: {error}")
