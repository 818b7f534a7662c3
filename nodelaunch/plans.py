"""Makes each node's plan out of the job, the node and what the preflight found there."""

from __future__ import annotations

import os

from lab_common.cores import count_cores
from nodelaunch.backends.nodes import Node
from nodelaunch.node.facts import find_gpus
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.gpus import list_visible
from nodelaunch.project import name_work
from nodelaunch.script import Plan
from nodelaunch.spec import JobSpec, Launch
from nodelaunch.values import read_threads

# Variables of the launcher that every node gets too.
FORWARDED = ("LAB_SCALE",)


def make_plans(spec: JobSpec, launch: Launch, code: str, found: Preflight | None) -> list[Plan]:
    """Returns what the script of each node says.

    Args:
        spec: The job.
        launch: Its names.
        code: The hash of its code.
        found: What the preflight found; None where every address and the port are given.

    Raises:
        LabError: The preflight found no address for a node; its own words.
    """
    names = [node.name for node in spec.nodes]
    known = found.addresses if found else {}
    addresses = dict(zip(names, (node.address or known.get(node.name) for node in spec.nodes), strict=True))
    if found and None in addresses.values():
        found.raise_if_red()
    known = found.interfaces if found else {}
    interfaces = dict(zip(names, (node.interface or known.get(node.name) for node in spec.nodes), strict=True))
    work = f"/{name_work(spec.root)}" if spec.root else ""
    return [
        Plan(
            job_id=launch.id,
            rendezvous_id=launch.rendezvous_id,
            node=index,
            node_name=node.name,
            nodes=len(spec.nodes),
            nproc_per_node=spec.nproc_per_node,
            python=node.python,
            job_folder=node.name_job_folder(launch.id, index),
            code_folder=f"{node.folder}/code/{code}",
            work_folder=f"{node.folder}/work{work}",
            script=spec.script_path,
            args=spec.args,
            address=addresses[node.name],
            head_address=addresses[names[0]],
            port=spec.port or (found.port if found else 0),
            interface=interfaces[node.name],
            threads=_share_cores(spec, node),
            join_timeout=spec.join_timeout,
            hang_timeout=spec.hang_timeout,
            limit=spec.limit,
            max_restarts=spec.max_restarts,
            rank_order=spec.rank_order,
            env=_choose_env(spec, node, hide_gpus=bool(found and found.hide_gpus)),
            program=spec.program,
            project=spec.root is not None,
            module=spec.module,
        )
        for index, node in enumerate(spec.nodes)
    ]


def _share_cores(spec: JobSpec, node: Node) -> int | None:
    """Threads per process on this machine, whose cores its nodes share; None leaves the sum to the other host."""
    for where, found in (("env", spec.env), ("the variable OMP_NUM_THREADS", os.environ)):
        if wanted := read_threads(found.get("OMP_NUM_THREADS", ""), where=where):
            return wanted
    if not node.here:
        return None
    return max(1, int(count_cores()) // (spec.nproc_per_node * node.together))


def _choose_env(spec: JobSpec, node: Node, *, hide_gpus: bool) -> dict[str, str]:
    env = {"LAB_DATA": node.data_folder, "LAB_RUNS": f"{node.folder}/runs"}
    env |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    env |= {"LAB_DATA_FOLDER": spec.data.find_on(node)} if spec.data else {}
    # On all nodes alike: a script that takes NCCL where it sees a GPU has to get the same answer on each.
    env |= {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else _share_gpus(spec, node)
    return {name: value for name, value in (env | dict(spec.env)).items() if name != "OMP_NUM_THREADS"}


def _share_gpus(spec: JobSpec, node: Node) -> dict[str, str]:
    """Which of this machine's GPUs a node here takes; none where there are too few for all nodes.

    Every node has a process with LOCAL_RANK 0, which takes the first GPU that it sees, and NCCL refuses two ranks on
    one GPU. Without any the scripts train on the CPU.
    """
    if not node.here:
        return {}
    names = [row[0] for row in find_gpus().get("gpus", [])]
    gpus = list_visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return {}
    first = node.index * spec.nproc_per_node
    own = gpus[first : first + spec.nproc_per_node] if len(gpus) >= node.together * spec.nproc_per_node else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
