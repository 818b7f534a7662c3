"""What a node has to have before a job starts there: the training script and what it imports, named by their hash."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.backends.nodes import Node
from nodelaunch.node import receive
from nodelaunch.node.facts import hash_files
from nodelaunch.node.place import PROGRAMS
from nodelaunch.node.probe import MARK
from nodelaunch.packages import find_packages, list_modules
from nodelaunch.program import list_files, make_command
from nodelaunch.project import find_project

# What stands beside a script is found before all that is installed, also by torchrun.
TAKEN = sys.stdlib_module_names | {"lab_common", "nodelaunch", "numpy", "torch", "torchvision"}
# Of one file of a job: all of them are kept in memory, and sent to each node.
LARGEST = 64 * 2**20


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the code folder, and the SHA-256 over their names and contents.

    Attributes:
        note: What of a project is copied, and what is not, in one line; "" where there is no project.
    """

    files: Mapping[str, bytes]
    hash: str
    note: str = ""


def collect_files(script: Path | None, extra: tuple[Path, ...] = (), root: Path | None = None) -> Bundle:
    """Reads the training script, other files that it imports or reads, and what runs around it on a node.

    Args:
        script: The training script; None for a module that is installed on the nodes.
        extra: The other files; they lie beside it on the nodes.
        root: The project that it is part of, all of which is read.

    Raises:
        LabError: A file is not there, cannot be read, is no regular file or too large, or two have the same name.
    """
    beside = () if root or script is None else (script, *extra)
    contents, note = _read_project(script, root) if root else (_read_beside(beside), "")
    packages = find_packages([source for name, source in contents.items() if name.endswith(".py")])
    # What stands in the project is found there.
    packages = {
        name: path
        for name, path in packages.items()
        if name not in ("lab_common", "nodelaunch") and (root is None or root not in path.parents)
    }
    for path in beside:
        if path.stem in TAKEN | packages.keys():
            shown, cause = clean(repr(path.name), 60), f"it would be imported in place of the module {path.stem!r}"
            fix = "rename it"
            raise LabError(f"A file of a job cannot be called {shown}.", where=clean(path, 300), cause=cause, fix=fix)
    contents |= {name: _read_file(path) for name, path in list_files().items()}
    for package, folder in packages.items():
        for path in list_modules(folder):
            name = Path(package, path.relative_to(folder)) if folder.is_dir() else Path(path.name)
            contents[name.as_posix()] = _read_file(path)
    return Bundle(contents, hash_files(contents), note)


def _read_beside(paths: tuple[Path, ...]) -> dict[str, bytes]:
    files = {}
    for path in paths:
        shown, where = clean(repr(path.name), 60), clean(path, 300)
        if f"script/{path.name}" in files:
            raise LabError(f"Two files of the job are called {shown}.", where=where, fix="rename one of them")
        files[f"script/{path.name}"] = path
    return {name: _read_file(path) for name, path in files.items()}


def _read_project(script: Path | None, root: Path) -> tuple[dict[str, bytes], str]:
    """Reads a project's files, and says which those are; the script is among them, also where git ignores it."""
    project = find_project(root)
    if script:
        project.files[script.relative_to(root).as_posix()] = script
    contents = {f"project/{Path(name).as_posix()}": _read_file(path) for name, path in project.files.items()}
    programs = sorted(name for name, path in project.files.items() if path.stat().st_mode & stat.S_IXUSR)
    if programs:  # as a file, so that the code's hash, which is over names and contents, is another one, too
        contents[PROGRAMS] = json.dumps(programs).encode()
    return contents, project.describe()


def _read_file(path: Path) -> bytes:
    """Reads a file of a job.

    Raises:
        LabError: It is not there, cannot be read, is no regular file, or is too large.
    """
    shown, where = clean(repr(path.name), 60), clean(path, 300)
    try:
        # A FIFO would hold us until somebody writes into it, and a device may act upon being opened.
        kind = path.stat().st_mode
        if stat.S_ISREG(kind):
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
                content = file.read(LARGEST + 1)
                size = os.fstat(file.fileno()).st_size
            if len(content) <= LARGEST:
                return content
            what = f"The file {shown} is too large for a job: {size / 2**20:,.0f} MiB of {LARGEST >> 20}."
            cause = "the files of a job are copied to each node at each launch"
            raise LabError(what, where=where, cause=cause, fix="name data by data=DataFolder(…), or by a path in args=")
    except (FileNotFoundError, NotADirectoryError) as error:
        fix = "give its path, relative to the current folder or absolute"
        cause = "a typo in the path, or a link whose target is gone"
        raise LabError(f"There is no file {shown} to run.", where=where, cause=cause, fix=fix) from error
    except OSError as error:
        fix = f"chmod u+r {shlex.quote(where)}, or copy it to a folder of yours"
        raise LabError(f"The file {shown} cannot be read.", where=where, cause=str(error.strerror), fix=fix) from error
    cause = "it is a folder" if stat.S_ISDIR(kind) else "it is a pipe, a socket or a device"
    raise LabError(f"{shown} is no regular file.", where=where, cause=cause, fix="give the path of the script itself")


def send(
    node: Node,
    root: str,
    folders: Mapping[str, Mapping[str, bytes] | Path],
    *,
    started: list[subprocess.Popen],
    timeout: float | None = 60.0,
) -> list[str]:
    """Puts folders into a folder of the node, each whole or not at all; one that is there already stays.

    Args:
        node: Where to.
        root: The folder there.
        folders: By their path within it, either files by name, or a folder of this machine.
        started: Takes in the process that sends, so that the caller can end it.
        timeout: Seconds after which the node is given up; None for data, which take as long as they take.

    Returns:
        The folders of code that were there already, and were changed since they were copied.

    Raises:
        LabError: The node was not reached, or its disk is full.
    """
    process = node.popen(make_command(node.python, receive, root, *folders))
    started.append(process)
    # A node that does not take what is sent must not hold the launcher for ever; ending ssh breaks the pipe.
    alarm = threading.Timer(timeout, process.kill) if timeout else None
    if alarm:
        alarm.start()
    try:
        # The pipe breaks when the receiver ends early; its own words then say why.
        with contextlib.suppress(OSError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for target, content in folders.items():
                _add(archive, target, content)
        said, errors = process.communicate()
    finally:
        if alarm:
            alarm.cancel()
    if process.returncode:
        words = "timed out" if process.returncode < 0 else errors.decode(errors="replace")
        raise node.explain(255 if process.returncode < 0 else process.returncode, words)
    # The last line: a login script of the node may print, too.
    return json.loads(said[said.rfind(MARK.encode()) + 1 :])


def _add(archive: tarfile.TarFile, target: str, content: Mapping[str, bytes] | Path) -> None:
    if isinstance(content, Path):
        archive.add(content, arcname=target)
        return
    for name, text in content.items():
        entry = tarfile.TarInfo(f"{target}/{name}")
        entry.size, entry.mode = len(text), 0o600
        archive.addfile(entry, io.BytesIO(text))
