"""Launches on nodes that are reached one by one: those of this machine, and hosts that ssh reaches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nodelaunch.backends import Say
from nodelaunch.backends.nodes import Link, PipeLink
from nodelaunch.bundle import Bundle
from nodelaunch.copying import copy_to_nodes
from nodelaunch.preflight import Preflight, check_nodes
from nodelaunch.preflight.verdicts import WILL_COPY
from nodelaunch.script import Placement, write_script
from nodelaunch.spec import JobSpec, Launch

# Together less than the ten seconds within which nothing of a job may outlive its launcher.
LEASE_SECONDS, GRACE_SECONDS = 6.0, 2.0
BY_HAND = True


def check(spec: JobSpec, job_id: str) -> Preflight:
    """Asks all nodes at once; see :class:`nodelaunch.backends.Backend`."""
    return check_nodes(
        spec.nodes,
        port=spec.port,
        nproc_per_node=spec.nproc_per_node,
        data=spec.data,
        torchrun=not spec.program,
        job_id=job_id,
        visible=spec.env.get("CUDA_VISIBLE_DEVICES"),
    )


def needs_preflight(spec: JobSpec) -> bool:
    """True if an address or the port is not known yet."""
    return spec.port is None or any(node.address is None for node in spec.nodes)


def write(spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
    """Writes one bash script for each node."""
    return {f"node{place.index}.sh": write_script(spec, launch, place) for place in places}


def copy(spec: JobSpec, launch: Launch, bundle: Bundle, found: Preflight | None, *, force: bool, say: Say) -> None:
    """Copies to all nodes at once."""
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
) -> dict[str, Link]:
    """Starts a supervisor on each node, which runs the node's script."""
    pool, begun = ThreadPoolExecutor(1), {}
    try:
        for place in places:
            if place.node.name in by_hand:
                say(f"on {place.node.name}, start by hand: bash {place.job_folder}.sh")
            else:
                # Not in this thread: an interrupt could come before the new process is assigned.
                begun[place.node.name] = pool.submit(_start_node, spec, launch, place)
        return {name: started.result() for name, started in begun.items()}
    except BaseException:
        for started in begun.values():
            started.cancel()
            started.add_done_callback(_stop_unfollowed)
        raise
    finally:
        pool.shutdown(wait=False)


def _stop_unfollowed(started: Future[Link]) -> None:
    """Ends a supervisor that nobody will follow; a thread waits for its end, so that it does not stay as a zombie."""
    if not started.cancelled() and not started.exception():
        link = started.result()
        link.stop()
        threading.Thread(target=lambda: deque(link.lines(), maxlen=0), daemon=True).start()


def _start_node(spec: JobSpec, launch: Launch, place: Placement) -> Link:
    """Starts a node's script under a supervisor there, which ends it when this process is gone."""
    bounds = [f"--lease={LEASE_SECONDS}", f"--grace={GRACE_SECONDS}", f"--limit={spec.limit}"]
    # The id in the environment marks this job's processes, on every node.
    identity = ["env", f"PYTHONPATH={place.code_folder}", f"LAB_JOB_ID={launch.id}", f"LAB_NODE={place.index}"]
    program = [place.node.python, "-P", "-u", "-m", "nodelaunch.node.supervisor", f"--job-folder={place.job_folder}"]
    return PipeLink(place.node, [*identity, *program, *bounds, "--", "bash", f"{place.job_folder}.sh"])
