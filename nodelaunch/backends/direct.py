"""Launches on nodes that are reached one by one: those of this machine, and hosts that ssh reaches."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from threading import Event

from nodelaunch.backends import Say
from nodelaunch.backends.nodes import Link, PipeLink
from nodelaunch.preflight import Preflight, check_nodes
from nodelaunch.script import Placement, write_script
from nodelaunch.spec import JobSpec, Launch

LEASE_SECONDS, GRACE_SECONDS = 6.0, 2.0  # together less than the ten within which nothing may outlive its launcher
ONE_BY_ONE = True


def check(spec: JobSpec) -> Preflight:
    """Checks in seconds if a job can run, and changes nothing."""
    return check_nodes(
        spec.nodes,
        port=spec.port,
        nproc_per_node=spec.nproc_per_node,
        data=spec.data,
        torchrun=not spec.program,
        visible=spec.env.get("CUDA_VISIBLE_DEVICES"),
    )


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Returns one bash script for each node by its file's name, in the order of the nodes."""
    return {f"node{place.index}.sh": write_script(spec, launch, place) for place in places}


def start(
    spec: JobSpec, launch: Launch, places: Sequence[Placement], *, by_hand: Sequence[str], say: Say, stop: Event
) -> dict[str, Link]:
    """Starts a supervisor on each node but those that are started by hand; returns the links by the node's name."""
    links: dict[str, Link] = {}
    bounds = [f"--lease={LEASE_SECONDS}", f"--grace={GRACE_SECONDS}", f"--limit={spec.limit}"]
    try:
        for place in places:
            node, folder = place.node, place.job_folder
            if node.name in by_hand:
                say(f"on {node.name}, start by hand: bash {shlex.quote(place.script)}")
                continue
            # The id in the environment marks this job's processes, on every node.
            identity = ["env", f"PYTHONPATH={place.code_folder}", f"LAB_JOB_ID={launch.id}", f"LAB_NODE={place.index}"]
            program = [node.python, "-P", "-u", "-m", "nodelaunch.node.supervisor", f"--job-folder={folder}", *bounds]
            links[node.name] = PipeLink(node, [*identity, *program, "--", "bash", place.script])
        return links
    except BaseException:
        for link in links.values():
            link.stop()
        raise
