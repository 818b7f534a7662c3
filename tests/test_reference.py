"""Reference runs: what `make reference` keeps of this machine's records."""

from dataclasses import replace

import pytest

from course import reference
from lab_common import LabError
from lab_utils import machine, timing


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
