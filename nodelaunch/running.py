"""A job that runs: its lines are shown, every node is ended when one has failed, and what came of it is told."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from threading import Event

from lab_common.text import clean
from nodelaunch.backends import Say
from nodelaunch.backends.nodes import Link
from nodelaunch.failure import describe_restart, diagnose
from nodelaunch.node.errors import StopReason
from nodelaunch.node.output import Log, read_lines
from nodelaunch.node.processes import find_jobs, stop_job
from nodelaunch.result import JobError, JobResult, find_log
from nodelaunch.spec import Launch
from nodelaunch.state import JobState

LOOK_SECONDS, BEAT_SECONDS, COUNTDOWN_SECONDS = 0.1, 0.5, 5.0
# How long the other ranks may take to say what the first failure did to them; and to end, once they were asked to.
SETTLE_SECONDS, END_SECONDS = 2.0, 4.5
LIMIT_MARGIN = 2.0  # seconds after which the launcher ends a job whose stopped supervisor has not kept its limit
# A display that is this many lines behind leaves lines out until it is nearly there: the launcher has to hear of a
# failure, and of an interrupt, while a rank prints faster than a notebook shows.
MANY_LINES, FEW_LINES = 1000, 50
OUTCOME = "outcome.txt"  # beside the log: how the job ended, for last()
MOST_LINES = 100_000  # of which a result holds the last; the log has all


class RunningJob:
    """One launch of a job, from the start of its supervisors to its result.

    Its ``id`` is the job's; its ``folder`` on this machine has the scripts and ``output.log``.
    """

    def __init__(
        self, launch: Launch, state: JobState, links: Mapping[str, Link], *, say: Say, stop: Event, preflight: float
    ) -> None:
        self.id, self.folder = launch.id, launch.folder
        self._spec, self._links, self._state = state.spec, links, state
        self._say, self._stop = say, stop
        self._seconds: dict[str, float | None] = {"preflight": preflight, "joined": None}
        # Not queue.Queue: Ctrl-C inside its get() can leave its lock locked for ever.
        self._queue: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._log: Log | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._behind = False  # the display leaves lines out
        self._begun = self._counted = time.monotonic()  # limit= and join_timeout= count from here
        # Since when something has failed, and since when no rank can move any more.
        self._failed: float | None = None
        self._standing: float | None = None
        self._reported: set[int] = set()  # the ranks that others were said to wait for
        self._over = Event()  # set once there is a result or an error
        self._result: JobResult | None = None
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Ends the job on every node; returns at once."""
        self._stop.set()

    def wait(self, timeout: float | None = None, *, check: bool = True) -> JobResult:
        """Waits for the end of the job, for ``timeout`` seconds at most.

        With ``check=False`` a job that failed raises nothing; ``JobResult.failure`` says why.

        Raises:
            JobError: The job failed; it names the rank that failed first.
            TimeoutError: It still runs, and continues.
            KeyboardInterrupt: The launcher was interrupted; the job has ended on every node.
        """
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        try:
            if not self._is_over_by(end):
                raise TimeoutError(f"job {self.id} still runs after {timeout:g} s")
        except KeyboardInterrupt:
            self._stop.set()
            self._is_over_by(time.monotonic() + 2 * END_SECONDS)
            raise
        if self._error:
            raise self._error
        if self._result.failure and check:
            raise JobError(self._result)
        return self._result

    def follow(self) -> None:
        """Follows the job to its end; ``wait`` then returns its result, or raises what went wrong here."""
        outcome = "Its launcher was interrupted."
        try:
            self._follow_links()
            self._result = self._make_result()
            outcome = str(self._result.failure or "It ended well.")
        except BaseException as error:
            self._error = error
        finally:
            with contextlib.suppress(OSError):  # the disk is full
                (self.folder / OUTCOME).write_text(outcome, errors="replace")
            self._over.set()

    def _is_over_by(self, end: float) -> bool:
        while not self._over.is_set() and time.monotonic() <= end:
            time.sleep(LOOK_SECONDS)  # not Event.wait(): Ctrl-C inside it can leave its lock locked for ever
        return self._over.is_set()

    def _follow_links(self) -> None:
        """Takes in what the supervisors say until all have ended, or have to; then ends what is left."""
        over = Event()  # ends the thread that beats
        try:
            self._log = Log(self.folder / "output.log")
            for node, link in self._links.items():
                threading.Thread(target=self._read, args=[node, link], daemon=True).start()
            threading.Thread(target=self._beat, args=[over], daemon=True).start()
            self._follow_lines()
        except BaseException as error:
            self._state.reason = StopReason.INTERRUPTED
            if not isinstance(error, KeyboardInterrupt):  # what shows the lines may be what failed
                self._say = lambda line: None
            raise
        finally:
            try:
                self._end_all()
            finally:
                over.set()
                if self._log:
                    with contextlib.suppress(OSError):  # the disk is full
                        self._log.close()
                for link in self._links.values():
                    if link.poll() is None:
                        link.kill()
                # What a lost supervisor left on this machine; on hosts the guards of the nodes do that.
                failed = self._state.reason or self._state.errors  # else one by hand is about to end
                left = [part for part in self._state.nodes.values() if not part.ended and (failed or not part.by_hand)]
                if left and any(node.here for node in self._spec.nodes):
                    stop_job({"id": self.id})  # a question as the probe gets it

    def _make_result(self) -> JobResult:
        state, failure = self._state, diagnose(self._state)
        size = max([self._spec.world_size, *(rank + 1 for rank in state.ranks)])
        return JobResult(
            ok=failure is None,
            results=tuple(state.rank_states[rank].result for rank in range(size)),
            ranks=tuple(state.ranks[rank] for rank in sorted(state.ranks)),
            failure=failure,
            restarts=tuple(describe_restart(errors) for errors in state.restarts),
            seconds={**self._seconds, "total": time.monotonic() - state.launched_at},
            memory=state.memory,
            folder=self.folder,
            lines=tuple(self._lines),
        )

    def _read(self, node: str, link: Link) -> None:
        """Passes on the lines of one node, in a thread of its own."""
        with contextlib.suppress(OSError, ValueError):
            for line in link.lines():
                self._queue.put((node, line))
        self._queue.put((node, None))

    def _beat(self, over: Event) -> None:
        while not over.wait(BEAT_SECONDS):
            for link in self._links.values():
                link.beat()

    def _follow_lines(self) -> None:
        while not self._are_all_gone():
            self._take(timeout=0.1)
            if self._stop.is_set():
                self._state.reason = StopReason.STOPPED
            if self._state.reason or self._must_end():
                return

    def _are_all_gone(self) -> bool:
        return all(self._state.nodes[node].gone for node in self._links)

    def _take(self, timeout: float) -> None:
        """Takes in one line: it goes to the log, to the state, and to the user."""
        try:
            node, line = self._queue.get(timeout=timeout)
        except queue.Empty:
            return
        if line is None:
            part = self._state.nodes[node]
            part.gone = True
            if part.ended is None:
                part.refusal = self._links[node].explain()
            return
        with contextlib.suppress(OSError):  # a full disk costs the log, and not the job
            if self._log:
                self._log.feed(f"{node}: ".encode() + line)
        shown = self._state.read(node, line)
        if shown is not None:
            self._lines.append(shown)
            self._show(shown)

    def _show(self, line: str) -> None:
        """Shows a line, unless the display is far behind."""
        was_behind, self._behind = self._behind, self._queue.qsize() > (FEW_LINES if self._behind else MANY_LINES)
        if not self._behind:
            self._say(line)
        elif not was_behind:
            self._say(f"(lines come too fast to be shown; they are in {self.folder / 'output.log'})")

    def _must_end(self) -> bool:
        """Returns True if the launcher has to end the job: nodes that do not come, or a failure that stays one."""
        now, state, spec = time.monotonic(), self._state, self._spec
        if now - self._begun > spec.limit + LIMIT_MARGIN:
            state.reason = StopReason.LIMIT
        elif self._seconds["joined"] is None:
            self._follow_join(now)
        # A rank that moves again is heard of a second later: of the last barrier it may look as if it still waited.
        self._standing = (self._standing or now) if state.stands_still() else None
        if self._standing and now - self._standing > SETTLE_SECONDS:
            state.reason = state.reason or StopReason.STANDSTILL
        parts = [state.nodes[node] for node in self._links]
        failed = any(part.gone and (part.ended is None or part.ended["returncode"]) for part in parts)
        if failed or (state.errors and not spec.max_restarts):
            self._failed = self._failed or now
        self._report_waits(now)
        return bool(state.reason) or (self._failed is not None and now - self._failed > SETTLE_SECONDS)

    def _follow_join(self, now: float) -> None:
        """Names the ranks when all nodes have joined; until then, counts down."""
        state, left = self._state, self._begun + self._spec.join_timeout - now
        if all(state.nodes[node].joined for node in self._links):
            self._seconds["joined"] = now - state.launched_at
            ranks = [state.ranks[rank] for rank in sorted(state.ranks)]
            who = "; ".join(f"rank {r.rank} on {r.node} ({r.address or r.host}, process {r.pid})" for r in ranks)
            self._say(f"all nodes joined after {now - state.launched_at:.1f} s: {who}")
        elif left < -1:
            state.reason = StopReason.JOIN
        elif now - self._counted >= COUNTDOWN_SECONDS:
            self._counted = now
            self._say(f"waiting for {', '.join(state.list_missing())} to join: {max(left, 0):.0f} s left")

    def _report_waits(self, now: float) -> None:
        """Names once each rank that others wait for; that alone is no failure."""
        still = self._state.still
        waits = [fact for fact in still.values() if fact["inside"] and now - fact["at"] > SETTLE_SECONDS]
        for rank in set(self._state.busy) - self._reported if waits else ():
            self._reported.add(rank)
            longest = max(waits, key=lambda fact: fact["seconds"])
            where = f"in {still[rank]['where']}" if rank in still else "at work"
            seconds = still.get(rank, longest)["seconds"]
            many = "1 rank waits" if len(waits) == 1 else f"{len(waits)} ranks wait"
            timeout = f" of {longest['timeout']:g} s" if longest["timeout"] else ""
            self._say(
                f"rank {rank} has been {where} for {seconds:.0f} s while {many} for it; this job is ended "
                f"after the group's own timeout{timeout}; hang_timeout= changes when this is said"
            )

    def _end_all(self) -> None:
        """Asks every supervisor to end and reads what they still say, which has the stacks and results."""
        self._state.asked = time.monotonic()
        for link in self._links.values():
            link.stop()
        end = time.monotonic() + END_SECONDS
        while not self._are_all_gone() and time.monotonic() < end:
            self._take(timeout=0.1)
        for _ in range(self._queue.qsize()):
            self._take(timeout=0)


def last(job_id: str | None = None) -> None:
    """Replays the log of a job of this machine, and says what came of it; the newest one if no id is given.

    Raises:
        LabError: There is no such log.
    """
    log = find_log(job_id)
    job, outcome = log.parent.name, log.parent / OUTCOME
    print(f"job {job}, {time.strftime('%d %B %Y, %H:%M', time.localtime(log.stat().st_mtime))}")
    with log.open("rb") as file:
        for line in read_lines(file):
            _, _, text = line.decode(errors="replace").rstrip("\n").partition(": ")
            if text.startswith("[rank "):
                print(clean(text))
    if find_jobs({"id": job})["jobs"]:
        print(f"It still runs. To end it: python -m nodelaunch stop {job}")
    else:
        print(outcome.read_text() if outcome.exists() else "It was cut off: its launcher was gone before its end.")
    print(f"log: {log}")
