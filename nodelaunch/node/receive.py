"""Unpacks on a node the tar file that the launcher sends on standard input: code, scripts, or data.

``receive FOLDER TARGET…`` puts each target, a folder within FOLDER, there whole or not at all. What is there already
stays. The exit status is CHANGED if that is code and has been changed. Also runs on Python 3.9
(:mod:`nodelaunch.transfer`).
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from nodelaunch.node.facts import hash_tree

CHANGED = 75


def unpack(stream, folder, targets):
    """Unpacks a tar file; returns True if code that was there already is not what its name, a hash, says."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".receiving-", dir=folder))
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(staging)
        for target in targets:
            put(staging / target, folder / target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    code = [folder / target for target in targets if target.startswith("code/")]
    return any(hash_tree(path) != path.name for path in code)


def put(source, place):
    """Moves a folder to its place, unless it is there already."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(place)
    except OSError:  # it exists, or another launch was faster
        if not place.is_dir():
            raise
        if place.parent.name == "jobs":  # a script that was started by hand has made the job's folder already
            for path in source.iterdir():
                path.replace(place / path.name)


if __name__ == "__main__":
    sys.exit(CHANGED if unpack(sys.stdin.buffer, Path(sys.argv[1]), sys.argv[2:]) else 0)
