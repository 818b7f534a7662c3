"""Judges the GPUs of all nodes together.

A training script chooses NCCL if it sees a GPU, and Gloo otherwise, and one half of the job would wait for the other.
So if one process has no GPU, the launcher hides the GPUs on all nodes.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodelaunch.backends.nodes import Node
from nodelaunch.preflight.verdicts import Facts, Verdict, Wanted, find_part, list_per_node, split_facts

# The first driver for a major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility.
FIRST_DRIVERS = {"11": 450, "12": 525, "13": 580}
IDENTITY = re.compile(r"(GPU|MIG)-")  # CUDA_VISIBLE_DEVICES may also name a GPU, or a part of one, in this way
CAUSE = "NCCL needs a GPU for each process, and all nodes have to take the same backend"


@dataclass(frozen=True)
class Offer:
    """The GPUs that a node has for a job."""

    words: str
    seen: int = 0  # that torch can use, and sees there if nobody hides them
    room: int = 0  # processes of each node that can have one: nodes on one machine share its GPUs
    here: bool = False  # on the launcher's machine
    cause: str = ""  # why torch cannot use them; "" if it can, or if there are none
    fix: str = ""  # the remedy for that


def list_visible(names: Sequence[str], visible: str | None) -> list[str]:
    """The GPUs of all ``names`` that a process sees with CUDA_VISIBLE_DEVICES: up to the first that does not exist."""
    if visible is None:
        return list(names)
    wanted = [part.strip() for part in visible.split(",")]
    return list(itertools.takewhile(lambda name: IDENTITY.match(name) or name in names, wanted))


def find_offers(nodes: Mapping[str, Node], facts: Facts, wanted: Wanted) -> dict[str, Offer | None]:
    """The GPUs of each node; None if it could not find them out."""
    return {name: _find_offer(nodes[name], own, wanted) for name, own in facts.items()}


def _find_offer(node: Node, own: Mapping, wanted: Wanted) -> Offer | None:
    if not (gpus := find_part(own, "gpus")):
        return None
    rows, visible = gpus["gpus"], gpus.get("visible") if wanted.visible is None else wanted.visible
    count = len(list_visible([row[0] for row in rows], visible)) if rows else 0
    if not count:
        return Offer("no GPU" if not rows else "no GPU that CUDA_VISIBLE_DEVICES shows", here=node.here)
    words = f"{count} × {rows[0][1]}"
    if trouble := _find_trouble(find_part(own, "versions"), driver=rows[0][-1]):
        return Offer(f"{words}, which torch cannot use", here=node.here, cause=trouble[0], fix=trouble[1])
    # If env= names the GPUs, every node takes the same ones.
    sharing = node.together if node.here and wanted.visible is None else 1
    words += f", shared by {sharing} nodes" if sharing > 1 else ""
    return Offer(words, seen=count, room=count // sharing, here=node.here)


def _find_trouble(versions: Mapping, driver: str) -> tuple[str, str] | None:
    """The reason why the torch of a node cannot use its GPUs, and the fix."""
    cuda = versions.get("cuda") or ""
    if versions.get("torch") and not cuda:
        return "torch is a build without CUDA", "install a build of torch with CUDA there, as on the other nodes"
    number, first = driver.partition(".")[0], FIRST_DRIVERS.get(cuda.partition(".")[0], 0)
    if number.isdigit() and int(number) < first:
        cause = f"the driver {driver} is too old for the CUDA {cuda} of torch, which needs {first} or newer"
        return cause, "install a newer driver there, or on all nodes a build of torch for an older CUDA"
    return None


def must_hide(offers: Mapping[str, Offer | None], wanted: Wanted) -> bool:
    """True if the GPUs have to be hidden on all nodes: some process sees one, and another has none."""
    # The choice of env= is left alone. Where a node could not find out its GPUs, the ranks compare what they see.
    if wanted.visible is not None or None in offers.values():
        return False
    enough = all(offer.room >= wanted.nproc_per_node for offer in offers.values())
    return any(offer.seen for offer in offers.values()) and not enough


def judge_gpus(offers: Mapping[str, Offer | None], facts: Facts, wanted: Wanted) -> list[Verdict]:
    """Judges if all processes have a GPU, or none, and names the processes that hold their memory."""
    have, verdicts = {name: offer for name, offer in offers.items() if offer}, split_facts(facts, "gpus")[1]
    table = list_per_node({name: offer.words for name, offer in have.items()})
    causes = "".join(f"; {name}: {offer.cause}" for name, offer in have.items() if offer.cause)
    if must_hide(offers, wanted):
        what = f"not every process has a GPU: all of them will use the CPU and gloo{table}"
        fix = f"{_advise(have, wanted)}; or run it as it is, on the CPU"
        return [*verdicts, Verdict(", ".join(have), "GPUs", "note", what, CAUSE + causes, fix)]
    if wanted.visible is not None and {bool(offer.seen) for offer in have.values()} == {True, False}:
        what = f"some nodes see a GPU and others none: nccl there and gloo here would wait for each other{table}"
        cause = f"env= sets CUDA_VISIBLE_DEVICES={wanted.visible} on all nodes{causes}"
        fix = "leave CUDA_VISIBLE_DEVICES out of env=, or env={'CUDA_VISIBLE_DEVICES': ''} for the CPU"
        return [*verdicts, Verdict(", ".join(have), "GPUs", "red", what, cause, fix)]
    for name, offer in have.items():
        verdicts += _judge_node(name, offer, find_part(facts[name], "gpu_users").get("rows", []), wanted)
    return verdicts


def _advise(offers: Mapping[str, Offer], wanted: Wanted) -> str:
    """The setting with which a job that has too few GPUs could use them."""
    if least := min(offer.room for offer in offers.values()):
        return f"nproc_per_node={least}"
    fixes = [f"on {name}: {offer.fix}" for name, offer in offers.items() if offer.fix]
    if all(offer.here for offer in offers.values()) and not fixes:
        count = min(offer.seen for offer in offers.values())
        return f"nodes=local_nodes({count})" + (", nproc_per_node=1" if wanted.nproc_per_node > 1 else "")
    return fixes[0] if fixes else f"leave {', '.join(n for n, offer in offers.items() if not offer.room)} out of nodes="


def _judge_node(name: str, offer: Offer, users: Sequence[Sequence[str]], wanted: Wanted) -> list[Verdict]:
    """Judges the GPUs of one node; ``users`` are process id, program and MiB of each that holds their memory."""
    if offer.cause:
        return [Verdict(name, "GPUs", "note", f"{offer.words}: gloo on the CPU", offer.cause, offer.fix)]
    if not offer.seen:
        return [Verdict(name, "GPUs", "ok", "no GPU: gloo on the CPU")]
    verdicts = []
    if offer.room < wanted.nproc_per_node:
        what = f"{offer.words} for {wanted.nproc_per_node} process(es) of a node"
        verdicts.append(Verdict(name, "GPUs", "note", what, CAUSE, f"nproc_per_node={max(1, offer.room)}"))
    shared = "a GPU that is shared is slower and may run full"
    for pid, program, used in users:
        what, fix = f"pid {pid} ({program}) holds {used} MiB", f"wait for it to end; on that node: ps -fp {pid}"
        if offer.here and pid == str(os.getpid()):
            what = f"the launcher's own process (pid {pid}) holds {used} MiB"
            fix = "start the launcher again before the job; in a notebook: restart the kernel"
        verdicts.append(Verdict(name, "GPUs", "note", what, shared, fix))
    return verdicts or [Verdict(name, "GPUs", "ok", f"{offer.words}, free")]
