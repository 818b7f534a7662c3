"""Unpacks on a node what the launcher sends on standard input: the code, unless it is there, and the job's script.

Sent as text (``python -c``) behind ``facts.py``, since nothing of ours may lie on the node yet: the standard library
alone, Python 3.9. It prints, behind the byte 0x1e, a JSON list of what was there already and was changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from nodelaunch.node.facts import hash_tree


def unpack(stream, folder, targets):
    """Unpacks a tar file into ``folder``; each of the ``targets``, folders within it, is then there whole.

    Returns:
        Those with code that was there already and is not what its name, a hash, says.
    """
    changed = []
    folder.mkdir(parents=True, exist_ok=True)
    # A file that is cut off midway stays in the temporary folder; under its name only what is whole appears.
    staging = Path(tempfile.mkdtemp(prefix=".receiving-", dir=folder))
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(staging, **safe)
        for target in targets:
            place = folder / target
            # Code is named by its hash, and a job by its id: what is there under this name is the same.
            if place.exists():
                if place.parent.name == "code" and hash_tree(place) != place.name:
                    changed.append(target)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                (staging / target).rename(place)
            except OSError:
                if not place.exists():  # unless another job was faster
                    raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return changed


if __name__ == "__main__":
    print("\x1e" + json.dumps(unpack(sys.stdin.buffer, Path(sys.argv[1]), sys.argv[2:])))
