"""Copies code, scripts and data to all nodes at once, each as a tar file over one connection."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.bundle import Bundle
from nodelaunch.node import receive
from nodelaunch.program import make_command
from nodelaunch.spec import JobSpec, Launch


def copy_to_nodes(
    spec: JobSpec, launch: Launch, bundle: Bundle, *, nodes: Sequence[Node], lacking: Collection[str]
) -> None:
    """Copies code and scripts to nodes, and the data to those that lack them; what is there already stays.

    Raises:
        LabError: A node was not reached, or its disk is full; code there was changed; or the data are not here either.
    """
    if lacking and not spec.data.is_here:
        cause = f"the folder was not made on this machine, or it has no {spec.data.identity[:60]}"
        fix = spec.data.fix or "give the path of the folder on this machine: DataFolder(path=…)"
        where = spec.data.path
        raise LabError(f"There is no {spec.data.name!r:.40} here to copy.", where=where, cause=cause, fix=fix)
    started: list[subprocess.Popen] = []
    code, scripts = f"code/{bundle.hash}", [*launch.folder.glob("*.sh"), *launch.folder.glob("*.sbatch")]
    parts = {code: bundle.files, f"jobs/{launch.id}": {path.name: path.read_bytes() for path in scripts}}

    def copy(node: Node) -> None:
        if not _send(node, node.folder, parts, started):
            where = f"{node.folder}/{code}"
            what = f"The code on {node.name} is not what its name says."
            cause = "a file was changed there, by hand or by a script that writes beside itself"
            fix = f"on that node: rm -r -- {shlex.quote(where)}   (it is copied again)"
            raise LabError(what, where=where, cause=cause, fix=fix)
        if node.name in lacking:
            _send(node, node.data_folder, {spec.data.name: spec.data.path}, started)

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


def _send(
    node: Node, root: str, folders: Mapping[str, Mapping[str, bytes] | Path], started: list[subprocess.Popen]
) -> bool:
    """Puts files by name, or a folder of this machine, into folders of a node, each by its path within ``root``.

    A folder appears whole or not at all, and one that is there already remains. ``started`` takes the process that
    sends, so that the caller can end it. Returns False if code that was there already has been changed.
    """
    process = node.popen(make_command(node.python, receive, root, *folders))
    started.append(process)
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
    _, errors = process.communicate()
    if process.returncode not in (0, receive.CHANGED):
        raise node.explain(process.returncode, errors.decode(errors="replace"))
    return process.returncode == 0
