"""What a job's supervisors have told so far, in the order in which it arrived."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from lab_common import LabError
from nodelaunch.ends import name_signal
from nodelaunch.node.errors import FULL
from nodelaunch.node.reasons import StopReason
from nodelaunch.node.supervisor import MARK
from nodelaunch.result import Rank

# Lines of a rank that are enough for a traceback.
TAIL = 60
SILENT = ("exit", "signal")  # kinds of errors of which a rank itself has said nothing
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
# How torchrun's agent reports, at once, a worker that ended badly (torch/distributed/elastic/multiprocessing/api.py).
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
# What it says at its own end, line by line, of each worker that failed; that it was told to end; and by which signal.
FAILED_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)$")
FAILED_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) \(pid: (\d+)\)")
# What NCCL's watchdog says before it aborts the process: of a rank that waited, and not of the one that it waited for.
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*")
SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


@dataclass
class NodeState:
    """One node's part.

    Attributes:
        joined: Whether its workers have started, all of them.
        ended: What the supervisor said at its end; None while it runs, and for ever where it was lost.
        gone: Whether the link has ended.
        refusal: Why it ended, where the supervisor had not said that it ends.
        tail: The last lines of torchrun itself.
        started: Whether the supervisor itself has started.
        ranks: Of the workers that have started.
        by_hand: Whether the user starts it, so that nothing is heard of it.
        told: Which of its programs a signal told to end, with the signal and when: "torchrun" or "the supervisor".
        full: What its ranks and its torchrun said of a full disk.
    """

    name: str
    address: str
    joined: bool = False
    started: bool = False
    ended: dict | None = None
    gone: bool = False
    refusal: LabError | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    ranks: set[int] = field(default_factory=set)
    by_hand: bool = False
    told: tuple[str, int, float] | None = None
    full: str = ""
    failed_rank: int | None = None


class JobState:
    """Everything that was heard of a job.

    Args:
        names: Of its nodes.
        addresses: Of its nodes.
        starter: What starts its ranks on each node, in words.
        restarts: Whether ranks may be started anew.
    """

    def __init__(
        self, names: list[str], addresses: list[str], starter: str = "torchrun", *, restarts: bool = True
    ) -> None:
        self.starter, self._restarts = starter, restarts
        self.nodes = {name: NodeState(name, address) for name, address in zip(names, addresses, strict=True)}
        self.ranks: dict[int, Rank] = {}
        self.results: dict[int, object] = {}
        self._ports: list[str | None] = []  # where the ranks of each attempt meet, in the order of their being heard
        self._last: dict[int, int] = {}  # rank -> number of the attempt in which it was last heard to start
        self._errors: list[dict] = []  # of all attempts, each with its number and the node's name
        self.stacks: dict[int, str] = {}
        self.done: dict[int, float] = {}
        self.memory: dict[int, int] = {}
        self.tails: dict[int, deque[str]] = {}  # of each rank, its last lines that are not empty
        self.waited: dict[int, str] = {}  # by rank, what NCCL's watchdog said of a collective in which it waited
        self.pids: dict[tuple[str, int], tuple[int, int]] = {}  # node and pid -> rank and attempt
        self.asked: float | None = None  # when the launcher asked all nodes to end, time.monotonic()
        self.limit: float | None = None  # the job's, in seconds, where the launcher's own clock ended it

    @property
    def errors(self) -> list[dict]:
        """Those of the attempt that was heard of last."""
        return [error for error in self._errors if error["attempt"] == self._present]

    @property
    def restarts(self) -> list[list[dict]]:
        """The errors of each earlier attempt that had some."""
        earlier = [[error for error in self._errors if error["attempt"] == one] for one in range(self._present)]
        return [errors for errors in earlier if errors]

    @property
    def _present(self) -> int:
        return max(0, len(self._ports) - 1)

    def read(self, node: str, line: bytes) -> str | None:
        """Takes in one line of a supervisor; returns it where it is a rank's output, to be shown."""
        text = line.decode(errors="replace").rstrip("\n")
        part = self.nodes[node]
        if text.startswith(MARK):
            with contextlib.suppress(ValueError):  # torn: its node was gone in mid-line
                self._read_event(part, json.loads(text[1:]))
            return None
        # First of all, for it may stand behind a rank's unfinished line, such as a bar of progress.
        if found := FAILED.search(text):
            self._read_exit(part, code=int(found[1]), pid=int(found[2]))
        if not part.full and FULL.search(text):
            part.full = text[:2000]
        rank, _, rest = text.removeprefix("[rank ").partition("] ")
        if text.startswith("[rank ") and rank.isdigit():
            if rest.strip():
                self.tails.setdefault(int(rank), deque(maxlen=TAIL)).append(rest)
            if found := WATCHDOG.search(rest):
                self._note_watchdog(int(rank), f"torch.distributed.DistBackendError: {found[0]}")
            return text
        part.tail.append(text)
        self._read_torchrun(part, text)
        return None

    def _read_torchrun(self, part: NodeState, text: str) -> None:
        """Takes in a line of torchrun about its end."""
        if found := FAILED_RANK.search(text):
            part.failed_rank = int(found[1])
        elif (found := FAILED_EXIT.search(text)) and part.failed_rank is not None:
            # Of a rank that ended before it had said who it is, this is all that is heard.
            self._read_exit(part, code=int(found[1]), pid=int(found[2]), rank=part.failed_rank)
        elif found := SIGNALLED.search(text):
            self._note_signal(part, "torchrun", int(found[1]))

    def _note_watchdog(self, rank: int, message: str) -> None:
        self.waited.setdefault(rank, message)
        for error in self.errors:  # torchrun may have been heard first
            if error["rank"] == rank and error.get("code") == -signal.SIGABRT:
                error["message"] = self.waited[rank]

    def _note_signal(self, part: NodeState, program: str, number: int) -> None:
        if part.told is None and self.asked is None:  # else it is the launcher that ends the job
            part.told = program, number, time.monotonic()

    def _read_exit(self, part: NodeState, *, code: int, pid: int, rank: int | None = None) -> None:
        """Notes a worker that ended without a word of its own: killed, or by os._exit."""
        silent = (part.name, pid) not in self.pids
        # Where lines wait, this may come when the rank has long been started anew.
        rank, attempt = self.pids.get((part.name, pid), (rank, self._present))
        if rank is None or any((error["rank"], error["attempt"]) == (rank, attempt) for error in self._errors):
            return
        if self.waited and code == -signal.SIGTERM:  # torchrun ends the others when the watchdog has aborted one
            return
        if rank in self.done and code in CRASHES:  # Gloo's threads, as the interpreter goes: the script had ended
            return
        message = f"exit status {code}" if code >= 0 else f"killed by signal {-code} ({name_signal(-code)})"
        message = self.waited.get(rank, message) if code == -signal.SIGABRT else message
        kind = "exit" if code >= 0 else "signal"
        facts = {"kind": kind, "code": code, "message": message, "traceback": "", "location": "", "rank": rank}
        self._add_error(part, facts, attempt, silent=silent)

    def _add_error(self, part: NodeState, facts: dict, attempt: int, **more: object) -> None:
        self._errors.append({**facts, "node": part.name, "attempt": attempt, "at": time.monotonic(), **more})

    def _read_event(self, part: NodeState, event: dict) -> None:
        kind = event["event"]
        if kind == "started":
            part.started = True
        elif kind == "stopping" and event["reason"] == StopReason.SIGNAL:
            self._note_signal(part, "the supervisor", event["signal"])
        elif kind == "worker":
            self._read_worker(part, event)
        elif kind in ("error", "hang"):
            # torchrun's word on the exit of the same rank says less, and may have come first.
            who = event["rank"], self._last.get(event["rank"], self._present)
            same = [error for error in self._errors if (error["rank"], error["attempt"]) == who]
            silent = [error for error in same if error["kind"] in SILENT]
            self._errors = [error for error in self._errors if error not in silent]
            facts = {"kind": "hang", "message": "", "location": "", **event}
            self._add_error(part, facts, who[1], **({"at": silent[0]["at"]} if silent else {}))
        elif kind == "result":
            self.results[event["rank"]] = event["value"]
        elif kind == "done":
            self.done[event["rank"]] = time.monotonic()
        elif kind == "stack":
            self.stacks[event["rank"]] = event["text"]
        elif kind == "ended":
            part.ended = event
            self.memory |= {int(rank): size for rank, size in event["memory"].items()}

    def _read_worker(self, part: NodeState, event: dict) -> None:
        rank, attempt = event["rank"], self._find_attempt(event)
        if self._last.setdefault(rank, attempt) != attempt:
            self._last[rank] = attempt
            self.waited.pop(rank, None)
            self.tails.pop(rank, None)
        self.done.pop(rank, None)
        facts = {key: event[key] for key in ("rank", "local_rank", "host", "pid")}
        self.ranks[rank] = Rank(node=part.name, address=part.address, **facts)
        self.pids[part.name, event["pid"]] = rank, attempt
        part.ranks.add(rank)
        part.joined = len(part.ranks) >= event["processes"]

    def _find_attempt(self, event: dict) -> int:
        """The number of the attempt in which a rank says that it has started.

        What went wrong before was mended. Which attempt that was cannot be told from the order in which the lines of
        several nodes come. Torch's TORCHELASTIC_RESTART_COUNT does not tell it: it counts what failed on its own node
        (tried with torch 2.14). Each attempt has a free port of its own, drawn at random; seldom it is one of before.
        """
        last = self._last.get(event["rank"], -1)
        if not self._restarts:
            return 0
        if last >= 0 and self.ranks[event["rank"]].pid == event["pid"]:
            return last
        port = event.get("port")
        later = [number for number, one in enumerate(self._ports) if number > last and one == port]
        if not later:
            self._ports.append(port)
            self.waited = {}
        return later[0] if later else self._present
