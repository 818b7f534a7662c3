"""Makes each node's plan out of the job, the node and what the preflight found there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lab_utils.launch.facts import find_gpus
from lab_utils.launch.local import LocalNode, choose_data
from lab_utils.launch.nodes import Node
from lab_utils.launch.preflight import Preflight
from lab_utils.launch.script import Plan
from lab_utils.launch.slurm import SlurmNode
from lab_utils.launch.values import read_threads

if TYPE_CHECKING:
    from lab_utils.launch.job import TorchrunJob

# Variables of the launcher that every node gets too.
FORWARDED = ("LAB_SCALE",)


def make_plans(job: TorchrunJob, code: str, found: Preflight | None) -> list[Plan]:
    """Returns what the script of each node says.

    Args:
        job: The job.
        code: The hash of its code.
        found: What the preflight found; None where every address and the port are given.

    Raises:
        LabError: The preflight found no address for a node; its own words.
    """
    names = [node.name for node in job.nodes]
    known = found.addresses if found else {}
    addresses = dict(zip(names, (node.address or known.get(node.name) for node in job.nodes), strict=True))
    if found and None in addresses.values():
        found.raise_if_red()
    known = found.interfaces if found else {}
    interfaces = dict(zip(names, (node.interface or known.get(node.name) for node in job.nodes), strict=True))
    return [
        Plan(
            job_id=job.id,
            rendezvous_id=job.rendezvous_id,
            node=index,
            node_name=node.name,
            nodes=len(job.nodes),
            nproc_per_node=job.nproc_per_node,
            python=node.python,
            # A folder for each node, for several may have one home; Slurm's script makes them by itself.
            job_folder=f"{node.folder}/jobs/{job.id}" + ("" if isinstance(node, SlurmNode) else f"/node{index}"),
            code_folder=f"{node.folder}/code/{code}",
            work_folder=f"{node.folder}/work",
            script=job.script.name,
            args=job.args,
            address=addresses[node.name],
            head_address=addresses[names[0]],
            port=job.port or (found.port if found else 0),
            interface=interfaces[node.name],
            threads=_share_cores(job, node),
            join_timeout=job.join_timeout,
            hang_timeout=job.hang_timeout,
            limit=job.limit,
            max_restarts=job.max_restarts,
            rank_order=job.rank_order,
            env=_choose_env(job, node),
        )
        for index, node in enumerate(job.nodes)
    ]


def _share_cores(job: TorchrunJob, node: Node) -> int | None:
    """Threads per process on this machine, whose cores its nodes share; None leaves the sum to the other host."""
    for where, found in (("env", job.env), ("the variable OMP_NUM_THREADS", os.environ)):
        if wanted := read_threads(found.get("OMP_NUM_THREADS", ""), where=where):
            return wanted
    if not isinstance(node, LocalNode):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (job.nproc_per_node * node.together))


def _choose_env(job: TorchrunJob, node: Node) -> dict[str, str]:
    env = {"LAB_DATA": choose_data(node), "LAB_RUNS": f"{node.folder}/runs"}
    env |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    env |= _share_gpus(job, node)
    return {name: value for name, value in (env | dict(job.env)).items() if name != "OMP_NUM_THREADS"}


def _share_gpus(job: TorchrunJob, node: Node) -> dict[str, str]:
    """Which of this machine's GPUs a node here takes; none where there are too few for all nodes.

    Every node has a process with LOCAL_RANK 0, which takes the first GPU that it sees, and NCCL refuses two ranks on
    one GPU. Without any the scripts train on the CPU.
    """
    if not isinstance(node, LocalNode):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [row[0] for row in find_gpus().get("gpus", [])] if visible is None else visible.split(",")
    gpus = [name.strip() for name in names if name.strip()]
    if not gpus:
        return {}
    first = node.index * job.nproc_per_node
    own = gpus[first : first + job.nproc_per_node] if len(gpus) >= node.together * job.nproc_per_node else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
