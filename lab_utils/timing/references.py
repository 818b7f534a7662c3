"""The reference runs of named hardware, which lie under ``data/reference``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab_common import LabError, checkout
from lab_common.files import read_bounded
from lab_utils.timing.records import FILE_BYTES, check_record, decode


def reference(lab: str) -> dict[str, Any] | None:
    """Returns the recorded reference run of a lab, or None where none has been recorded.

    Returns:
        ``lab``, ``machine`` (the facts of the machine card, with ``label``), ``when`` (UTC) and ``records``, whose
        results hold Timings.
    """
    path = reference_path(lab)
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


def reference_path(lab: str) -> Path:
    """Returns where the reference run of a lab lies."""
    return checkout() / "data" / "reference" / f"{lab}.json"
