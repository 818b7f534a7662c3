"""A job: what runs, on which nodes, and the scripts, the check and the launch of it."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lab_common import LabError
from lab_common.files import write_atomically
from lab_common.text import clean
from nodelaunch.backends import Say
from nodelaunch.backends.nodes import Node
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import WILL_COPY
from nodelaunch.result import JobResult
from nodelaunch.running import RunningJob
from nodelaunch.script import Placement, place_nodes
from nodelaunch.spec import JobSpec, Launch, make_launch
from nodelaunch.state import JobState
from nodelaunch.transfer import Bundle, collect_files, copy_to_nodes

FRESH_SECONDS = 60.0  # how long a preflight counts; after it a port may have been taken


class TorchrunJob:
    """A training script that torchrun, or another program, runs on one or more nodes.

    It takes the arguments of :class:`nodelaunch.spec.JobSpec`, and has them as attributes. Each ``run()`` or
    ``start()`` is a launch with a new id and folder.
    """

    def __init__(
        self, script: str | Path, args: Sequence[object] = (), nodes: Sequence[Node] = (), **options: Any
    ) -> None:
        self.spec = JobSpec(script, args, nodes, **options)
        self._backend = import_module(self.spec.nodes[0].backend)
        self._preflight = Preflight()
        self._stop = threading.Event()
        self._launch, self._started = make_launch(self.spec.script.stem), False

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the specification."""
        if name.startswith("_") or name == "spec":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self.spec, name)

    @property
    def id(self) -> str:
        """Id of the current launch, or of the next one if none has started."""
        return self._launch.id

    @property
    def folder(self) -> Path:
        """Folder of that launch on this machine, ``jobs/<id>`` in LAB_RUNS or ``runs``: the scripts and the log."""
        return self._launch.folder

    def preflight(self) -> Preflight:
        """Asks every node whether the job can run there, in seconds; changes nothing.

        Returns:
            The verdicts; a notebook shows them as a table.
        """
        self._collect()  # a file that is missing here is named before any node is asked
        return self._ask_nodes()

    def write(self) -> list[Path]:
        """Writes the bash script of every node into ``folder``, to be read, or run by hand on its node.

        If an address or the port is not known, the nodes are asked first.

        Returns:
            One path per node, in the order of ``nodes``; on Slurm one batch script.
        """
        launch = self._renew_launch()
        bundle, spec = self._collect(), self.spec
        known = spec.port is not None and all(node.address for node in spec.nodes)
        if self._backend.ONE_BY_ONE and not known and not self._is_fresh():
            self._ask_nodes()
        return self._write(launch, bundle.hash)[1]

    def start(self, *, force: bool = False, by_hand: Sequence[str] = (), show: bool | Say = True) -> RunningJob:
        """Starts the job and returns while it runs: ``wait()`` for its result, or ``stop()`` it.

        Args:
            force: Start even if the preflight has a red line.
            by_hand: Names of nodes that you start yourself, by the command that is shown.
            show: True to print lines as they come, or a function that takes each.

        Raises:
            LabError: The preflight has a red line, or a node was not reached.
        """
        running = self._begin(force=force, by_hand=by_hand, show=show)
        threading.Thread(target=running.follow, daemon=True, name=f"job {running.id}").start()
        return running

    def run(
        self, *, check: bool = True, force: bool = False, by_hand: Sequence[str] = (), show: bool | Say = True
    ) -> JobResult:
        """Runs the job to its end: checks the nodes, copies code and data, starts torchrun on each, follows it.

        Args:
            check: Raise if the job failed; otherwise ``JobResult.failure`` says it.
            force: As in ``start``.
            by_hand: As in ``start``.
            show: As in ``start``.

        Raises:
            JobError: The job failed; it names the rank that failed first.
            LabError: The preflight has a red line, or a node was not reached.
            KeyboardInterrupt: The launcher was interrupted; the job has ended on every node.
        """
        running = self._begin(force=force, by_hand=by_hand, show=show)
        running.follow()  # in this thread, where an interrupt ends it
        return running.wait(check=check)

    def stop(self) -> None:
        """Ends a job that runs in another thread; it ends on every node."""
        self._stop.set()

    def _renew_launch(self) -> Launch:
        """Returns the names of the next launch, new if the present ones were used."""
        if self._started:
            self._launch, self._started = make_launch(self.spec.script.stem), False
        return self._launch

    def _collect(self) -> Bundle:
        return collect_files(self.spec.script, self.spec.files, self.spec.root)

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._preflight.started <= FRESH_SECONDS

    def _ask_nodes(self) -> Preflight:
        self._preflight = self._backend.check(self.spec)
        return self._preflight

    def _begin(self, *, force: bool, by_hand: Sequence[str], show: bool | Say) -> RunningJob:
        """Checks the nodes, copies to them, and starts the supervisors."""
        launch, spec, stop = self._renew_launch(), self.spec, threading.Event()
        self._stop = stop  # a stop() while nothing ran was for nothing
        say = show if callable(show) else (lambda line: print(line, flush=True)) if show else (lambda line: None)
        self._check_by_hand(by_hand)
        # Read once: a script that is saved meanwhile must not be copied under the hash of the one before.
        bundle = self._collect()
        try:
            self._check(force=force, say=say)
            self._started = True
            if bundle.note:
                say(bundle.note)
            places, _ = self._write(launch, bundle.hash)
            state = JobState([node.name for node in spec.nodes], [place.address or "" for place in places], spec)
            for name in by_hand:
                state.nodes[name].by_hand = True
            self._copy(bundle)
            links = self._backend.start(spec, launch, places, by_hand=by_hand, say=say, stop=stop)
            return RunningJob(launch, state, links, say=say, stop=stop, preflight=self._preflight.seconds)
        finally:
            self._preflight = Preflight()  # it counts for one launch: that takes the port

    def _check(self, *, force: bool, say: Say) -> None:
        """Asks the nodes, unless they were asked just now, and raises a LabError if the preflight has a red line."""
        # What was red may have been fixed since, and what was free may have been taken.
        if not self._is_fresh() or not (self._preflight.ok or force):
            self._ask_nodes()
        ready, count = self._preflight.ok, len(self.spec.nodes)
        if not force:
            self._preflight.raise_if_red()
        say(f"preflight: {count} node(s) {'ready' if ready else 'NOT ready; started anyway'}")
        if self._preflight.hide_gpus:
            say("preflight: not every process has a GPU: all of them use the CPU and gloo (job.preflight() says more)")

    def _write(self, launch: Launch, code_hash: str) -> tuple[list[Placement], list[Path]]:
        """Writes the scripts of a launch of the code with this hash; returns the places and the scripts' paths."""
        places = place_nodes(self.spec, launch, code_hash, self._preflight)
        launch.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        texts = self._backend.write(self.spec, launch, places)
        for name, text in texts.items():
            # Nobody else may read it: the id of the rendezvous is a secret.
            with write_atomically(launch.folder / name, mode=0o700) as file:
                file.write(text.encode(errors="surrogateescape"))
        return places, [launch.folder / name for name in texts]

    def _copy(self, bundle: Bundle) -> None:
        """Copies code and scripts to the nodes, and the data to those that lack them."""
        spec, nodes = self.spec, self.spec.nodes
        lacking = {verdict.node for verdict in self._preflight.verdicts if verdict.found == WILL_COPY}
        if not self._backend.ONE_BY_ONE:  # they share one folder, which no preflight has looked into
            nodes = nodes[:1]
            lacking = {nodes[0].name} if spec.data and spec.data.copy_data else set()
        copy_to_nodes(spec, self._launch, bundle, nodes=nodes, lacking=lacking)

    def _check_by_hand(self, by_hand: Sequence[str]) -> None:
        names = {node.name for node in self.spec.nodes}
        if by_hand and not (self._backend.ONE_BY_ONE and set(by_hand) < names):
            what = f"by_hand names some nodes of the job, not {clean(by_hand, 60)}."
            cause = "the launcher starts at least one node, which it follows; Slurm starts all or none"
            fix = f"some of {clean(', '.join(sorted(names)), 80)}, or start all that job.write() wrote"
            raise LabError(what, where="by_hand", cause=cause, fix=fix)


TorchrunJob.__signature__ = inspect.signature(JobSpec)
