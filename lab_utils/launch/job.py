"""A torchrun job: what runs, on which nodes, and the scripts, the check and the launch of it."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab_utils import LabError, env_folder
from lab_utils.files import write_atomically
from lab_utils.launch import kinds, slurm, values
from lab_utils.launch.bundle import Bundle, collect_files
from lab_utils.launch.causes import explain_folder
from lab_utils.launch.diagnosis import diagnose, find_first
from lab_utils.launch.nodes import Node
from lab_utils.launch.outcome import JobError, JobResult
from lab_utils.launch.plans import make_plans
from lab_utils.launch.preflight import Preflight, check_nodes
from lab_utils.launch.run import Run
from lab_utils.launch.script import Plan, write_script
from lab_utils.launch.start import copy_all, start_links, sweep
from lab_utils.launch.story import Story

# How long a preflight counts: within it nothing is asked twice, and after it a port may have been taken.
FRESH_SECONDS = 60.0
Say = Callable[[str], None]


@dataclass
class TorchrunJob:
    """A training script that torchrun runs on one or more nodes.

    Args:
        script: The training script, on this machine.
        args: Its arguments.
        nodes: From ``local_nodes``, ``ssh_nodes`` or ``slurm_nodes``.
        nproc_per_node: Processes on each node, one per device.
        env: More environment variables for it. No secrets: they stand in the scripts.
        port: Port of the rendezvous on the first node; None takes a free one.
        join_timeout: Seconds to wait until all nodes have joined.
        hang_timeout: Seconds after which a rank that does not move is said to hang.
        limit: Seconds after which the job is ended in any case.
        max_restarts: How often torchrun starts the workers anew after a failure.
        rank_order: "address": rank 0 is on the node with the lowest address, compared as text (torchrun's c10d);
            "nodes": on the first of the list (torchrun's static rendezvous).
        files: Other files that the script imports or reads beside itself.
        dataset: Folder in ``LAB_DATA/packed`` of the data set, which the preflight compares; None skips that.
        pack: That folder here, where it has another name: ``Dataset.pack``.
        copy_data: Whether to copy that pack from this machine to the nodes that lack it.
    """

    script: str | Path
    args: Sequence[object] = ()
    nodes: Sequence[Node] = ()
    nproc_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    join_timeout: float = 60.0
    hang_timeout: float = 60.0
    limit: float = 3600.0
    max_restarts: int = 0
    rank_order: str = "address"
    files: Sequence[str | Path] = ()
    dataset: str | None = None
    pack: Path | None = None
    copy_data: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        """Checks a field as it is set, also after the construction: its value stands in scripts that bash runs."""
        if name in values.JOB:
            value = kinds.check_value("TorchrunJob", name, value, values.JOB[name])
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        """Finds the pack, and begins the first launch."""
        self.pack = self.pack or env_folder("LAB_DATA", "data") / "packed" / str(self.dataset)
        self._preflight: Preflight | None = None
        self._checked, self._stop = 0.0, threading.Event()
        self._renew()

    def _renew(self) -> None:
        """Gives the next launch an id of its own: what is left of an earlier one must not be joined."""
        name = re.sub(r"[^A-Za-z0-9-]+", "-", self.script.stem)[:30].strip("-") or "job"
        self.id = f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self.rendezvous_id = secrets.token_hex(16)
        self.folder = env_folder("LAB_RUNS", "runs") / "jobs" / self.id

    def preflight(self) -> Preflight:
        """Asks every node whether the job can run there, in seconds; changes nothing.

        Returns:
            The verdicts; a notebook shows them as a table.
        """
        self._checked = time.monotonic()
        if self._on_slurm:
            self._preflight = slurm.check_queue(self.nodes, self._collect().hash)
            return self._preflight
        self._preflight = check_nodes(
            self.nodes,
            port=self.port,
            nproc_per_node=self.nproc_per_node,
            bundle=self._collect().hash,
            data_file=f"packed/{self.dataset}/manifest.json" if self.dataset else "",
            pack=str(self.pack),
            copy_data=self.copy_data,
            job_id=self.id,
        )
        return self._preflight

    def write(self) -> list[Path]:
        """Writes the bash script of every node into ``folder``, to be read, or run by hand on its node.

        The nodes are asked first where an address is not known.

        Returns:
            One path per node, in the order of ``nodes``; on Slurm one batch script.

        Raises:
            LabError: A value cannot be in a script, a node that has to be asked does not answer, or the folder cannot
                be written.
        """
        return self._write(self._plan(self._collect()))

    def _write(self, plans: Sequence[Plan]) -> list[Path]:
        if self._on_slurm:
            texts = {slurm.SCRIPT: slurm.write(plans[0], self.nodes)}
        else:
            texts = {f"node{plan.node}.sh": write_script(plan) for plan in plans}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, text in texts.items():
                with write_atomically(self.folder / name, mode=0o700) as file:  # the id of the rendezvous is a secret
                    file.write(text.encode(errors="surrogateescape"))
        except OSError as error:
            raise explain_folder(self.folder, error) from error
        return [self.folder / name for name in texts]

    def run(
        self,
        *,
        check: bool = True,
        force: bool = False,
        by_hand: Sequence[str] = (),
        show: bool | Say = True,
    ) -> JobResult:
        """Runs the job to its end: checks the nodes, copies what they lack, starts torchrun on each, follows it.

        Args:
            check: Whether a failed job raises; otherwise ``JobResult.failure`` says it.
            force: Whether to start although the preflight has a red line.
            by_hand: Names of nodes that you start yourself, by the command that is shown.
            show: Whether to print lines as they come, or a function that takes each.

        Raises:
            JobError: The job failed; it names the rank that failed first.
            LabError: The preflight has a red line, or a node was not reached.
            KeyboardInterrupt: The cell was interrupted; the job has ended on every node.
        """
        self._stop.clear()  # a stop() while nothing ran was for nothing
        say = show if callable(show) else (lambda line: print(line, flush=True)) if show else (lambda line: None)
        seconds = {}
        if by_hand and self._on_slurm:
            fix = "leave by_hand away, or read the script that job.write() leaves"
            raise LabError("Slurm starts all nodes of a job or none.", where="by_hand", fix=fix)
        by_hand = kinds.check_value("TorchrunJob.run", "by_hand", by_hand, values.NAMES)
        if unknown := set(by_hand) - {node.name for node in self.nodes}:
            fix = f"by_hand takes names of {', '.join(node.name for node in self.nodes)[:80]}"
            raise LabError(f"No node of this job is called {min(unknown)[:60]!r}.", where="by_hand", fix=fix)
        try:
            checked = self._preflight
            # What was red may have been mended since, and what was free may have been taken.
            if checked is None or time.monotonic() - self._checked > FRESH_SECONDS or not (checked.ok or force):
                checked = self.preflight()
            seconds["preflight"] = checked.seconds
            if not force:
                checked.raise_if_red()
            say(f"preflight: {len(self.nodes)} node(s) {'ready' if checked.ok else 'NOT ready; started anyway'}")
            # Once: a script that is saved meanwhile must not be copied under the hash of the one before.
            bundle = self._collect()
            result = self._follow(bundle, say, by_hand, seconds, force=force)
        finally:
            self._preflight = None
            self._renew()
        if result.failure and check:
            raise JobError(result)
        return result

    def stop(self) -> None:
        """Ends a job that runs in another thread; it ends on every node."""
        self._stop.set()

    def _collect(self) -> Bundle:
        return collect_files(self.script, self.files)

    @property
    def _on_slurm(self) -> bool:
        return isinstance(self.nodes[0], slurm.SlurmNode)

    def _plan(self, bundle: Bundle) -> list[Plan]:
        """What the script of each node says; asks the nodes first where an address or the port is not known."""
        known = self._on_slurm or (self.port is not None and all(node.address is not None for node in self.nodes))
        if self._preflight is None and not known:
            self.preflight()
        return make_plans(self, bundle.hash, self._preflight)

    def _follow(
        self, bundle: Bundle, say: Say, by_hand: Sequence[str], seconds: dict[str, float], *, force: bool
    ) -> JobResult:
        started = time.monotonic()
        plans = self._plan(bundle)
        self._write(plans)
        copy_all(self, bundle, self._preflight, force=force, say=say)
        story = Story([node.name for node in self.nodes], [plan.address or "" for plan in plans])
        for name in by_hand:
            story.nodes[name].by_hand = True
        links = start_links(self, plans, by_hand=by_hand, say=say, stop=self._stop)
        run = Run(
            links,
            story,
            log=self.folder / "output.log",
            join_timeout=self.join_timeout,
            limit=self.limit,
            restarts=self.max_restarts > 0,
            say=say,
            stop=self._stop,
        )
        try:
            run.follow()
        finally:
            failed = bool(run.why or story.errors)  # else a node that was started by hand is about to end
            parts = [(node, story.nodes[node.name]) for node in self.nodes]
            sweep([node for node, part in parts if not part.ended and (failed or not part.by_hand)], self.id)
        seconds |= {"joined": run.joined, "total": time.monotonic() - started}
        failure = diagnose(story, why=run.why)
        size = max([len(self.nodes) * self.nproc_per_node, *(rank + 1 for rank in story.ranks)])
        return JobResult(
            ok=failure is None,
            results=tuple(story.results.get(rank) for rank in range(size)),
            ranks=tuple(story.ranks[rank] for rank in sorted(story.ranks)),
            failure=failure,
            restarts=tuple(find_first(errors) for errors in story.restarts),
            seconds=seconds,
            memory=story.memory,
            folder=self.folder,
            lines=tuple(run.lines),
        )
