"""``python -m course.reference lab1``: writes this machine's records of a lab as its reference run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lab_common import LabError, checkout
from lab_common.commandline import run_command
from lab_common.files import write_atomically
from lab_common.nvidia import query_smi
from lab_utils import machine
from lab_utils.timing.records import Records, circumstances, decode, encode

# What nvidia-smi tells of a GPU, in its own words: MiB, MHz, W and °C. The clocks are those of the moment.
GPU_FIELDS = ("driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
GPU_FIELDS += ("temperature.gpu", "memory.total")


def read(lab: str) -> dict[str, Any] | None:
    """Returns the recorded reference run of a lab, or None if none has been recorded.

    Returns:
        ``lab``, ``machine`` (the facts of the machine card, with ``label``), ``when`` (UTC) and ``records``, whose
        results hold Timings.
    """
    path = reference_path(lab)
    return decode(path.read_bytes()) if path.exists() else None


def recorded(lab: str, kind: str, by: str) -> tuple[str, dict[str, Any]]:
    """Returns the hardware, version and date of a reference run in words, and its results of a kind; "" and {} without.

    Args:
        lab: The lab.
        kind: As in ``Records.once``.
        by: One of its settings, whose value, as a text, is the key of a result.
    """
    run = read(lab)
    records = run["records"] if run else []
    found = {str(record["settings"].get(by)): record["result"] for record in records if record["kind"] == kind}
    if not found:
        return "", {}
    here = run["machine"]
    return f"{here['label']}, torch {here['torch'].partition('+')[0]}, {run['when'][:10]}", found


def reference_path(lab: str) -> Path:
    """Returns the path of a lab's reference run."""
    return checkout() / "data" / "reference" / f"{lab}.json"


def describe_machine() -> dict[str, Any]:
    """Returns the facts of the machine card with ``label``, and others on which a GPU's speed depends.

    Returns:
        The fields of ``machine.Machine``, ``label``, ``cudnn`` and ``nccl`` (versions; None if torch has none),
        ``driver`` (None without ``nvidia-smi``) and ``clocks``: for each GPU of ``nvidia-smi`` its ``GPU_FIELDS``.
    """
    here, gpus = machine.describe(), read_gpus()
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return asdict(here) | {
        "label": here.label,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": gpus[0].get("driver_version") if gpus else None,
        "clocks": gpus,
    }


def read_gpus() -> list[dict[str, str]]:
    """Returns the facts of each GPU from ``nvidia-smi``; [] if it has no answer."""
    try:
        return [dict(zip(GPU_FIELDS, row, strict=True)) for row in query_smi(f"gpu={','.join(GPU_FIELDS)}")]
    except (OSError, ValueError):
        return []


def save_reference(lab: str, *, allow_cpu: bool = False) -> Path:
    """Writes this machine's newest record per kind and settings to ``data/reference/<lab>.json``.

    Args:
        lab: The lab, such as ``lab1``.
        allow_cpu: Accepts a machine without a GPU, and records that used none.

    Raises:
        LabError: There is no GPU, or no record of this machine and this version of torch.
    """
    here, records = describe_machine(), Records(lab)
    if not here["gpus"] and not allow_cpu:
        raise LabError(
            "A reference run is recorded on a GPU, and this machine has none.",
            where=here["label"],
            fix="run `make reference` on a machine with a GPU (or add --allow-cpu)",
        )
    own = [record for record in records.read() if circumstances(record)[1:] == (here["label"], torch.__version__)]
    newest = {encode([record["kind"], record["settings"]]): record for record in own if allow_cpu or used_gpu(record)}
    if not newest:
        cause = "it measured on the processor; labs 4 and 5 need two GPUs" if own else ""
        raise LabError(
            f"There are no records of {lab} from {'a GPU of ' if own else ''}this machine.",
            where=records.path.name,
            cause=cause or "the lab has not been run here with this version of torch",
            fix="run the lab's notebook first, or `make reference`, which does both",
        )
    content = {
        "lab": lab,
        "machine": here,
        "when": max(record["when"] for record in newest.values()),
        "records": list(newest.values()),
    }
    path = reference_path(lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(encode(content, indent=1) + b"\n")
    return path


def used_gpu(record: dict[str, Any]) -> bool:
    """Returns True if one of a record's Timings was measured on a GPU, or if it has no Timings."""
    result = encode(record["result"])
    return b'"device": "cuda' in result or b'"device": "' not in result


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.reference", description=__doc__)
    parser.add_argument("lab", metavar="LAB", help="such as lab1")
    parser.add_argument("--allow-cpu", action="store_true", help="record a machine without a GPU")
    arguments = parser.parse_args()
    path = save_reference(arguments.lab, allow_cpu=arguments.allow_cpu)
    print(f"wrote {path.parent.name}/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
