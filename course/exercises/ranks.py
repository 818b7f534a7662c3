"""Ranks for a check: forked processes with a Gloo group, which end within a bounded time whatever an answer does."""

from __future__ import annotations

import builtins
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course.calls import count_collectives
from course.check import NotYetError, attempts
from lab_common import LabError
from lab_common.text import clean
from nodelaunch.node.children import PR_SET_PDEATHSIG, set_process

# Seconds: a collective waits so long for the other ranks; the ranks may take so long in all; and when one has failed,
# the others have so long to say what they know.
COLLECTIVE, LIMIT, GRACE = 5.0, 25.0, 1.0
PRINTED = 20  # lines of a rank's own print() that are shown
# What Gloo says where the ranks do not do the same.
NETWORK = ("gloo", "Timed out", "Connection closed", "Connection reset")


@dataclass(frozen=True)
class _Report:
    """What one rank says at its end."""

    value: Any = None
    error: str = ""
    message: str = ""
    line: str = ""
    calls: int = 0
    printed: str = ""


def run_on_ranks(work: Callable[[int], Any], answer: Callable, *, case: str, count: int = 2) -> list[Any]:
    """Runs a function on ranks that are forked for it, and ends them.

    Args:
        work: Called on each rank with the rank's number; there is a Gloo group of ``count`` ranks. What it returns has
            to be picklable.
        answer: The learner's function, which ``work`` calls: its lines are named where it fails.
        case: What is tried, in a few words.
        count: The number of ranks.

    Returns:
        What the ranks returned, in their order.

    Raises:
        NotYetError: The ranks waited for each other, or sent what does not fit together, or did not end.
        LabError: A process group is open in this process.
        Exception: An error of the answer, as the first rank reported it.
    """
    if dist.is_initialized():
        fix = "dist.destroy_process_group(), then run the cell again"
        raise LabError("A process group is open here.", where="this kernel", fix=fix)
    # The first optimizer, or DDP, imports hundreds of modules: once here, and not in each rank of each check.
    import torch._dynamo  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="lab-ranks-") as folder:
        store = Path(folder) / "store"
        ranks = {rank: _fork(work, answer, rank, count, store) for rank in range(count)}
        reports: dict[int, _Report] = {}
        try:
            _gather(ranks, reports)
        finally:
            for pid, pipe in ranks.values():
                pipe.close()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    _show_printed(reports)
    _judge(reports, count, case)
    return [reports[rank].value for rank in range(count)]


def _fork(work: Callable, answer: Callable, rank: int, count: int, store: Path) -> tuple[int, Connection]:
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
            _run_rank(work, answer, rank, count, store, theirs)
    finally:
        os._exit(0)  # nothing of the kernel is finished here: its files, threads and sockets are the parent's


def _run_rank(work: Callable, answer: Callable, rank: int, count: int, store: Path, pipe: Connection) -> None:
    # The kernel is interrupted as a group; it ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Gloo writes there, at a mismatch, what the check says in words; pytest has a traceback written.
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    printed, calls = io.StringIO(), 0
    with redirect_stdout(printed):
        try:
            group = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=COLLECTIVE)}
            dist.init_process_group("gloo", store=dist.FileStore(str(store), count), **group)
            value = work(rank)
            report = _Report(value, calls=count_collectives(), printed=printed.getvalue())
        except Exception as error:
            with suppress(Exception):
                calls = count_collectives()
            line = attempts.find_line(error, answer)
            report = _Report(None, type(error).__name__, str(error), line, calls, printed.getvalue())
    pipe.send_bytes(pickle.dumps(report))
    # Until it is ended: a rank that is gone closes its connections, while another may still be opening them.
    time.sleep(LIMIT)


def _gather(ranks: dict[int, tuple[int, Connection]], reports: dict[int, _Report]) -> None:
    """Waits for the reports; for those of the other ranks only shortly, where one has failed."""
    end, open_pipes = time.monotonic() + LIMIT, {pipe: rank for rank, (_, pipe) in ranks.items()}
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            rank = open_pipes.pop(pipe)
            with suppress(EOFError, ConnectionError):  # the rank died without a word
                reports[rank] = pickle.loads(pipe.recv_bytes())
            if rank not in reports or reports[rank].error:
                # A collective of the others that has lost its partner ends by its own limit at the latest.
                end = min(end, time.monotonic() + GRACE)


def _show_printed(reports: dict[int, _Report]) -> None:
    for rank, report in sorted(reports.items()):
        for line in report.printed.splitlines()[:PRINTED]:
            print(f"[rank {rank}] {clean(line, 200)}")


def _judge(reports: dict[int, _Report], count: int, case: str) -> None:
    """Raises what went wrong: first an error that is the answer's own, then what the ranks did to each other."""
    failed = {rank: report for rank, report in sorted(reports.items()) if report.error}
    for report in failed.values():
        if not any(word in report.message for word in NETWORK):
            kind = getattr(builtins, report.error, RuntimeError)
            error = (kind if issubclass(kind, Exception) else RuntimeError)(report.message)
            error.line_of_answer = report.line
            raise error
    if not failed and len(reports) == count:
        return
    expected = "every rank calls the same collectives in the same order, on tensors of equal size"
    if not failed:
        silent = ", ".join(str(rank) for rank in range(count) if rank not in reports)
        raise NotYetError(
            f"{case}: did not end",
            yours=f"rank {silent} gave no result",
            expected=expected,
            hint="a loop that does not end, a wait for what nobody sends, or tensors that differ in size or dtype",
        )
    calls = ", ".join(f"rank {rank} called {report.calls}" for rank, report in sorted(reports.items()))
    rank, report = next(iter(failed.items()))
    raise NotYetError(
        f"{case}: the ranks do not fit together",
        yours=f"{calls} collectives; rank {rank} stopped at {report.line or 'a collective'}",
        expected=expected,
        hint="look for a collective that only one rank calls, or one whose tensor differs in size or dtype",
    )
