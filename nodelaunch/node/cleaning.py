"""Removes what earlier launches left in the launcher's folder on a node, unless a running job uses it.

It removes ``code/<hash>``, ``jobs/<id>`` and what an interrupted copy left. It touches no folder with another name, and
follows no symbolic link. Also runs on Python 3.9 (:mod:`nodelaunch.program`).
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
# By the folder that they are in; the ids of jobs are those of `nodelaunch.spec.make_launch`.
NAMES = {
    "jobs": re.compile(r"[A-Za-z0-9-]{1,30}-[0-9]{4}-[0-9]{6}-[0-9a-f]{4}"),
    "code": re.compile(r"[0-9a-f]{64}"),
    "": re.compile(re.escape(STAGING) + ".+"),
}
# No younger folder is removed: a launch may be copying it, or starting from it.
YOUNGEST = {"jobs": HOUR, "code": HOUR, "": DAY}
# How many of the newest remain when a launch copies to a node, and how long that launch waits for the removal.
KEPT, TRIM_SECONDS = {"jobs": 100, "code": 20}, 5.0
HASH = re.compile(r"[0-9a-f]{64}")
LIMIT = re.compile(r"LAB_LIMIT=([0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?)")


def clean_folder(request):
    """Removes what is older than ``days`` and not in use.

    Args:
        request: ``folder``, the launcher's on this node; ``days`` since the last change; ``seconds`` after which no
            other removal begins; ``keep``, how many of the newest remain in any case, by kind; ``dry_run``, to count
            only.

    Returns:
        How many were removed, by kind, their size in ``bytes``, which ``failed`` and why, and whether ``more`` is left.
    """
    folder, end = Path(request["folder"]), time.monotonic() + request["seconds"]
    done = {"jobs": 0, "code": 0, "copies": 0, "bytes": 0, "failed": {}, "more": False}
    for kind, path, size in find_unused(folder, request["days"] * DAY, request.get("keep", {})):
        if time.monotonic() > end:
            done["more"] = True
            break
        try:
            if request.get("dry_run") or remove(path, folder):
                done[kind or "copies"] += 1
                done["bytes"] += size
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            done["failed"][str(path.relative_to(folder))] = f"{error.strerror or error}{where}"
    return done


def find_unused(folder, age, keep):
    """Yields the kind, path and size in bytes of each folder to remove.

    A job is in use if a process has its id, or if something in its folder changed within its time limit: it may run on
    another node that shares the folder, or wait in a queue, where the launcher touches its lease. Code is in use if it
    is in the PYTHONPATH of a process, or if the script of a job in use names it.
    """
    now = time.time()
    listed = {kind: list_own(folder, kind) for kind in NAMES}
    old = {
        kind: {path.name for when, path in found[keep.get(kind, 0) :] if now - when >= max(age, YOUNGEST[kind])}
        for kind, found in listed.items()
    }
    used = find_used() if old["jobs"] or old["code"] else set()
    for _, job in listed["jobs"]:
        text = read_scripts(job)
        code = set(HASH.findall(text))
        if job.name in old["jobs"] or code & old["code"]:
            limit = max([HOUR, *map(float, LIMIT.findall(text))])
            if job.name in used or now - measure(job)[0] < limit:
                used |= {job.name, *code}
    for kind in NAMES:
        for _, path in listed[kind]:
            # The launcher's own record of a job is in the same folder if this node is the launcher; it has the log.
            if path.name in old[kind] - used and not (kind == "jobs" and (path / "output.log").exists()):
                changed, size = measure(path)
                if now - changed >= max(age, YOUNGEST[kind]):
                    yield kind, path, size


def list_own(folder, kind):
    """The folders of one kind that have a name of ours, each with the time of its last change, newest first."""
    place, found = folder / kind, []
    with contextlib.suppress(OSError):  # it does not exist yet
        for path in [] if kind and place.is_symlink() else list(place.iterdir()):
            with contextlib.suppress(OSError):  # it vanished meanwhile
                if NAMES[kind].fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    found.append((path.lstat().st_mtime, path))
    return sorted(found, reverse=True)


def find_used():
    """The ids of jobs, and the hashes of code, in the environments of living processes."""
    used = set()
    for pid, _, _ in list_processes():
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            for line in read_environment(pid):
                name, _, value = line.decode(errors="replace").partition("=")
                used |= {value} if name == "LAB_JOB_ID" else set(HASH.findall(value)) if name == "PYTHONPATH" else set()
    return used


def read_scripts(job):
    """The text of a job's scripts."""
    with contextlib.suppress(OSError):
        scripts = [path for path in job.iterdir() if path.suffix in (".sh", ".sbatch") and not path.is_symlink()]
        return "".join(read(path) for path in scripts if path.is_file())
    return ""


def measure(folder):
    """The time of the last change within a folder, and its size in bytes."""
    newest = size = 0
    inner = (Path(place, name) for place, folders, names in os.walk(folder) for name in folders + names)
    for path in (folder, *inner):
        with contextlib.suppress(OSError):  # it vanished meanwhile
            facts = path.lstat()
            newest, size = max(newest, facts.st_mtime), size + facts.st_size
    return newest, size


def remove(path, folder):
    """Removes a folder; False if another launch was faster, or uses it again.

    It is renamed first, so that what has the name of code or of a job is whole even if the removal is interrupted.

    Raises:
        OSError: It cannot be removed, or not all of it.
    """
    aside = folder / f"{STAGING}{secrets.token_hex(8)}"
    try:
        path.rename(aside)
        if path.parent != folder and time.time() - aside.lstat().st_mtime < HOUR:  # a launch has just touched it
            with contextlib.suppress(OSError):  # unless that launch has already copied the same again
                aside.rename(path)
                return False
        shutil.rmtree(aside)
    except FileNotFoundError:
        return False
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # all that can be removed
        raise
    return True
