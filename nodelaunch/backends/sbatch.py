"""The batch script of a Slurm job: what `sbatch` reads, and what `srun` then starts on each node that Slurm chose."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace

from lab_common import LabError
from nodelaunch import values
from nodelaunch.script import Bash, Placement, write_environment, write_start
from nodelaunch.spec import JobSpec, Launch

# Seconds without a touch of the launcher's file after which a node ends, and from SIGTERM to SIGKILL. The lease is
# longer than on SSH: the supervisors open the file at each look, so that a shared file system asks for its true age,
# but a change may still show seconds late.
LEASE_SECONDS, GRACE_SECONDS = 7.0, 2.0
PARTITION = re.compile(r"[A-Za-z0-9_.,-]+")
TIME = re.compile(r"(\d{1,3}-)?\d{1,6}(:\d{1,2}){0,2}", re.ASCII)  # minutes, hours:minutes:seconds …
# An option as it may stand in a line of #SBATCH, where a space or a quote would begin something else.
OPTION = re.compile(r"--[a-z][a-z-]*(=[\w@%:,./+*\[\]()=~|&!-]+)?", re.ASCII)


@dataclass(frozen=True)
class SlurmRequest:
    """A request for nodes, in sbatch's options.

    Attributes:
        count: Number of nodes.
        partition: Slurm's partition; None leaves it to the cluster.
        time_limit: Time after which Slurm ends the job, as sbatch takes it: "00:30:00".
        extra: More options of sbatch, such as "--gpus-per-node=1" or "--account=course".
    """

    count: int = values.checked(values.whole(1, 1000, 2))
    partition: str | None = values.checked(values.optional(values.check_text), default=None)
    time_limit: str = values.checked(values.check_text, default="00:30:00")
    extra: tuple[str, ...] = values.checked(values.list_of(values.check_text), default=())

    def __post_init__(self) -> None:
        """Checks what stands in the lines of #SBATCH, which no quotes protect."""
        values.check_fields(self, "slurm_nodes")
        if self.partition is not None and not PARTITION.fullmatch(self.partition):
            what = f"{json.dumps(self.partition)[:60]} is no name of a partition."
            raise LabError(what, where="slurm_nodes", fix="sinfo shows the partitions' names")
        if not TIME.fullmatch(self.time_limit):
            what = f"{json.dumps(self.time_limit)[:60]} is no time limit."
            raise LabError(what, where="slurm_nodes", fix="time_limit='00:30:00', which is hours:minutes:seconds")
        for option in self.extra:
            if not OPTION.fullmatch(option):
                raise LabError(
                    f"{json.dumps(option)[:60]} is not one option of sbatch.",
                    where="slurm_nodes(…, extra=…)",
                    cause="each begins with --, has its value behind =, and neither spaces nor quotes",
                    fix="extra=['--gpus-per-node=1', '--account=course']",
                )


def write_sbatch(spec: JobSpec, launch: Launch, place: Placement) -> str:
    """Returns the text of a batch script, which also works by hand: ``cd FOLDER; sbatch job.sbatch``.

    Which nodes it runs on, and so their addresses, is known only there: the script finds them out.

    Args:
        spec: The job.
        launch: Its names.
        place: The first node, whose folders are on the shared file system. Which node it is, the addresses and, if it
            is 0, the port are found out by the script.
    """
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
    rendezvous_id = Bash(f'{launch.rendezvous_id}-"$SLURM_JOB_ID"')
    return f"""#!/usr/bin/env bash
{_write_requests(spec, launch)}
# Job {launch.id}. By hand: cd to the folder of this file, then `sbatch job.sbatch`; `squeue --me` shows its turn.

export LAB_JOB_ROOT={root}
{write_environment(spec, launch, rendezvous_id)}
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


def _write_requests(spec: JobSpec, launch: Launch) -> str:
    """Writes the lines of #SBATCH, each with a comment."""
    request = spec.nodes[0].request
    # Relative to the folder in which sbatch is called: a path here could not have every character.
    lines = [
        (f"--job-name={launch.id}", "what squeue calls it"),
        (f"--nodes={len(spec.nodes)}", "nodes that take part"),
        ("--ntasks-per-node=1", "one on each, which starts the processes"),
        (f"--time={request.time_limit}", "after which Slurm ends it"),
        ("--output=slurm-%j.out", "what Slurm and srun say; %j is the job's number"),
        ("--no-requeue", "a job that runs twice would join its own past"),
    ]
    if request.partition:
        lines.append((f"--partition={request.partition}", "where the nodes are taken from"))
    lines += [(option, "as asked for") for option in request.extra]
    width = max(len(option) for option, _ in lines)
    return "\n".join(f"#SBATCH {option:<{width}}  # {comment}" for option, comment in lines)
