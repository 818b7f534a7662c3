"""The benchmark on a GPU, rehearsed on a CPU: its arithmetic, its arms, what it refuses, and how it resumes."""

import contextlib
import json
import math
import os
import subprocess
import sys
import types
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.claims import PAGE
from benchmarks.gpu import TIME_IS_UP, arms, peers, roofline, speed, speed_report, worker
from benchmarks.gpu.arms import LR, OURS, SGD, Arm, Setup, Training, make_training
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.speed_report import ROUNDS
from benchmarks.gpu.worker import Worker, make_pool
from lab_common import LabError

CPU = torch.device("cpu")
EXACT = Setup("tiny", "imagenet", CPU, backend="eager", amp=False)
CONV = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False)
SHAPES = torch.Size((8, 64, 16, 16)), torch.Size((8, 128, 8, 8))
H200 = roofline.SHEETS["H200"]


def count(module, read, wrote, fusion, **more):
    return {one.layer: (one.flops, one.bytes) for one in roofline.count_layer("x", module, read, wrote, fusion, **more)}


def test_roofline_of_a_convolution_by_hand():
    flops = 2 * (8 * 128 * 8 * 8) * (64 * 3 * 3)
    inputs, outputs, weights = 8 * 64 * 16 * 16, 8 * 128 * 8 * 8, 128 * 64 * 9
    moved = 2 * (inputs + outputs + weights)
    kinds = ("x forward", "x input", "x weight")
    for fusion in ("unfused", "fused"):
        assert count(CONV, *SHAPES, fusion) == dict.fromkeys(kinds, (flops, moved))
    assert list(count(CONV, *SHAPES, "fused", first=True)) == ["x forward", "x weight"]
    ideal = count(CONV, *SHAPES, "ideal")
    assert [ideal[kind][1] - moved for kind in kinds] == [0, 2 * (inputs + outputs), 2 * outputs]
    # 75 million operations take 0.08 µs, and 0.54 MB take 0.11 µs: the bytes decide, until they are twice as fast.
    kernel = roofline.Kernel("x", flops, moved)
    assert kernel.seconds(989e12, 4.8e12) == moved / 4.8e12 == pytest.approx(0.113e-6, rel=0.01)
    assert kernel.seconds(989e12, 9.6e12) == flops / 989e12 == pytest.approx(0.0763e-6, rel=0.01)


def test_roofline_of_the_other_layers_by_hand():
    shape = torch.Size((8, 64, 16, 16))
    size = 8 * 64 * 16 * 16
    for fusion, batch_norm, relu, addition in (("unfused", 8, 5, 6), ("fused", 8, 0, 4), ("ideal", 0, 0, 3)):
        assert count(nn.BatchNorm2d(64), shape, shape, fusion)["x"] == (0, 2 * batch_norm * size)
        assert count(nn.ReLU(), shape, shape, fusion)["x"] == (0, 2 * relu * size)
        block = nn.Identity()
        block.downsample = None
        assert count(block, shape, shape, fusion)["x addition"] == (0, 2 * addition * size)
    # 2 bytes read, 2 and 8 written, forward; the same backward, the other way round.
    pooled = torch.Size((8, 64, 8, 8))
    assert count(nn.MaxPool2d(2), shape, pooled, "fused")["x"] == (0, 2 * (2 * size + 10 * size / 4))
    assert count(nn.Linear(64, 10), torch.Size((8, 64)), torch.Size((8, 10)), "fused")["x input"] == (
        2 * 8 * 64 * 10,
        2 * (8 * 64 + 8 * 10 + 64 * 10),
    )


def test_operations_are_those_that_torch_counts():
    kernels = roofline.list_kernels("tiny", "imagenet", 2, "fused")
    assert sum(kernel.flops for kernel in kernels) == roofline.count_flops("tiny", "imagenet", 2) > 1e6


def test_roofline_of_resnet152_is_what_the_module_says():
    rates = roofline.predict("resnet152", "imagenet", 1024, H200)
    assert [round(rates[fusion], -3) for fusion in roofline.PASSES] == [191_000, 243_000, 343_000]
    kernels = roofline.list_kernels("resnet152", "imagenet", 1024, "unfused")
    moved = sum(kernel.bytes for kernel in kernels)
    assert moved / 1024 == pytest.approx(22.6e6, rel=0.005)
    assert 1024 * H200[1] / moved == pytest.approx(211_000, rel=0.01)
    # 1.4 GFLOP an image: three times the forward pass's 0.235 GMAC, less the first layer's gradient.
    assert sum(kernel.flops for kernel in kernels) / 1024 == pytest.approx(6 * 0.235e9, rel=0.01)


def test_a_data_sheet_belongs_to_one_board():
    assert roofline.find_sheet("NVIDIA H200") == H200
    assert roofline.find_sheet("NVIDIA H100 80GB HBM3") == (989e12, 3.35e12)
    assert roofline.find_sheet("NVIDIA H100 PCIe") is roofline.find_sheet("NVIDIA A100-SXM4-80GB") is None


def train_plainly(setup, pool, steps):
    """Trains in five lines of PyTorch, with which every arm has to agree."""
    model, losses = setup.build(), []
    optimizer = torch.optim.SGD(model.parameters(), LR, **SGD)
    for index in range(steps):
        images, labels = pool[index % len(pool)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(setup.normalize(images)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def assert_trains_alike(training, pool, setup=EXACT):
    losses = []
    training.run([(training.prepare(images), labels) for images, labels in pool], 3, losses=losses)
    expected, model = train_plainly(setup, pool, 3)
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, own), plain in zip(training.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(own.grad, plain.grad, rtol=1e-3, atol=1e-5) if own.grad is not None else None
    for own, plain in zip(training.model.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5)


def pretend_timm(monkeypatch):
    """Stands in for timm, which is not in the lock, as far as our loop uses it: networks and the optimizer."""
    timm, optim = types.ModuleType("timm"), types.ModuleType("timm.optim")
    timm.is_model = lambda name: name == "resnet18"
    timm.create_model = lambda name, num_classes: replace(EXACT, net=name).build()
    optim.create_optimizer_v2 = lambda model, opt, **more: {"momentum": torch.optim.SGD}[opt](
        model.parameters(), **more
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.optim", optim)


@pytest.mark.parametrize("name", [*OURS, *PEERS, "reference"])
def test_an_arm_trains_as_five_plain_lines(name, monkeypatch):
    if name.startswith("Lightning"):
        assert PEERS[name].package == "lightning"  # needs an environment of its own: the test below
        return
    pretend_timm(monkeypatch)
    monkeypatch.setattr(arms, "capture_step", lambda step, batch, drop: step)
    arm, pool = worker.ARMS[name], make_pool(16, CPU)[:2]
    make = arm.make
    if "mode" in make.keywords if isinstance(make, partial) else False:
        make = partial(make, mode=None)  # modes are inductor's alone
    if isinstance(make, partial) and make.keywords.get("weights"):
        training = make(EXACT)
        assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16, torch.float32}
        assert training.model[1].weight.dtype == torch.float32
        make = partial(make, weights=torch.float32)
    if isinstance(make, partial) and "amp" in make.keywords:
        make = partial(make, amp=False)
    training = make(EXACT)
    if arm.graph:
        training.capture(pool[0])
    assert_trains_alike(training, pool)


def test_blocks_are_compiled_one_by_one(monkeypatch):
    setup = replace(EXACT, net="resnet18")
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((type(self).__name__, options)))
    training = make_training(setup, compiled="blocks")
    assert compiled == [("BasicBlock", {"backend": "eager", "dynamic": False})] * 8
    assert torch._dynamo.config.recompile_limit == 64
    pretend_timm(monkeypatch)
    theirs = peers.make_timm(replace(setup, stem="cifar"), amp=False, channels_last=True)
    assert theirs.model.conv1.kernel_size == (3, 3) and isinstance(theirs.model.maxpool, nn.Identity)
    for model in (training.model, theirs.model):
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.ndim == 4)


def test_lightning_trains_as_five_plain_lines(lightning):
    code = """
import torch
from test_gpu_speed import CPU, EXACT, assert_trains_alike, make_pool, peers
training = peers.make_lightning(EXACT, precision="32-true")
pool = make_pool(16, CPU)[:2]
assert_trains_alike(training, pool)
marks = []
training.run([(training.prepare(images), labels) for images, labels in pool], 3, marks.append)
print(marks, len(training.optimizer.state))
"""
    folder = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{folder}:{folder.parent}"}
    run = subprocess.run([lightning, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert run.stdout.strip().endswith("[0, 1, 2, 3] 11"), run.stdout + run.stderr


def test_reset_starts_anew():
    pool = make_pool(16, CPU)[:2]
    training, first, again = make_training(EXACT), [], []
    training.run(pool, 3, losses=first)
    training.reset()
    training.run(pool, 3, losses=again)
    assert again == first
    training.set_lr(0.0)
    assert training.optimizer.param_groups[0]["lr"].item() == 0


def test_a_pool_is_random_and_permuted_alike():
    (images, labels), *_ = make_pool(64, CPU)
    assert images.dtype == torch.uint8 and images.shape == (64, 3, 32, 32)
    assert 120 < images.float().mean() < 135 and 60 < images.float().std() < 90
    assert set(labels.tolist()) == set(range(10))
    for (images, labels), (others, other) in zip(make_pool(64, CPU), make_pool(64, CPU, permuted=True), strict=True):
        assert not images.equal(others)
        pairs = {image.numpy().tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
        assert pairs == {image.numpy().tobytes(): int(label) for image, label in zip(others, other, strict=True)}


class PretendCuda:
    """Notes what a capture calls, in order; a replay runs nothing."""

    def __init__(self, monkeypatch):
        self.calls = []
        stream = types.SimpleNamespace
        self.main = stream(name="main", wait_stream=lambda other: self.calls.append(f"main waits for {other.name}"))
        self.side = stream(name="side", wait_stream=lambda other: self.calls.append(f"side waits for {other.name}"))
        graph = types.SimpleNamespace(replay=lambda: self.calls.append("replay"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.main)
        monkeypatch.setattr(torch.cuda, "stream", lambda one: self.note(f"on {one.name}"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda _, stream: self.note(f"capture on {stream.name}"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.calls.append("reset peak"))

    @contextlib.contextmanager
    def note(self, words):
        self.calls.append(words)
        yield
        self.calls.append(f"end of {words}")


def test_a_capture_warms_up_on_a_side_stream(monkeypatch):
    cuda = PretendCuda(monkeypatch)
    seen = []

    def step(images, labels):
        cuda.calls.append("step")
        seen.append(images)
        return torch.zeros(())

    batch = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    replay = arms.capture_step(step, batch, lambda: cuda.calls.append("drop gradients"))
    assert cuda.calls == [
        *("side waits for main", "on side", "step", "step", "step", "end of on side", "main waits for side"),
        *("drop gradients", "reset peak", "capture on side", "step", "end of capture on side"),
    ]
    replay(torch.full((2,), 7, dtype=torch.uint8), torch.ones(2, dtype=torch.int64))
    assert cuda.calls[-1] == "replay" and len(seen) == 4
    # The captured step reads what was copied there, and not the batch that it was captured with.
    assert seen[-1].tolist() == [7, 7] and batch[0].tolist() == [0, 0]


def freeze(setup):
    training = make_training(setup)
    for module in training.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return training


class Slower(Training):
    def set_lr(self, lr):
        super().set_lr(0.9 * lr)


def slow_down(setup):
    plain = make_training(setup)
    return Slower(plain.model, plain.optimizer, plain.step)


def forget_momentum(setup):
    training = make_training(setup)
    training.optimizer.param_groups[0]["momentum"] = 0.0
    return training


def skip_half(setup):
    plain = make_training(setup)
    return Training(plain.model, plain.optimizer, lambda images, labels: plain.step(images[::2], labels[::2]))


WRONG = {"lr": slow_down, "momentum": forget_momentum, "batch norm": freeze, "half a batch": skip_half}


@pytest.fixture
def inline(monkeypatch):
    """Makes workers answer in this process, one for each arm as on a GPU; returns them by arm."""
    hosts = {}

    class Inline:
        def __init__(self, setup):
            self.worker, self.answers = Worker(setup), []
            self.process = types.SimpleNamespace(exitcode=None)

        def ask(self, name, **arguments):
            hosts[arguments["arm"]] = self
            self.answers.append(worker.answer(self.worker, name, arguments))

        def finish(self, seconds):
            return self.answers.pop(0) if seconds > 0 else {"error": "no time was left", "late": True}

    monkeypatch.setattr(speed, "Host", Inline)
    monkeypatch.setattr(speed, "close_all", lambda hosts: None)
    # So steep that a tiny network, too, learns enough in 30 steps.
    monkeypatch.setattr(worker, "CURVE_LR", 0.02)
    return hosts


def rehearse(out, *arguments):
    return speed.main(["--out", str(out), "--dry", *arguments])


def read_rows(out):
    return {(one["group"], one["arm"]): one for one in json.loads(out.read_text())["measurements"]}


@pytest.mark.parametrize("wrong", ["", "momentum"])
def test_an_arm_with_other_losses_is_not_timed(wrong, inline, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "DRY", replace(speed.DRY, curve=30))
    monkeypatch.setitem(worker.ARMS, "eager", Arm(WRONG.get(wrong, make_training)))
    out = tmp_path / "speed.json"
    assert rehearse(out, "--arms", "eager", "examples AMP") == 0
    row, peer = (read_rows(out)["eager", arm] for arm in ("eager", "examples AMP"))
    curve = json.loads(out.read_text())["curves"]["imagenet/8"]
    assert len(curve["losses"]) == 30 and curve["noise"] < 1e-3
    assert len(peer["seconds"]) == ROUNDS and peer["fidelity"] is None
    if wrong:
        assert row["status"].startswith("refused: its losses are off by") and not row["seconds"]
        assert row["fidelity"] > 0.02
    else:
        assert row["status"] == "" and len(row["seconds"]) == ROUNDS and 0 < row["fidelity"] < 0.02


def test_what_is_wrong_shows_in_the_losses(inline, monkeypatch):
    makers = {"reference": arms.make_reference, "right": make_training, **WRONG}
    del makers["momentum"]  # above
    curves = {}
    for name, make in makers.items():
        monkeypatch.setitem(worker.ARMS, name, Arm(make))
        one = Worker(EXACT)
        one.build(name, 8)
        curves[name] = one.warm(name, 1, 30)["losses"]
    off = {name: speed.find_deviation(losses, curves["reference"]) for name, losses in curves.items()}
    assert off["reference"] == 0 and off["right"] < 1e-3
    assert min(off[name] for name in WRONG if name in off) > 2 * speed.LIMIT, off


def test_deviation_is_the_largest_of_all_steps():
    assert speed.find_deviation([1.0, 2.1, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.05)
    for losses in ([1.0], [1.0, math.nan], []):
        assert speed.find_deviation(losses, [1.0, 2.0]) == math.inf
    assert speed.find_deviation([], []) == math.inf


def test_it_goes_on_where_it_stopped(inline, monkeypatch, tmp_path, capsys):
    out, some = tmp_path / "deep" / "speed.json", ("--arms", "eager", "examples fp32")
    assert rehearse(out, *some, "--seconds", "1") == TIME_IS_UP
    assert json.loads(out.read_text())["missing"] == [["imagenet", 8, "eager"], ["imagenet", 8, "rest"]]
    assert not inline
    # The time is up in the second group: the first stays.
    take = speed.Session._take_turns

    def take_until_rest(self, group, *more):
        if group.name == "rest":
            self.end = 0.0
        take(self, group, *more)

    monkeypatch.setattr(speed.Session, "_take_turns", take_until_rest)
    assert rehearse(out, *some) == TIME_IS_UP
    before = read_rows(out)
    assert len(before["eager", "eager"]["seconds"]) == ROUNDS and not before["rest", "examples fp32"]["seconds"]
    assert "1 of 2 groups are missing: call again" in capsys.readouterr().out
    monkeypatch.setattr(speed.Session, "_take_turns", take)
    assert rehearse(out, *some) == 0
    after = read_rows(out)
    assert after["eager", "eager"] == before["eager", "eager"]
    assert len(after["rest", "examples fp32"]["seconds"]) == ROUNDS == len(after["rest", "eager"]["seconds"])
    assert list(json.loads(out.read_text())["curves"]) == ["imagenet/8"]
    # Nothing is left to do; other code begins anew, and what was there stays beside it.
    inline.clear()
    assert rehearse(out, *some) == 0 and not inline and read_rows(out) == after
    monkeypatch.setattr(speed, "make_key", lambda *more: {"net": "tiny", "machine": "another"})
    assert rehearse(out, *some, "--seconds", "1") == TIME_IS_UP
    assert not read_rows(out) and read_rows(out.with_suffix(".old.json")) == after


def test_an_arm_that_fails_leaves_the_others(inline, monkeypatch, tmp_path):
    def fail(setup):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def fail_late(setup):
        training = make_training(setup)
        run = training.run

        def run_or_fail(batches, count, mark=None, losses=None):
            if mark is not None:  # only while it is timed
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            run(batches, count, losses=losses)

        training.run = run_or_fail
        return training

    monkeypatch.setitem(worker.ARMS, "torchvision AMP fp16", Arm(fail, ours=False))
    monkeypatch.setitem(worker.ARMS, "eager", Arm(fail_late))
    out = tmp_path / "speed.json"
    assert rehearse(out, "--arms", "eager", "torchvision AMP fp16", "examples AMP") == 0
    rows = read_rows(out)
    assert rows["eager", "torchvision AMP fp16"]["status"] == "out of memory"
    assert (
        rows["eager", "eager"]["status"].startswith("RuntimeError: CUDA error")
        and not rows["eager", "eager"]["seconds"]
    )
    assert len(rows["eager", "examples AMP"]["seconds"]) == ROUNDS
    assert "eager" not in inline["eager"].worker.running  # its memory is free


def test_a_process_that_dies_says_so():
    host = worker.Host(EXACT)
    host.ask("time", arm="eager", lead=0, count=1)
    assert host.finish(60)["error"] == "KeyError: 'eager'"
    assert host.finish(0.01)["late"]
    host.process.kill()
    host.process.join()
    host.ask("drop", arm="eager")
    assert host.finish(60) == {"error": "its process ended with status -9"}
    worker.close_all([host])


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(speed.machine, "device", lambda: CPU)
    with pytest.raises(LabError, match="--dry"):
        speed.main(["--out", str(tmp_path / "speed.json")])


def test_the_plan_begins_with_what_the_goals_need():
    plan = speed.list_plan("", (), (), False)
    assert [(group.stem, group.batch, group.name) for group in plan[:4]] == [
        *(("imagenet", 1024, "eager"), ("imagenet", 128, "eager")),
        *(("imagenet", 1024, "compiled"), ("imagenet", 128, "compiled")),
    ]
    assert {group.batch for group in plan if group.stem == "imagenet"} == {128, 512, 1024, 4096}
    assert {arm for group in plan for arm in group.arms} == {*OURS, *PEERS}
    assert {group.stem for group in plan} == {"imagenet", "cifar"}
    some = speed.list_plan("cifar", (128,), ("graph", "timm compiled"), False)
    assert [(group.stem, group.batch, group.arms) for group in some] == [
        ("cifar", 128, ("graph",)),
        ("cifar", 128, ("timm compiled",)),
    ]
    assert speed.Scale().count_steps(0.002) == 200 and speed.Scale().count_steps(1.0) == 5


def make_result(**rates):
    """A result with images per second by group and arm; ``eager_128={"graph": 5000}``."""
    rows = []
    for place, arms_of in rates.items():
        group, batch = place.split("_")
        for arm, rate in arms_of.items():
            seconds = [int(batch) / rate * factor for factor in (1.0, 0.98, 1.03, 1.0, 1.0, 1.01)]
            row = {"stem": "imagenet", "batch": int(batch), "group": group, "arm": arm, "seconds": seconds}
            rows.append(row | {"status": "", "peak_bytes": 2**32, "fidelity": 0.004 if arm in OURS else None})
    sheet = {"1024": {"fused": 200_000.0, "unfused": 150_000.0}, "128": {"fused": 120_000.0}}
    key = {"net": "resnet152", "machine": "NVIDIA H200", "rounds": 6}
    return {"key": key, "measurements": rows, "roofline": {"imagenet": sheet}}


def test_goals_are_judged_both_ways():
    peers_of = {"timm AMP": 5_000, "examples AMP": 4_000}
    good = make_result(
        eager_128={"graph": 20_000, "eager": 6_000} | peers_of,
        eager_1024={"graph": 70_000, "timm AMP": 40_000},
        compiled_1024={"regional graph": 111_000, "timm compiled": 100_000, "timm AMP": 40_000},
    )
    claims = {claim.text: claim for claim in speed_report.judge(good)}
    holds = [claim.holds for claim in claims.values()]
    assert holds == [True, None, None, True, True]
    first, _, _, fourth, share = claims.values()
    # Eager against eager: our graph is no argument there.
    assert first.measured == "1.20 (1.20 to 1.20, n = 6); eager 6,000 against timm AMP 5,000 images/s"
    assert fourth.measured.startswith(
        "1.11 (1.11 to 1.11, n = 6); regional graph 111,000 against timm compiled 100,000"
    )
    assert share.measured == "56% (regional graph 111,000 of 200,000 images/s)"
    poor = make_result(
        eager_128={"eager": 4_900, "graph": 19_900} | peers_of,
        eager_1024={"graph": 70_000, "timm AMP": 40_000},
        compiled_128={"compiled": 50_000, "timm compiled": 49_000},
        compiled_1024={"compiled": 100_000, "timm compiled": 101_000},
    )
    assert [claim.holds for claim in speed_report.judge(poor)] == [True, None, False, False, False]
    # An arm with fewer rounds than the others is none.
    poor["measurements"][0]["seconds"].pop()
    assert speed_report.judge(poor)[0].holds is None
    # A result of before, in five rounds: they are too few to tell.
    for row in poor["measurements"]:
        row["seconds"] = row["seconds"][:5]
    poor["key"].pop("rounds")
    claim = speed_report.judge(poor)[0]
    assert claim.measured.startswith("too few rounds to tell (n = 5); eager 4,900") and claim.holds is None
    assert [claim.holds for claim in speed_report.judge({"measurements": []})] == [None] * 5


def test_the_page_gets_what_was_measured_and_what_was_not(tmp_path):
    result = make_result(eager_1024={"eager": 21_000, "graph": 70_000, "timm AMP": 20_000})
    top = [
        {"name": "batch_norm_collect", "share": 0.4},
        {"name": "sm90_xmma", "share": 0.1},
        {"name": "x", "share": 0.2},
    ]
    profile = {"stem": "imagenet", "batch": 1024, "arm": "graph", "top": top, "milliseconds": 15.49, "calls": 2503.0}
    result |= {
        "profiles": [profile, {"stem": "imagenet", "error": "out of memory"}],
        "when": "2026-12-01T10:00:00+00:00",
        "machine": {"label": "NVIDIA H200"},
    }
    result["measurements"][2]["finite"] = False
    result["key"] |= {"versions": {"torch": "2.11.0"}}
    (tmp_path / "data" / "reference").mkdir(parents=True)
    (tmp_path / "data" / "reference" / "gpu_speed.json").write_text(json.dumps(result))
    page = tmp_path / PAGE
    page.parent.mkdir()
    page.write_text("# Labs\n<!-- BEGIN: make gpu -->\nof before\n<!-- END: make gpu -->\n")
    for _ in range(2):
        speed_report.keep(tmp_path)
    text = page.read_text()
    assert "of before" not in text and text.count("on 01 December 2026; NVIDIA H200, torch 2.11.0.") == 1
    assert "batch 1,024 | 1.05 (1.05 to 1.05, n = 6); eager 21,000 against timm AMP 20,000 images/s |  |" in text
    assert "| 35% (graph 70,000 of 200,000 images/s) | at least 55%: **not kept** |" in text
    assert "| ours: graph | 70,000 ± 2.5% |" in text
    assert "| timm AMP (its loss was not finite) | 20,000 ± 2.5% |" in text
    assert "one step of graph at batch 1,024 runs 2,503 kernels in 15.5 ms. The 3 most" in text
    assert "account for 70% of that (rounded): batch normalisation 40%, others 20%, convolutions 10%." in text
    assert "Not measured yet: ours, eager, against the best eager AMP peer, batch 128; ours, graph or compiled," in text


def test_table_and_figure(tmp_path):
    result = make_result(
        eager_128={"graph": 20_000, "timm AMP": 5_000}, eager_1024={"graph": 70_000}, rest_1024={"timm fp32": 30_000}
    )
    assert speed_report.write_table(result).splitlines() == [
        "| images/s at batch | 128 | 1,024 | peak memory | losses off by |",
        "| --- | --: | --: | --: | --: |",
        "| ours: graph | 20,000 ± 2.5% | 70,000 ± 2.5% | 4.0 GiB | 0.40% |",
        "| timm AMP | 5,000 ± 2.5% |  | 4.0 GiB |  |",
        "| timm fp32 |  | 30,000 ± 2.5% | 4.0 GiB |  |",
        "| computed roofline | 120,000 | 200,000 |  |  |",
    ]
    ax = speed_report.draw(result)
    labels = ax.get_legend_handles_labels()[1]
    assert set(labels) == {"ours: graph", "timm AMP", "timm fp32", "roofline, fused"}
    heights = sorted(bar.get_height() for bar in ax.patches)
    assert heights == pytest.approx([5_000, 20_000, 30_000, 70_000])
    grey = {bar.get_facecolor()[:3] for bar in ax.patches if bar.get_height() in (heights[0], heights[2])}
    assert all(max(colour) - min(colour) < 0.02 for colour in grey)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["128", "1,024"]
    ax.figure.savefig(tmp_path / "speed.svg")
    assert asdict(speed_report.judge(result)[4])["holds"] is False
