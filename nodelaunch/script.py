"""The placement of each node, and the bash script that it runs: readable, and safe whatever is in its arguments.

Every value is quoted by ``shlex.quote``; in comments it is JSON, which has no newline.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import dataclass

from lab_common.cores import count_cores
from nodelaunch.backends.nodes import Node
from nodelaunch.node.facts import find_gpus
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.gpus import list_visible
from nodelaunch.spec import JobSpec, Launch
from nodelaunch.transfer import name_work


class Bash(str):
    """A piece of bash that stands in a script as it is, such as a variable on Slurm; all other text is quoted."""


@dataclass(frozen=True)
class Placement:
    """One node of a launch: what its script says that the job's specification does not."""

    node: Node
    index: int | Bash  # from 0
    address: str | None  # its own, by IPv4
    head: str | None  # the address of node 0, where the rendezvous listens
    is_head: int | Bash  # 1 on node 0, 0 on the others
    port: int | Bash  # of the rendezvous, on node 0
    interface: str | None  # of the gradients; None leaves the choice to Gloo and NCCL
    # Of this job on the node, for logs, events and results; on Slurm all nodes' until slurm.write names the node's own.
    job_folder: str
    code_folder: str  # there, with script/ or project/, and what runs around the script
    threads: str | None = None  # per process, as OMP_NUM_THREADS takes it; None shares the node's cores
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES of the node; None leaves it alone

    @property
    def script(self) -> str:
        """Path of the node's script, beside its folder: what direct.write calls node<index>.sh is copied there."""
        return f"{self.job_folder}.sh"


def place_nodes(spec: JobSpec, launch: Launch, code_hash: str, preflight: Preflight) -> list[Placement]:
    """Finds out what each node's script says besides the specification; ``code_hash`` names the job's code."""
    # The preflight may be empty if all addresses and the port are given, or if Slurm chooses.
    addresses = [node.address or preflight.addresses.get(node.name) for node in spec.nodes]
    if None in addresses:
        preflight.raise_if_red()
    return [
        Placement(
            node=node,
            index=index,
            address=addresses[index],
            head=addresses[0],
            is_head=int(index == 0),
            port=spec.port or preflight.port,
            interface=node.interface or preflight.interfaces.get(node.name),
            job_folder=node.name_job_folder(launch.id, index),
            code_folder=f"{node.folder}/code/{code_hash}",
            threads=_share_cores(spec, node),
            gpus="" if preflight.hide_gpus else _share_gpus(spec, node),
        )
        for index, node in enumerate(spec.nodes)
    ]


def _share_cores(spec: JobSpec, node: Node) -> str | None:
    """Returns the threads per process: the user's choice, or a share of this machine's cores; None on another host."""
    chosen = spec.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if chosen or not node.here:
        return chosen
    return str(max(1, int(count_cores()) // (spec.nproc_per_node * node.together)))


def _share_gpus(spec: JobSpec, node: Node) -> str | None:
    """Chooses the GPUs of this machine that a node here takes; "" if there are too few for all nodes."""
    if not node.here:
        return None
    names = [row[0] for row in find_gpus().get("gpus", [])]
    gpus = list_visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return None
    # Every node has a process with LOCAL_RANK 0, which takes the first GPU that it sees. NCCL refuses two on one GPU.
    first, enough = node.index * spec.nproc_per_node, len(gpus) >= node.together * spec.nproc_per_node
    return ",".join(gpus[first : first + spec.nproc_per_node] if enough else [])


def write_script(spec: JobSpec, launch: Launch, place: Placement) -> str:
    """Returns the text of a node's bash script, which also works when it is run by hand on that node."""
    return f"""#!/usr/bin/env bash
# Node {place.index} of {len(spec.nodes)}, {json.dumps(place.node.name)}, of job {launch.id}.
# To run it by hand on that node, while the other nodes run theirs (all within {spec.join_timeout:g} s):
#     bash node{place.index}.sh

{write_environment(spec, launch, place, launch.rendezvous_id)}
{write_start(spec, place)}"""


def write_environment(spec: JobSpec, launch: Launch, place: Placement, rendezvous_id: str) -> str:
    """Writes exports: our settings and the job's own, and after them, which counts, what the job's parts rely on."""
    rendezvous = f"""\
# torchrun's --rdzv-id: a secret, and so not among its arguments, which every user of the machine can see.
# The rank stands in front of each of its lines.
export PET_RDZV_ID={_quote(rendezvous_id)} TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${{rank}}] '
"""
    restarts = """\
# A new store for each attempt: in a shared one, workers that are restarted may read where those before them listened,
# and wait for the dead (seen with torch 2.14).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
"""
    words = [f"{name}={shlex.quote(value)}" for name, value in list_variables(spec, place).items()]
    settings = "\n".join(f"export {line}" for line in [" ".join(words[:2]), *words[2:]])  # two folders share a line
    return f"""\
# Where data and results are, and what the job's env= says.
{settings}
# What nodelaunch has to know about the job.
export LAB_JOB_ID={_quote(launch.id)} LAB_WORLD_SIZE={spec.world_size}
export LAB_JOIN_TIMEOUT={spec.join_timeout:g} LAB_HANG_TIMEOUT={spec.hang_timeout:g} LAB_LIMIT={spec.limit:g}
{"" if spec.program else rendezvous}\
# Lines appear when they are printed, and a crash in C code shows a traceback.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
{restarts if spec.max_restarts else ""}"""


def list_variables(spec: JobSpec, place: Placement) -> dict[str, str]:
    """Returns the variables of a node's processes by their names: our settings, and over them the job's own."""
    node = place.node
    ours = {
        "LAB_DATA": node.data_folder,
        "LAB_RUNS": f"{node.folder}/runs",
        "LAB_SCALE": os.environ.get("LAB_SCALE"),
        "LAB_DATA_FOLDER": spec.data.find_on(node) if spec.data else None,
        "CUDA_VISIBLE_DEVICES": place.gpus,
    }
    elsewhere = ("OMP_NUM_THREADS", "PYTHONPATH")  # where the script has a comment on them
    variables = {name: value for name, value in ours.items() if value is not None} | spec.env
    return {name: value for name, value in variables.items() if name not in elsewhere}


def write_start(spec: JobSpec, place: Placement, around: str = "") -> str:
    """Writes what a node does; what runs ``around`` the program is "", or a command and a space."""
    node, path = place.node, _quote(f":{spec.env['PYTHONPATH']}") if spec.env.get("PYTHONPATH") else ""
    python, work = _quote(node.python), f"/{name_work(spec.root)}" if spec.root else ""
    copy = f"""\
# The project as it was when the job was launched, over what earlier jobs left here.
PYTHONPATH="$code" {python} -P -m nodelaunch.node.copy_project "$code" "$work" || exit 1
"""
    beside = '"$work/"' if spec.root else '"$code/script/"'
    share, cores = spec.nproc_per_node, "$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)"  # macOS has no nproc
    threads = _quote(place.threads) if place.threads else f"$(( ({cores} + {share - 1}) / {share} ))"
    # To NCCL a name is the beginning of one, and eth1 also means eth10, unless there is a "=" before it.
    name = _quote(place.interface or "")
    interfaces = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if place.interface else {}
    chosen = [f"{variable}={value}" for variable, value in interfaces.items() if variable not in spec.env]
    if spec.program:
        program = " ".join(python if word in ("python", "python3") else _quote(word) for word in spec.program)
        starter = f"""\
# nodelaunch.node.starter starts that many processes, with torchrun's variables, and ends all when one has failed.
exec {around}{python} -m nodelaunch.node.starter "${{options[@]}}" -- \\
  {program}"""
    else:
        starter = f"""\
# nodelaunch.node.agent is torchrun (`python -m torch.distributed.run`), whose stores listen at this node's own address
# only. nodelaunch.node.worker runs the script unchanged; around it, it keeps the error, shows where a hanging rank
# stands, compares the nodes, and dies with torchrun.
exec {around}{python} -m nodelaunch.node.agent "${{options[@]}}" \\
  -m nodelaunch.node.worker"""
    return f"""\
# The code as it was when the job was launched, and what this job leaves behind.
code={_quote(place.code_folder)}
job={_quote(place.job_folder)}
# Relative paths of the training script count from here; the folder stays for the next job.
work={_quote(f"{node.folder}/work{work}")}
mkdir -p -- "$work" "$job" && cd -- "$work" || exit 1
{copy if spec.root else ""}
# The network interface of the gradients. Left alone, Gloo takes the one that the host's own name resolves to, which on
# Debian and Ubuntu is often the loopback: the other node then finds nobody there. NCCL's second "=": this very name.
{f"export {' '.join(chosen)}" if chosen else "# (chosen by env=, or left alone)"}
# torchrun sets this only for several processes per node; left alone, every process takes all cores.
export OMP_NUM_THREADS={threads}

# Where Python finds the packages that the script imports. What runs around it takes none from the current folder.
export PYTHONPATH="$code"{path} PYTHONSAFEPATH=1 LAB_JOB_FOLDER="$job" LAB_NODE={place.index}
options=(
{_write_options(spec, place)}
)
arguments=({shlex.join(spec.args)})
{starter} {beside}{_quote(spec.script_path)} "${{arguments[@]}}"
"""


def _quote(text: str) -> str:
    return text if isinstance(text, Bash) else shlex.quote(text)


def _write_options(spec: JobSpec, place: Placement) -> str:
    head, wait = _quote(place.head), math.ceil(spec.join_timeout)  # torchrun reads nothing but whole seconds
    rows = [
        (f"--nnodes={len(spec.nodes)}", "nodes that take part"),
        (f"--nproc-per-node={spec.nproc_per_node}", "processes on each, one per device"),
    ]
    if spec.rank_order == "nodes" and not spec.program:
        static = f"--rdzv-backend=static --rdzv-conf=timeout={wait}"
        rows += [(static, "ranks in the nodes' order; seconds to wait for all")]
    if spec.rank_order == "nodes" or spec.program:
        rows += [
            (f"--node-rank={place.index}", "this node's place among them"),
            (f"--master-addr={head} --master-port={place.port}", "where node 0 listens: MASTER_ADDR and MASTER_PORT"),
        ]
    else:
        # is_host: torchrun would find out by comparing host names, and with "127.0.1.1 thishost" in /etc/hosts no node
        # takes itself for the host. read_timeout bounds each question to it.
        conf = f"is_host={place.is_head},join_timeout={wait},read_timeout=30"
        rows += [
            ("--rdzv-backend=c10d", "the nodes find each other, and are numbered by address"),
            (f"--rdzv-endpoint={head}:{place.port}", "where node 0 listens"),
            (f"--rdzv-conf={conf}", "whether this node listens; seconds to wait"),
        ]
    if not spec.program:
        restarts = f"--max-restarts={spec.max_restarts} --monitor-interval=0.1"
        rows += [
            (f"--local-addr={_quote(place.address)}", "this node's own address, so that no host name has to resolve"),
            (restarts, "restarts after a failure; seconds between two looks"),
            ('--log-dir="$job/logs" --tee=3', "without a launcher, ranks print there and here; errors too"),
        ]
    return "\n".join(f"  {option:<54}  # {comment}" for option, comment in rows)
