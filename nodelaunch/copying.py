"""Copies code, scripts and data to all nodes at once, each as a tar file over one connection."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.bundle import Bundle
from nodelaunch.node import receive
from nodelaunch.node.probe import MARK
from nodelaunch.preflight import Preflight
from nodelaunch.preflight.verdicts import Verdict
from nodelaunch.program import make_command
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
        launch: Its folder has the scripts.
        bundle: The job's files.
        nodes: The receivers.
        lacking: Names of the nodes that get the data.
        force: Continue even if code was changed on a node.
        say: Called with a line for such code.

    Raises:
        LabError: A node was not reached, or its disk is full; code there was changed; or the data are not here either.
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
            folder = f"{node.folder}/{name}"
            cause = "a file was changed there by hand; the launcher's copy is the one to change"
            fix = f"on that node: rm -r -- {shlex.quote(folder)}   (it is copied again)"
            changed.append(Verdict(node.name, "code", "red", f"{folder} is not what its name says", cause, fix))
        if node.name in lacking:
            send(node, node.data_folder, {spec.data.name: spec.data.path}, started=started, timeout=None)

    pool = ThreadPoolExecutor(len(nodes))
    try:
        for copied in as_completed([pool.submit(copy, node) for node in nodes]):
            copied.result()
    except BaseException:  # an interrupt, or one node's error: the other copies are pointless
        for process in started:
            process.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if not force:
        Preflight(tuple(changed)).raise_if_red()
    for verdict in changed:
        say(f"{verdict.node}: {verdict.found}; started anyway")


def send(
    node: Node,
    root: str,
    folders: Mapping[str, Mapping[str, bytes] | Path],
    *,
    started: list[subprocess.Popen],
    timeout: float | None = 60.0,
) -> list[str]:
    """Puts folders into a folder of the node, each whole or not at all; one that is there already remains.

    Args:
        node: The receiver.
        root: The folder there.
        folders: Files by name, or a folder of this machine, by the path within ``root``.
        started: Takes the process that sends, so that the caller can end it.
        timeout: Seconds after which the copy fails; None for data, which may take any time.

    Returns:
        The folders of code that were there already, and were changed since they were copied.

    Raises:
        LabError: The node was not reached, or its disk is full.
    """
    process = node.popen(make_command(node.python, receive, root, *folders))
    started.append(process)
    # A node that stops reading must not block the launcher: ending ssh breaks the pipe.
    alarm = threading.Timer(timeout or threading.TIMEOUT_MAX, process.kill)
    alarm.daemon = True
    alarm.start()
    try:
        # The pipe breaks if the receiver ends early; its own words then explain why.
        with contextlib.suppress(OSError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for target, content in folders.items():
                if isinstance(content, Path):
                    archive.add(content, arcname=target)
                    continue
                for name, text in content.items():
                    entry = tarfile.TarInfo(f"{target}/{name}")
                    entry.size, entry.mode = len(text), 0o600
                    archive.addfile(entry, io.BytesIO(text))
        said, errors = process.communicate()
    finally:
        alarm.cancel()
    if process.returncode:
        words = "timed out" if process.returncode < 0 else errors.decode(errors="replace")
        raise node.explain(255 if process.returncode < 0 else process.returncode, words)
    return json.loads(said[said.rfind(MARK.encode()) + 1 :])  # the last line: a login script may print, too
