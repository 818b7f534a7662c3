"""Parts of lab 4: its cost model on made-up measurements, what others published, and its scripts."""

import json
from functools import partial

import pytest
from torch import nn

import nodelaunch as launch
from lab_utils import models
from lab_utils.timing import Timing

pytestmark = pytest.mark.usefixtures("runs")
SCRIPT = "notebooks/scripts/compare_parallel.py"
NAMES = {
    "training": ["1 device", "DP", "DDP", "half the batch"],
    "inference": ["1 device", "DP", "two processes, as in DDP"],
}


@pytest.fixture
def run_cells(run_cells_of):
    return partial(run_cells_of, "04_data_parallel")


def make_found(seconds):
    """Makes the result of ``Records`` for the script's report, with a time per set-up."""
    cases = [
        {"batch": batch}
        | {
            kind: [Timing(name, (seconds[name.split()[-1]],) * 3, images=batch) for name in NAMES[kind]]
            for kind in NAMES
        }
        for batch in (16, 64, 256)
    ]
    links = [Timing("copy", (0.011,)), Timing("all_reduce", (0.101,)), Timing("meeting", (0.001,))]
    return {"cores": 2, "cases": cases, "weights_bytes": 10_000_000, "links": [one.as_record() for one in links]}


FOUND = make_found({"device": 2.0, "DP": 1.6, "DDP": 1.0, "batch": 0.9})


def read_runs(found):
    return {kind: [one for case in found["cases"] for one in case[kind]] for kind in NAMES}


def test_the_bytes_of_the_cost_model_by_hand(run_cells, capsys):
    count_bytes = run_cells("count-bytes")["count_bytes"]
    net = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2))  # 6 weights; 4 more, and 2 + 2 buffers + 1
    weights, buffers = 4 * (6 + 4), 4 * (2 + 2) + 8  # the count of batches is an int64
    assert count_bytes(net, 10, 2) == {
        "DP": {
            "weights and buffers": weights + buffers,
            "images": 5 * 3 * 32 * 32 * 4,
            "outputs and their gradients": 5 * 10 * 4 * 2,
            "gradients": weights,
        },
        "DDP": {"weights and buffers": buffers, "gradients": weights},
    }
    assert count_bytes(net, 12, 4)["DDP"]["gradients"] == pytest.approx(1.5 * weights)
    alone = count_bytes(net, 12, 1)
    assert sum(alone["DP"].values()) == sum(alone["DDP"].values()) == 0


def test_the_prediction_is_computing_plus_bytes_over_the_links_speed(run_cells, capsys):
    """A block as large as the weights takes 10 ms to copy and 100 ms to all-reduce, without the rendezvous."""
    names = run_cells("count-bytes", "predicted", found=FOUND, runs=read_runs(FOUND), BATCHES=[16, 64, 256], NET="tiny")
    assert names["SPEED"] == pytest.approx({"DP": 1e9, "DDP": 1e8})
    assert "DP's link: 1.0 GB/s, DDP's link: 0.1 GB/s" in capsys.readouterr().out
    for (batch, way), (compute, send, predicted, measured, off) in names["rows"].items():
        moved = names["count_bytes"](names["models"].build("tiny"), batch, 2)[way]
        seconds = 0.9 + sum(moved.values()) / {"DP": 1e9, "DDP": 1e8}[way]
        assert [compute, send, predicted] == pytest.approx([900, 1e3 * (seconds - 0.9), 1e3 * seconds])
        assert measured == {"DP": 1600, "DDP": 1000}[way]
        assert off == pytest.approx(100 * (1e3 * seconds / measured - 1))


def test_the_what_if_takes_the_time_that_each_stem_took_here(run_cells, monkeypatch):
    """With the CIFAR stem a step takes ten times as long: a link ten times slower gives the same speed-up."""
    seconds = {"imagenet": 64 * 0.05, "cifar": 8 * 0.5}  # of a batch of 64, and of 8
    stems = iter(seconds.values())
    monkeypatch.setattr("lab_utils.timing.measure", lambda *_, **__: Timing("step", (next(stems),)))
    names = {"GPUS": 0, "NET": "tiny", "DEVICE": "cpu", "CORES": 1}
    names = run_cells("baseline", "count-bytes", "what-if", **names)
    assert names["PER_IMAGE"] == pytest.approx({"imagenet": 0.05, "cifar": 0.5})
    predict = names["predict_speed_ups"]
    assert predict("cifar", 1e15) == pytest.approx({"DP": 2, "DDP": 2}, rel=0.01)
    assert predict("cifar", 1e5) == pytest.approx(predict("imagenet", 1e6))
    slow = predict("imagenet", 1e4)
    assert slow["DP"] < slow["DDP"] < 0.1
    # An image takes 0.05 s here and BATCH of them FASTER times less there; the bytes come on top of each one's half.
    alone, sent = 256 * 0.05 / 100, sum(names["MOVED"]["DP"].values()) / 1e6
    assert predict("imagenet", 1e6)["DP"] == pytest.approx(alone / (alone / 2 + sent))


def test_what_others_published_stands_there_with_its_source(run_cells, capsys, root):
    cited = json.loads((root / "data" / "reference" / "cited_data_parallel.json").read_text())
    facts = {"source", "url", "hardware", "software", "workload", "when", "seconds", "note"}
    assert all(run.keys() >= facts for run in cited)
    seconds = run_cells("cited")["seconds"]
    out = capsys.readouterr().out
    assert "recorded on two GPUs: nothing yet" in out
    assert all(run["url"] in out and run["hardware"] in out for run in cited)
    assert list(seconds.values()) == [run["seconds"] for run in cited]


def test_the_script_measures_all_set_ups_on_the_cpu(root):
    command = ["--net", "tiny", "--repeats", 2, "--batch-sizes", 4, 8]
    job = launch.TorchrunJob(root / SCRIPT, command, nodes=launch.local_nodes(1), nproc_per_node=2)
    found = job.run(show=False, force=True).results[0]
    assert [case["batch"] for case in found["cases"]] == [4, 8]
    for case in found["cases"]:
        for kind, names in NAMES.items():
            timings = [Timing.from_record(row["Timing"]) for row in case[kind]]
            assert [timing.name for timing in timings] == names
            assert all(
                len(one.seconds) == 2 and min(one.seconds) > 0 and one.images == case["batch"] for one in timings
            )
    assert [row["name"] for row in found["links"]] == ["copy", "all_reduce", "meeting"]
    assert found["weights_bytes"] == 4 * sum(parameter.numel() for parameter in models.build("tiny").parameters())


@pytest.mark.usefixtures("warm_torchrun")
def test_with_stored_statistics_the_three_set_ups_train_alike(root):
    """That DP and DDP do so with the batch's own, the lab itself claims."""

    def train(how):
        command = ["--how", how, "--device", "cpu", "--batch-size", 16, "--steps", 4, "--bn", "frozen"]
        script = root / "notebooks" / "scripts" / "train_parallel.py"
        job = launch.TorchrunJob(script, command, nodes=launch.local_nodes(1), nproc_per_node=1 + (how == "ddp"))
        return job.run(show=False, force=True).results[0]

    one, dp, ddp = map(train, ("single", "dp", "ddp"))
    for what in ("loss", "accuracy"):
        assert dp[what] == pytest.approx(one[what], abs=1e-4) and ddp[what] == pytest.approx(one[what], abs=1e-4)
    assert len(ddp["loss"]) == 4 and len(ddp["ends"]) == 5
