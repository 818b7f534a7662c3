"""Collects what the supervisors of a job have reported so far, in the order in which it arrived."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from lab_common import LabError
from lab_common.text import clean_message
from nodelaunch.node.errors import FULL
from nodelaunch.node.supervisor import MARK
from nodelaunch.result import Rank

# Lines of a rank that are enough for a traceback.
TAIL = 60
SILENT = ("exit", "signal")  # kinds of errors that are known from torchrun alone
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
# How torchrun's agent reports, at once, a worker that ended badly (torch/distributed/elastic/multiprocessing/api.py).
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
# Its report at its own end, line by line, of each worker that failed.
FAILED_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)$")
FAILED_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) \(pid: (\d+)\)")
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
    ranks: set[int] = field(default_factory=set)  # those of the workers that have started
    ended: dict | None = None  # the supervisor's last event; None while it runs, and forever if it was lost
    gone: bool = False  # the link has ended
    refusal: LabError | None = None  # why the link ended, if the supervisor had not reported its end
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))  # the last lines of torchrun itself
    full: str = ""  # a line of its ranks or of torchrun about a full disk
    failed_rank: int | None = None  # the rank that torchrun's report at its end is about


class JobState:
    """Everything that was heard of a job.

    Args:
        names: The nodes' names.
        addresses: The nodes' addresses.
        starter: What starts the ranks on each node, in words.
        restarts: True if torchrun may restart the workers.
        group: The size of the group that the ranks have to form; 0 for a job that needs none.
    """

    def __init__(
        self,
        names: list[str],
        addresses: list[str],
        starter: str = "torchrun",
        *,
        restarts: bool = True,
        group: int = 0,
    ) -> None:
        self.starter, self._restarts, self.group = starter, restarts, group
        self.nodes = {name: NodeState(name, address) for name, address in zip(names, addresses, strict=True)}
        self.ranks: dict[int, Rank] = {}
        self.results: dict[int, object] = {}
        self._ports: list[str | None] = []  # where the ranks of each attempt meet, in the order in which we heard them
        self._last: dict[int, int] = {}  # rank -> number of the attempt in which it was last heard to start
        # Of all attempts: the fields of the event "error" (node/report.py), and `node`, `attempt`, `at`.
        self._errors: list[dict] = []
        self.pids: dict[tuple[str, int], tuple[int, int]] = {}  # node and pid -> rank and attempt
        # By rank, in the present attempt: the watch's facts about a main thread that stands (nodelaunch.node.watch);
        # the sizes of the groups that it opened; what a script that opened none of all ranks believed, and advice.
        self.still: dict[int, dict] = {}
        self.groups: dict[int, list[int]] = {}
        self.believed: dict[int, list[str]] = {}
        self.advice: dict[int, str] = {}
        self.done: dict[int, float] = {}
        self.stacks: dict[int, str] = {}
        self.memory: dict[int, int] = {}
        self.tails: dict[int, deque[str]] = {}  # the last lines that are not empty
        self.waited: dict[int, str] = {}  # the words of NCCL's watchdog about a collective in which the rank waited
        self.halted: set[int] = set()  # stopped by SIGSTOP
        self.lingering: set[int] = set()  # whose script has ended, while threads of it still run
        # Set by the launcher when it ends the job: because no rank can move any more; when it asked all nodes to end
        # (time.monotonic()); the job's limit in seconds, if the launcher's own clock ended it.
        self.standstill = False
        self.asked: float | None = None
        self.limit: float | None = None

    @property
    def errors(self) -> list[dict]:
        """The errors of the latest attempt."""
        return [error for error in self._errors if error["attempt"] == self._present]

    @property
    def restarts(self) -> list[list[dict]]:
        """The errors of each earlier attempt that had some."""
        earlier = [[error for error in self._errors if error["attempt"] == one] for one in range(self._present)]
        return [errors for errors in earlier if errors]

    @property
    def _present(self) -> int:
        return max(0, len(self._ports) - 1)

    @property
    def waiting(self) -> list[int]:
        """The ranks that stand in torch.distributed, and have for as long as the job's ``hang_timeout``."""
        return sorted(rank for rank, fact in self.still.items() if fact["inside"])

    @property
    def absent(self) -> list[int]:
        """The ranks that do something else, and may come to the others."""
        return sorted(set(self.ranks) - {*self.waiting, *self.halted, *self.done})

    def stands_still(self) -> bool:
        """True if no rank can move any more, since each waits for another one, or for a thread that waits."""
        if not all(part.joined for part in self.nodes.values()) or self.absent:
            return False
        if self.waiting:
            return True
        idle = {rank for rank, fact in self.still.items() if fact.get("idle")}
        return bool(self.lingering) and set(self.ranks) == set(self.done) and self.lingering <= idle

    def name_stands(self) -> str:
        """The places of all ranks that have not moved for ``hang_timeout`` seconds, in words; "" if there are none."""
        stands = [f"rank {rank} in {fact['where']}" for rank, fact in sorted(self.still.items()) if fact["where"]]
        more = f"; and {len(stands) - 4} more" if len(stands) > 4 else ""
        seconds = min((fact["seconds"] for fact in self.still.values()), default=0)
        return f"these ranks have not moved for {seconds:.0f} s: {'; '.join(stands[:4])}{more}" if stands else ""

    @property
    def trained_alone(self) -> bool:
        """True if ranks that should have formed one group formed none of that size."""
        known = self.groups.keys() == self.ranks.keys()  # a rank that did not report may have formed one unseen
        formed = any(max(sizes, default=0) >= self.group for sizes in self.groups.values())
        return known and self.group > 1 and not formed

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
        if text.startswith("[rank ") and rank.isdigit():
            if rest.strip():
                words = rest if rest.isprintable() else clean_message(rest)  # each line comes here
                self.tails.setdefault(int(rank), deque(maxlen=TAIL)).append(words)
            if found := WATCHDOG.search(rest):
                self._note_watchdog(int(rank), f"torch.distributed.DistBackendError: {found[0]}")
            return text
        part.tail.append(text if text.isprintable() else clean_message(text))
        if found := FAILED_RANK.search(text):
            part.failed_rank = int(found[1])
        elif (found := FAILED_EXIT.search(text)) and part.failed_rank is not None:
            # For a rank that ended before it had introduced itself, this is all that is heard.
            self._read_exit(part, code=int(found[1]), pid=int(found[2]), rank=part.failed_rank)
        return None

    def _note_watchdog(self, rank: int, message: str) -> None:
        self.waited.setdefault(rank, message)
        for error in self.errors:  # torchrun may have been heard first
            if error["rank"] == rank and error.get("code") == -signal.SIGABRT:
                error["message"] = self.waited[rank]

    def _read_exit(self, part: NodeState, *, code: int, pid: int, rank: int | None = None) -> None:
        """Notes a worker that ended without reporting an error itself: killed, or by os._exit."""
        # If lines wait on their node, this may come when the rank has long been restarted.
        rank, attempt = self.pids.get((part.name, pid), (rank, self._present))
        if rank is None or any((error["rank"], error["attempt"]) == (rank, attempt) for error in self._errors):
            return
        hangs = self.waited or any("Timed out waiting" in error["message"] for error in self.errors)
        if hangs and code == -signal.SIGTERM:  # torchrun ends the others when one has given up waiting
            return
        if rank in self.done and code in CRASHES:  # Gloo's threads, as the interpreter goes: the script had ended
            return
        message = f"exit status {code}" if code >= 0 else f"killed by signal {-code} ({name_signal(-code)})"
        message = self.waited.get(rank, message) if code == -signal.SIGABRT else message
        kind = "exit" if code >= 0 else "signal"
        facts = {"kind": kind, "code": code, "message": message, "traceback": "", "location": "", "rank": rank}
        self._add_error(part, facts, attempt)

    def _add_error(self, part: NodeState, facts: dict, attempt: int, **more: object) -> None:
        self._errors.append({**facts, "node": part.name, "attempt": attempt, "at": time.monotonic(), **more})

    def _read_event(self, part: NodeState, event: dict) -> None:
        rank = event.get("rank")
        match event["event"]:
            case "started":
                part.started = True
            case "worker":
                self._read_worker(part, event)
            case "error":
                self._read_error(part, event)
            case "result":
                self.results[rank] = event["value"]
            case "done":
                self.done[rank] = time.monotonic()
                self.still.pop(rank, None)
                self.believed[rank] = event.get("believed", [])
                if event.get("advice"):
                    self.advice[rank] = event["advice"]
            case "still":
                self.still[rank] = {**event, "heard": time.monotonic()}
            case "moves":
                self.still.pop(rank, None)
            case "groups":
                self.groups[rank] = event["sizes"]
            case "elsewhere":
                if not self.groups.get(rank):  # what it starts may join the ranks, unseen
                    self.groups.pop(rank, None)
            case "lingers":
                self.lingering.add(rank)
            case "left":
                self.lingering.discard(rank)
            case "halted":
                (self.halted.add if event["halted"] else self.halted.discard)(rank)
            case "stack":
                self.stacks[rank] = event["text"]
            case "ended":
                part.ended = event
                self.memory |= {int(number): size for number, size in event["memory"].items()}

    def _read_error(self, part: NodeState, event: dict) -> None:
        # torchrun's word on the exit of the same rank says less, and may have come first.
        who = event["rank"], self._last.get(event["rank"], self._present)
        same = [error for error in self._errors if (error["rank"], error["attempt"]) == who]
        silent = [error for error in same if error["kind"] in SILENT]
        self._errors = [error for error in self._errors if error not in silent]
        facts = event | {name: clean_message(event.get(name, "")) for name in ("message", "traceback")}
        self._add_error(part, facts, who[1], **({"at": silent[0]["at"]} if silent else {}))

    def _read_worker(self, part: NodeState, event: dict) -> None:
        rank, attempt = event["rank"], self._find_attempt(event)
        if self._last.setdefault(rank, attempt) != attempt:
            self._last[rank] = attempt
            for facts in (self.waited, self.tails, self.groups):
                facts.pop(rank, None)
        for facts in (self.done, self.still, self.believed, self.advice):
            facts.pop(rank, None)
        self.halted.discard(rank)
        self.lingering.discard(rank)
        facts = {key: event[key] for key in ("rank", "local_rank", "host", "pid")}
        self.ranks[rank] = Rank(node=part.name, address=part.address, **facts)
        self.pids[part.name, event["pid"]] = rank, attempt
        part.ranks.add(rank)
        part.joined = len(part.ranks) >= event["processes"]

    def _find_attempt(self, event: dict) -> int:
        """The number of the attempt in which a rank has started.

        The order in which the lines of several nodes come does not tell it, nor does TORCHELASTIC_RESTART_COUNT, which
        counts what failed on its own node (tried with torch 2.14). Each attempt has a free port of its own, drawn at
        random; it is seldom one of before.
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


def name_signal(number: int) -> str:
    """A signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
