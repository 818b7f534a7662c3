"""How a training script hands its result to the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lab_common import LabError
from lab_common.files import write_atomically

# Each rank's result goes over the connection to its node in one line.
LONGEST = 8 * 2**20


def report(value: Any) -> None:
    """Hands this rank's result to the launcher, where it becomes ``JobResult.results[rank]``; the last call counts.

    Without the launcher (``python train.py``) it is printed, so that the script runs by itself too.

    Args:
        value: Numbers, strings, and lists and dictionaries of them.

    Raises:
        LabError: JSON cannot hold the value, or it is longer than 8 MiB.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        fix = "turn tensors into numbers with .item() or .tolist()"
        raise LabError("This result cannot be reported.", where="launch.report", cause=str(error), fix=fix) from error
    if len(text) > LONGEST:
        fix = "report the few numbers that you compare, and write the rest to a file"
        raise LabError("This result is too long to be reported.", where=f"{len(text):,} bytes as JSON", fix=fix)
    folder = os.environ.get("LAB_JOB_FOLDER")
    if not folder:
        print(f"result: {text}")
        return
    results = Path(folder) / "results"
    results.mkdir(parents=True, exist_ok=True)
    with write_atomically(results / f"rank{os.environ.get('RANK', '0')}.json") as file:
        file.write(text.encode())
