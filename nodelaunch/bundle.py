"""Collects what a job copies to its nodes: the script or the project, and what it imports, named by their hash."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.node.facts import hash_files
from nodelaunch.node.place import PROGRAMS
from nodelaunch.packages import find_packages, list_modules
from nodelaunch.program import list_files
from nodelaunch.project import find_project

OWN = {"lab_common", "nodelaunch"}
# Python finds a file beside the script before what is installed; torchrun would import it, too.
TAKEN = sys.stdlib_module_names | OWN | {"numpy", "torch", "torchvision"}
# All files of a job are kept in memory, and sent to each node.
LARGEST = 64 * 2**20


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the code folder, and the SHA-256 over their names and contents.

    Attributes:
        note: One line on what of a project is copied and what is not; "" without a project.
    """

    files: Mapping[str, bytes]
    hash: str
    note: str = ""


def collect_files(script: Path | None, extra: tuple[Path, ...] = (), root: Path | None = None) -> Bundle:
    """Reads the training script, other files that it imports or reads, and what runs around it on a node.

    Args:
        script: The training script; None for a module that is installed on the nodes.
        extra: The other files; they are copied beside it.
        root: The project that contains the script, which is read as a whole.

    Raises:
        LabError: A file does not exist, cannot be read, is not a regular file or too large, or has the name of another.
    """
    note, contents = "", {name: read_file(path) for name, path in list_files().items()}
    beside = () if root or script is None else (script, *extra)
    if root:
        project = find_project(root)
        note = project.describe()
        if script:  # even if git ignores it
            project.files[script.relative_to(root).as_posix()] = script
        contents |= {f"project/{Path(name).as_posix()}": read_file(path) for name, path in project.files.items()}
        programs = sorted(name for name, path in project.files.items() if path.stat().st_mode & stat.S_IXUSR)
        if programs:  # in a file, so that the hash, which is over names and contents, changes with the modes
            contents[PROGRAMS] = json.dumps(programs).encode()
    for path in beside:
        name = f"script/{path.name}"
        if name in contents:
            what = f"Two files of the job are called {clean(repr(path.name), 60)}."
            raise LabError(what, where=clean(path, 300), fix="rename one of them")
        contents[name] = read_file(path)
    scripts = [name for name in contents if name.startswith(("project/", "script/")) and name.endswith(".py")]
    packages = find_packages([contents[name] for name in scripts])
    for path in beside:
        if path.stem in TAKEN | packages.keys():
            cause = f"it would be imported in place of the module {path.stem!r}"
            what = f"A file of a job cannot be called {clean(repr(path.name), 60)}."
            raise LabError(what, where=clean(path, 300), cause=cause, fix="rename it")
    for package, folder in packages.items():
        if package not in OWN and not (root and root in folder.parents):  # a project has its own packages
            for path in list_modules(folder):
                name = Path(package, path.relative_to(folder)) if folder.is_dir() else Path(path.name)
                contents[name.as_posix()] = read_file(path)
    return Bundle(contents, hash_files(contents), note)


def read_file(path: Path) -> bytes:
    """Reads a file of a job.

    Raises:
        LabError: It does not exist, cannot be read, is not a regular file, or is too large.
    """
    shown, where = clean(repr(path.name), 60), clean(path, 300)
    try:
        # Opening a FIFO would wait for a writer, and a device may act on being opened.
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
