"""Unpacks on a node what the launcher sends on standard input: the code, unless it is there, and the job's script.

Sent by :mod:`nodelaunch.program`: the standard library alone, Python 3.9. It prints, behind the byte 0x1e, a JSON list
of what was there already and was changed. Afterwards it removes the oldest code and jobs that nothing uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from nodelaunch.node.cleaning import STAGING, trim_folder
from nodelaunch.node.facts import hash_tree


def unpack(stream, folder, targets):
    """Unpacks a tar file into ``folder``; each of the ``targets``, folders within it, is then there whole.

    Returns:
        Those with code that was there already and is not what its name, a hash, says.
    """
    changed = []
    folder.mkdir(parents=True, exist_ok=True)
    # A file that is cut off midway stays in the temporary folder; under its name only what is whole appears.
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(staging, **safe)
        for target in targets:
            place = folder / target
            is_code = place.parent.name == "code"
            if is_code:
                with contextlib.suppress(OSError):  # it is not there yet, or another user's
                    os.utime(place, follow_symlinks=False)  # its last use: what was not used for long goes first
            # Code is named by its hash, and a job by its id: what is there under this name is the same.
            if place.exists():
                if is_code and hash_tree(place) != place.name:
                    changed.append(target)
                elif place.parent.name == "jobs":  # a script that was started by hand has made the folder already
                    fill(place, staging / target)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                (staging / target).rename(place)
            except OSError:
                if not place.exists():  # unless another job was faster
                    raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if any(target.startswith("code/") for target in targets):  # else it is the folder of data sets
        trim_folder(folder)
    return changed


def fill(place, source):
    """Moves those files of a flat folder to ``place`` that it lacks."""
    for path in source.iterdir():
        if not (place / path.name).exists():
            path.rename(place / path.name)


if __name__ == "__main__":
    print("\x1e" + json.dumps(unpack(sys.stdin.buffer, Path(sys.argv[1]), sys.argv[2:])))
