"""Launches on nodes that are reached one by one: those of this machine, and hosts that ssh reaches."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nodelaunch.backends import Say
from nodelaunch.backends.nodes import PipeLink
from nodelaunch.bundle import Bundle
from nodelaunch.copying import copy_to_nodes
from nodelaunch.preflight import Preflight, check_nodes
from nodelaunch.preflight.verdicts import WILL_COPY
from nodelaunch.script import Placement, write_script
from nodelaunch.spec import JobSpec, Launch

# Together less than the ten seconds within which nothing of a job may outlive its launcher.
LEASE_SECONDS, GRACE_SECONDS = 6.0, 2.0
ONE_BY_ONE = True


def check(spec: JobSpec, job_id: str) -> Preflight:
    """Checks in seconds if a job can run, and changes nothing."""
    return check_nodes(
        spec.nodes,
        port=spec.port,
        nproc_per_node=spec.nproc_per_node,
        data=spec.data,
        torchrun=not spec.program,
        job_id=job_id,
        visible=spec.env.get("CUDA_VISIBLE_DEVICES"),
    )


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Returns one bash script for each node by its file's name, in the order of the nodes."""
    return {f"node{place.index}.sh": write_script(spec, launch, place) for place in places}


def copy(spec: JobSpec, launch: Launch, bundle: Bundle, found: Preflight | None, *, force: bool, say: Say) -> None:
    """Copies code and scripts to all nodes, and data to those that lack it; what is there already stays.

    Raises:
        LabError: A node was not reached, its disk is full, or code there was changed.
    """
    verdicts = found.verdicts if found else ()
    lacking = {verdict.node for verdict in verdicts if verdict.found == WILL_COPY}
    copy_to_nodes(spec, launch, bundle, nodes=spec.nodes, lacking=lacking, force=force, say=say)


def start(
    spec: JobSpec,
    launch: Launch,
    places: Sequence[Placement],
    *,
    by_hand: Sequence[str],
    say: Say,
    stop: threading.Event,
) -> dict[str, PipeLink]:
    """Starts a supervisor on each node but those that are started by hand; returns the links by the node's name.

    Raises:
        LabError: A node could not be started; the others are ended.
    """
    links: dict[str, PipeLink] = {}
    try:
        for place in places:
            if place.node.name in by_hand:
                say(f"on {place.node.name}, start by hand: bash {place.job_folder}.sh")
            else:
                links[place.node.name] = _start_node(spec, launch, place)
        return links
    except BaseException:
        for link in links.values():
            link.stop()
        raise


def _start_node(spec: JobSpec, launch: Launch, place: Placement) -> PipeLink:
    """Starts a node's script under a supervisor there, which ends it when this process is gone."""
    bounds = [f"--lease={LEASE_SECONDS}", f"--grace={GRACE_SECONDS}", f"--limit={spec.limit}"]
    # The id in the environment marks this job's processes, on every node.
    identity = ["env", f"PYTHONPATH={place.code_folder}", f"LAB_JOB_ID={launch.id}", f"LAB_NODE={place.index}"]
    program = [place.node.python, "-P", "-u", "-m", "nodelaunch.node.supervisor", f"--job-folder={place.job_folder}"]
    return PipeLink(place.node, [*identity, *program, *bounds, "--", "bash", f"{place.job_folder}.sh"])
