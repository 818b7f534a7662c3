"""Benchmarks and tests for a machine with a GPU, each in its own process: ``python -m benchmarks.gpu``."""

from __future__ import annotations

import json
from pathlib import Path

from lab_common.files import write_atomically

TIME_IS_UP = 75  # sysexits.h: EX_TEMPFAIL, "the user is invited to retry the operation"


def write_json(path: Path, content: object) -> None:
    """Writes JSON atomically."""
    with write_atomically(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
