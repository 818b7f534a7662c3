"""Nodes that Slurm chooses: one batch job, its place in the queue, and a link to each of its nodes."""

from __future__ import annotations

import contextlib
import os
import re
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
from nodelaunch.backends.nodes import ThisMachine
from nodelaunch.backends.sbatch import SlurmRequest, write_sbatch
from nodelaunch.bundle import Bundle
from nodelaunch.copying import copy_to_nodes
from nodelaunch.node.cleaning import mark_used
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import Verdict, judge_error
from nodelaunch.script import Placement
from nodelaunch.spec import JobSpec, Launch

SCRIPT = "job.sbatch"
BY_HAND = False
# Final states; GONE is ours, for a job that Slurm has forgotten.
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
OVER |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
LOOK_SECONDS, STOP_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class SlurmNode(ThisMachine):
    """One of the nodes that Slurm will choose; attributes as in :class:`nodelaunch.backends.nodes.Node`.

    Its folder is on a file system that this machine and all nodes share, so that files are copied here.

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
        """The folder of a job's files: one for all nodes, in which the batch script makes one for each."""
        return f"{self.folder}/jobs/{job_id}"


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
        partition: Slurm's partition; None leaves it to the cluster.
        folder: A folder that all nodes see under the same path; None is ``LAB_RUNS/slurm``.
        time_limit: Time after which Slurm ends the job, hours:minutes:seconds.
        python: The interpreter, under the same path on all nodes; None is this one.
        interface: The network interface between the nodes; None finds it by the route.
        extra: More options of sbatch, each one string: ``["--gpus-per-node=1", "--account=course"]``.

    Raises:
        LabError: A value cannot be in a batch script.
    """
    request = SlurmRequest(count, partition=partition, time_limit=time_limit, extra=extra)
    place = values.check_value("slurm_nodes", "folder", folder, values.optional(values.check_path))
    place = place or env_folder("LAB_RUNS", "runs") / "slurm"
    python = sys.executable if python is None else python
    return [
        SlurmNode(f"slurm{index}", str(place), request, python=python, interface=interface)
        for index in range(request.count)
    ]


def check(spec: JobSpec, job_id: str) -> Preflight:
    """Judges the queue.

    Slurm chooses the nodes later, so the ranks compare their versions when they meet.
    """
    started, nodes = time.monotonic(), spec.nodes
    try:
        verdict = judge_queue(nodes[0].request, len(nodes))
    except LabError as error:
        verdict = judge_error("Slurm", error)
    return Preflight((verdict,), seconds=time.monotonic() - started)


def needs_preflight(spec: JobSpec) -> bool:
    """Never: the batch script finds out addresses and port."""
    return False


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Writes one batch script for all nodes."""
    return {SCRIPT: write_sbatch(spec, launch, places[0])}


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
    """Submits ``job.sbatch``, reports each change in the queue, and waits for its turn.

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
            mark_used(folder, Path(places[0].code_folder))  # it may wait for hours
            time.sleep(LOOK_SECONDS)
    except BaseException:
        job.end()
        raise
    if (queue := describe_queue(job.number)) != said:
        say(queue)
    return {node.name: SlurmLink(node.name, index, job) for index, node in enumerate(spec.nodes)}


class SlurmLink:
    """The link to one node of a Slurm job; see :class:`nodelaunch.backends.nodes.Link`."""

    def __init__(self, node: str, index: int, job: SlurmJob) -> None:
        self.node, self.job = node, job
        self._path = job.folder / f"node{index}.out"

    def lines(self) -> Iterator[bytes]:
        """Yields what the node printed, until the job is over."""
        rest, read, quiet = b"", 0, 0
        while quiet < 3:
            # The state comes first, so that everything that was written before the end of the job is read.
            over = self.job.state in OVER
            new = b""
            with contextlib.suppress(OSError), self._path.open("rb") as file:  # opened each time: only then
                file.seek(read)  # does a shared file system show what other machines wrote
                new = file.read()
            read += len(new)
            *whole, rest = (rest + new).split(b"\n")
            yield from (line + b"\n" for line in whole)
            quiet = quiet + 1 if over and not new else 0
            time.sleep(0.1)
        if rest:
            yield rest + b"\n"

    def beat(self) -> None:
        """Sends a heartbeat."""
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
        """The error of a job that Slurm ended, or that failed; None if it ended well."""
        if not self.poll():
            return None
        facts, number = self.job.facts, self.job.number
        log = self.job.folder / f"slurm-{number}.out"
        last = ""
        with contextlib.suppress(OSError):
            last = ([line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""])[-1]
        what = f"Slurm job {number} ended as {facts['JobState']}, exit status {facts.get('ExitCode', 'unknown')}."
        where, cause = (
            facts.get("NodeList") or "no node",
            last[:300] or f"Slurm's reason: {facts.get('Reason', 'none')}",
        )
        return LabError(what, where=where, cause=cause, fix=f"scontrol show job {number}", log=log)


def submit(path: Path, *, lease: Path | None = None) -> int:
    """Hands a batch script to Slurm from the script's own folder, and returns the job's number.

    Args:
        path: The script.
        lease: The file that the launcher touches while it runs; None lets the job run without a launcher.

    Raises:
        LabError: Slurm is not here, or refuses.
    """
    # A notebook may itself run in a Slurm job, and SLURM_… describe that one.
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    env |= {"LAB_LEASE": str(lease)} if lease else {}
    done = _ask("sbatch", "--parsable", path.name, cwd=path.parent, env=env)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines() or [""]
        cause = said[-1].rpartition("error: ")[2][:300]
        fix = f"sinfo shows what there is; by hand: cd {path.parent}; sbatch {path.name}"
        raise LabError("Slurm does not take the job.", where=path, cause=cause, fix=fix)
    return int(done.stdout.strip().split(";")[0])  # "12;cluster" if there are several clusters


def judge_queue(request: SlurmRequest, count: int) -> Verdict:
    """Judges if Slurm has ``count`` nodes in service: "ok", "note" if the job will wait for some of them, or "red".

    Raises:
        LabError: Slurm is not here, or does not answer.
    """
    only = [f"--partition={request.partition}"] if request.partition else []
    done = _ask("sinfo", "--noheader", "--Node", "--format=%P|%a|%N|%t", *only)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["sinfo gave no reason"])[-1]
        fix = "ask who runs the cluster; sinfo shows when it is back"
        raise LabError("Slurm does not answer.", where="sinfo", cause=said[:300], fix=fix)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 3]
    # A node may be in several partitions. States with another last character, such as *, are not in service.
    usable = {node: state for _, up, node, state in rows if up == "up" and state in ("idle", "mix", "alloc", "comp")}
    there, idle = len(usable), list(usable.values()).count("idle")
    names = ", ".join(sorted({name.rstrip("*") for name, *_ in rows})) or "none"
    found = f"{there} node(s) in service, {idle} of them idle (partitions: {names}); {count} asked for"
    if there >= count:
        return Verdict("Slurm", "queue", "note" if idle < count else "ok", found)
    fix = "sinfo shows what there is; slurm_nodes(…, partition=…) chooses"
    return Verdict("Slurm", "queue", "red", found, "another partition was meant", fix)


def describe_queue(job: int) -> str:
    """Returns the state of a job, its reason and its nodes, in words."""
    facts = look_up(job)
    on = f" on {nodes}" if (nodes := facts.get("NodeList", "")) not in ("", "(null)") else ""
    why = f" ({reason})" if (reason := facts.get("Reason", "None")) != "None" else ""
    return f"Slurm job {job}: {facts['JobState']}{on}{why}"


def look_up(job: int) -> dict[str, str]:
    """Returns Slurm's facts of a job; its ``JobState`` is "GONE" if Slurm no longer knows it."""
    done = _ask("scontrol", "show", "job", "--oneliner", str(job))
    if done.returncode:
        # Slurm forgets a job some minutes after its end. The controller may also be away for a moment.
        return {"JobState": "GONE" if "Invalid job id" in done.stderr else "UNKNOWN"}
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


class SlurmJob:
    """A submitted job, which its links share: its state, looked up at most twice a second, and its lease."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._lock, self._looked, self._facts = threading.Lock(), 0.0, {"JobState": "UNKNOWN"}
        self._stopping = False

    @property
    def facts(self) -> dict[str, str]:
        """Slurm's facts of it."""
        with self._lock:
            if self._facts["JobState"] not in OVER and time.monotonic() - self._looked > LOOK_SECONDS:
                self._facts, self._looked = look_up(self.number), time.monotonic()
            return self._facts

    @property
    def state(self) -> str:
        """Its state now."""
        return self.facts["JobState"]

    def beat(self) -> None:
        """Sends a heartbeat: touches the lease."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / "lease")

    def stop(self) -> None:
        """Asks the supervisors to end everything, and cancels the job if that takes too long."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        (self.folder / "lease").unlink(missing_ok=True)
        timer = threading.Timer(STOP_SECONDS, self.end)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """Cancels it."""
        (self.folder / "lease").unlink(missing_ok=True)
        if self.state not in OVER:
            _ask("scancel", str(self.number))


def _ask(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **options)
    except FileNotFoundError as error:
        cause = f"there is no program `{argv[0]}`: this is not a login node of a Slurm cluster"
        fix = "launch from a login node, or use local_nodes(2) or ssh_nodes([...])"
        raise LabError("Slurm's programs are not on this machine.", where="PATH", cause=cause, fix=fix) from error
