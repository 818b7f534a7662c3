"""A job that runs: its lines are shown, every node is ended when one has failed, and what came of it is told."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from lab_common.text import clean
from nodelaunch.backends.nodes import PipeLink
from nodelaunch.backends.slurm import SlurmLink
from nodelaunch.failure import describe_restart, diagnose
from nodelaunch.node.errors import StopReason
from nodelaunch.node.output import Log, read_lines
from nodelaunch.node.processes import find_jobs, stop_job
from nodelaunch.node.report import MARK
from nodelaunch.preflight import Preflight
from nodelaunch.result import JobError, JobResult, find_log
from nodelaunch.spec import JobSpec, Launch
from nodelaunch.state import JobState

LOOK_SECONDS, BEAT_SECONDS, COUNTDOWN_SECONDS = 0.1, 0.5, 5.0
# How long the other ranks may take to say what the first failure did to them; and to end, once they were asked to.
SETTLE_SECONDS, END_SECONDS = 2.0, 4.5
# A supervisor that was stopped does not keep its limit; the launcher gives it this long.
LIMIT_MARGIN = 2.0
# A display that is this many lines behind leaves lines out until it is nearly there, and says how many: the launcher
# has to hear of a failure, and of an interrupt, while a rank prints faster than a notebook shows.
MANY_LINES, FEW_LINES = 1000, 50
# The last lines that a result holds; the log has all.
MOST_LINES = 100_000


class RunningJob:
    """One launch of a job, from the start of its supervisors to its result.

    It gets the running supervisors by node (``links``), the preflight if there was one (``found``), and when the launch
    began by ``time.monotonic()`` (``started``). ``stop`` is set from another thread to end the job.

    Attributes:
        id: The job's id.
        folder: Folder on this machine, with the scripts and ``output.log``.
    """

    def __init__(
        self,
        spec: JobSpec,
        launch: Launch,
        *,
        links: Mapping[str, PipeLink | SlurmLink],
        state: JobState,
        found: Preflight | None,
        started: float,
        say: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.id, self.folder = launch.id, launch.folder
        self._spec, self._links, self._state, self._found = spec, links, state, found
        self._say, self._stop, self._started = say, stop, started
        # Not queue.Queue: Ctrl-C inside its get() can leave its lock locked for ever.
        self._queue: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._log: Log | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._cut = False  # the disk with the log is full
        self._unshown = 0  # lines that were left out of the display just now
        self._begun = self._told = time.monotonic()
        # When all had joined, after that; since when something has failed; since when no rank can move any more.
        self._joined = self._failed = self._standing = None
        self._reported: set[int] = set()
        self._over = threading.Event()  # set once there is a result or an error
        self._result: JobResult | None = None
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Ends the job on every node; returns at once."""
        self._stop.set()

    def wait(self, timeout: float | None = None, *, check: bool = True) -> JobResult:
        """Waits for the end of the job.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            check: Raise if the job failed; otherwise ``JobResult.failure`` says it.

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
        try:
            self._follow_links()
            self._result = self._make_result()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _is_over_by(self, end: float) -> bool:
        while not self._over.is_set() and time.monotonic() <= end:
            time.sleep(LOOK_SECONDS)  # not Event.wait(): Ctrl-C inside it can leave its lock locked for ever
        return self._over.is_set()

    def _follow_links(self) -> None:
        """Takes in what the supervisors say until all have ended, or have to; then ends what is left."""
        over = threading.Event()  # ends the thread that beats
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
                    with contextlib.suppress(OSError):  # the disk is full, and that was said
                        self._log.close()
                for link in self._links.values():
                    if link.poll() is None:
                        link.kill()
                # What a lost supervisor left on this machine; on hosts the guards of the nodes do that.
                failed = bool(self._state.reason or self._state.errors)  # else one by hand is about to end
                parts = [(node, self._state.nodes[node.name]) for node in self._spec.nodes]
                if any(node.here and not part.ended and (failed or not part.by_hand) for node, part in parts):
                    stop_job({"id": self.id})

    def _make_result(self) -> JobResult:
        state, spec = self._state, self._spec
        seconds = {"preflight": self._found.seconds if self._found else 0.0, "joined": self._joined}
        failure, results = diagnose(state), state.results
        size = max([spec.world_size, *(rank + 1 for rank in state.ranks)])
        return JobResult(
            ok=failure is None,
            results=tuple(results.get(rank) for rank in range(size)),
            ranks=tuple(state.ranks[rank] for rank in sorted(state.ranks)),
            failure=failure,
            restarts=tuple(describe_restart(errors) for errors in state.restarts),
            seconds={**seconds, "total": time.monotonic() - self._started},
            memory=state.memory,
            folder=self.folder,
            lines=tuple(self._lines),
        )

    def _read(self, node: str, link: PipeLink | SlurmLink) -> None:
        """Passes on the lines of one node, in a thread of its own."""
        with contextlib.suppress(OSError, ValueError):
            for line in link.lines():
                self._queue.put((node, line))
        self._queue.put((node, None))

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            for link in self._links.values():
                link.beat()

    def _follow_lines(self) -> None:
        while not self._is_over():
            self._take(timeout=0.1)
            if self._stop.is_set():
                self._state.reason = StopReason.STOPPED
            if self._state.reason or self._must_end():
                return

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
        try:
            if self._log:
                self._log.feed(f"{node}: ".encode() + line)
        except OSError as error:  # a full disk costs the log, and not the job
            if not self._cut:
                self._cut = True
                self._say(f"(from here on the log is not complete: {error.strerror})")
        shown = self._state.read(node, line)
        if shown is not None:
            self._lines.append(shown)
            self._show(shown)

    def _show(self, line: str) -> None:
        """Shows a line, unless the display is far behind."""
        if self._queue.qsize() > (FEW_LINES if self._unshown else MANY_LINES):
            self._unshown += 1
            return
        self._report_unshown()
        self._say(line)

    def _report_unshown(self) -> None:
        if self._unshown:
            self._say(f"({self._unshown} lines came too fast to be shown; they are in {self.folder / 'output.log'})")
            self._unshown = 0

    def _is_over(self) -> bool:
        return all(self._state.nodes[node].gone for node in self._links)

    def _must_end(self) -> bool:
        """Returns True if the launcher has to end the job: nodes that do not come, or a failure that stays one."""
        now, spec, parts = time.monotonic(), self._spec, [self._state.nodes[node] for node in self._links]
        passed = now - self._begun
        if passed > spec.limit + LIMIT_MARGIN:
            self._state.reason = StopReason.LIMIT
        elif self._joined is None and all(part.joined for part in parts):
            self._joined = now - self._started
            self._introduce()
        elif self._joined is None and passed > spec.join_timeout + 1:
            self._state.reason = StopReason.JOIN
        elif self._joined is None and now - self._told >= COUNTDOWN_SECONDS:
            self._told = now
            self._count_down(spec.join_timeout - passed)
        # A rank that moves again is heard of a second later: of the last barrier it may look as if it still waited.
        self._standing = (self._standing or now) if self._state.stands_still() else None
        if self._standing and now - self._standing > SETTLE_SECONDS:
            self._state.reason = self._state.reason or StopReason.STANDSTILL
        failed = any(part.gone and (part.ended is None or part.ended["returncode"]) for part in parts)
        if failed or (self._state.errors and not spec.max_restarts):
            self._failed = self._failed or now
        self._report_waits()
        return bool(self._state.reason) or (self._failed is not None and now - self._failed > SETTLE_SECONDS)

    def _report_waits(self) -> None:
        """Names once each rank that others wait for; that alone is no failure."""
        state, now = self._state, time.monotonic()
        waits = [fact for fact in state.still.values() if fact["inside"] and now - fact["heard"] > SETTLE_SECONDS]
        for rank in set(state.absent) - self._reported if waits else ():
            self._reported.add(rank)
            longest = max(waits, key=lambda fact: fact["seconds"])
            stands = state.still.get(rank)
            where, seconds = (f"in {stands['where']}", stands["seconds"]) if stands else ("at work", longest["seconds"])
            many = "1 rank waits" if len(waits) == 1 else f"{len(waits)} ranks wait"
            timeout = f" of {longest['timeout']:g} s" if longest["timeout"] else ""
            self._say(
                f"rank {rank} has been {where} for {seconds:.0f} s while {many} for it; this job is ended "
                f"after the group's own timeout{timeout}; hang_timeout= changes when this is said"
            )

    def _count_down(self, left: float) -> None:
        parts = self._state.nodes.values()
        absent = [part.name for part in parts if not part.started] or [part.name for part in parts if not part.joined]
        self._say(f"waiting for {', '.join(absent)} to join: {max(left, 0):.0f} s left")

    def _introduce(self) -> None:
        ranks = [self._state.ranks[rank] for rank in sorted(self._state.ranks)]
        who = "; ".join(f"rank {r.rank} on {r.node} ({r.address or r.host}, process {r.pid})" for r in ranks)
        self._say(f"all nodes joined after {self._joined:.1f} s: {who}")

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


def last(job_id: str | None = None) -> None:
    """Replays the log of a job of this machine, and says what came of it; the newest one if no id is given.

    Raises:
        LabError: There is no such log.
    """
    log = find_log(job_id)
    with log.open("rb") as file:
        heard = [line.partition(b": ") for line in read_lines(file)]
    known = {node for node, _, rest in heard if rest.startswith(MARK.encode())}
    heard = [one for one in heard if one[0] in known]  # not the log's own note of what is left out in it
    names = list(dict.fromkeys(node.decode(errors="replace") for node, _, _ in heard))
    state = JobState(names, [""] * len(names))
    said = [state.read(node.decode(errors="replace"), rest) for node, _, rest in heard]
    job = log.parent.name
    print(f"job {job}, {time.strftime('%d %B %Y, %H:%M', time.localtime(log.stat().st_mtime))}")
    print(*(clean(line) for line in said if line is not None), sep="\n")
    if find_jobs({"id": job})["jobs"]:
        print(f"It still runs. To end it: python -m nodelaunch stop {job}")
    elif not (state.errors or all(part.ended for part in state.nodes.values())):
        print("It was cut off: its launcher was gone before its end.")
    elif not state.errors and {part.ended["reason"] for part in state.nodes.values()} == {StopReason.RELEASE}:
        print("Its launcher ended it: by stop(), an interrupt or a limit, or since ranks did not join or did not move.")
    else:
        print(diagnose(state) or "It ended well.")
    print(f"log: {log}")
