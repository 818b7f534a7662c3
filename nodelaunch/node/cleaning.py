"""Removes the oldest code and jobs from the launcher's folder on a node, unless they were used within the last hour.

A launch and, every few minutes, a running job mark what they use by its time of change (:func:`mark_used`), on any node
that shares the folder. Also runs on Python 3.9 (:mod:`nodelaunch.program`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time

HOUR, DAY = 3600.0, 86400.0
STAGING = ".receiving-"
# By the folder that they are in: their names (of jobs as in `nodelaunch.spec.make_launch`), how many of the newest
# remain, and for how many seconds the others do. A large copy may take long.
KINDS = {
    "jobs": (re.compile(r"[A-Za-z0-9-]{1,30}-[0-9]{4}-[0-9]{6}-[0-9a-f]{4}"), 100, HOUR),
    "code": (re.compile(r"[0-9a-f]{64}"), 20, HOUR),
    "": (re.compile(re.escape(STAGING) + ".+"), 0, DAY),
}
# A launch waits for the removal.
SECONDS = 5.0


def mark_used(*folders):
    """Notes that folders of code or jobs are in use."""
    for folder in folders:
        if folder.parent.name in KINDS:
            with contextlib.suppress(OSError):  # it does not exist, or is another user's
                os.utime(folder, follow_symlinks=False)


def trim(folder):
    """Removes what is neither new nor in use from a folder of the launcher; touches nothing with another name."""
    now, end = time.time(), time.monotonic() + SECONDS
    for kind, (names, kept, seconds) in KINDS.items():
        found = []
        with contextlib.suppress(OSError):  # there is none, or another launch removes from it
            for path in (folder / kind).iterdir():
                if names.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    found.append((path.stat().st_mtime, path))
        for used, path in sorted(found, reverse=True)[kept:]:
            # If this node is the launcher, its own record of a job may have the same name; it has the log.
            if now - used < seconds or time.monotonic() > end or (path / "output.log").exists():
                continue
            # Renamed first: what has the name of code is whole, even if the removal is interrupted.
            aside = folder / f"{STAGING}{path.name}"
            with contextlib.suppress(OSError):  # another launch was faster, or it is another user's
                path.rename(aside)
                shutil.rmtree(aside)
