"""A job that was launched: it is followed to its end, and what came of it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from nodelaunch.backends.nodes import Link
from nodelaunch.failure import describe_restart, diagnose
from nodelaunch.node.processes import stop_job
from nodelaunch.preflight import Claim
from nodelaunch.result import JobError, JobResult
from nodelaunch.run import END_SECONDS, Run
from nodelaunch.spec import JobSpec, Launch
from nodelaunch.state import JobState

# Between two looks for an interrupt while somebody waits.
LOOK_SECONDS = 0.1


class RunningJob:
    """One launch of a job, from its start to its result.

    Attributes:
        id: Of the job.
        folder: On this machine, with the scripts and ``output.log``.
    """

    def __init__(
        self,
        spec: JobSpec,
        launch: Launch,
        *,
        links: Mapping[str, Link],
        state: JobState,
        seconds: dict[str, float],
        started: float,
        say: Callable[[str], None],
        stop: threading.Event,
        claim: Claim | None,
    ) -> None:
        self.id, self.folder = launch.id, launch.folder
        # `seconds` has what the preflight took; `started` is when the launch began.
        self._spec, self._state, self._seconds, self._stop = spec, state, seconds, stop
        self._started, self._over = started, threading.Event()
        self._claim = claim  # torchrun listens at the port some seconds after the preflight, on a busy machine
        self._result: JobResult | None = None
        self._error: BaseException | None = None
        self._run = Run(
            links,
            state,
            log=self.folder / "output.log",
            join_timeout=spec.join_timeout,
            limit=spec.limit,
            restarts=spec.max_restarts > 0,
            say=say,
            stop=stop,
        )

    def stop(self) -> None:
        """Ends the job on every node; returns at once."""
        self._stop.set()

    def wait(self, timeout: float | None = None, *, check: bool = True) -> JobResult:
        """Waits for the end of the job.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            check: Whether a failed job raises; otherwise ``JobResult.failure`` says it.

        Raises:
            JobError: The job failed; it names the rank that failed first.
            TimeoutError: It still runs, and goes on.
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
        return self._tell(check=check)

    def _is_over_by(self, end: float) -> bool:
        # Not Event.wait(): an interrupt that meets it as it takes its lock leaves that locked for ever.
        while not self._over.is_set():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def follow_in_background(self) -> None:
        """Follows the job in a thread, which keeps its lease and shows its lines."""
        threading.Thread(target=self._follow_quietly, daemon=True, name=f"job {self.id}").start()

    def follow(self, *, check: bool = True) -> JobResult:
        """Follows the job to its end in this thread, where an interrupt ends it."""
        try:
            self._result = self._follow()
        finally:
            self._over.set()
        return self._tell(check=check)

    def _follow_quietly(self) -> None:
        try:
            self._result = self._follow()
        except BaseException as error:  # it is raised where somebody waits for the result
            self._error = error
        finally:
            self._over.set()

    def _tell(self, *, check: bool) -> JobResult:
        if self._error:
            raise self._error
        if self._result.failure and check:
            raise JobError(self._result)
        return self._result

    def _follow(self) -> JobResult:
        state, run = self._state, self._run
        try:
            run.follow()
        finally:
            self._claim = None
            failed = bool(run.reason or state.errors)  # else a node that was started by hand is about to end
            parts = [(node, state.nodes[node.name]) for node in self._spec.nodes]
            if any(node.here and not part.ended and (failed or not part.by_hand) for node, part in parts):
                stop_job({"id": self.id})  # elsewhere the guards of the nodes do it
        self._seconds |= {"joined": run.joined, "total": time.monotonic() - self._started}
        failure = diagnose(state, run.reason)
        size = max([len(self._spec.nodes) * self._spec.nproc_per_node, *(rank + 1 for rank in state.ranks)])
        return JobResult(
            ok=failure is None,
            results=tuple(state.results.get(rank) for rank in range(size)),
            ranks=tuple(state.ranks[rank] for rank in sorted(state.ranks)),
            failure=failure,
            restarts=tuple(describe_restart(errors) for errors in state.restarts),
            seconds=self._seconds,
            memory=state.memory,
            folder=self.folder,
            lines=tuple(run.lines),
        )
