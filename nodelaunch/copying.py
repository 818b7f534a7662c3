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
    """Copies code and scripts to nodes, and the data to those that lack them; what is there already stays."""
    if lacking and not spec.data.is_here:
        what, where = f"There is no {spec.data.name!r:.40} here to copy.", spec.data.path
        cause = f"the folder was not made on this machine, or it has no {spec.data.identity[:60]}"
        fix = spec.data.fix or "give the path of the folder on this machine: DataFolder(path=…)"
        raise LabError(what, where=where, cause=cause, fix=fix)
    started: list[subprocess.Popen] = []
    scripts = {path.name: path.read_bytes() for path in launch.folder.glob("*.s*h")}  # .sh or .sbatch
    parts = {f"code/{bundle.hash}": bundle.files, f"jobs/{launch.id}": scripts}

    def copy(node: Node) -> None:
        _send(node, node.folder, parts, started)
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
) -> None:
    """Puts files by name, or a folder of this machine, into folders of a node, each by its path within ``root``.

    A folder appears whole or not at all. ``started`` takes the process that sends, so that the caller can end it.
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
    if process.returncode == receive.CHANGED:
        what, where = f"The code on {node.name} is not what its name says.", f"{root}/{next(iter(folders))}"
        cause = "a file was changed there, by hand or by a script that writes beside itself"
        fix = f"on that node: rm -r -- {shlex.quote(where)}   (it is copied again)"
        raise LabError(what, where=where, cause=cause, fix=fix)
    if process.returncode:
        raise node.explain(process.returncode, errors.decode(errors="replace"))
