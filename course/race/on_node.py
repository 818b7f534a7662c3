"""Runs on a node of a lap: ``describe`` prints its hardware, ``follow FILE`` sends each version of a saved file.

A version is a line with its number of bytes, then these bytes. It is sent as soon as the file has stopped changing,
until standard input ends. Only the standard library and ``lab_common`` are imported here.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lab_common.cores import count_cores
from lab_common.nvidia import query_smi

EVERY = 0.02  # seconds between two looks at the file


def describe() -> dict[str, object]:
    """Returns a node's processor, cores, GPUs and versions."""
    cpu, gpus = "", []
    with suppress(OSError):  # not on macOS
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    with suppress(OSError):  # there is no nvidia-smi
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            gpus = [row[0] for row in query_smi("gpu=name")]
    return {
        "cpu": cpu or "an unnamed processor",
        "cores": count_cores(),
        "gpus": gpus,
        "versions": {"python": sys.version.split()[0], "torch": metadata.version("torch")},
    }


def _look(path: Path) -> tuple[int, ...] | None:
    """Returns a key that changes with the file's content; None if there is no regular file."""
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def follow(path: Path) -> None:
    """Makes the file's folder, prints ``ready``, and sends versions of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    sent = seen = None
    over = False
    while not over:
        over = bool(select.select([sys.stdin], [], [], EVERY)[0])
        before, seen = seen, _look(path)
        # Unchanged since the last look: nobody is writing to it.
        if seen and seen != sent and (seen == before or over):
            sent = seen
            with suppress(FileNotFoundError):  # it was replaced between the two calls: the next look finds the new one
                content = path.read_bytes()
                out.write(b"%d\n" % len(content) + content)
                out.flush()


if __name__ == "__main__":
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))
    else:
        follow(Path(sys.argv[2]))
