"""Before a training script starts, its ranks compare what they are about to run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from datetime import timedelta
from pathlib import Path

MEETING_SECONDS = 30.0
DEVICES = (
    "a node has no GPU, or its driver is too old for its torch: nccl there and gloo here would wait for each other",
    "env={'CUDA_VISIBLE_DEVICES': ''} hides the GPUs on all nodes, which then use the CPU",
)
STARTED = ("a script was changed or started by hand with other arguments", "start all nodes with job.run()")


class MismatchError(RuntimeError):
    """The nodes of a job do not run the same thing; with the likely cause and the fix, where these are known."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("; ".join(differences))
        only_devices = all(text.startswith("device: ") for text in differences)
        self.cause, self.fix = DEVICES if only_devices else STARTED


def check_agreement(script: str) -> None:
    """Compares what the nodes are about to run, over the store through which their workers meet.

    torch itself notices only parameters of different shapes; another batch size or another version of the script trains
    silently, and not what was meant.

    Raises:
        MismatchError: The nodes differ in script, arguments, number of nodes or processes, torch, Python or device, or
            two of them run the script of the same node.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wanted, node = int(os.environ.get("LAB_WORLD_SIZE", world_size)), os.environ.get("LAB_NODE")
    if world_size == 1 and wanted > 1:  # there is nobody to compare with; alone it would train, and not what was meant
        raise MismatchError([f"node {node} ({socket.gethostname()}) was told of {wanted} processes in all, and 1 came"])
    # With max_restarts torchrun's store is not shared with the workers (see script.py), and nothing is compared.
    if world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch
    from torch.distributed import TCPStore

    mine = {
        "node": f"{node} ({socket.gethostname()})",
        "number": node,
        "torchrun": os.environ.get("GROUP_RANK"),
        "script": hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12],
        "arguments": sys.argv[1:],
        "number of nodes": os.environ.get("LAB_TOLD_NODES"),
        "processes in all": [wanted, world_size],
        # As the preflight compares them: a build for CPUs and one for CUDA train together over Gloo.
        "torch": torch.__version__.partition("+")[0],
        "Python": ".".join(platform.python_version().split(".")[:2]),
        "device": find_device(),
    }
    timeout = timedelta(seconds=MEETING_SECONDS)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    place = f"nodelaunch/{os.environ['LAB_JOB_ID']}"
    store.set(f"{place}/{rank}", json.dumps(mine))
    if rank == 0:
        ranks = [json.loads(store.get(f"{place}/{number}")) for number in range(world_size)]
        store.set(f"{place}/verdict", json.dumps(find_differences(ranks)))
    if differences := json.loads(store.get(f"{place}/verdict")):
        raise MismatchError(differences)


def find_device() -> str:
    """Returns "GPU" if torch will find one, otherwise "CPU", without starting CUDA.

    ``torch.cuda.is_available()`` would start it, and a script could no longer choose its GPU by CUDA_VISIBLE_DEVICES.
    """
    import torch

    return "GPU" if torch.cuda.device_count() else "CPU"


def find_differences(ranks: list[dict]) -> list[str]:
    """Names, in words, every fact in which a rank's node differs from that of rank 0, with both nodes' values."""
    first, found = ranks[0], []
    owners: dict[str, dict] = {}  # by the node's number, the first rank that has it
    for other in ranks:
        owner = owners.setdefault(other["number"], other)
        if other["torchrun"] != owner["torchrun"]:
            found.append(f"node {owner['node']} and node {other['node']} both run node{other['number']}.sh")
        if other["processes in all"][0] != other["processes in all"][1]:
            wanted, there = other["processes in all"]
            found.append(f"node {other['node']} was told of {wanted} processes in all, and {there} came")
        for fact in ("script", "arguments", "number of nodes", "torch", "Python", "device"):
            if other[fact] != first[fact]:
                found.append(f"{fact}: {first[fact]} on node {first['node']}, {other[fact]} on node {other['node']}")
    return list(dict.fromkeys(found))
