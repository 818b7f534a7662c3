"""Removes what earlier launches left in the launcher's folder on a node, unless it was used lately.

It removes ``code/<hash>``, ``jobs/<id>`` and what an interrupted copy left. A launch and, every few minutes, a running
job mark what they use by its time of change (:func:`mark_used`), on whichever node that shares the folder. It touches
no folder with another name, and follows no symbolic link. Also runs on Python 3.9 (:mod:`nodelaunch.program`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

HOUR, DAY = 3600.0, 86400.0
STAGING = ".receiving-"
# By the folder that they are in; the ids of jobs are those of `nodelaunch.spec.make_launch`.
NAMES = {
    "jobs": re.compile(r"[A-Za-z0-9-]{1,30}-[0-9]{4}-[0-9]{6}-[0-9a-f]{4}"),
    "code": re.compile(r"[0-9a-f]{64}"),
    "": re.compile(re.escape(STAGING) + ".+"),
}
# Seconds since the last use within which a folder is in use; a large copy may take long.
IN_USE = {"jobs": HOUR, "code": HOUR, "": DAY}
# How many of the newest remain when a launch copies to a node, and how long that launch waits for the removal.
KEPT, TRIM_SECONDS = {"jobs": 100, "code": 20}, 5.0


def mark_used(*folders):
    """Notes that folders of code or jobs are in use."""
    for folder in folders:
        if folder.parent.name in NAMES:
            with contextlib.suppress(OSError):  # it does not exist, or is another user's
                os.utime(folder, follow_symlinks=False)


def clean_folder(request):
    """Removes what was not used for some ``days``.

    Args:
        request: ``folder``, the launcher's on this node; ``days`` since the last use, at least an hour; ``seconds``
            after which no other removal begins; ``keep``, how many of the newest remain in any case, by kind;
            ``dry_run``, to count only.

    Returns:
        How many were removed, by kind, their size in ``bytes``, which ``failed`` and why, and whether ``more`` is left.
    """
    folder, now, end = Path(request["folder"]), time.time(), time.monotonic() + request["seconds"]
    done = {"jobs": 0, "code": 0, "copies": 0, "bytes": 0, "failed": {}, "more": False}
    for kind in NAMES:
        for used, path in list_own(folder, kind)[request.get("keep", {}).get(kind, 0) :]:
            # If this node is the launcher, its own record of a job has the same name; it has the log.
            if now - used < max(request["days"] * DAY, IN_USE[kind]) or (path / "output.log").exists():
                continue
            if time.monotonic() > end:
                done["more"] = True
                return done
            try:
                size = measure(path)
                if request.get("dry_run") or remove(path, folder):
                    done[kind or "copies"] += 1
                    done["bytes"] += size
            except OSError as error:
                where = f": {error.filename}" if error.filename else ""
                done["failed"][str(path.relative_to(folder))] = f"{error.strerror or error}{where}"
    return done


def list_own(folder, kind):
    """The folders of one kind that have a name of ours, each with the time of its last use, newest first."""
    place, found = folder / kind, []
    with contextlib.suppress(OSError):  # it does not exist yet
        for path in [] if kind and place.is_symlink() else list(place.iterdir()):
            with contextlib.suppress(OSError):  # it vanished meanwhile
                if NAMES[kind].fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    found.append((path.lstat().st_mtime, path))
    return sorted(found, reverse=True)


def measure(folder):
    """The size of a folder in bytes."""
    size = 0
    for place, folders, names in os.walk(folder):
        for name in folders + names:
            with contextlib.suppress(OSError):  # it vanished meanwhile
                size += Path(place, name).lstat().st_size
    return size


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
