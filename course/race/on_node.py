"""Prints a node's hardware and versions, and whether it sees a folder; imports the standard library and lab_common."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lab_common.cores import count_cores
from lab_common.nvidia import query_smi


def describe(folder: str) -> dict[str, object]:
    """Returns a node's processor, cores, GPUs and versions, and if it sees the folder."""
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
        "sees": Path(folder).is_dir(),
    }


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
