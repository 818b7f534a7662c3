"""Unpacks on a node the tar file that the launcher sends on standard input: code, scripts, or data.

It then removes the oldest code and jobs that nothing uses, and prints, after the byte 0x1e, a JSON list of the code
that was there already and was changed. Also runs on Python 3.9 (:mod:`nodelaunch.program`).
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from nodelaunch.node.cleaning import KEPT, STAGING, TRIM_SECONDS, clean_folder, mark_used
from nodelaunch.node.facts import hash_tree


def unpack(stream, folder, targets):
    """Unpacks a tar file, so that each of the ``targets``, folders within ``folder``, is there whole or not at all.

    Returns:
        The code that was there already and is not what its name, a hash, says.
    """
    changed = []
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(staging, **safe)
        for target in targets:
            put(staging / target, folder / target)
            if target.startswith("code/") and hash_tree(folder / target) != Path(target).name:
                changed.append(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if any(target.startswith("code/") for target in targets):
        clean_folder({"folder": folder, "days": 0, "keep": KEPT, "seconds": TRIM_SECONDS})
    return changed


def put(source, place):
    """Moves a folder to its place; what has this name already remains, since the name says what is in it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    mark_used(place)
    try:
        source.rename(place)
    except OSError:  # it exists, or another launch was faster
        if not place.is_dir():
            raise
        if place.parent.name == "jobs":  # a script that was started by hand has made the job's folder already
            for path in source.iterdir():
                if not (place / path.name).exists():
                    path.rename(place / path.name)


if __name__ == "__main__":
    print("\x1e" + json.dumps(unpack(sys.stdin.buffer, Path(sys.argv[1]), sys.argv[2:])))
