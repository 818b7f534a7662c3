"""Collects what a job copies to its nodes: the script and its files, or the project, named by their hash."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch.node.facts import hash_files
from nodelaunch.program import list_files

# Python finds a file beside the script before what is installed; torchrun would import it, too.
TAKEN = sys.stdlib_module_names | {"lab_common", "lab_utils", "nodelaunch", "numpy", "torch", "torchvision"}
# All files of a job are kept in memory, and sent to each node at each launch. In a project, a large file is data.
TOTAL, LARGEST, MOST = 64 * 2**20, 8 * 2**20, 5000
# Tools make these again. A virtual environment is recognised by its pyvenv.cfg.
MADE = {".git", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv"}
MADE |= {"__pycache__", "node_modules", "wandb"}


@dataclass(frozen=True)
class Bundle:
    """The files of a job, by their path in the code folder."""

    files: Mapping[str, bytes]
    hash: str  # SHA-256 over their names and contents
    note: str = ""  # on what of a project is copied and what is not


def collect_files(script: Path, extra: tuple[Path, ...] = (), root: Path | None = None) -> Bundle:
    """Reads the script and the ``extra`` files beside it, or the project ``root``, and what runs around it there."""
    files, note, beside = list_files(), "", () if root else (script, *extra)
    if root:
        project, note = find_project(root)
        project[script.relative_to(root).as_posix()] = script  # even if git ignores it
        files |= {f"project/{name}": path for name, path in project.items()}
    files |= {f"script/{path.name}": path for path in beside}
    contents = {name: read_file(path) for name, path in files.items()}
    for path in beside:
        if path.stem in TAKEN or files[f"script/{path.name}"] != path:
            cause = f"it would take the place of another file, or of the module {path.stem!r}"
            what = f"A file of a job cannot be called {clean(repr(path.name), 60)}."
            raise LabError(what, where=clean(path, 300), cause=cause, fix="rename it")
    return Bundle(contents, hash_files(contents), note)


def read_file(path: Path) -> bytes:
    """Reads a file of a job, or raises a LabError that says why it cannot be copied."""
    shown, fix = clean(repr(path.name), 60), "give its path, relative to the current folder or absolute"
    try:
        facts = path.stat()
        if stat.S_ISREG(facts.st_mode) and facts.st_size <= TOTAL:
            return path.read_bytes()
        what, cause = f"{shown} is no regular file.", "it is a folder, a pipe, a socket or a device"
        if stat.S_ISREG(facts.st_mode):
            what = f"The file {shown} is too large for a job: {facts.st_size / 2**20:,.0f} MiB of {TOTAL >> 20}."
            cause, fix = "the files of a job are copied to each node", "name data by data=DataFolder(…)"
    except (FileNotFoundError, NotADirectoryError):
        what, cause = f"There is no file {shown} to run.", "a typo in the path, or a link whose target is gone"
    except OSError as error:
        what, cause = f"The file {shown} cannot be read.", str(error.strerror)
        fix = f"chmod u+r {shlex.quote(str(path))}, or copy it to a folder of yours"
    raise LabError(what, where=clean(path, 300), cause=cause, fix=fix)


def find_project(root: Path) -> tuple[dict[str, Path], str]:
    """The files of a folder that are copied, by their path in it, and a line on what is left out."""
    files, sizes, left_out = {}, Counter(), []
    for path in _walk(root, left_out):
        name, target = path.relative_to(root), path.resolve()
        if not target.is_file() or root not in target.parents:
            left_out.append(f"{clean(name, 60)} (leads elsewhere)")
        elif (size := target.stat().st_size) > LARGEST:
            left_out.append(f"{clean(name, 60)} ({size / 2**20:,.0f} MiB)")
        else:
            files[name.as_posix()] = path
            sizes[name.parts[0]] += size
        if len(files) > MOST or sizes.total() > TOTAL:
            what = f"The project is too large for a job: more than {TOTAL >> 20} MiB or {MOST:,} files."
            cause = f"most of it is in {', '.join(clean(name, 40) for name, _ in sizes.most_common(3))}"
            fix = "name data in a .gitignore, or give a smaller folder as root="
            raise LabError(what, where=clean(root, 300), cause=cause, fix=fix)
    if len(left_out) > 6:
        left_out[5:] = [f"and {len(left_out) - 5} more"]
    out = f"; left out: {', '.join(left_out)}" if left_out else ""
    return files, f"project {clean(root.name, 60)}: {len(files)} files, {sizes.total() / 2**20:.1f} MiB{out}"


def name_work(root: Path) -> str:
    """The name of a project's folder on a node: readable, and different for another folder of the same name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name)[:40].strip("-.") or "project"
    return f"{name}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:6]}"


def _walk(root: Path, left_out: list[str]) -> Iterator[Path]:
    """The files below a folder that git does not ignore; adds the folders that it skips to ``left_out``."""
    own, ignored = {env_folder("LAB_RUNS", "runs").resolve()}, _list_ignored(root)
    if os.environ.get("LAB_DATA"):  # otherwise `data` may be any folder of the project, such as a package
        own.add(env_folder("LAB_DATA", "data").resolve())
    for place, folders, names in os.walk(root):
        here = Path(place)
        folders[:] = sorted(name for name in folders if name not in MADE and here / name not in ignored)
        for path in [here / name for name in folders]:
            if path.is_symlink() or path.resolve() in own or os.path.exists(path / "pyvenv.cfg"):  # noqa: PTH110 - no right
                folders.remove(path.name)
                left_out.append(clean(path.relative_to(root), 60))
        yield from (here / name for name in sorted(names) if name not in MADE and here / name not in ignored)


def _list_ignored(folder: Path) -> set[Path]:
    """The files and folders below a folder that git ignores; none without git or a repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {folder / os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
