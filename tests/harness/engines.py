"""The environments of frameworks that the lock does not have, for the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course import frameworks
from lab_common import LabError

# The labs that need one, and those that have cells for one and do without it.
NEEDED = {"12_lightning": "lightning"}
USED = {"13_schedulers": ("ray",), "14_other_frameworks": ("horovod", "tensorflow", "jax")}


def need_engine_of(notebook: Path) -> None:
    """Skips, or fails, the test of a notebook whose framework is not here."""
    if name := NEEDED.get(notebook.stem):
        find_engine(name)


def find_engine(name: str) -> Path:
    """The Python of a framework's environment; without it the test is skipped, or fails if it must be here."""
    try:
        return frameworks.find_python(name)
    except LabError as error:
        words = f"{error.what.rstrip('.')}: make engines ENGINE={name}"
    if name in os.environ.get("LAB_REQUIRE_ENGINES", "").split(","):
        pytest.fail(f"LAB_REQUIRE_ENGINES names {name}, but {words}", pytrace=False)
    pytest.skip(f"NOT TESTED HERE: {words}")
