"""Follows a running job: shows its lines, counts down while nodes join, and ends every node when one has failed."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from lab_utils.launch.nodes import Link
from lab_utils.launch.story import Story

BEAT_SECONDS = 0.5
COUNTDOWN_SECONDS = 5.0
# How long the other ranks may take to say what the first failure did to them; and to end, once they were asked to.
SETTLE_SECONDS, END_SECONDS = 2.0, 4.5
# A job may print faster than a notebook can show. What waits for longer than this, with so many lines behind it, goes
# to the log only, until no more than a few wait: a failure, or a stop, must not have to wait behind it.
LATE_SECONDS, MANY_LINES, FEW_LINES = 1.0, 100, 10


class Run:
    """One launch of a job, from its supervisors' start to their end.

    Args:
        links: The running supervisors, by node.
        story: Takes in what they say.
        log: The file that every line is added to.
        join_timeout: Seconds until the workers of all nodes must have started.
        restarts: Whether a failure may be mended by torchrun itself.
        say: Shows a line to the learner.
        stop: Set from another thread to end the job.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        story: Story,
        *,
        log: Path,
        join_timeout: float,
        restarts: bool,
        say: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._links, self._story, self._say, self._stop = links, story, say, stop
        self._join_timeout, self._restarts, self._log = join_timeout, restarts, log
        self._queue: queue.SimpleQueue[tuple[str, bytes | None, float]] = queue.SimpleQueue()
        self._unshown, self._cut = 0, False
        self._started = self._told = time.monotonic()
        self._failed: float | None = None
        self.lines: list[str] = []
        self.joined: float | None = None
        self.why = ""

    def follow(self) -> None:
        """Follows the job until every supervisor has ended.

        Raises:
            KeyboardInterrupt: The cell was interrupted; every node has ended, or ends by itself within its lease.
        """
        over = threading.Event()
        try:
            for node, link in self._links.items():
                threading.Thread(target=self._read, args=[node, link], daemon=True).start()
            threading.Thread(target=self._beat, args=[over], daemon=True).start()
            # Unbuffered: a log that is read while the job runs, or after the launcher was killed, has to be whole.
            with self._log.open("ab", buffering=0) as log:
                self._attend(log)
        except BaseException as error:
            self.why = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
            if self.why == "stopped":  # what shows the lines may be what failed, and must not fail again
                self._say = lambda line: None
            raise
        finally:
            try:
                self._end_all()
            finally:
                over.set()
                for link in self._links.values():
                    if link.poll() is None:
                        link.kill()

    def _read(self, node: str, link: Link) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in link.lines():
                self._queue.put((node, line, time.monotonic()))
        self._queue.put((node, None, time.monotonic()))

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            for link in self._links.values():
                link.beat()

    def _attend(self, log: BinaryIO) -> None:
        while not self._is_over():
            self._take(log, timeout=0.1)
            if self._stop.is_set():
                self.why = "stopped"
                return
            if self._must_end():
                return

    def _take(self, log: BinaryIO, timeout: float) -> None:
        try:
            node, line, came = self._queue.get(timeout=timeout)
        except queue.Empty:
            return
        if line is None:
            part = self._story.nodes[node]
            part.gone = True
            if part.ended is None:
                part.refusal = self._links[node].explain()
            return
        try:
            log.write(f"{node}: ".encode() + line)
        except OSError as error:  # a full disk costs the log, and not the job
            if not self._cut:
                self._cut = True
                self._say(f"(from here on the log is not complete: {error.strerror})")
        shown = self._story.read(node, line)
        if shown is not None:
            self.lines.append(shown)
            self._show(shown, came)

    def _show(self, line: str, came: float) -> None:
        waiting, late = self._queue.qsize(), time.monotonic() - came > LATE_SECONDS
        if waiting > FEW_LINES if self._unshown else late and waiting > MANY_LINES:
            self._unshown += 1
            return
        self._confess()
        self._say(line)

    def _confess(self) -> None:
        if self._unshown:
            self._say(f"({self._unshown} lines came too fast to be shown; they are in {self._log})")
            self._unshown = 0

    def _is_over(self) -> bool:
        return all(self._story.nodes[node].gone for node in self._links)

    def _must_end(self) -> bool:
        """Whether the launcher has to end the job: nodes that do not come, or a failure that nothing will mend."""
        now = time.monotonic()
        if self.joined is None:
            if all(self._story.nodes[node].joined for node in self._links):
                self.joined = now - self._started
                self._introduce()
            elif now - self._started > self._join_timeout + 1:
                self.why = "join"
                return True
            elif now - self._told >= COUNTDOWN_SECONDS:
                self._told = now
                self._count_down(self._join_timeout - (now - self._started))
        if self._failed is None and self._has_failed():
            self._failed = now
        return self._failed is not None and now - self._failed > SETTLE_SECONDS

    def _has_failed(self) -> bool:
        parts = [self._story.nodes[node] for node in self._links]
        if any(part.gone and (part.ended is None or part.ended["returncode"]) for part in parts):
            return True
        hangs = any(error["kind"] == "hang" for error in self._story.errors)
        return hangs or (bool(self._story.errors) and not self._restarts)

    def _count_down(self, left: float) -> None:
        parts = self._story.nodes.values()
        absent = [part.name for part in parts if not part.started] or [part.name for part in parts if not part.joined]
        self._say(f"waiting for {', '.join(absent)} to join: {max(left, 0):.0f} s left")

    def _introduce(self) -> None:
        ranks = [self._story.ranks[rank] for rank in sorted(self._story.ranks)]
        who = "; ".join(
            f"rank {rank.rank} on {rank.node} ({rank.address or rank.host}, process {rank.pid})" for rank in ranks
        )
        self._say(f"all nodes joined after {self.joined:.1f} s: {who}")

    def _end_all(self) -> None:
        """Asks every supervisor to end and reads what they still say, which has the stacks and results."""
        self._story.asked = time.monotonic()
        for link in self._links.values():
            link.stop()
        end = time.monotonic() + END_SECONDS
        with self._log.open("ab", buffering=0) as log:
            while not self._is_over() and time.monotonic() < end:
                self._take(log, timeout=0.1)
            for _ in range(self._queue.qsize()):
                self._take(log, timeout=0)
        self._confess()
