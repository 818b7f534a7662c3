"""Removes what earlier launches left in the launcher's folder on a node, where no running job uses it.

Part of the programs that :mod:`nodelaunch.node.probe` and :mod:`nodelaunch.node.receive` describe: the standard library
alone, and Python 3.9. It removes ``code/<hash>``, ``jobs/<id>`` and what a copy that was cut off left. It touches no
folder with any other name, and follows no symbolic link.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from nodelaunch.node.facts import read
from nodelaunch.node.guard import list_processes, read_environment

HOUR, DAY = 3600.0, 86400.0
STAGING = ".receiving-"
# By the folder that they lie in; the ids of jobs are those of `nodelaunch.spec.make_launch`.
NAMES = {
    "jobs": re.compile(r"[A-Za-z0-9-]{1,30}-[0-9]{4}-[0-9]{6}-[0-9a-f]{4}"),
    "code": re.compile(r"[0-9a-f]{64}"),
    "": re.compile(re.escape(STAGING) + ".+"),
}
# No younger folder is removed: a launch may just copy it, or start from it.
YOUNGEST = {"jobs": HOUR, "code": HOUR, "": DAY}
# How many stay, the newest, when the launcher copies to a node; and for how long a launch waits for the removal.
KEPT = {"jobs": 100, "code": 20, "": 0}
TRIM_SECONDS = 5.0
HASH = re.compile(r"[0-9a-f]{64}")
LIMIT = re.compile(r"LAB_LIMIT=([0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?)")


def clean_folder(request):
    """Removes what is older than ``days`` and not in use: see :func:`remove_unused`, whose answer it returns."""
    kept = dict.fromkeys(KEPT, 0)
    return remove_unused(
        Path(request["folder"]), request["days"] * DAY, kept, request["seconds"], dry_run=request["dry_run"]
    )


def trim_folder(folder):
    """Removes what is not in use, but for the newest; whatever cannot be removed stays."""
    return remove_unused(folder, 0.0, KEPT, TRIM_SECONDS)


def remove_unused(folder, age, kept, seconds, *, dry_run=False):
    """Removes folders of ours that are older than ``age`` seconds and that no running job uses.

    Args:
        folder: The launcher's folder on this node.
        age: In seconds, since the last change.
        kept: By kind, how many of the newest stay in any case.
        seconds: After which no other folder is begun.
        dry_run: Whether to count only.

    Returns:
        How many were removed, by kind, their size in ``bytes``, which ``failed`` and why, and whether ``more`` is left.
    """
    done, end = {"jobs": 0, "code": 0, "copies": 0, "bytes": 0, "failed": {}, "more": False}, time.monotonic() + seconds
    for kind, path, size in find_unused(folder, age, kept):
        if time.monotonic() > end:
            done["more"] = True
            break
        try:
            if dry_run or remove(path, folder):
                done[kind or "copies"] += 1
                done["bytes"] += size
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            done["failed"][str(path.relative_to(folder))] = f"{error.strerror or error}{where}"
    return done


def find_unused(folder, age, kept):
    """Yields the kind, path and size in bytes of each folder that may go; see :func:`remove_unused`.

    A job is in use when a process carries its id, or when something in its folder changed within its time limit: its
    processes may be on another node that shares the folder, or it waits in a queue, where the launcher touches its
    lease. Code is in use when it is in the PYTHONPATH of a process, or when the script of a job in use names it.
    """
    now = time.time()
    listed = {kind: list_own(folder, kind) for kind in NAMES}
    old = {
        kind: {path.name for when, path in found[kept[kind] :] if now - when >= max(age, YOUNGEST[kind])}
        for kind, found in listed.items()
    }
    used = find_used() if old["jobs"] or old["code"] else set()
    for _, job in listed["jobs"]:
        text = read_scripts(job)
        names = set(HASH.findall(text))
        if job.name not in used and (job.name in old["jobs"] or names & old["code"]):
            changed, size = measure(job)
            # What has the log in it is the launcher's own record of a job, where its folder is that of a node, too.
            if now - changed >= max([HOUR, *map(float, LIMIT.findall(text))]):
                if job.name in old["jobs"] and now - changed >= age and not (job / "output.log").exists():
                    yield "jobs", job, size
                continue
        used |= names
    for kind in ("code", ""):
        for _, path in listed[kind]:
            if path.name in old[kind] - used:
                changed, size = measure(path)
                if now - changed >= max(age, YOUNGEST[kind]):
                    yield kind, path, size


def list_own(folder, kind):
    """The folders of one kind that have a name of ours, each behind the time when it was last touched, newest first."""
    place, found = folder / kind, []
    with contextlib.suppress(OSError):  # there is none yet
        for path in [] if kind and place.is_symlink() else list(place.iterdir()):
            with contextlib.suppress(OSError):  # it vanished meanwhile
                if NAMES[kind].fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    found.append((path.lstat().st_mtime, path))
    return sorted(found, reverse=True)


def find_used():
    """The ids of jobs, and the hashes of code, that stand in the environment of a living process."""
    used = set()
    for pid, _, _ in list_processes():
        for line in _read_lines(pid):
            name, _, value = line.partition("=")
            used |= {value} if name == "LAB_JOB_ID" else set(HASH.findall(value)) if name == "PYTHONPATH" else set()
    return used


def _read_lines(pid):
    """The variables of a process; none where it is gone, or somebody else's."""
    with contextlib.suppress(OSError):
        return [line.decode(errors="replace") for line in read_environment(pid)]
    return []


def read_scripts(job):
    """The text of a job's scripts."""
    with contextlib.suppress(OSError):
        scripts = [path for path in job.iterdir() if path.suffix in (".sh", ".sbatch") and not path.is_symlink()]
        return "".join(read(path) for path in scripts if path.is_file())
    return ""


def measure(folder):
    """When something within a folder was last changed, and how many bytes are in it."""
    newest = size = 0
    inner = (Path(place, name) for place, folders, names in os.walk(folder) for name in folders + names)
    for path in (folder, *inner):
        with contextlib.suppress(OSError):  # it vanished meanwhile
            facts = path.lstat()
            newest, size = max(newest, facts.st_mtime), size + facts.st_size
    return newest, size


def remove(path, folder):
    """Removes a folder; returns whether it did, since another launch may have been faster, or use it now.

    It is renamed first: what stands under the name of code or of a job is whole, also where the removal is cut off.

    Raises:
        OSError: It cannot be removed, or not all of it.
    """
    aside = path
    try:
        if path.parent != folder:
            aside = folder / f"{STAGING}{secrets.token_hex(8)}"
            path.rename(aside)
            if time.time() - aside.lstat().st_mtime < HOUR:  # a launch has touched it since we looked
                with contextlib.suppress(OSError):  # unless that launch has already put the same there
                    aside.rename(path)
                    return False
        shutil.rmtree(aside)
    except FileNotFoundError:
        shutil.rmtree(aside, ignore_errors=True)  # another removes it at the same time
        return False
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # all that can be removed
        raise
    return True
