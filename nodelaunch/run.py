"""Follows a running job: shows its lines, counts down while nodes join, and ends every node when one has failed."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from nodelaunch.backends.nodes import Link
from nodelaunch.node.errors import StopReason
from nodelaunch.node.output import Log
from nodelaunch.state import JobState

BEAT_SECONDS = 0.5
COUNTDOWN_SECONDS = 5.0
# How long the other ranks may take to say what the first failure did to them; and to end, once they were asked to.
SETTLE_SECONDS, END_SECONDS = 2.0, 4.5
# A job may print faster than a notebook can show. What waits for longer than this, with so many lines behind it, goes
# to the log only, until no more than a few wait: a failure, or a stop, must not have to wait behind it.
LATE_SECONDS, MANY_LINES, FEW_LINES = 1.0, 100, 10
# What waits for the launcher beyond this waits on its node, whose reader looks again after so long.
WAITING_LINES, FULL_SECONDS = 20_000, 0.05
# A supervisor that was stopped does not keep its limit; the launcher gives it this long.
LIMIT_MARGIN = 2.0
HINT = "hang_timeout= changes when this is said"
# Characters of each rank's output that a result holds: its first lines, and its last.
FIRST, LAST = 2**20, 2**18


class Kept:
    """The output of all ranks in the order in which it came; of a rank that prints much, the first and last lines."""

    def __init__(self) -> None:
        self._count = 0
        self._first: list[tuple[int, str]] = []
        self._room: dict[str, int] = {}
        self._last: dict[str, deque[tuple[int, str]]] = {}
        self._size: dict[str, int] = {}
        self._dropped: dict[str, int] = {}

    def add(self, line: str) -> None:
        """Adds a line, which begins with its rank."""
        rank, entry = line.partition("] ")[0], (self._count, line)
        self._count += 1
        if rank not in self._last and len(line) <= self._room.setdefault(rank, FIRST):
            self._first.append(entry)
            self._room[rank] -= len(line)
            return
        last = self._last.setdefault(rank, deque())
        last.append(entry)
        self._size[rank] = self._size.get(rank, 0) + len(line)
        while self._size[rank] > LAST and len(last) > 1:
            self._size[rank] -= len(last.popleft()[1])
            self._dropped[rank] = self._dropped.get(rank, 0) + 1

    def list_lines(self) -> list[str]:
        """All that was kept; a line says how many were left out."""
        entries = [*self._first, *(entry for last in self._last.values() for entry in last)]
        for rank, count in self._dropped.items():
            entries.append((self._last[rank][0][0] - 1, f"{rank}] ({count:,} lines are left out here)"))
        return [line for _, line in sorted(entries)]


class Run:
    """One launch of a job, from its supervisors' start to their end.

    Args:
        links: The running supervisors, by node.
        state: Takes in what they say.
        log: The file that every line is added to.
        join_timeout: Seconds until the workers of all nodes must have started.
        limit: Seconds after which the job is ended in any case.
        restarts: Whether a failure may be mended by torchrun itself.
        say: Shows a line to the user.
        stop: Set from another thread to end the job.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        state: JobState,
        *,
        log: Path,
        join_timeout: float,
        limit: float,
        restarts: bool,
        say: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._links, self._state, self._say, self._stop = links, state, say, stop
        self._join_timeout, self._limit, self._restarts, self._path = join_timeout, limit, restarts, log
        # Not queue.Queue: an interrupt that meets the launcher as it takes that one's lock leaves it locked for ever.
        self._queue: queue.SimpleQueue[tuple[str, bytes | None, float]] = queue.SimpleQueue()
        self._unshown, self._cut = 0, False
        self._started = self._told = time.monotonic()
        self._failed: float | None = None
        self._standing: float | None = None  # since when no rank can move any more
        self._reported: set[object] = set()  # ranks of which it was said that others wait for them
        self._kept, self._log = Kept(), None
        self.joined: float | None = None
        self.reason: StopReason | None = None

    def follow(self) -> None:
        """Follows the job until every supervisor has ended.

        Raises:
            KeyboardInterrupt: The launcher was interrupted; every node has ended, or ends by itself within its lease.
        """
        over = threading.Event()
        try:
            self._log = Log(self._path)
            for node, link in self._links.items():
                threading.Thread(target=self._read, args=[node, link, over], daemon=True).start()
            threading.Thread(target=self._beat, args=[over], daemon=True).start()
            self._follow_lines()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.reason = StopReason.INTERRUPTED if interrupted else StopReason.STOPPED
            if not interrupted:  # what shows the lines may be what failed, and must not fail again
                self._say = lambda line: None
            raise
        finally:
            try:
                self._end_all()
            finally:
                over.set()
                if self._log:
                    with contextlib.suppress(OSError):  # the disk is full, and that was said
                        self._log.close()
                for link in self._links.values():
                    if link.poll() is None:
                        link.kill()

    @property
    def lines(self) -> list[str]:
        """The output of all ranks, as far as it is kept."""
        return self._kept.list_lines()

    def _read(self, node: str, link: Link, over: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in link.lines():
                self._hand_on((node, line, time.monotonic()), over)
        self._hand_on((node, None, time.monotonic()), over)

    def _hand_on(self, entry: tuple[str, bytes | None, float], over: threading.Event) -> None:
        while self._queue.qsize() >= WAITING_LINES:
            if over.wait(FULL_SECONDS):
                return
        self._queue.put(entry)

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            for link in self._links.values():
                link.beat()

    def _follow_lines(self) -> None:
        self._follow_to_end()
        if self.reason is None and self._failed is None and self._state.may_have_trained_alone:
            self._say("no rank opened a group of all ranks; whether the programs that they started did, is not known")

    def _follow_to_end(self) -> None:
        while not self._is_over():
            self._take(timeout=0.1)
            if self._stop.is_set():
                self.reason = StopReason.STOPPED
                return
            if self._must_end():
                return

    def _take(self, timeout: float) -> None:
        try:
            node, line, came = self._queue.get(timeout=timeout)
        except queue.Empty:
            return
        if line is None:
            part = self._state.nodes[node]
            part.gone = True
            if part.ended is None:
                part.refusal = self._links[node].explain()
            return
        try:
            if self._log:
                self._log.write(f"{node}: ".encode() + line)
        except OSError as error:  # a full disk costs the log, and not the job
            if not self._cut:
                self._cut = True
                self._say(f"(from here on the log is not complete: {error.strerror})")
        shown = self._state.read(node, line)
        if shown is not None:
            self._kept.add(shown)
            self._show(shown, came)

    def _show(self, line: str, came: float) -> None:
        waiting, late = self._queue.qsize(), time.monotonic() - came > LATE_SECONDS
        if waiting > FEW_LINES if self._unshown else late and waiting > MANY_LINES:
            self._unshown += 1
            return
        self._report_unshown()
        self._say(line)

    def _report_unshown(self) -> None:
        if self._unshown:
            self._say(f"({self._unshown} lines came too fast to be shown; they are in {self._path})")
            self._unshown = 0

    def _is_over(self) -> bool:
        return all(self._state.nodes[node].gone for node in self._links)

    def _must_end(self) -> bool:
        """Whether the launcher has to end the job: nodes that do not come, or a failure that nothing will mend."""
        now = time.monotonic()
        if now - self._started > self._limit + LIMIT_MARGIN:
            self.reason, self._state.limit = StopReason.LIMIT, self._limit
            return True
        if self.joined is None:
            if all(self._state.nodes[node].joined for node in self._links):
                self.joined = now - self._started
                self._introduce()
            elif now - self._started > self._join_timeout + 1:
                self.reason = StopReason.JOIN
                return True
            elif now - self._told >= COUNTDOWN_SECONDS:
                self._told = now
                self._count_down(self._join_timeout - (now - self._started))
        # A rank that moves again is heard of a second later: of the last barrier it may look as if it still waited.
        self._standing = (self._standing or now) if self._state.stands_still() else None
        if self._standing and now - self._standing > SETTLE_SECONDS:
            self._state.standstill = True
            return True
        if self._failed is None and self._has_failed():
            self._failed = now
        self._report_waits()
        return self._failed is not None and now - self._failed > SETTLE_SECONDS

    def _has_failed(self) -> bool:
        parts = [self._state.nodes[node] for node in self._links]
        if any(part.gone and (part.ended is None or part.ended["returncode"]) for part in parts):
            return True
        hangs = any(error["kind"] == "hang" for error in self._state.errors)
        return hangs or (bool(self._state.errors) and not self._restarts)

    def _report_waits(self) -> None:
        """Says once of each rank that others wait for it, or that threads keep it; that alone is no failure."""
        state = self._state
        facts = [fact for fact in state.still.values() if time.monotonic() - fact["heard"] > SETTLE_SECONDS]
        for fact in facts:
            if fact.get("thread") and ("thread", fact["rank"]) not in self._reported:
                self._reported.add(("thread", fact["rank"]))
                words = f"the script has ended on rank {fact['rank']}; its thread {fact['thread']!r} still runs"
                self._say(f"{words} ({fact['seconds']:.0f} s; {HINT})")
        waits = [fact for fact in facts if fact["inside"]]
        if not waits:
            all_stand = set(state.ranks) == {fact["rank"] for fact in facts if fact["where"]}
            if facts and all_stand and "all" not in self._reported:
                self._reported.add("all")
                self._say(f"{state.name_stands()}; limit= ends a job that never moves; {HINT}")
            return
        longest = max(waits, key=lambda fact: fact["seconds"])
        many = f"{len(waits)} rank{' waits' if len(waits) == 1 else 's wait'} for it"
        timeout = f" of {longest['timeout']:g} s" if longest["timeout"] else ""
        for rank in state.absent:
            if rank not in self._reported:
                self._reported.add(rank)
                where = f"in {state.still[rank]['where']}" if rank in state.still else "at work"
                words = f"rank {rank} has been {where} for {longest['seconds']:.0f} s while {many}"
                self._say(f"{words}; this job is ended after the group's own timeout{timeout}; {HINT}")

    def _count_down(self, left: float) -> None:
        parts = self._state.nodes.values()
        absent = [part.name for part in parts if not part.started] or [part.name for part in parts if not part.joined]
        self._say(f"waiting for {', '.join(absent)} to join: {max(left, 0):.0f} s left")

    def _introduce(self) -> None:
        ranks = [self._state.ranks[rank] for rank in sorted(self._state.ranks)]
        who = "; ".join(f"rank {r.rank} on {r.node} ({r.address or r.host}, process {r.pid})" for r in ranks)
        self._say(f"all nodes joined after {self.joined:.1f} s: {who}")

    def _end_all(self) -> None:
        """Asks every supervisor to end and reads what they still say, which has the stacks and results."""
        self._state.asked = time.monotonic()
        for link in self._links.values():
            link.stop()
        end = time.monotonic() + END_SECONDS
        while not self._is_over() and time.monotonic() < end:
            self._take(timeout=0.1)
        for _ in range(self._queue.qsize()):
            self._take(timeout=0)
        self._report_unshown()
