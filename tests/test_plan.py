"""The planner against sums done by hand, a simulation of its overlap, and published results."""

import json
import math
import re
from dataclasses import replace

import pytest

from lab_common import LabError
from lab_utils import machine, timing
from scripts import plan
from scripts.plan import ALGORITHMS, Setup, all_reduce, predict

# 100 bytes at 10 bytes/s between nodes and 50 inside; a message takes 1 s more between them, and 0.5 s more inside.
PLAIN = Setup(compute=6, batch=8, size=100, latency=1, bandwidth=10, buckets=1, images=8000)
PAIRS = replace(PLAIN, devices=2, inner_latency=0.5, inner_bandwidth=50)


@pytest.mark.parametrize(
    ("setup", "nodes", "seconds"),
    [
        (PLAIN, 1, (0, 0, 0)),
        (PLAIN, 2, (2 + 10, 2 + 20, 2 + 10)),
        (PLAIN, 4, (6 + 15, 4 + 20, 6 + 15)),
        (PLAIN, 5, (8 + 16, 6 + 20, 8 + 16)),
        # 2(N - n) steps of 0.5 s inside, 2(n - 1) of 1 s between.
        (PAIRS, 1, (1 + 2, 1 + 4, 1 + 2)),
        (PAIRS, 2, (2 + 2 + 15, 1 + 2 + 20, 1 + 2 + 2 + 10)),
        (PAIRS, 4, (4 + 6 + 17.5, 1 + 4 + 20, 1 + 2 + 6 + 15)),
    ],
)
def test_all_reduces_take_what_the_formulas_say(setup, nodes, seconds):
    assert [all_reduce(setup, nodes, algorithm, 100) for algorithm in ALGORITHMS] == pytest.approx(list(seconds))


def test_a_row_has_time_efficiency_speed_days_and_cost():
    row = predict(replace(PLAIN, price=3), 4, "ring")
    assert (row["nodes"], row["devices"], row["step (s)"]) == (4, 4, 6 + 21), "one bucket: nothing overlaps"
    assert row["efficiency (%)"] == pytest.approx(100 * 6 / 27) and row["images/s"] == pytest.approx(4 * 8 / 27)
    assert row["days"] == pytest.approx(8000 / (32 / 27) / 86_400) and row["cost"] == pytest.approx(row["days"] * 288)
    strong = predict(PLAIN, 4, "ring", "strong")
    assert strong["step (s)"] == 1.5 + 21 and strong["images/s"] == pytest.approx(8 / 22.5)
    assert strong["efficiency (%)"] == pytest.approx(100 * 1.5 / 22.5), "as many devices alone: 4 · 8 images in 6 s"
    alone = predict(PLAIN, 1, "tree")
    assert (alone["step (s)"], alone["efficiency (%)"]) == (6, 100)


@pytest.mark.parametrize(("buckets", "compute"), [(1, 9.0), (4, 9.0), (4, 60.0), (7, 2.0), (25, 30.0)])
def test_the_planners_overlap_is_that_of_the_simulated_buckets(buckets, compute):
    """The closed form, of equal buckets that are full at equal intervals, against the simulation of any."""
    setup = replace(PLAIN, buckets=buckets, compute=compute)
    backward, send = compute * setup.backward, all_reduce(setup, 4, "ring", 100 / buckets)
    ready = [backward * (number + 1) / buckets for number in range(buckets)]
    end = 0.0
    for full in ready:  # a bucket is sent when it is full and the link is free
        end = max(end, full) + send
    end = max(end, backward)
    assert predict(setup, 4, "ring")["step (s)"] == pytest.approx(compute - backward + end)


def test_the_table_has_all_algorithms_and_ends_with_one_image_per_device():
    rows = plan.tabulate(replace(PLAIN, buckets=0), nodes=(1, 8, 16))
    assert [(row["scaling"], row["nodes"]) for row in rows[::3]] == [
        *(("weak", nodes) for nodes in (1, 8, 16)),
        *(("strong", nodes) for nodes in (1, 8)),
    ]
    assert [row["algorithm"] for row in rows[:3]] == list(ALGORITHMS)
    assert predict(replace(PLAIN, buckets=0, size=80 * 2**20), 2, "ring") == predict(
        replace(PLAIN, buckets=4, size=80 * 2**20), 2, "ring"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute": 0}, "--compute is 0"),
        ({"compute": math.nan}, "--compute is nan"),
        ({"batch": 0.5}, "--batch is 0.5"),
        ({"latency": -1e-6}, "--latency is -1e-06"),
        ({"devices": 1.5}, "--devices is 1.5"),
        ({"backward": 1.2}, "--backward is 1.2"),
        ({"size": None, "latency": None}, "The planner needs --size, --latency"),
    ],
)
def test_values_that_are_none_are_refused(change, words):
    with pytest.raises(LabError) as refused:
        replace(PLAIN, **change)
    assert refused.value.what.startswith(words) and refused.value.fix.startswith("give ")


@pytest.mark.parametrize(("nodes", "algorithm"), [(0, "ring"), (1.5, "ring"), (2, "butterfly")])
def test_other_all_reduces_are_refused(nodes, algorithm):
    with pytest.raises(LabError, match="There is no all-reduce"):
        all_reduce(PLAIN, nodes, algorithm, 100)


EXAMPLE = ["--compute", "0.5", "--batch", "50", "--size", "1e9", "--latency", "0", "--bandwidth", "1e10"]
EXAMPLE += ["--price", "2"]


def test_the_command_prints_its_assumptions_and_the_table(runs, capsys):
    more = ["--buckets", "1", "--nodes", "1", "2", "4", "--images", "1e6"]
    assert plan.main([*EXAMPLE, *more]) == 0
    out = capsys.readouterr().out
    assert "no stragglers" in out and "upper\nbound" in out and "compute: 0.5; " in out and "by lab 5" not in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["weak"], ["strong"])]
    assert len(rows) == 18
    # Two nodes send 1 GB in 0.1 s after 0.5 s of computing: 100 images in 0.6 s.
    ring = next(row for row in rows if row[:4] == ["weak", "2", "2", "ring"])
    assert [float(one) for one in ring[4:]] == pytest.approx([0.6, 83.3333, 166.6667, 0.0694, 6.6667], abs=6e-5)


def test_the_command_says_what_is_missing(runs, capsys):
    assert plan.main(["--compute", "1", "--latency", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("The planner needs --batch, --size, --bandwidth.\n")
    assert "lab 5" in captured.err


def test_what_lab_5_measured_is_the_default(runs, capsys, monkeypatch):
    def add(stem, batch, alone, sizes):
        one = {name: timing.Timing(name, (seconds,) * 3) for name, seconds in (("alone", alone), ("compute", 0.2))}
        # Two ranks: 2 · 1 ms of latency, and each byte once, at 100 MB/s.
        buckets = [{"bytes": size, "ready": 0.01, "send": 0.002 + size / 1e8} for size in sizes]
        return {"stem": stem, "batch": batch, **one, "buckets": buckets, "backward": 0.15, "busy": 0.5}

    records = timing.Records("lab5")
    steps = [add("cifar", 8, 0.25, [4e6, 9e6]), add("imagenet", 8, 0.1, [1e6])]
    records.add("buckets", {"world_size": 2, "steps": steps}, net="resnet18")
    found = plan.read_records()
    assert found == pytest.approx(
        {"compute": 0.25, "batch": 8, "size": 13e6, "latency": 1e-3, "bandwidth": 1e8, "backward": 0.75, "buckets": 2}
    )
    assert plan.main(["--nodes", "2", "--batch", "16"]) == 0
    assert "compute: 0.25, by lab 5" in (out := capsys.readouterr().out) and "batch: 16;" in out
    with monkeypatch.context() as patch:
        patch.setattr(machine.facts, "read_cpu", lambda: ("another", ()))
        assert plan.read_records() == {}, "another machine's are none of this one's"
    records.add("buckets", {"world_size": 2, "steps": []}, net="resnet18")
    assert plan.read_records() == {}


def test_each_published_result_is_cited_and_its_error_is_what_is_computed(root):
    file = json.loads((root / "data" / "reference" / "published_scaling.json").read_text())
    results = file["results"]
    assert len({one["source"] for one in results}) >= 5 and {one["source"] for one in results} == set(file["sources"])
    assert all(set(source) == {"title", "authors", "year", "where"} for source in file["sources"].values())
    for one in results:
        # Where the source has speeds and no efficiency, that is their ratio.
        speeds = [float(text) for text in re.findall(r": ([\d.]+)", one["words"])]
        if speeds:
            devices = {"tensorflow2017": 8, "dlperf2020": 32, "nvidia2019": 16}[one["source"]]
            assert one["reported"] == pytest.approx(100 * speeds[1] / speeds[0] / devices, abs=0.051), one["name"]
        else:
            assert f"{one['reported']:.0f}% scaling efficiency" in one["words"], one["name"]
    rows = plan.check_published()
    for one, row in zip(results, rows, strict=True):
        found = (
            100 * one["setup"]["compute"] / predict(Setup(**one["setup"]), one["nodes"], one["algorithm"])["step (s)"]
        )
        assert row["error (points)"] == pytest.approx(found - one["reported"])
        assert -5 < row["error (points)"] < 35, "an upper bound, as far as the inputs are the sources' own"
