"""Everything that goes to a node: the programs that we run there, a job's code, named by its hash, and its data.

A node may have Python 3.9 and nothing installed. A program is a zip of lab_common and nodelaunch.node, an argument of a
few lines of Python that start it, and has to be below 128 KiB. All else goes as one tar file over a connection.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import nodelaunch
from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch.backends.nodes import Node
from nodelaunch.node import receive
from nodelaunch.node.facts import hash_files
from nodelaunch.spec import JobSpec, Launch

# Python finds a file beside the script before what is installed; torchrun would import it, too.
TAKEN = sys.stdlib_module_names | {"lab_common", "lab_utils", "nodelaunch", "numpy", "torch", "torchvision"}
# All files of a job are kept in memory, and sent to each node at each launch. In a project, a large file is data.
TOTAL, LARGEST, MOST = 64 * 2**20, 8 * 2**20, 5000
# Tools make these again. A virtual environment is recognised by its pyvenv.cfg.
MADE = {".git", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv"}
MADE |= {"__pycache__", "node_modules", "wandb"}
# The current folder goes first: a random.py in the home folder must not be imported in place of Python's own.
STUB = """\
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import base64, os, runpy, tempfile, zlib
try:
    archive = open(os.memfd_create("nodelaunch"), "wb")
    place = "/proc/self/fd/%d" % archive.fileno()
except (AttributeError, OSError):  # no Linux
    archive = tempfile.NamedTemporaryFile(suffix=".pyz")
    place = archive.name
archive.write(zlib.decompress(base64.b64decode(sys.argv.pop(1))))
archive.flush()
sys.path.insert(0, place)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


# Programs for a node.


def make_command(python: str, module: ModuleType, *arguments: str) -> list[str]:
    """Returns the command that runs a module on a node, whatever is installed there.

    The module is one of ``nodelaunch.node``, or another that imports only the standard library and ``lab_common``.
    """
    inside = module.__name__.startswith("nodelaunch.node.")
    name = module.__name__ if inside else module.__name__.rpartition(".")[2]
    return [python, "-c", STUB, _pack(None if inside else module.__file__), name, *arguments]


@functools.lru_cache(maxsize=8)
def _pack(extra: str | None) -> str:
    files, stream = list_files(), io.BytesIO()
    if extra:
        files[Path(extra).name] = Path(extra)
    with zipfile.ZipFile(stream, "w") as archive:
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
    return base64.b64encode(zlib.compress(stream.getvalue(), 9)).decode()


def list_files() -> dict[str, Path]:
    """The files that run around a script on a node, lab_common and nodelaunch.node, by their path in the archive."""
    root = Path(nodelaunch.__file__).parents[1]
    patterns = ("lab_common/[!.]*.py", "nodelaunch/__init__.py", "nodelaunch/node/[!.]*.py")
    return {path.relative_to(root).as_posix(): path for pattern in patterns for path in root.glob(pattern)}


# The code of a job.


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


# Copies to all nodes at once.


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
