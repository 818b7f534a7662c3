"""The table of the GPU paths: it names what is there, misses no test, and says what is known."""

from __future__ import annotations

import json

import pytest
from paths import OUTCOMES, PATHS, TABLE, find_tests, make_table, read_outcomes, tell

from lab_common import checkout

pytestmark = pytest.mark.gpu
WAIT = "timing: synchronize_waits_for_the_device"


def test_the_committed_table_is_what_would_be_written_now():
    written = make_table(read_outcomes(checkout() / OUTCOMES))
    assert (checkout() / TABLE).read_text(encoding="utf-8") == written, "run: python -m tests.gpu.paths"


def test_each_path_stands_where_the_table_says():
    for path in PATHS:
        file, _, name = path.where.partition(": ")
        text = (checkout() / file).read_text(encoding="utf-8")
        if file.endswith(".ipynb"):
            assert name in [cell["id"] for cell in json.loads(text)["cells"]], path
        else:
            assert f"def {name}(" in text or f"class {name}" in text, path


def test_each_test_is_in_the_table_once():
    named = [path.test for path in PATHS]
    own = {name for name in find_tests() if not name.startswith("paths: ")}
    assert sorted(named) == sorted(own)
    assert len({path.name for path in PATHS}) == len(PATHS)


@pytest.mark.parametrize("folder", ["", "tests/gpu/"])
def test_an_outcome_is_told_with_its_machine_and_the_worst_counts(folder):
    names = [
        f"{folder}test_gpu_timing.py::test_synchronize_waits_for_the_device[{name}]" for name in ("cuda", "cuda:0")
    ]
    assert tell(WAIT, False, {}) == "never on a GPU; rehearsed on a CPU" and tell(WAIT, True, {}) == "never"
    passed, mixed = dict.fromkeys(names, "passed"), {names[0]: "passed", names[1]: "failed"}
    assert tell(WAIT, False, passed) == "passed on a GPU; rehearsed on a CPU"
    assert tell(WAIT, True, mixed) == "FAILED on a GPU" and tell(WAIT, True, {names[0]: "skipped"}) == "never"
    content = {"machine": {"label": "NVIDIA H100"}, "torch": "2.11.0+cu130", "when": "2026-12-01T10:00:00+00:00"}
    table = make_table(content | {"tests": passed})
    assert "1 of them passed on NVIDIA H100, torch 2.11.0+cu130, on 2026-12-01." in table
    assert "None of them has run on a GPU yet." in make_table({})
