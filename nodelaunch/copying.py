"""Copies to several nodes at once what they lack."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.bundle import Bundle, send
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import Verdict, Wanted, judge_code
from nodelaunch.spec import JobSpec, Launch


def copy_to_nodes(
    spec: JobSpec,
    launch: Launch,
    bundle: Bundle,
    *,
    nodes: Sequence[Node],
    lacking: Collection[str] = (),
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Copies code and scripts to nodes, and the data to those that lack them.

    Args:
        spec: The job.
        launch: Whose folder holds the scripts.
        bundle: The job's files.
        nodes: Where to.
        lacking: Names of the nodes that get the data.
        force: Whether to go on with code that was changed on a node.
        say: Is told of such code.

    Raises:
        LabError: A node was not reached, or its disk is full; or code that is there was changed; or the data are not
            here either.
    """
    if lacking and not spec.data.is_here:
        cause = f"the folder was not made on this machine, or it has no {spec.data.identity[:60]}"
        fix = spec.data.fix or "give the path of the folder on this machine: DataFolder(path=…)"
        where = spec.data.path
        raise LabError(f"There is no {spec.data.name!r:.40} here to copy.", where=where, cause=cause, fix=fix)
    started: list[subprocess.Popen] = []
    changed: list[Verdict] = []
    scripts = {path.name: path.read_bytes() for path in launch.folder.glob("*") if path.suffix in (".sh", ".sbatch")}

    def copy(node: Node) -> None:
        parts = {f"code/{bundle.hash}": bundle.files, f"jobs/{launch.id}": scripts}
        for name in send(node, node.folder, parts, started=started):
            code = {"folder": f"{node.folder}/{name}", "hash": ""}
            changed.extend(judge_code(node.name, {"code": code}, Wanted(bundle=bundle.hash)))
        if node.name in lacking:
            send(node, node.data_folder, {spec.data.name: spec.data.path}, started=started, timeout=None)

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
