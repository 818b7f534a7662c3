"""Collects what the supervisors of a job have reported so far.

A supervisor passes on what torchrun and the ranks print (a rank's lines begin with "[rank N] "), and events: one JSON
object each, behind MARK. All but the first and the last are about one rank, which is in their field ``rank``:

=========== ============================================== ========================================================
event       fields                                         meaning
=========== ============================================== ========================================================
started                                                    the supervisor runs
worker      pid, host, local_rank, processes, port         a rank has started, one of so many on its node
error       kind, message, traceback, location,            its script raised, or ended itself with an exit status
            disk, file, cause, fix
groups      sizes                                          the sizes of the process groups that it has opened
elsewhere                                                  it joins the others by means that are not seen
still       inside, where, seconds, timeout, …             its main thread stands (nodelaunch.node.watch says where)
moves                                                      the main thread moves again
halted      halted                                         the process is stopped (SIGSTOP), or goes on
done        believed, advice                               its script has ended; what it took for its place among all
lingers                                                    threads of the script still run
left                                                       they have ended, too
stack       text                                           where its threads stood when it was ended
result      value                                          what it gave to ``nodelaunch.report``
ended       returncode, reason, why, memory, folder, room  the supervisor has ended; its reason, if it ended the rest
=========== ============================================== ========================================================
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lab_common import LabError
from lab_common.text import clean_message
from nodelaunch.node.errors import FULL, StopReason
from nodelaunch.node.report import MARK
from nodelaunch.result import Rank
from nodelaunch.spec import JobSpec

TAIL = 60  # lines of a rank, which are enough for a traceback
SILENT = ("exit", "signal")  # kinds of errors of which the rank itself said nothing
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
# How torchrun's agent reports, at once, a worker that ended badly (torch/distributed/elastic/multiprocessing/api.py).
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
# The last words of NCCL's watchdog before it aborts the process: a rank that waited, and not the one it waited for.
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*")


@dataclass
class NodeState:
    """One node's part of a job."""

    name: str
    address: str
    by_hand: bool = False  # the user starts the node, so that nothing is heard of it
    started: bool = False  # the supervisor itself
    joined: bool = False  # all of its workers have started
    ended: dict | None = None  # the supervisor's last event; None while it runs, and forever if it was lost
    gone: bool = False  # the link has ended
    refusal: LabError | None = None  # why the link ended, if the supervisor had not reported its end
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))  # the last lines of torchrun itself
    full: str = ""  # a line of its ranks or of torchrun about a full disk


@dataclass
class RankState:
    """One rank's part of a job, since it was started last."""

    done: bool = False  # its script has ended
    lingers: bool = False  # its script has ended, while threads of it still run
    halted: bool = False  # stopped by SIGSTOP
    still: dict | None = None  # the event about its main thread, while that stands, and when it came (`at`)
    groups: list[int] | None = None  # the sizes of its process groups; None if it may have formed one unseen
    believed: list[str] = field(default_factory=list)  # what a script that opened no group of all ranks took for true
    advice: str = ""
    stack: str = ""  # where it stood when it was ended
    waited: str = ""  # the words of NCCL's watchdog about a collective in which the rank waited
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))  # its last lines that are not empty
    result: object = None  # what it gave to nodelaunch.report


class JobState:
    """The reports of the supervisors of a job, whose nodes have these names and addresses."""

    def __init__(self, names: list[str], addresses: list[str], spec: JobSpec | None = None) -> None:
        self.spec, self.launched_at = spec, time.monotonic()
        self.nodes = {name: NodeState(name, address) for name, address in zip(names, addresses, strict=True)}
        self.ranks: dict[int, Rank] = {}  # those that have started
        # Grows at each look, and also has ranks of which only a line was heard.
        self.rank_states: dict[int, RankState] = defaultdict(RankState)
        self.memory: dict[int, int] = {}  # by rank, the largest resident set in bytes
        # Why the launcher ended the job, if it did, and when it asked all nodes to end (time.monotonic()).
        self.reason: StopReason | None = None
        self.asked: float | None = None
        # torchrun's attempts: where the ranks of each one meet, in the order in which we heard of them; the errors of
        # all (the fields of the event, and `node`, `attempt`, `at`); and the last attempt in which a rank has started.
        self._ports: list[str | None] = []
        self._errors: list[dict] = []
        self._last: dict[int, int] = {}
        self._pids: dict[tuple[str, int], tuple[int, int]] = {}  # node and pid -> rank and attempt

    @property
    def errors(self) -> list[dict]:
        """The errors of the latest attempt."""
        return [error for error in self._errors if error["attempt"] == self._attempt]

    @property
    def restarts(self) -> list[list[dict]]:
        """The errors of each earlier attempt that had some."""
        earlier = [[error for error in self._errors if error["attempt"] == one] for one in range(self._attempt)]
        return [errors for errors in earlier if errors]

    @property
    def _attempt(self) -> int:
        return max(0, len(self._ports) - 1)

    def find_ranks(self, holds: Callable[[RankState], object]) -> list[int]:
        """Returns the ranks of which something holds."""
        return sorted(rank for rank, one in self.rank_states.items() if holds(one))

    @property
    def still(self) -> dict[int, dict]:
        """By rank, the facts about a main thread that stands."""
        return {rank: self.rank_states[rank].still for rank in self.find_ranks(lambda one: one.still)}

    @property
    def stacks(self) -> dict[int, str]:
        """By rank, where it stood when it was ended."""
        return {rank: self.rank_states[rank].stack for rank in self.find_ranks(lambda one: one.stack)}

    @property
    def waiting(self) -> list[int]:
        """The ranks that stand in torch.distributed, and have for as long as the job's ``hang_timeout``."""
        return self.find_ranks(lambda one: one.still and one.still["inside"])

    @property
    def busy(self) -> list[int]:
        """The ranks that do something else, and may come to the others."""
        return sorted(set(self.ranks) - {*self.waiting, *self.find_ranks(lambda one: one.halted or one.done)})

    def list_missing(self) -> list[str]:
        """Returns the nodes that have not joined; those that were not even started, if there are some."""
        parts = self.nodes.values()
        return [part.name for part in parts if not part.started] or [part.name for part in parts if not part.joined]

    def stands_still(self) -> bool:
        """True if no rank can move any more, since each waits for another one, or for a thread that waits."""
        if not all(part.joined for part in self.nodes.values()) or self.busy:
            return False
        lingering = [one for one in self.rank_states.values() if one.lingers]
        idle = bool(lingering) and all(one.still and one.still.get("idle") for one in lingering)
        return bool(self.waiting) or (idle and all(self.rank_states[rank].done for rank in self.ranks))

    def read(self, node: str, line: bytes) -> str | None:
        """Takes in one line of a supervisor; returns it if it is a rank's output, to be shown."""
        text = line.decode(errors="replace").rstrip("\n")
        part = self.nodes[node]
        if text.startswith(MARK):
            with contextlib.suppress(ValueError):  # torn: its node was gone in mid-line
                self._read_event(part, json.loads(text[1:]))
            return None
        # First of all, for it may stand behind a rank's unfinished line, such as a progress bar.
        if found := FAILED.search(text):
            self._read_exit(part, code=int(found[1]), pid=int(found[2]))
        if not part.full and FULL.search(text):
            part.full = text[:2000]
        rank, _, rest = text.removeprefix("[rank ").partition("] ")
        if not (text.startswith("[rank ") and rank.isdigit()):
            part.tail.append(text if text.isprintable() else clean_message(text))
            return None
        one = self.rank_states[int(rank)]
        if rest.strip():
            one.tail.append(rest if rest.isprintable() else clean_message(rest))  # each line comes here
        if (found := WATCHDOG.search(rest)) and not one.waited:
            one.waited = f"torch.distributed.DistBackendError: {found[0]}"
            for error in self.errors:  # torchrun may have been heard first
                if error["rank"] == int(rank) and error.get("code") == -signal.SIGABRT:
                    error["message"] = one.waited
        return text

    def _read_exit(self, part: NodeState, *, code: int, pid: int) -> None:
        """Notes a worker that ended without reporting an error itself: killed, or by os._exit."""
        # If lines wait on their node, this may come when the rank has long been restarted.
        rank, attempt = self._pids.get((part.name, pid), (None, 0))
        if rank is None or any((error["rank"], error["attempt"]) == (rank, attempt) for error in self._errors):
            return
        one, waited = self.rank_states[rank], self.find_ranks(lambda one: one.waited)
        hangs = waited or any("Timed out waiting" in error["message"] for error in self.errors)
        if hangs and code == -signal.SIGTERM:  # torchrun ends the others when one has given up waiting
            return
        if one.done and code in CRASHES:  # Gloo's threads, as the interpreter goes: the script had ended
            return
        kind, message = "exit", f"exit status {code}"
        if code < 0:
            kind, message = "signal", f"killed by signal {-code} ({SIGNAL_NAMES.get(-code, 'unknown')})"
        if one.waited and code == -signal.SIGABRT:
            message = one.waited
        facts = {"kind": kind, "code": code, "message": message, "traceback": "", "location": "", "rank": rank}
        self._add_error(part, facts, attempt)

    def _add_error(self, part: NodeState, facts: dict, attempt: int, **more: object) -> None:
        self._errors.append({**facts, "node": part.name, "attempt": attempt, "at": time.monotonic(), **more})

    def _read_event(self, part: NodeState, event: dict) -> None:
        one = self.rank_states[event["rank"]] if "rank" in event else RankState()
        match event["event"]:
            case "started":
                part.started = True
            case "worker":
                self._read_worker(part, event)
            case "error":
                self._read_error(part, event)
            case "groups":
                one.groups = event["sizes"]
            case "elsewhere":
                one.groups = one.groups or None
            case "still":
                one.still = {**event, "at": time.monotonic()}
            case "moves":
                one.still = None
            case "halted":
                one.halted = event["halted"]
            case "done":
                one.done, one.still = True, None
                one.believed, one.advice = event.get("believed", []), event.get("advice", "")
            case "lingers" | "left" as name:
                one.lingers = name == "lingers"
            case "stack":
                one.stack = event["text"]
            case "result":
                one.result = event["value"]
            case "ended":
                part.ended = event
                self.memory |= {int(number): size for number, size in event["memory"].items()}

    def _read_error(self, part: NodeState, event: dict) -> None:
        # torchrun's word on the exit of the same rank says less, and may have come first.
        who = event["rank"], self._last.get(event["rank"], self._attempt)
        same = [error for error in self._errors if (error["rank"], error["attempt"]) == who]
        silent = [error for error in same if error["kind"] in SILENT]
        self._errors = [error for error in self._errors if error not in silent]
        facts = event | {name: clean_message(event.get(name, "")) for name in ("message", "traceback")}
        self._add_error(part, facts, who[1], **({"at": silent[0]["at"]} if silent else {}))

    def _read_worker(self, part: NodeState, event: dict) -> None:
        rank, attempt = event["rank"], self._find_attempt(event)
        if self._last.setdefault(rank, attempt) != attempt:
            self._last[rank], self.rank_states[rank] = attempt, RankState()
        facts = {key: event[key] for key in ("rank", "local_rank", "host", "pid")}
        self.ranks[rank] = Rank(node=part.name, address=part.address, **facts)
        self._pids[part.name, event["pid"]] = rank, attempt
        part.joined = sum(one.node == part.name for one in self.ranks.values()) >= event["processes"]

    def _find_attempt(self, event: dict) -> int:
        """The number of the attempt in which a rank has started: each has a port of its own, drawn at random."""
        # Neither the order of the lines of several nodes tells it, nor TORCHELASTIC_RESTART_COUNT, which counts what
        # failed on its own node (tried with torch 2.14).
        last = self._last.get(event["rank"], -1)
        if self.spec and not self.spec.max_restarts:
            return 0
        if last >= 0 and self.ranks[event["rank"]].pid == event["pid"]:
            return last
        port = event.get("port")
        later = [number for number, one in enumerate(self._ports) if number > last and one == port]
        if not later:
            self._ports.append(port)
        return later[0] if later else self._attempt
