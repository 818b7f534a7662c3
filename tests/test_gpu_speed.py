"""The benchmark of ``make gpu``: its arithmetic on a CPU, arms that train alike, and goals judged both ways."""

import json
import math
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.gpu import TIME_IS_UP, arms, report, roofline, speed
from benchmarks.gpu.arms import ARMS, LR, REFERENCE, SGD, Arm, Setup, make_ours
from lab_common import LabError

CPU = torch.device("cpu")
EXACT = Setup("tiny", "imagenet", CPU)
H200 = roofline.SHEETS["H200"]


def count(module, read, wrote, fusion, **more):
    return [(one.flops, one.bytes) for one in roofline.count_layer(module, read, wrote, fusion, **more)]


def test_roofline_of_the_layers_by_hand():
    conv = nn.Conv2d(64, 128, 3, stride=2, padding=1)
    read, wrote = torch.Size((8, 64, 16, 16)), torch.Size((8, 128, 8, 8))
    flops, moved = 2 * wrote.numel() * (64 * 3 * 3), 2 * (read.numel() + wrote.numel() + 128 * 64 * 9)
    assert count(conv, read, wrote, "fused") == [(flops, moved)] * 3
    assert count(conv, read, wrote, "fused", first=True) == [(flops, moved)] * 2
    # 75 million operations take 0.08 µs, and 0.54 MB take 0.11 µs: the bytes decide, until they are twice as fast.
    kernel = roofline.Kernel(flops, moved)
    assert kernel.seconds(989e12, 4.8e12) == moved / 4.8e12 == pytest.approx(0.113e-6, rel=0.01)
    assert kernel.seconds(989e12, 9.6e12) == flops / 989e12 == pytest.approx(0.0763e-6, rel=0.01)
    size, block = read.numel(), nn.Identity()
    block.downsample = None
    for fusion, batch_norm, relu, addition in (("unfused", 8, 5, 6), ("fused", 8, 0, 4)):
        assert count(nn.BatchNorm2d(64), read, read, fusion) == [(0, 2 * batch_norm * size)]
        assert count(nn.ReLU(), read, read, fusion) == [(0, 2 * relu * size)]
        assert count(block, read, read, fusion) == [(0, 2 * addition * size)]


def test_roofline_of_resnet152_is_what_the_module_says():
    rates = roofline.predict("resnet152", "imagenet", 1024, H200)
    assert [round(rates[fusion], -3) for fusion in roofline.PASSES] == [191_000, 243_000]
    kernels = roofline.list_kernels("resnet152", "imagenet", 1024, "unfused")
    # 1.4 GFLOP an image: three times the forward pass's 0.235 GMAC, less the first layer's gradient.
    assert sum(kernel.flops for kernel in kernels) / 1024 == pytest.approx(6 * 0.235e9, rel=0.01)


def test_a_data_sheet_belongs_to_one_board():
    assert roofline.find_sheet("NVIDIA H200") == H200
    assert roofline.find_sheet("NVIDIA H100 80GB HBM3") == (989e12, 3.35e12)
    assert roofline.find_sheet("NVIDIA H100 PCIe") is roofline.find_sheet("NVIDIA A100-SXM4-80GB") is None


@pytest.fixture
def timm(monkeypatch):
    """Stands in for timm, which is not in the lock, as far as our loop uses it: networks and the optimizer."""
    timm, optim = types.ModuleType("timm"), types.ModuleType("timm.optim")
    timm.is_model = lambda name: False
    optim.create_optimizer_v2 = lambda model, opt, **more: {"momentum": torch.optim.SGD}[opt](
        model.parameters(), **more
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.optim", optim)


@pytest.mark.parametrize("name", [*ARMS, "reference"])
@pytest.mark.usefixtures("timm")
def test_an_arm_trains_as_five_plain_lines(name, monkeypatch):
    """Without the roundings of autocast, and uncompiled, all arms take the same steps."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: torch.enable_grad())
    pool = speed.make_pool(16, CPU)
    model = EXACT.build()
    optimizer, expected = torch.optim.SGD(model.parameters(), LR, **SGD), []
    for images, labels in pool[:3]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(EXACT.normalize(images)), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    training = {**ARMS, "reference": REFERENCE}[name].make(EXACT)
    losses = [float(training.step(training.prepare(images), labels)) for images, labels in pool[:3]]
    assert losses == pytest.approx(expected, rel=1e-4)
    for own, plain in zip(training.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-4)


def test_weights_momentum_and_learning_rate_start_anew():
    training = make_ours(EXACT, amp=False)
    first = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    pool = speed.make_pool(8, CPU)
    one = [float(loss) for loss in speed.run_steps(training, pool, 3)]
    training.load(first)
    assert [float(loss) for loss in speed.run_steps(training, pool, 3)] == pytest.approx(one, rel=1e-6)
    training.set_lr(0.0)
    before = training.model.state_dict()["1.weight"].clone()
    speed.run_steps(training, pool, 1)
    assert torch.equal(before, training.model.state_dict()["1.weight"])


def forget_momentum(setup):
    training = make_ours(setup)
    training.optimizer.param_groups[0]["momentum"] = 0.0
    return training


def skip_half(setup):
    training = make_ours(setup)
    step = training.step
    training.step = lambda images, labels: step(images[::2], labels[::2])
    return training


@pytest.mark.parametrize("make", [forget_momentum, skip_half])
def test_a_wrong_step_shows_in_its_losses(make, monkeypatch):
    monkeypatch.setattr(speed, "CURVE_LR", 0.02)  # so steep that a tiny network, too, learns enough in 30 steps
    scale = speed.DRY | {"curve": 30}
    right, wrong, reference = (
        speed.prepare(arm, EXACT, 8, scale)[2]["losses"] for arm in (ARMS["eager"], Arm(make, ours=True), REFERENCE)
    )
    assert speed.find_deviation(right, reference) < speed.LIMIT < speed.find_deviation(wrong, reference)


def test_deviation_is_the_largest_of_all_steps():
    assert speed.find_deviation([1.0, 2.1, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.05)
    for losses in ([1.0], [1.0, math.nan], []):
        assert speed.find_deviation(losses, [1.0, 2.0]) == math.inf


def fail(setup):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Inline(speed.Host):
    """An arm that answers in this process."""

    def __init__(self, arm, setup, batch, scale):
        try:
            self.training, self.pool, facts = speed.prepare(arm, setup, batch, scale)
        except RuntimeError as error:
            facts = {"error": str(error)}
        self.answers = [facts]

    def receive(self, end):
        if end <= 0:
            raise TimeoutError
        return self.answers.pop()

    def ask(self, what, end):
        if what == "profile":
            return speed.profile(self.training, self.pool)
        return speed.time_steps(self.training, self.pool, what)

    def close(self):
        pass


def test_a_group_is_measured_in_turn_and_an_arm_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(speed, "Host", Inline)
    monkeypatch.setitem(ARMS, "torchvision AMP fp16", Arm(fail))
    out = tmp_path / "speed.json"
    assert speed.main(["--out", str(out), "--dry"]) == 0
    result = json.loads(out.read_text())
    rows = {row["arm"]: row for row in result["measurements"]}
    assert "out of memory" in rows["torchvision AMP fp16"]["status"] and not rows["torchvision AMP fp16"]["seconds"]
    assert rows["timm AMP channels_last"]["status"] == "timm is not installed"
    assert len(rows["eager"]["seconds"]) == len(rows["examples AMP"]["seconds"]) == speed.ROUNDS
    assert rows["eager"]["fidelity"] < speed.LIMIT and rows["examples AMP"]["fidelity"] is None
    assert result["profiles"][0]["arm"] == "eager" and result["roofline"]["imagenet"]["8"]["fused"] > 0
    assert "all groups are measured" in capsys.readouterr().out
    # Nothing is left to do; other code begins anew, and what was there stays beside it.
    assert speed.main(["--out", str(out), "--dry"]) == 0 and json.loads(out.read_text()) == result
    monkeypatch.setattr(speed, "make_key", lambda *more: {"net": "tiny", "machine": "another"})
    assert speed.main(["--out", str(out), "--dry", "--seconds", "0"]) == TIME_IS_UP
    assert json.loads(out.with_suffix(".old.json").read_text()) == result


def test_a_process_of_its_own_answers_and_one_that_dies_says_so():
    host = speed.Host(replace(ARMS["eager"], make=partial(make_ours, amp=False)), EXACT, 8, speed.DRY)
    end = speed.time.monotonic() + 120
    assert host.receive(end)["finite"] and host.ask(2, end) > 0
    with pytest.raises(TimeoutError):
        host.receive(0)
    host.process.kill()
    host.process.join()
    assert host.ask(2, end) == {"error": "its process ended with status -9"}
    host.close()


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(speed.machine, "device", lambda: CPU)
    with pytest.raises(LabError, match="--dry"):
        speed.main(["--out", str(tmp_path / "speed.json")])


def make_result(*rates):
    """A result with images per second by batch and arm: ``(128, {"graph": 5000})``."""
    rows = []
    for batch, arms_of in rates:
        for arm, rate in arms_of.items():
            seconds = [batch / rate * factor for factor in (1.0, 0.98, 1.03, 1.0, 1.0, 1.01)]
            row = {"stem": "imagenet", "batch": batch, "group": "eager", "arm": arm, "seconds": seconds}
            rows.append(row | {"ours": ARMS[arm].ours, "peak_bytes": 2**32, "fidelity": 0.004})
    key = {"net": "resnet152", "rounds": 6, "versions": {"torch": "2.11.0"}}
    result = {"key": key, "measurements": rows, "roofline": {"imagenet": {"1024": {"fused": 200_000.0}}}}
    return result | {"when": "2026-11-27T10:00:00+00:00", "machine": {"label": "NVIDIA H200"}, "profiles": []}


def test_goals_are_judged_against_the_best_of_their_own_kind():
    good = make_result(
        (1024, {"eager": 6_000, "graph": 120_000, "timm AMP channels_last": 5_000, "examples AMP": 4_000})
    )
    eager, _, graph, *_, share = report.judge(good)
    assert eager.measured == "1.20 (1.20 to 1.20, n = 6); eager 6,000 against timm AMP channels_last 5,000 images/s"
    assert not graph.measured and graph.holds is None, "no peer is a graph"
    assert share.measured == "60% (graph 120,000 of 200,000 images/s)" and share.holds
    poor = make_result((1024, {"eager": 4_900, "timm AMP channels_last": 5_000}))
    assert report.judge(poor)[0].measured.startswith("0.98") and report.judge(poor)[-1].holds is False
    for row in poor["measurements"]:
        row["seconds"] = row["seconds"][:5]
    assert not report.judge(poor)[0].measured, "an arm with fewer rounds than the others is none"
    del poor["key"]["rounds"]  # a result of before, in five rounds: they are too few to tell
    assert report.judge(poor)[0].measured.startswith("too few rounds to tell (n = 5)")


def test_the_page_gets_what_was_measured_and_what_was_not(tmp_path, root):
    result = make_result((1024, {"eager": 6_000, "timm AMP channels_last": 5_000}), (128, {"eager": 3_000}))
    (tmp_path / "data" / "reference").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "data" / "reference" / "gpu_speed.json").write_text(json.dumps(result))
    (tmp_path / "docs" / "performance.md").write_text("# A\n<!-- BEGIN: make gpu -->\n<!-- END: make gpu -->\n")
    report.keep(tmp_path)
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "| ours: eager | 3,000 ± 2.5% | 6,000 ± 2.5% | 4.0 GiB | 0.40% |" in page
    assert "| timm AMP channels_last |  | 5,000 ± 2.5% | 4.0 GiB | 0.40% |" in page
    assert "Not measured yet: ours, eager, against the best eager AMP peer, batch 128;" in page


def test_the_pages_block_is_that_of_the_record(root):
    record = json.loads((root / "data" / "reference" / "gpu_speed.json").read_text())
    assert report.write_report(record) in (root / "docs" / "performance.md").read_text()


def test_a_capture_warms_up_first_and_a_replay_reads_what_was_copied(monkeypatch):
    """By a stand-in for CUDA's streams and graphs: the order of the calls, without a GPU."""
    calls = []
    stream = types.SimpleNamespace(wait_stream=lambda other: calls.append("waits"))
    graph = types.SimpleNamespace(replay=lambda: calls.append("replay"))

    class Block:
        def __init__(self, *args, stream=None):
            self.name = "capture" if stream else "side"

        def __enter__(self):
            calls.append(self.name)

        def __exit__(self, *error):
            calls.append(f"end of {self.name}")

    names = {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": Block, "graph": Block}
    names |= {"CUDAGraph": lambda: graph, "reset_peak_memory_stats": lambda: calls.append("reset peak")}
    for name, value in (names | {"max_memory_allocated": lambda: 7}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    seen = []
    training = arms.Training(nn.Linear(1, 1), types.SimpleNamespace(zero_grad=lambda **_: calls.append("drop")), None)
    training.step = lambda images, labels: (calls.append("step"), seen.append(images), torch.zeros(()))[-1]
    batch = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    training.capture(batch)
    assert calls == [
        *("waits", "side", "step", "step", "step", "end of side", "waits"),
        *("drop", "reset peak", "capture", "step", "end of capture"),
    ]
    training.step(torch.full((2,), 7, dtype=torch.uint8), torch.ones(2, dtype=torch.int64))
    assert calls[-1] == "replay" and len(seen) == 4 and training.peak == 7
    assert seen[-1].tolist() == [7, 7] and batch[0].tolist() == [0, 0]
