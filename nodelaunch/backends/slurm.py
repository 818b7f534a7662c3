"""Nodes that Slurm chooses: one batch job, its place in the queue, and a link to what runs on each of its nodes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lab_common import LabError, env_folder
from nodelaunch import values
from nodelaunch.backends import Say
from nodelaunch.backends.sbatch import SlurmRequest, write_sbatch
from nodelaunch.backends.submission import (
    LOOK_SECONDS,
    OVER,
    SlurmJob,
    cancel,
    describe_queue,
    judge_queue,
    list_partitions,
    submit,
)
from nodelaunch.bundle import Bundle
from nodelaunch.copying import copy_to_nodes
from nodelaunch.ends import explain_end
from nodelaunch.node.facts import find_code
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import Verdict, Wanted, judge_code, judge_error
from nodelaunch.script import Placement
from nodelaunch.spec import JobSpec, Launch

__all__ = ["SlurmLink", "SlurmNode", "cancel", "describe_queue", "slurm_nodes", "start", "submit", "write_sbatch"]

SCRIPT = "job.sbatch"
# The supervisors open the launcher's file anew at each look, upon which a shared file system asks for its true age.
LEASE_SECONDS = 7.0
BY_HAND = False


@dataclass(frozen=True)
class SlurmNode:
    """One of the nodes that Slurm will choose; attributes as in :class:`nodelaunch.backends.nodes.Node`.

    Its folder is on a file system that this machine and all nodes share, so that what has to be copied to the node is
    copied here.

    Attributes:
        request: What is asked of Slurm, the same for all nodes of a list.
    """

    name: str = values.checked(values.NAME)
    folder: str = values.checked(values.FOLDER)
    request: SlurmRequest
    python: str = values.checked(values.NAME, default=sys.executable)
    address: str | None = values.checked(values.optional(values.check_address), default=None)
    interface: str | None = values.checked(values.optional(values.NAME), default=None)
    data: str | None = values.checked(values.optional(values.NAME), default=None)
    backend: ClassVar[str] = __name__
    here: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks every field."""
        values.check_fields(self, "slurm_nodes")

    @property
    def data_folder(self) -> str:
        """LAB_DATA of a job there."""
        return self.data or f"{self.folder}/data"

    def name_job_folder(self, job_id: str, index: int) -> str:
        """Where a job's files go: one folder for all nodes, in which the batch script makes one for each."""
        return f"{self.folder}/jobs/{job_id}"

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        """Starts a program on this machine, which sees the nodes' files; on the nodes only the job runs."""
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def explain(self, returncode: int, stderr: str) -> LabError:
        """Says why a program could not be run here."""
        if end := explain_end("this machine", self.folder, returncode, stderr):
            return end
        last = (stderr.strip().splitlines() or [f"exit status {returncode}"])[-1]
        return LabError(
            "The nodes' shared folder could not be prepared.",
            where=self.folder,
            cause=last[:300],
            fix="see that the folder can be written to and that the disk has room, then run the job again",
        )


def slurm_nodes(
    count: int,
    *,
    partition: str | None = None,
    folder: str | Path | None = None,
    time_limit: str = "00:30:00",
    python: str | None = None,
    interface: str | None = None,
    extra: Sequence[str] = (),
) -> list[SlurmNode]:
    """Makes nodes that Slurm chooses when the job starts; nothing is asked of Slurm before.

    Args:
        count: How many nodes.
        partition: Where they are taken from; None leaves it to the cluster.
        folder: A folder that all nodes see under the same path; ``LAB_RUNS/slurm`` where None.
        time_limit: After which Slurm ends the job, hours:minutes:seconds.
        python: The interpreter, under the same path on all nodes; this one where None.
        interface: The network interface between the nodes; None finds it by the route.
        extra: More options of sbatch, each one string: ``["--gpus-per-node=1", "--account=course"]``.

    Raises:
        LabError: A value cannot stand in a batch script.
    """
    request = SlurmRequest(count, partition=partition, time_limit=time_limit, extra=extra)
    place = values.check_value("slurm_nodes", "folder", folder, values.optional(values.check_path))
    place = place or env_folder("LAB_RUNS", "runs") / "slurm"
    python = sys.executable if python is None else python
    return [
        SlurmNode(f"slurm{index}", str(place), request, python=python, interface=interface)
        for index in range(request.count)
    ]


def check(spec: JobSpec, code: str, job_id: str) -> Preflight:
    """Looks whether Slurm is here and has as many nodes as asked for; the nodes themselves are chosen later.

    What is compared between hosts before a job on SSH (versions) is compared on Slurm when the ranks meet. The code
    lies in a folder that this machine shares, where it is looked at.
    """
    started, nodes, request = time.monotonic(), spec.nodes, spec.nodes[0].request
    try:
        state, found = judge_queue(list_partitions(request.partition), len(nodes))
        fix = "sinfo shows what there is; slurm_nodes(…, partition=…) chooses" if state == "red" else ""
        verdict = Verdict("Slurm", "queue", state, found, "another partition was meant" if fix else "", fix)
    except LabError as error:
        verdict = judge_error("Slurm", error)
    there = {"code": find_code({"folder": nodes[0].folder, "code": code})}
    changed = [found for found in judge_code("Slurm", there, Wanted(bundle=code)) if found.state == "red"]
    return Preflight((verdict, *changed), {}, {}, 0, time.monotonic() - started, {})


def needs_preflight(spec: JobSpec) -> bool:
    """Never: the batch script finds out addresses and port."""
    return False


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Writes one batch script for all nodes."""
    return {SCRIPT: write_sbatch(spec, launch, places[0], lease=LEASE_SECONDS)}


def copy(spec: JobSpec, launch: Launch, bundle: Bundle, found: Preflight | None, *, force: bool, say: Say) -> None:
    """Copies into the folder that all nodes share."""
    # The preflight asks no node for its data; what is there already stays.
    lacking = {spec.nodes[0].name} if spec.data and spec.data.copy_data else ()
    copy_to_nodes(spec, launch, bundle, nodes=spec.nodes[:1], lacking=lacking, force=force, say=say)


def start(
    spec: JobSpec,
    launch: Launch,
    places: Sequence[Placement],
    *,
    by_hand: Sequence[str] = (),
    say: Say,
    stop: threading.Event,
) -> dict[str, SlurmLink]:
    """Submits ``job.sbatch``, tells each change of its place in the queue, and waits for its turn.

    Raises:
        LabError: Slurm does not take the job.
        KeyboardInterrupt: The waiting was interrupted; the job is cancelled.
    """
    folder = Path(places[0].job_folder)
    lease = folder / "lease"
    lease.touch()
    job = SlurmJob(submit(folder / SCRIPT, lease=lease), folder)
    said = ""
    try:
        while job.state in ("PENDING", "CONFIGURING", "UNKNOWN") and not stop.is_set():
            if (queue := describe_queue(job.number)) != said:
                say(said := queue)
            job.beat()
            time.sleep(LOOK_SECONDS)
    except BaseException:
        job.end()
        raise
    if (queue := describe_queue(job.number)) != said:
        say(queue)
    return {node.name: SlurmLink(node.name, index, job) for index, node in enumerate(spec.nodes)}


class SlurmLink:
    """What runs on one node of a Slurm job; see :class:`nodelaunch.backends.nodes.Link`."""

    def __init__(self, node: str, index: int, job: SlurmJob) -> None:
        self.node, self.job = node, job
        self._path = job.folder / f"node{index}.out"

    def lines(self) -> Iterator[bytes]:
        """Yields what the node printed, until the job is over."""
        rest, read, quiet = b"", 0, 0
        while quiet < 3:
            # A look at the state first: what was written before the job was over is then read for certain.
            over = self.job.state in OVER
            new = b""
            with contextlib.suppress(OSError), self._path.open("rb") as file:  # opened anew: a shared file system
                file.seek(read)  # shows what other machines wrote when a file is opened
                new = file.read()
            read += len(new)
            *whole, rest = (rest + new).split(b"\n")
            yield from (line + b"\n" for line in whole)
            quiet = quiet + 1 if over and not new else 0
            time.sleep(0.1)
        if rest:
            yield rest + b"\n"

    def beat(self) -> None:
        """Says that the launcher lives."""
        self.job.beat()

    def stop(self) -> None:
        """Asks the supervisors of the whole job to end everything."""
        self.job.stop()

    def kill(self) -> None:
        """Cancels the whole job."""
        self.job.end()

    def poll(self) -> int | None:
        """Returns the exit status of the job, or None while it is not over."""
        if self.job.state not in OVER:
            return None
        status, _, number = self.job.facts.get("ExitCode", "0:0").partition(":")
        code = int(status) or (128 + int(number or 0) if int(number or 0) else 0)
        return code or int(self.job.state not in ("COMPLETED", "GONE"))

    def explain(self) -> LabError | None:
        """Says what Slurm did to the job; None where it ended well."""
        if not self.poll():
            return None
        facts, number = self.job.facts, self.job.number
        log = self.job.folder / f"slurm-{number}.out"
        last = ""
        with contextlib.suppress(OSError):
            last = ([line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""])[-1]
        return LabError(
            f"Slurm job {number} ended as {facts['JobState']}, exit status {facts.get('ExitCode', 'unknown')}.",
            where=facts.get("NodeList", "") or "no node",
            cause=last[:300] or f"Slurm's reason: {facts.get('Reason', 'none')}",
            fix=f"scontrol show job {number}",
            log=log,
        )
