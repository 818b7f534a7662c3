"""The reference runs of named hardware, which lie under ``data/reference``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lab_common import LabError, checkout
from lab_common.files import read_bounded, write_atomically
from lab_utils import machine
from lab_utils.timing.records import FILE_BYTES, Records, check_record, circumstances, decode, encode


def reference(lab: str) -> dict[str, Any] | None:
    """Returns the recorded reference run of a lab, or None where none has been recorded.

    Returns:
        ``lab``, ``machine`` (the facts of the machine card, with ``label``), ``when`` (UTC) and ``records``, whose
        results hold Timings.
    """
    path = _reference_path(lab)
    try:
        run = decode(read_bounded(path, FILE_BYTES))
        _check_reference(run)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise LabError("The reference run cannot be read.", where=path, cause=cause, fix="make reference") from error
    return run


def _check_reference(run: Any) -> None:
    """Raises ValueError where something that JSON held is no reference run."""
    here = run.get("machine") if isinstance(run, dict) else None
    if not isinstance(here, dict) or not isinstance(run.get("records"), list):
        raise ValueError("it has no machine or no records")
    texts = (run.get("lab"), run.get("when"), here.get("label"), here.get("torch"))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it does not say what was recorded, when and where")
    for record in run["records"]:
        check_record(record)


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
    path = _reference_path(lab)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(encode(content, indent=1) + b"\n")
    except OSError as error:
        cause, fix = error.strerror or "", "free some space, or see who owns the folder"
        raise LabError("The reference run cannot be written.", where=path, cause=cause, fix=fix) from error
    return path


def _reference_path(lab: str) -> Path:
    return checkout() / "data" / "reference" / f"{lab}.json"
