"""The benchmark of ``make gpu``: its arithmetic on a CPU, arms that train alike, and goals judged both ways."""

import json
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.gpu import TIME_IS_UP, report, roofline, speed
from benchmarks.gpu.arms import ARMS, LR, REFERENCE, SGD, Arm, Setup, make_ours
from lab_common import LabError

CPU = torch.device("cpu")
EXACT = Setup("tiny", "imagenet", CPU)
H200 = roofline.SHEETS["H200"]


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
    reference = speed.Host(REFERENCE, EXACT, 8, speed.DRY)
    assert len(reference.receive(speed.time.monotonic() + 120)["losses"]) == speed.DRY["curve"]
    reference.close()
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
    eager, *others, share = report.judge(good)
    assert eager.measured == "1.20 (1.20 to 1.20, n = 6); eager 6,000 against timm AMP channels_last 5,000 images/s"
    assert not any("graph" in claim.text for claim in others), "no peer is a graph"
    assert share.measured == "60% (graph 120,000 of 200,000 images/s)" and share.holds
    poor = make_result((1024, {"eager": 4_900, "timm AMP channels_last": 5_000}))
    assert report.judge(poor)[0].measured.startswith("0.98") and report.judge(poor)[-1].holds is False
    for row in poor["measurements"]:
        row["seconds"] = row["seconds"][:5]
    assert not report.judge(poor)[0].measured, "an arm with fewer rounds than the others is none"
    del poor["key"]["rounds"]  # a result of before, in five rounds: they are too few to tell
    assert report.judge(poor)[0].measured.startswith("too few rounds to tell (n = 5)")


def test_the_pages_block_is_that_of_the_record(root):
    record = json.loads((root / "data" / "reference" / "gpu_speed.json").read_text())
    assert report.write_report(record) in (root / "docs" / "performance.md").read_text()
