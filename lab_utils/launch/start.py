"""Copies to the nodes what they lack and starts a supervisor on each."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from lab_utils import LabError
from lab_utils.launch import slurm
from lab_utils.launch.bundle import Bundle, send
from lab_utils.launch.local import LocalNode, choose_data
from lab_utils.launch.nodes import Link, Node, PipeLink
from lab_utils.launch.preflight import Preflight
from lab_utils.launch.processes import stop_job
from lab_utils.launch.script import Plan
from lab_utils.launch.verdicts import WILL_COPY, Verdict, Wanted, judge_code

if TYPE_CHECKING:
    from lab_utils.launch.job import TorchrunJob

# Together less than the ten seconds within which nothing of a job may outlive its launcher.
LEASE_SECONDS, GRACE_SECONDS = 6.0, 2.0


def copy_all(
    job: TorchrunJob,
    bundle: Bundle,
    found: Preflight | None = None,
    *,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Copies scripts and package to all nodes at once, and the data to those of which the preflight said so.

    Args:
        job: The job.
        bundle: Its files.
        found: What the preflight found; None where there was none.
        force: Whether to go on with code that was changed on a node.
        say: Is told of such code.

    Raises:
        LabError: A node was not reached, or its disk is full; or code that is there was changed; or the data are not
            here either.
    """
    on_slurm = isinstance(job.nodes[0], slurm.SlurmNode)
    verdicts = found.verdicts if found else ()
    lacking = {verdict.node for verdict in verdicts if verdict.check == "data" and verdict.found == WILL_COPY}
    started: list[subprocess.Popen] = []
    scripts = {path.name: path.read_bytes() for path in job.folder.glob("*") if path.suffix in (".sh", ".sbatch")}

    if on_slurm and job.dataset and job.copy_data:  # whose preflight asks no node; what is there already stays
        lacking = {job.nodes[0].name}

    if lacking and not (job.pack / "manifest.json").is_file():
        cause, fix = "it was not prepared here, or LAB_DATA points elsewhere", "python -m lab_utils.data prepare"
        raise LabError(f"There is no {job.dataset!r:.40} here to copy.", where=job.pack, cause=cause, fix=fix)

    changed: list[Verdict] = []

    def copy(node: Node) -> None:
        parts = {f"code/{bundle.hash}": bundle.files, f"jobs/{job.id}": scripts}
        for name in send(node, node.folder, parts, started=started):
            code = {"folder": f"{node.folder}/{name}", "hash": ""}
            changed.extend(judge_code(node.name, {"code": code}, Wanted(bundle=bundle.hash)))
        if node.name in lacking:
            parts = {f"packed/{job.dataset}": job.pack}
            send(node, choose_data(node), parts, started=started, timeout=None)

    # Slurm's nodes share one folder.
    nodes = job.nodes[:1] if on_slurm else job.nodes
    pool = ThreadPoolExecutor(len(nodes))
    try:
        for copied in as_completed([pool.submit(copy, node) for node in nodes]):
            copied.result()
    except BaseException:  # an interrupt, or one node's error: nobody waits for the other copies
        for process in started:
            process.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if not force:
        Preflight(tuple(changed), {}, {}, 0, 0.0, {}).raise_if_red()
    for verdict in changed:
        say(f"{verdict.node}: {verdict.found}; started anyway")


def start_links(
    job: TorchrunJob,
    plans: Sequence[Plan],
    *,
    by_hand: Sequence[str],
    say: Callable[[str], None],
    stop: threading.Event,
) -> dict[str, Link]:
    """Starts the script of every node but those that are started by hand; returns the links by node.

    Raises:
        LabError: A node could not be started; those that were are ended.
    """
    if isinstance(job.nodes[0], slurm.SlurmNode):
        return {link.node: link for link in slurm.start(plans[0], job.nodes, say=say, stop=stop)}
    links = {}
    try:
        for node, plan in zip(job.nodes, plans, strict=True):
            if node.name in by_hand:
                say(f"on {node.name}, start by hand: bash {plan.job_folder}.sh")
            else:
                links[node.name] = _start(node, plan)
    except BaseException:
        for link in links.values():
            link.stop()
        raise
    return links


def sweep(nodes: Sequence[Node], job: str) -> None:
    """Ends what is left of a job on those of the nodes that are this machine; elsewhere its guards do."""
    if any(isinstance(node, LocalNode) for node in nodes):
        stop_job({"id": job})


def _start(node: Node, plan: Plan) -> Link:
    """Starts a node's script under a supervisor there, which ends it when this process is gone."""
    bounds = [f"--lease={LEASE_SECONDS}", f"--grace={GRACE_SECONDS}", f"--limit={plan.limit}"]
    # The id in the environment is what tells this job's processes from all others, on every node.
    identity = ["env", f"PYTHONPATH={plan.code_folder}", f"LAB_JOB_ID={plan.job_id}", f"LAB_NODE={plan.node}"]
    program = [node.python, "-P", "-u", "-m", "lab_utils.launch.supervisor", f"--job-folder={plan.job_folder}", *bounds]
    return PipeLink(node, [*identity, *program, "--", "bash", f"{plan.job_folder}.sh"])
