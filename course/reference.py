"""``python -m course.reference lab1``: writes this machine's records of a lab as its reference run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from lab_common import LabError
from lab_common.files import write_atomically
from lab_utils import machine
from lab_utils.timing.records import Records, circumstances, encode
from lab_utils.timing.references import reference_path


def save_reference(lab: str, *, allow_cpu: bool = False) -> Path:
    """Writes this machine's newest record per kind and settings to ``data/reference/<lab>.json``.

    Args:
        lab: The lab, such as ``lab1``.
        allow_cpu: Accepts a machine without a GPU.

    Raises:
        LabError: There is no GPU, or no record of this machine and this version of torch.
    """
    here, records = machine.describe(), Records(lab)
    if not here.gpus and not allow_cpu:
        raise LabError(
            "A reference run is recorded on a GPU, and this machine has none.",
            where=here.label,
            fix="run `make reference` on a machine with a GPU (or add --allow-cpu)",
        )
    newest = {
        encode([record["kind"], record["settings"]]): record
        for record in records.read()
        if circumstances(record)[1:] == (here.label, torch.__version__)
    }
    if not newest:
        raise LabError(
            f"There are no records of {lab} from this machine.",
            where=records.path.name,
            cause="the lab has not been run here with this version of torch",
            fix="run the lab's notebook first, or `make reference`, which does both",
        )
    content = {
        "lab": lab,
        "machine": asdict(here) | {"label": here.label},
        "when": max(record["when"] for record in newest.values()),
        "records": list(newest.values()),
    }
    path = reference_path(lab)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(encode(content, indent=1) + b"\n")
    except OSError as error:
        cause, fix = error.strerror or "", "free some space, or see who owns the folder"
        raise LabError("The reference run cannot be written.", where=path, cause=cause, fix=fix) from error
    return path


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.reference", description=__doc__)
    parser.add_argument("lab", help="such as lab1")
    parser.add_argument("--allow-cpu", action="store_true", help="record a machine without a GPU")
    arguments = parser.parse_args()
    try:
        path = save_reference(arguments.lab, allow_cpu=arguments.allow_cpu)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {path.parent.name}/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
