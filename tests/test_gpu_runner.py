"""The runner of ``make gpu`` with small steps, a notebook without Jupyter, and reference runs."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu.__main__ import Step
from course import reference
from lab_common import LabError
from lab_utils import machine, timing

# A process that leaves another one behind in a session of its own, says its number, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def make_step(program="print('ran')", name="one", cap=60, **more):
    """A step that runs Python code."""
    return Step(name, (sys.executable, "-S", "-c", program), cap, **more)


def run(out, *steps, seconds=60):
    """Runs steps as one call does; returns their outcomes."""
    passed = runner.run_all(list(steps), out, seconds)
    known = json.loads((out / "results.json").read_text())["steps"]
    assert passed == all(known.get(step.name, {}).get("outcome") == "passed" for step in steps)
    return {name: one["outcome"] for name, one in known.items()}


def test_steps_run_in_order_a_failure_stops_none_and_only_what_has_not_passed_is_run_again(tmp_path, capsys):
    late = make_step("import sys; sys.exit(75)", "late")
    bad = make_step("import sys; print('the reason'); sys.exit(3)", "bad")
    outcomes = run(tmp_path, make_step(name="first"), bad, late)
    assert outcomes["first"] == "passed" and outcomes["bad"] == "failed: exit status 3"
    assert outcomes["late"].startswith("unfinished") and "the reason" in capsys.readouterr().out
    assert run(tmp_path, make_step("raise SystemExit(1)", "first"), make_step(name="bad"))["bad"] == "passed"
    assert "first: passed before" in capsys.readouterr().out
    assert "last" not in run(tmp_path, make_step(name="first"), make_step(name="last"), seconds=5)
    assert "last: not begun, 5 s were left" in capsys.readouterr().out


def test_a_step_is_ended_whole_at_its_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.5)
    assert run(tmp_path, make_step(PARENT, cap=3))["one"].startswith("unfinished")
    pid, end = int((tmp_path / "one.log").read_text().split()[0]), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_outcome_of_each_test_is_kept(tmp_path):
    cases = "".join(
        f'<testcase classname="tests.gpu.test_x" name="test_{name}">{inside}</testcase>'
        for name, inside in {"a": "", "b": "<failure/>", "c": "<skipped/>", "d": "<error/>"}.items()
    )
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    runner.keep_outcomes(tmp_path)
    kept = json.loads((tmp_path / "reference" / "gpu_tests.json").read_text())
    assert list(kept["tests"].values()) == ["passed", "failed", "skipped", "failed"]
    assert kept["machine"]["label"] and kept["torch"] and kept["when"]


def test_without_a_gpu_there_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "describe_machine", lambda: {"gpus": [], "label": "a machine"})
    assert runner.main(["--out", str(tmp_path)]) == 1
    assert "There is no GPU that torch can use" in capsys.readouterr().err


def test_a_notebook_runs_without_jupyter(tmp_path, root):
    folder = tmp_path / "notebooks"
    (folder / "scripts").mkdir(parents=True)
    sources = [
        "import inspect\nfrom IPython.display import HTML, display\n\ndef f():\n    return 42",
        "print(inspect.getsource(f))\ndisplay(HTML('<b>bold</b>'))\nf()",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])",
    ]
    cells = [{"cell_type": "code", "id": f"c{n}", "source": [text]} for n, text in enumerate(sources)]
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    (folder / "00_small.ipynb").write_text(json.dumps(content))
    program = "import pathlib; from benchmarks.gpu import notebook; "
    program += f"here = pathlib.Path({str(tmp_path)!r}); notebook.checkout = lambda: here; "
    program += "notebook.run_notebook(0, here / 'out')"
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert "return 42" in done.stdout and "\nbold\n" in done.stdout and "\n42\n" in done.stdout, done.stderr
    assert "--- c2:" in done.stdout and [*(tmp_path / "out").glob("lab0-*.png")]


def test_the_step_of_the_tests_finds_them(tmp_path, root):
    """By the step's own command: on a GPU's machine the files above tests/gpu are not loaded."""
    (tests, *_) = runner.list_steps(tmp_path, dry=False)
    command = [*tests.command, "--collect-only", "-q"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "tests collected" in done.stdout, done.stdout[-2000:]


def test_a_record_with_less_in_it_does_not_replace_one(tmp_path):
    for folder, groups in ((tmp_path / "out" / "reference", [1]), (tmp_path / "data" / "reference", [1, 2])):
        folder.mkdir(parents=True)
        (folder / "lab1.json").write_text(json.dumps({"records": groups}))
    runner.publish_references(tmp_path / "out", tmp_path)
    assert json.loads((tmp_path / "data" / "reference" / "lab1.json").read_text()) == {"records": [1, 2]}


def test_no_cell_of_these_labs_has_a_magic(root):
    for lab in runner.LABS:
        (path,) = (root / "notebooks").glob(f"{lab:02d}_*.ipynb")
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                compile("".join(cell["source"]), f"{path.name}: {cell['id']}", "exec")


# Reference runs.


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A machine with a GPU, by its description, and records of its own."""
    here = replace(machine.describe(), gpus=(machine.Gpu("NVIDIA H200", 2**37, (9, 0)),), cuda="13.0")
    monkeypatch.setattr(machine, "describe", lambda: here)
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("course.reference.checkout", lambda: tmp_path)
    return tmp_path / "data" / "reference"


def test_a_reference_run_holds_what_was_measured_on_the_gpu_alone(on_gpu):
    slow, fast = (timing.Timing("one", (0.5,), device=device) for device in ("cpu", "cuda:0"))
    records = timing.Records("lab4")
    records.add("set-ups", {"cases": [slow]}, batch=8)
    with pytest.raises(LabError, match="no records of lab4 from a GPU of this machine") as caught:
        reference.save_reference("lab4")
    assert "two GPUs" in caught.value.cause
    records.add("set-ups", {"cases": [fast]}, batch=64)
    records.add("rates", {"GPU": {"GB/s": 3000.0}}, side=8192)
    reference.save_reference("lab4")
    label, found = reference.recorded("lab4", "set-ups", by="batch")
    assert found == {"64": {"cases": [fast]}}
    assert reference.recorded("lab4", "rates", by="side")[1] == {"8192": {"GPU": {"GB/s": 3000.0}}}
    assert (
        label.startswith("NVIDIA H200, torch 2.") and "+" not in label and label[-10:] == records.read()[0]["when"][:10]
    )
    assert reference.recorded("lab4", "training", by="batch") == reference.recorded("lab5", "x", by="y") == ("", {})
