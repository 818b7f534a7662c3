"""Nodes that Slurm chooses: one batch script, one job in the queue, and a link to each of its nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import ClassVar

from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch import values
from nodelaunch.backends import Say
from nodelaunch.backends.nodes import Link, ThisMachine
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import Verdict, judge_error
from nodelaunch.script import Bash, Placement, write_environment, write_start
from nodelaunch.spec import JobSpec, Launch

SCRIPT = "job.sbatch"
ONE_BY_ONE = False
# An option as it may stand in a line of #SBATCH, where a space or a quote would begin something else.
OPTION = re.compile(r"--[a-z][a-z-]*(=[\w@%:,./+*\[\]()=~|&!-]+)?", re.ASCII)
# Seconds without a touch of the launcher's file after which a node ends, and from SIGTERM to SIGKILL. The lease is
# longer than on SSH: the supervisors open the file at each look, so that a shared file system asks for its true age,
# but a change may still show seconds late.
LEASE_SECONDS, GRACE_SECONDS = 7.0, 2.0
LOOK_SECONDS = 0.5
# States before its turn, and final ones. Ours: the controller does not answer (UNKNOWN); Slurm has forgotten it (GONE).
WAITING = {"PENDING", "CONFIGURING", "UNKNOWN"}
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
OVER |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}


@dataclass(frozen=True, kw_only=True)
class SlurmNode(ThisMachine):
    """One of the nodes that Slurm will choose. All of them share its folder with this machine."""

    options: tuple[str, ...]  # of sbatch, the same for all nodes of a list
    backend: ClassVar[str] = __name__
    maker: ClassVar[str] = "slurm_nodes"

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
    count = values.check_value("slurm_nodes", "count", count, values.whole(1, 1000, 2))
    extra = values.check_value("slurm_nodes", "extra", extra, values.list_of(values.TEXT))
    options = [f"--time={time_limit}", *([] if partition is None else [f"--partition={partition}"]), *extra]
    for option in options:
        if not OPTION.fullmatch(option):
            what = f"{json.dumps(option)[:60]} is not one option of sbatch."
            cause = "each begins with --, has its value behind =, and neither spaces nor quotes"
            fix = "slurm_nodes(2, partition='gpu', time_limit='00:30:00', extra=['--gpus-per-node=1'])"
            raise LabError(what, where="slurm_nodes", cause=cause, fix=fix)
    place = values.check_value("slurm_nodes", "folder", folder, values.optional(values.check_path))
    place = place or env_folder("LAB_RUNS", "runs") / "slurm"
    own = {"folder": str(place), "interface": interface, "options": tuple(options)}
    own |= {} if python is None else {"python": python}
    return [SlurmNode(name=f"slurm{index}", **own) for index in range(count)]


def check(spec: JobSpec) -> Preflight:
    """Asks Slurm if it would take the job, and when; it chooses the nodes later, and the ranks compare them."""
    started = time.monotonic()
    try:
        done = _sbatch("--test-only", f"--nodes={len(spec.nodes)}", *spec.nodes[0].options, "--wrap=true")
        said = clean(done.stderr.strip().rpartition("sbatch: ")[2], 300)
        verdict = Verdict("Slurm", "queue", "ok", said)
        if done.returncode:
            cause, fix = "it has no such nodes, partition or option", "sinfo shows what there is"
            verdict = Verdict("Slurm", "queue", "red", said, cause, fix)
    except LabError as error:
        verdict = judge_error("Slurm", error)
    return Preflight((verdict,), started=started, seconds=time.monotonic() - started)


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Returns one batch script for all nodes, which finds out there which these are, and their addresses."""
    place = places[0]
    root, python = shlex.quote(place.job_folder), shlex.quote(place.node.python)
    place = replace(
        place,
        index=Bash('"$SLURM_NODEID"'),
        address=Bash('"$own"'),
        head=Bash('"$head"'),
        is_head=Bash("$is_host"),
        # The number of the job makes a port that two jobs on one node will not share.
        port=place.port or Bash("$((20000 + SLURM_JOB_ID % 10000))"),
        job_folder=Bash('"$LAB_JOB_ROOT/node$SLURM_NODEID"'),
        interface=place.interface or Bash("$interface"),
    )
    around = '"${supervise[@]}" '
    requests = [
        (f"--job-name={launch.id}", "what squeue calls it"),
        (f"--nodes={len(spec.nodes)}", "nodes that take part"),
        ("--ntasks-per-node=1", "one on each, which starts the processes"),
        # Relative to the folder in which sbatch is called: a path here could not have every character.
        ("--output=slurm-%j.out", "what Slurm and srun say; %j is the job's number"),
        ("--no-requeue", "a job that runs twice would join its own past"),
        *((option, "as asked for") for option in place.node.options),
    ]
    lines = "\n".join(f"#SBATCH {option:<34}  # {comment}" for option, comment in requests)
    rendezvous_id = Bash(f'{launch.rendezvous_id}-"$SLURM_JOB_ID"')
    text = f"""#!/usr/bin/env bash
{lines}
# Job {launch.id}. By hand: cd to the folder of this file, then `sbatch job.sbatch`; `squeue --me` shows its turn.

export LAB_JOB_ROOT={root}
{write_environment(spec, launch, place, rendezvous_id)}
# The IPv4 address of a node by its name in Slurm, as it is seen from the node that asks.
find_address() {{
  local known
  known=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
  getent ahostsv4 "$known" | sed -n '1s/ .*//p'
}}

# Who this node is: its own address and interface, that of node 0, and whether it is that one.
find_place() {{
  local names peer route
  names=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
  # The way to another node tells the own address and interface. The own name would not: on Debian and Ubuntu it stands
  # for the loopback. Node 0 looks to node 1, and all others to node 0, where the rendezvous listens.
  peer=$(find_address "${{names[$((SLURM_NODEID == 0 ? SLURM_NNODES > 1 : 0))]}}")
  route=$(ip -4 route get "$peer")
  own=$(sed -n 's/.* src \\([^ ]*\\).*/\\1/p' <<< "$route")
  [ -n "$own" ] || {{ echo "No way to $peer, which is the other node: $route"; exit 1; }}
  interface=$(sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' <<< "$route")
  head=$([ "$SLURM_NODEID" = 0 ] && echo "$own" || echo "$peer") is_host=$((SLURM_NODEID == 0))
}}

# What runs on each node.
run_node() {{
supervise=()
if [ -n "${{LAB_LEASE:-}}" ]; then
  # A launcher reads one file per node, and ends its job by taking the lease away, and by dying. Without a launcher
  # everything goes to the file of the job, and to end it is for Slurm to do.
  exec > "$LAB_JOB_ROOT/node$SLURM_NODEID.out" 2>&1
  supervise=(
    {python} -P -u -m nodelaunch.node.supervisor --job-folder="$LAB_JOB_ROOT/node$SLURM_NODEID"
    --lease-file="$LAB_LEASE" --lease={LEASE_SECONDS:g} --grace={GRACE_SECONDS:g} --limit={spec.limit:g} --
  )
fi
find_place
{write_start(spec, place, around)}}}

# One task per node; when one has failed, the others are ended. srun does not know by itself how many cores the job has
# per task. `declare -f` prints the functions, since the other nodes do not have this file.
exec srun --kill-on-bad-exit=1 --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
  bash -c "$(declare -f find_address find_place run_node); run_node"
"""
    return {SCRIPT: text}


def start(
    spec: JobSpec, launch: Launch, places: Sequence[Placement], *, by_hand: Sequence[str], say: Say, stop: Event
) -> dict[str, Link]:
    """Submits ``job.sbatch``, reports each change in the queue, and waits for its turn; cancels it if interrupted."""
    job, said = submit(Path(places[0].job_folder)), ""
    try:
        while True:
            if (queue := job.describe()) != said:
                say(said := queue)
            if job.facts["JobState"] not in WAITING or stop.is_set():
                return {node.name: SlurmLink(index, job) for index, node in enumerate(spec.nodes)}
            job.beat()
            time.sleep(LOOK_SECONDS)
    except BaseException:
        job.end()
        raise


def submit(folder: Path) -> SlurmJob:
    """Hands the batch script in a job's folder to Slurm, with the lease that the launcher keeps renewing."""
    (folder / "lease").touch()
    done = _sbatch("--parsable", SCRIPT, cwd=folder, lease=str(folder / "lease"))
    if done.returncode:
        cause, fix = clean(done.stderr.strip().rpartition("error: ")[2], 300), "sinfo shows what there is"
        raise LabError("Slurm does not take the job.", where=folder / SCRIPT, cause=cause, fix=fix)
    return SlurmJob(int(done.stdout.strip().split(";")[0]), folder)  # "12;cluster" if there are several clusters


class SlurmJob:
    """A submitted job, which its links share: its state, looked up at most twice a second, and its lease."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._looked, self._facts = 0.0, {"JobState": "UNKNOWN"}

    @property
    def facts(self) -> dict[str, str]:
        """Slurm's facts of it: ``JobState``, and others such as its ``Reason`` and its ``NodeList``."""
        if self._facts["JobState"] not in OVER and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()  # before the answer: all links ask
            done = _ask("scontrol", "show", "job", "--oneliner", str(self.number))
            # Slurm forgets a job some minutes after its end. The controller may also be away for a moment.
            state = "GONE" if "Invalid job id" in done.stderr else "UNKNOWN"
            self._facts = {"JobState": state, **dict(re.findall(r"(\w+)=(\S*)", done.stdout))}
        return self._facts

    @property
    def is_over(self) -> bool:
        """True in one of Slurm's final states."""
        return self.facts["JobState"] in OVER

    def describe(self) -> str:
        """Returns its state, the reason and its nodes, in words."""
        facts = self.facts
        on = f" on {nodes}" if (nodes := facts.get("NodeList", "(null)")) not in ("", "(null)") else ""
        why = f" ({reason})" if (reason := facts.get("Reason", "None")) != "None" else ""
        return f"Slurm job {self.number}: {facts['JobState']}{on}{why}"

    def beat(self) -> None:
        """Sends a heartbeat: touches the lease."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / "lease")

    def stop(self) -> None:
        """Asks the supervisors to end everything."""
        (self.folder / "lease").unlink(missing_ok=True)

    def end(self) -> None:
        """Cancels it."""
        self.stop()
        if not self.is_over:
            _ask("scancel", str(self.number))


class SlurmLink:
    """The :class:`nodelaunch.backends.nodes.Link` to one node of a Slurm job: a file that grows, and the lease."""

    def __init__(self, index: int, job: SlurmJob) -> None:
        self.job = job
        self._path = job.folder / f"node{index}.out"
        # One lease and one cancellation are for all nodes.
        self.beat, self.stop, self.kill = job.beat, job.stop, job.end

    def lines(self) -> Iterator[bytes]:
        """Yields what the node printed, until the job is over."""
        rest, read, quiet = b"", 0, 0
        while quiet < 3:
            # The state comes first, so that everything that was written before the end of the job is read.
            over = self.job.is_over
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

    def poll(self) -> int | None:
        """Returns 1 if the job has failed, 0 if it ended well, or None while it is not over."""
        return int(self.job.facts["JobState"] not in ("COMPLETED", "GONE")) if self.job.is_over else None

    def explain(self) -> LabError | None:
        """The error of a job that Slurm ended, or that failed; None if it ended well."""
        if not self.poll():
            return None
        facts, number = self.job.facts, self.job.number
        log = self.job.folder / f"slurm-{number}.out"
        said = log.read_text(errors="replace").strip() if log.is_file() else ""
        last = said.rpartition("\n")[2] or f"Slurm's reason: {facts.get('Reason', 'None')}"
        what = f"Slurm job {number} ended as {facts['JobState']}, exit status {facts.get('ExitCode', 'unknown')}."
        where, fix = facts.get("NodeList", "no node"), f"scontrol show job {number}"
        return LabError(what, where=where, cause=clean(last, 300), fix=fix, log=log)


def _sbatch(*argv: str, cwd: Path | None = None, lease: str = "") -> subprocess.CompletedProcess[str]:
    # A notebook may itself run in a Slurm job, and SLURM_… describe that one.
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    return _ask("sbatch", *argv, cwd=cwd, env=env | {"LAB_LEASE": lease})


def _ask(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **options)
    except FileNotFoundError as error:
        cause = f"there is no program `{argv[0]}`: this is not a login node of a Slurm cluster"
        fix = "launch from a login node, or use local_nodes(2) or ssh_nodes([...])"
        raise LabError("Slurm's programs are not on this machine.", where="PATH", cause=cause, fix=fix) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"{argv[0]} did not answer within a minute")
