"""Lists the files of a project that are copied to the nodes: not data, not what git ignores, not what tools made."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch.node.facts import SKIPPED

# Tools make these again. A virtual environment is recognised by its pyvenv.cfg.
MADE = {".git", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv"}
MADE |= {"__pycache__", "node_modules", "wandb"}
# A larger file is data. The whole project is kept in memory, and sent to each node at each launch.
LARGEST, TOTAL, MOST = 8 * 2**20, 64 * 2**20, 5000


@dataclass(frozen=True)
class Project:
    """The files of a folder that are copied.

    Attributes:
        root: The folder.
        files: By their path within it.
        size: Of all files, in bytes.
        left_out: What is not copied, in words, for the user.
    """

    root: Path
    files: dict[str, Path]
    size: int
    left_out: tuple[str, ...]

    def describe(self) -> str:
        """One line: how much is copied, and what is not."""
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"project {clean(self.root.name, 60)}: {len(self.files)} files, {self.size / 2**20:.1f} MiB{out}"


def find_project(root: Path) -> Project:
    """Looks through a folder.

    Raises:
        LabError: It has more files, or more bytes, than a job can carry.
    """
    left_out: list[str] = []
    listed = _list_git(root, left_out)
    files, sizes, large = {}, Counter(), []
    for name in _walk(root, left_out) if listed is None else sorted(listed):
        path, shown = root / name, clean(name, 60)
        try:
            facts, inside = path.stat(), root in path.resolve().parents
        except OSError:  # git still lists it, or it is a broken link
            left_out.append(f"{shown} (not there)")
            continue
        if stat.S_ISDIR(facts.st_mode) and not path.is_symlink():
            left_out.append(f"{shown} (git lists no files of it)")
        elif not stat.S_ISREG(facts.st_mode) or not inside:
            left_out.append(f"{shown} (leads elsewhere)")
        elif facts.st_size > LARGEST:
            large.append((facts.st_size, shown))
        else:
            files[name] = path
            sizes[name.partition("/")[0]] += facts.st_size
        if len(files) > MOST or sizes.total() > TOTAL:
            raise LabError(
                f"The project is too large for a job: more than {TOTAL >> 20} MiB or {MOST:,} files.",
                where=clean(root, 300),
                cause="a project is copied to each node at each launch; most of it is in "
                + ", ".join(clean(name, 40) for name, _ in sizes.most_common(3)),
                fix="name data in a .gitignore, or give a smaller folder as root=",
            )
    left_out += [f"{shown} ({size / 2**20:,.0f} MiB)" for size, shown in sorted(large, reverse=True)]
    if len(left_out) > 6:
        left_out[5:] = [f"and {len(left_out) - 5} more"]
    return Project(root, files, sizes.total(), tuple(left_out))


def name_work(root: Path) -> str:
    """The name of a project's folder on a node: readable, and different for another folder of the same name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name)[:40].strip("-.") or "project"
    return f"{name}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:6]}"


def _list_git(root: Path, left_out: list[str]) -> list[str] | None:
    """The files that git knows or would add, also in repositories within; None without a repository."""
    if not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode or not done.stdout:  # no repository, another user's, or an ignored folder of one
        return None
    runs, listed = env_folder("LAB_RUNS", "runs").resolve(), {}
    for line in done.stdout.split(b"\0"):
        mark, _, name = os.fsdecode(line).partition(" ")  # "?" before files that git does not know yet
        if not name or (MADE if mark == "?" else set(SKIPPED)) & {*Path(name).parts[:-1]}:
            continue
        path = root / name
        if root in runs.parents and runs in (path, *path.parents):
            left_out.append(clean(runs.relative_to(root), 60))
        # A repository within this one, of which git lists only the folder.
        elif _has(path, ".git") and (inner := _list_git(path, left_out)):
            listed |= dict.fromkeys(f"{name.rstrip('/')}/{file}" for file in inner)
        else:
            listed[name] = None
    left_out[:] = dict.fromkeys(left_out)
    return list(listed)


def _walk(root: Path, left_out: list[str]) -> Iterator[str]:
    """The files below a folder; adds the folders that it skips to ``left_out``."""
    own = {env_folder("LAB_RUNS", "runs").resolve()}
    if os.environ.get("LAB_DATA"):  # otherwise `data` may be any folder of the project, such as a package
        own.add(env_folder("LAB_DATA", "data").resolve())

    def refuse(error: OSError) -> None:
        left_out.append(f"{clean(Path(error.filename).relative_to(root), 60)} ({error.strerror})")

    for place, folders, names in os.walk(root, onerror=refuse):
        folders.sort()
        for name in list(folders):
            path = Path(place, name)
            linked = os.path.islink(path)  # noqa: PTH114 - see _has
            if name in MADE or linked or path.resolve() in own or _has(path, "pyvenv.cfg"):
                folders.remove(name)
                if name != "__pycache__":
                    left_out.append(clean(path.relative_to(root), 60))
        yield from (str(Path(place, name).relative_to(root)) for name in sorted(names))


def _has(folder: Path, name: str) -> bool:
    """True if something of this name is in a folder that is not a link."""
    # Not by methods of Path, which raise for folders that we may not read.
    return not os.path.islink(folder) and os.path.exists(folder / name)  # noqa: PTH110, PTH114
