"""The bash script that one node runs: short, readable, and safe whatever stands in its arguments and paths.

Every value is quoted by ``shlex.quote``, so that a space, a quote, ``;$( )`` or a newline in it is data; in comments it
stands as JSON, which has no newline.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from lab_common import LabError
from nodelaunch import kinds, values


@dataclass(frozen=True)
class Plan:
    """Everything that the script of one node says.

    Attributes:
        job_id: The job; new at each launch.
        rendezvous_id: The rendezvous; new at each launch, so that nothing joins the dead job of before, and a secret,
            so that no stranger guesses it.
        node: Which node this is, from 0.
        node_name: What the user calls it; stands in a comment only.
        nodes: How many nodes the job has.
        nproc_per_node: Processes on each node, one per device.
        python: The interpreter on the node.
        job_folder: Folder of this job on the node; logs, events and results land here.
        code_folder: Folder on the node that holds ``script/`` or ``project/``, and the packages that it imports.
        work_folder: The current folder of the script, kept from job to job: relative checkpoints are found again.
        script: The training script within ``script/``, or within the project; "" for a module.
        args: Its arguments.
        address: The node's own IPv4 address.
        head_address: IPv4 address of node 0, where the rendezvous listens.
        port: The rendezvous' port there.
        interface: Network interface for the gradients; None leaves the choice to Gloo and NCCL.
        threads: Threads per process; None takes the node's cores, shared among its processes.
        join_timeout: Seconds to wait for all nodes.
        hang_timeout: Seconds after which the launcher looks at a rank that does not move.
        limit: Seconds after which the node ends in any case.
        max_restarts: How often torchrun starts the workers anew after a failure.
        rank_order: "address": c10d, which numbers the nodes by address; "nodes": static, in the order of the list.
        env: More environment variables.
        program: What starts the script, with its options; () is torchrun.
        project: Whether the script is part of a project, of which ``work_folder`` gets a copy.
        module: The module that runs in place of the script, as ``python -m`` runs it.
    """

    job_id: str
    rendezvous_id: str
    node: int
    node_name: str
    nodes: int
    nproc_per_node: int
    python: str
    job_folder: str
    code_folder: str
    work_folder: str
    script: str
    args: tuple[str, ...]
    address: str
    head_address: str
    port: int
    interface: str | None = None
    threads: int | None = None
    join_timeout: float = 60.0
    hang_timeout: float = 60.0
    limit: float = 3600.0
    max_restarts: int = 0
    rank_order: str = "address"
    env: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    project: bool = False
    module: str | None = None

    def __post_init__(self) -> None:
        """Checks the type and the range of every field: what is no text stands in the script without quotes."""
        kinds.settle(self, values.PLAN, owner="Plan")


@dataclass(frozen=True)
class Place:
    """What differs between nodes, as it stands in a script: a value, or the variable of bash that holds it.

    Attributes:
        node: Its number.
        own: Its address.
        head: The address of node 0.
        is_host: 1 on node 0, 0 on the others.
        port: Of the rendezvous.
        job: The folder of the job.
        interface: Lines that set the variables of the network interface.
        rendezvous_id: Of the job.
        around: What runs around the program: "", or a command and a space.
    """

    node: str
    own: str
    head: str
    is_host: str
    port: str
    job: str
    interface: str
    rendezvous_id: str
    around: str = ""


def write_script(plan: Plan) -> str:
    """Returns the text of a node's bash script, which also works when it is run by hand on that node.

    Raises:
        LabError: A value cannot be in a script at all: a NUL byte, an address that is none, a name of a variable that
            is none, or a folder that PYTHONPATH cannot hold.
    """
    check_plan(plan)
    for text in (plan.address, plan.head_address):
        _check_address(text)
    chosen = plan.interface and shlex.quote(plan.interface)
    place = Place(
        node=str(plan.node),
        own=plan.address,
        head=plan.head_address,
        is_host=str(int(plan.node == 0)),
        port=str(plan.port),
        job=shlex.quote(plan.job_folder),
        interface=write_interface(plan, chosen) if chosen else "# (not chosen: the preflight was skipped)",
        rendezvous_id=shlex.quote(plan.rendezvous_id),
    )
    return f"""#!/usr/bin/env bash
# Node {plan.node} of {plan.nodes}, {_comment(plan.node_name)}, of job {plan.job_id}.
# To run it by hand on that node, while the other nodes run theirs (all within {plan.join_timeout:g} s):
#     bash node{plan.node}.sh

{write_environment(plan, place)}
{write_start(plan, place, write_variables(plan))}"""


def write_environment(plan: Plan, place: Place) -> str:
    """What is the same on all nodes of a job, as exports."""
    quote = shlex.quote
    rendezvous = f"""\
# torchrun's --rdzv-id: a secret, and so not among its arguments, which every user of the machine can see.
export PET_RDZV_ID={place.rendezvous_id}
# The rank stands in front of each of its lines. torchrun has an option for it, too, but not yet in torch 2.11.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${{rank}}] '
"""
    return f"""\
# What nodelaunch has to know about the job.
export LAB_JOB_ID={quote(plan.job_id)} LAB_WORLD_SIZE={plan.nodes * plan.nproc_per_node}
export {_write_bounds(plan)}
{"" if plan.program else rendezvous}\
# Lines appear when they are printed, and a crash in C code shows a traceback.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
{_write_restart_setting(plan)}"""


def write_variables(plan: Plan) -> str:
    """The job's own variables, as exports; PYTHONPATH stands elsewhere, behind ours."""
    own = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in own.items())


def write_start(plan: Plan, place: Place, variables: str = "") -> str:
    """What a node does: it prepares its folders, sets the ``variables``, and starts the program."""
    quote = shlex.quote
    path = plan.env.get("PYTHONPATH", "")
    script = f'"$work/"{quote(plan.script)}' if plan.project else f'"$code/script/"{quote(plan.script)}'
    script = f"-m {quote(plan.module)}" if plan.module else script
    return f"""\
# The code as it was when the job was launched, and what this job leaves behind.
code={quote(plan.code_folder)}
job={place.job}
# Relative paths of the training script count from here; the folder stays for the next job.
work={quote(plan.work_folder)}
mkdir -p -- "$work" "$job" && cd -- "$work" || exit 1
{_write_copy(plan)}
# The network interface of the gradients. Left alone, Gloo takes the one that the host's own name resolves to, which on
# Debian and Ubuntu is often the loopback: the other node then finds nobody there. NCCL's second "=": this very name.
{place.interface}
# torchrun sets this only for several processes per node; left alone, every process takes all cores.
{_write_threads(plan)}

# Where Python finds the packages that the script imports. What runs around it takes none from the current folder.
export PYTHONPATH="$code"{quote(f":{path}") if path else ""} PYTHONSAFEPATH=1
export LAB_JOB_FOLDER="$job" LAB_NODE={place.node}
{variables}\
options=(
{_write_options(_list_others(plan, place) if plan.program else _list_torchrun(plan, place))}
)
arguments=({"".join(f"{chr(10)}  {quote(argument)}" for argument in plan.args)}
)
{_write_program(plan, place, script) if plan.program else _write_torchrun(plan, place, script)}"""


def write_interface(plan: Plan, name: str) -> str:
    """The variables by which Gloo and NCCL are told the interface, but for those that the job sets by itself."""
    # To NCCL a name is the beginning of one, and eth1 also means eth10, unless there is a "=" before it. Gloo wants the
    # whole name, and no sign.
    values = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    chosen = [f"{variable}={value}" for variable, value in values.items() if variable not in plan.env]
    return f"export {' '.join(chosen)}" if chosen else "# (chosen by env=)"


def check_plan(plan: Plan) -> None:
    """Checks what no quotes can make harmless.

    Raises:
        LabError: The names, the way to restart, or the folder of the code cannot be in a script.
    """
    for name in (plan.job_id, plan.rendezvous_id):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            fix = "letters, digits, '-', '_' and '.' only"
            raise LabError(f"No job can be called {_comment(name)[:60]}.", where="job_id", fix=fix)
    if plan.max_restarts and plan.rank_order == "nodes":
        raise LabError(
            "Restarts need a rendezvous that can meet again.",
            where=f"max_restarts={plan.max_restarts}, rank_order='nodes'",
            cause="torchrun's static rendezvous keeps the addresses of the workers that died",
            fix="leave rank_order as it is, or max_restarts=0",
        )
    if plan.max_restarts and plan.program:
        where = f"max_restarts={plan.max_restarts}, program={_comment(plan.program[0])[:40]}"
        cause, fix = "what runs in its place starts each process once", "leave one of the two away"
        raise LabError("Only torchrun starts ranks anew.", where=where, cause=cause, fix=fix)
    if ":" in plan.code_folder:
        raise LabError(
            "The folder of a node must not have a ':' in its name.",
            where=plan.code_folder,
            cause="PYTHONPATH separates folders by it",
            fix="choose another folder=, or another LAB_RUNS",
        )


def _write_bounds(plan: Plan) -> str:
    """The seconds after which a node gives up, as assignments."""
    bounds = {"JOIN_TIMEOUT": plan.join_timeout, "HANG_TIMEOUT": plan.hang_timeout, "LIMIT": plan.limit}
    return " ".join(f"LAB_{name}={seconds:g}" for name, seconds in bounds.items())


def _write_restart_setting(plan: Plan) -> str:
    """A line for jobs whose workers may be started anew; "" for others."""
    if not plan.max_restarts:
        return ""
    return (
        "# A new store for each attempt: in a shared one, workers that are started anew may read where those before\n"
        "# them listened, and wait for the dead (seen with torch 2.14).\n"
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
    )


def _write_threads(plan: Plan) -> str:
    if plan.threads is not None:
        return f"export OMP_NUM_THREADS={plan.threads}"
    share = plan.nproc_per_node
    cores = "$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)"  # macOS has no nproc
    return f"export OMP_NUM_THREADS=$(( ({cores} + {share - 1}) / {share} ))"


def _write_copy(plan: Plan) -> str:
    if not plan.project:
        return ""
    return (
        "# The project as it was when the job was launched, over what earlier jobs left here.\n"
        f'PYTHONPATH="$code" {shlex.quote(plan.python)} -P -m nodelaunch.node.place "$code" "$work" || exit 1\n'
    )


def _write_options(rows: list[tuple[str, str]]) -> str:
    width = 54
    return "\n".join(f"  {option:<{width}}  # {comment}" for option, comment in rows)


def _list_torchrun(plan: Plan, place: Place) -> list[tuple[str, str]]:
    return [
        (f"--nnodes={plan.nodes}", "nodes that take part"),
        (f"--nproc-per-node={plan.nproc_per_node}", "processes on each, one per device"),
        *_list_rendezvous(plan, place),
        (f"--local-addr={place.own}", "this node's own address, so that no host name has to resolve"),
        (f"--max-restarts={plan.max_restarts}", "how often the workers are started anew after a failure"),
        ("--monitor-interval=0.1", "seconds between two looks at the workers"),
        ('--log-dir="$job/logs"', "a folder for what each rank prints"),
        ("--tee=3", "which goes there and to the screen, errors too (1 + 2)"),
    ]


def _list_rendezvous(plan: Plan, place: Place) -> list[tuple[str, str]]:
    wait = math.ceil(plan.join_timeout)  # torchrun reads nothing but whole seconds
    if plan.rank_order == "nodes":
        return [
            ("--rdzv-backend=static", "ranks in the order of the nodes"),
            (f"--node-rank={place.node}", "this node's place in that order"),
            (f"--master-addr={place.head}", "where node 0 listens"),
            (f"--master-port={place.port}", "and at which port"),
            (f"--rdzv-conf=timeout={wait}", "seconds to wait for all nodes"),
        ]
    # is_host: torchrun would find out by comparing host names, and with "127.0.1.1 thishost" in /etc/hosts no node
    # takes itself for the host. read_timeout bounds each question to it.
    conf = f"is_host={place.is_host},join_timeout={wait},read_timeout=30"
    return [
        ("--rdzv-backend=c10d", "the nodes find each other, and are numbered by address"),
        (f"--rdzv-endpoint={place.head}:{place.port}", "where node 0 listens"),
        (f"--rdzv-conf={conf}", "whether this node listens; seconds to wait"),
    ]


def _list_others(plan: Plan, place: Place) -> list[tuple[str, str]]:
    return [
        (f"--nnodes={plan.nodes}", "nodes that take part"),
        (f"--node-rank={place.node}", "this node's place among them"),
        (f"--nproc-per-node={plan.nproc_per_node}", "processes on each, one per device"),
        (f"--master-addr={place.head}", "node 0: MASTER_ADDR of every process"),
        (f"--master-port={place.port}", "a port that is free there: MASTER_PORT"),
    ]


def _write_torchrun(plan: Plan, place: Place, script: str) -> str:
    kind = "module" if plan.module else "training script"
    return f"""\
# nodelaunch.node.agent is torchrun (`python -m torch.distributed.run`), whose stores listen at this node's own address
# only. nodelaunch.node.worker runs the {kind} unchanged; around it, it keeps the error, shows where a hanging
# rank stands, compares the nodes, and dies with torchrun.
exec {place.around}{shlex.quote(plan.python)} -m nodelaunch.node.agent "${{options[@]}}" \\
  -m nodelaunch.node.worker {script} "${{arguments[@]}}"
"""


def _write_program(plan: Plan, place: Place, script: str) -> str:
    program = [plan.python if word in ("python", "python3") else word for word in plan.program]
    return f"""\
# nodelaunch.node.starter starts the command so many times, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR and
# the like), and ends all when one has failed.
exec {place.around}{shlex.quote(plan.python)} -m nodelaunch.node.starter "${{options[@]}}" -- \\
  {shlex.join(program)} {script} "${{arguments[@]}}"
"""


def _comment(text: str) -> str:
    return json.dumps(text)


def _check_address(text: str | None) -> None:
    try:
        ipaddress.IPv4Address(text or "")
    except ValueError as error:
        fix = "give the node's IPv4 address, for example 10.0.0.11 (ip -4 addr shows it)"
        raise LabError(f"{_comment(text)[:60]} is not an IPv4 address.", where="address of a node", fix=fix) from error
