"""The planner against sums done by hand and published results; the prediction of DDP steps, without measuring any."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks import prediction, prediction_ranks
from lab_common import LabError
from lab_utils import machine, plan, timing
from lab_utils.plan import ALGORITHMS, Setup, all_reduce, predict

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


@pytest.mark.parametrize("nodes", [1, 2, 3, 64, 10_000])
def test_with_one_device_per_node_the_hierarchical_is_a_ring(nodes):
    ring, hierarchical = (all_reduce(PLAIN, nodes, algorithm, 12_345) for algorithm in ("ring", "hierarchical"))
    assert hierarchical == pytest.approx(ring)


def test_latency_alone_and_bandwidth_alone():
    slow = replace(PLAIN, bandwidth=1e300)
    assert [all_reduce(slow, 1024, algorithm, 100) for algorithm in ALGORITHMS] == pytest.approx([2046, 20, 2046])
    thin = replace(PLAIN, latency=0)
    for algorithm in ALGORITHMS:
        assert all_reduce(thin, 10_000, algorithm, 100) == pytest.approx(20, rel=2e-4), "twice the bytes in the limit"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_nodes_are_never_quicker_and_a_better_link_never_slower(algorithm):
    steps = [predict(PAIRS, nodes, algorithm)["step (s)"] for nodes in plan.NODES]
    assert all(one <= two for one, two in pairwise(steps)) and steps[0] < steps[-1]
    for better in ({"bandwidth": 20}, {"latency": 0.1}, {"inner_bandwidth": 500}, {"inner_latency": 0}, {"size": 50}):
        assert predict(replace(PAIRS, **better), 8, algorithm)["step (s)"] <= steps[3]
    costs = [predict(replace(PAIRS, price=1), nodes, algorithm)["cost"] for nodes in plan.NODES]
    assert costs == sorted(costs), "what is waited for is paid for"


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
    end = prediction.simulate(ready, [send] * buckets, backward)
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
        ({"compute": math.inf}, "--compute is inf"),
        ({"batch": 0.5}, "--batch is 0.5"),
        ({"size": -4}, "--size is -4"),
        ({"bandwidth": 0}, "--bandwidth is 0"),
        ({"latency": -1e-6}, "--latency is -1e-06"),
        ({"devices": 1.5}, "--devices is 1.5"),
        ({"devices": 0}, "--devices is 0"),
        ({"inner_bandwidth": 0}, "--inner-bandwidth is 0"),
        ({"backward": 1.2}, "--backward is 1.2"),
        ({"buckets": -1}, "--buckets is -1"),
        ({"price": -1}, "--price is -1"),
        ({"size": None, "latency": None}, "The planner needs --size, --latency"),
    ],
)
def test_values_that_are_none_are_refused(change, words):
    with pytest.raises(LabError) as refused:
        replace(PLAIN, **change)
    assert refused.value.what.startswith(words) and refused.value.fix.startswith("give ")


@pytest.mark.parametrize(("nodes", "algorithm"), [(0, "ring"), (-2, "tree"), (1.5, "ring"), (2, "butterfly")])
def test_other_all_reduces_are_refused(nodes, algorithm):
    with pytest.raises(LabError, match="There is no all-reduce"):
        all_reduce(PLAIN, nodes, algorithm, 100)


EXAMPLE = ["--compute", "0.5", "--batch", "50", "--size", "1e9", "--latency", "0", "--bandwidth", "1e10"]
EXAMPLE += ["--price", "2"]


def test_the_command_prints_its_assumptions_and_the_table(runs, capsys, tmp_path):
    figure = tmp_path / "plan.svg"
    more = ["--buckets", "1", "--nodes", "1", "2", "4", "--images", "1e6", "--figure", str(figure)]
    assert plan.main([*EXAMPLE, *more]) == 0
    out = capsys.readouterr().out
    assert "no stragglers" in out and "upper\nbound" in out and "compute: 0.5; " in out and "by lab 5" not in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["weak"], ["strong"])]
    assert len(rows) == 18
    # Two nodes send 1 GB in 0.1 s after 0.5 s of computing: 100 images in 0.6 s.
    ring = next(row for row in rows if row[:4] == ["weak", "2", "2", "ring"])
    assert [float(one) for one in ring[4:]] == pytest.approx([0.6, 83.3333, 166.6667, 0.0694, 6.6667], abs=6e-5)
    assert "svg" in figure.read_text()[:300]


def test_the_command_says_what_is_missing(runs, capsys):
    assert plan.main(["--compute", "1", "--latency", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("The planner needs --batch, --size, --bandwidth.\n")
    assert "lab 5" in captured.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--figure", "{folder}/none/plan.svg"], "No such file or directory"),
        (["--nodes", "0"], "a whole number of nodes from 1"),
    ],
)
def test_the_command_refuses_in_words(runs, capsys, tmp_path, more, words):
    assert plan.main([*EXAMPLE, *(word.format(folder=tmp_path) for word in more)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err
    with pytest.raises(SystemExit):
        plan.main(["--published", "--figure", str(tmp_path / "plan.svg")])


def test_a_number_of_nodes_that_is_named_twice_is_one_row(runs, capsys, tmp_path):
    assert plan.main([*EXAMPLE, "--nodes", "2", "2", "--figure", str(tmp_path / "plan.svg")]) == 0
    assert len(re.findall("^ *weak +2 ", capsys.readouterr().out, re.MULTILINE)) == len(ALGORITHMS)


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


def test_each_published_result_is_cited_and_its_error_is_what_is_computed(root, capsys):
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
    assert plan.main(["--published"]) == 0
    out = capsys.readouterr().out
    assert all(f"{row['error (points)']:.4f}".rstrip("0") in out for row in rows) and "upper\nbound" in out


def test_one_published_error_by_hand():
    """Goyal et al.: 100 MB over 32 servers on 50 Gb/s, four buckets, 0.192 s a step, of which backward is 0.12 s."""
    row = next(row for row in plan.check_published() if "Goyal" in row["result"])
    send = 4 * 2 * 5 * 9.6e-6 + 2 * 100e6 / 6.25e9
    assert row["predicted (%)"] == pytest.approx(100 * 0.192 / (0.192 + send / 4)), "the last bucket is what is left"


@pytest.mark.parametrize(
    ("ready", "sends", "backward", "end"),
    [
        ([], [], 5, 5),
        ([1, 2], [0, 0], 5, 5),
        ([3], [4], 3, 7),
        ([1, 2, 3], [1, 1, 1], 3, 4),  # each is gone before the next is full
        ([1, 2, 3], [5, 1, 1], 3, 8),  # the link is busy
        ([1, 6], [2, 2], 6, 8),  # the link waits
        ([4, 1], [1, 1], 6, 6),  # DDP sends in order, full or not
    ],
)
def test_buckets_are_sent_in_order_when_they_are_full_and_the_link_is_free(ready, sends, backward, end):
    assert prediction.simulate(ready, sends, backward) == end


def make_calibration():
    """Parts of steps that lie on lines in the batch, and a link of 1 ms and 1 MB/s."""
    numbers = [50_000, 50_000, 50_000]

    def part(batch):
        ready = [0.003 * batch, 0.002 * batch, 0.001 * batch]
        return {"forward": 0.1 + 0.001 * batch, "backward": 0.003 * batch, "rest": 0.005, "ready": ready}

    steps = [{"net": "deep", "batch": batch, "numbers": numbers} | part(batch) for batch in (8, 32)]
    return {"steps": steps, "link": [[size, 1e-3 + size / 1e6] for size in (2**14, 2**18, 2**20)]}


def test_a_step_is_predicted_from_other_batches_and_the_link():
    case = prediction.Case("deep", 16, 0.3, 2, "100mbit")
    found = prediction.predict(case, make_calibration())
    # A bucket is full with two of the parameters of 200,000 bytes: the first one at 0.032 s, and it takes 0.401 s; the
    # second one at 0.048 s, and it waits for the first.
    assert found["buckets"] == [400_000, 200_000]
    assert found["seconds"] == pytest.approx(0.116 + 0.032 + 0.401 + 0.201 + 0.005)
    assert (found["net"], found["batch"], found["cap"], found["ranks"]) == ("deep", 16, 0.3, 2)
    assert case.batch not in prediction.CALIBRATION_BATCHES
    assert not set(prediction.CALIBRATION_BATCHES) & set(prediction.HELD_OUT_BATCHES)


def test_at_least_twelve_cases_are_held_out_on_shaped_links():
    work = prediction.Work()
    shaped = [rate for rate in work.rates if rate != prediction.LOOPBACK]
    cases = [case for rate in shaped for ranks in work.ranks for case in work.list_cases(rate, ranks)]
    assert len(set(cases)) == len(cases) >= 12 and {case.ranks for case in cases} == {2, 4}
    assert set(shaped) <= set(prediction.RATES)


@pytest.mark.parametrize("cap", [0.25, 1.0])
def test_the_buckets_are_those_that_ddp_fills(cap):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for net in prediction.Work().nets:
            step = prediction_ranks.Step(net, 2, cap)
            assert isinstance(step.model, DDP)
            parameters, order = list(step.net.parameters()), []
            for index, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, index=index, order=order: order.append(index))
            for _ in range(prediction_ranks.WARMUP):
                order.clear()
                step()
            numbers = [parameter.numel() for parameter in parameters]
            ready = [order.index(index) for index in range(len(parameters))]
            logged = step.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
            buckets = prediction.fill_buckets(numbers, ready, cap)
            assert [4 * sum(numbers[index] for index in one) for one in buckets] == list(map(int, logged.split(",")))
    finally:
        dist.destroy_process_group()


def pretend(monkeypatch, factor, missing=""):
    """Ranks that take ``factor`` times what is predicted; and hosts, without which only the loopback is left."""
    calls = []

    def run_ranks(hosts, ranks, what, asked, folder):
        calls.append((what, ranks, (folder / "predictions.json").exists()))
        if what == "calibrate":
            return make_calibration()
        cases = [prediction.predict(prediction.Case(**case), make_calibration()) for case in asked["cases"]]
        return [{"seconds": factor * case["seconds"], "buckets": case["buckets"]} for case in cases]

    monkeypatch.setattr(prediction, "run_ranks", run_ranks)
    monkeypatch.setattr(prediction, "find_missing", lambda: missing)
    monkeypatch.setattr(prediction.shutil, "which", lambda name: name)
    monkeypatch.setattr(prediction, "Hosts", lambda: prediction.contextlib.nullcontext("hosts"))
    monkeypatch.setattr(prediction, "shape", lambda hosts, rate: prediction.contextlib.nullcontext())
    return calls


WORK = prediction.Work(nets=("deep",), caps=(0.3,), rates=("100mbit", prediction.LOOPBACK))


def test_predictions_are_written_down_before_anything_is_measured(monkeypatch, tmp_path):
    calls = pretend(monkeypatch, 1 / 1.04)
    shaped, loopback = prediction.check_all(tmp_path, WORK)
    jobs = [(ranks, written) for written in (False, True) for ranks in (2, 4, 2, 4)]
    assert calls == [("measure" if written else "calibrate", ranks, written) for ranks, written in jobs]
    assert shaped.holds and shaped.measured == "median error 4.0 %, largest 4.0 %" and "(4 conf" in shaped.text
    assert shaped.numbers == pytest.approx({"median error (%)": 4, "largest error (%)": 4})
    assert loopback.holds and loopback.bound == "", "it is stated alone"


def test_a_median_error_above_the_bound_breaks_the_claim(monkeypatch, tmp_path):
    pretend(monkeypatch, 1 / 0.94)
    shaped, loopback = prediction.check_all(tmp_path, WORK)
    assert shaped.holds is False and loopback.holds, "no bound is claimed for the loopback"


def test_without_hosts_only_the_loopback_is_measured(monkeypatch, tmp_path):
    calls = pretend(monkeypatch, 1.0, missing="only root on Linux can make hosts out of namespaces")
    shaped, loopback = prediction.check_all(tmp_path, WORK)
    assert shaped.holds is None and "only root" in shaped.measured and loopback.holds and len(calls) == 4


def test_predictions_that_were_changed_after_measuring_are_refused(monkeypatch, tmp_path):
    pretend(monkeypatch, 1.0)
    prediction.check_all(tmp_path, WORK)
    predictions, measured = (tmp_path / name for name in ("predictions.json", "measured.json"))
    assert [row["error"] for row in prediction.compare(predictions, measured)] == pytest.approx([0] * 8)
    written, found = json.loads(predictions.read_text()), json.loads(measured.read_text())
    better = json.loads(predictions.read_text())
    better["cases"][0]["seconds"] *= 1.01
    predictions.write_text(json.dumps(better, indent=1))
    with pytest.raises(LabError, match="not made before measuring"):
        prediction.compare(predictions, measured)
    predictions.write_text(json.dumps(written, indent=1))
    assert len(prediction.compare(predictions, measured)) == 8, "the same bytes again"
    measured.write_text(json.dumps(found | {"when": written["when"]}))
    with pytest.raises(LabError, match="not made before measuring"):
        prediction.compare(predictions, measured)
    found["steps"][0]["buckets"] = [600_000]
    measured.write_text(json.dumps(found))
    with pytest.raises(LabError, match="DDP filled its buckets in another way"):
        prediction.compare(predictions, measured)
