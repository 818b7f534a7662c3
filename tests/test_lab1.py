"""Parts of lab 1 that a machine without a GPU does not reach by itself: the search, and the reference run's place."""

import json
from functools import partial

import pytest

from lab_utils import timing
from lab_utils.timing import Timing

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def run_cells(run_cells_of):
    return partial(run_cells_of, "01_mixed_precision")


def make_sweep(gains, baseline="fp32", candidate="bf16"):
    """Timings of two precisions at rising batch sizes, the candidate ``gains`` times as fast."""
    slow = [Timing(baseline, (1.0,) * 3, images=16 * 2**power) for power in range(len(gains))]
    fast = [Timing(candidate, (1 / gain,) * 3, images=16 * 2**power) for power, gain in enumerate(gains)]
    return slow + fast


def test_the_search_finds_the_largest_batch_and_stays_below_its_limit(run_cells, capsys):
    find_largest = run_cells("largest-batch", ON_GPU=False, STEMS=(), lines={})["find_largest"]
    assert "No GPU" in capsys.readouterr().out
    for largest in (8, 9, 100, 1000, 4216, 38_660):
        tried = []
        found = find_largest(lambda batch, tried=tried, largest=largest: tried.append(batch) or batch <= largest)
        assert 0.96 * largest <= found <= largest
        assert len(tried) < 25
    assert find_largest(lambda batch: batch <= 5) in range(4, 6)
    assert find_largest(lambda batch: True, limit=1000) == pytest.approx(1000, rel=0.04)
    tried = []
    find_largest(lambda batch: tried.append(batch) or True, limit=1000)
    assert max(tried) <= 1000


def test_a_reference_run_stands_beside_the_learners_with_its_hardware_versions_and_date(
    run_cells, capsys, tmp_path, monkeypatch
):
    records = timing.Records("lab1", tmp_path)
    records.add("throughput", make_sweep((0.5, 1.0, 2.0), baseline="tf32"), stem="imagenet")
    content = {
        "lab": "lab1",
        "machine": {"label": "NVIDIA H200", "torch": "2.14.1"},
        "when": "2026-12-01T10:00:00+00:00",
        "records": [json.loads(line) for line in records.path.read_text().splitlines()],
    }
    path = tmp_path / "data" / "reference" / "lab1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    monkeypatch.setattr("lab_utils.timing.references.checkout", lambda: tmp_path)
    mine = {"imagenet": make_sweep((2.0, 2.0))}
    names = run_cells("throughput-figure", "answers", throughput=mine, my_speed_up=2.0)
    out = capsys.readouterr().out
    label = "NVIDIA H200, torch 2.14.1, 2026-12-01"
    assert f"{label}\n  imagenet stem: bf16 is ahead from batch 32 on; 2.00 times tf32" in out
    assert "no reference run" not in out
    assert names["axes"][0][1].get_title(loc="left") == label
