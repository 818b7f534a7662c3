"""The benchmark of ``make gpu`` on a CPU: its roofline, arms that train as plain code does, its report."""

import pytest
import torch
from torch import nn

from benchmarks.gpu import __main__ as speed
from benchmarks.gpu import arms, roofline
from lab_common import LabError
from lab_utils.timing.records import decode

CPU = torch.device("cpu")
H200 = roofline.SHEETS["H200"]


def test_roofline_of_resnet152_is_what_the_module_says():
    assert round(roofline.predict("resnet152", "imagenet", 1024, H200), -3) == 243_000
    kernels = roofline.list_kernels("resnet152", "imagenet", 1024)
    # 1.4 GFLOP an image: three times the forward pass's 0.235 GMAC, less the first layer's gradient.
    assert sum(kernel.flops for kernel in kernels) / 1024 == pytest.approx(6 * 0.235e9, rel=0.01)


def test_a_data_sheet_belongs_to_one_board():
    assert roofline.find_sheet("NVIDIA H200") == H200
    assert roofline.find_sheet("NVIDIA H100 80GB HBM3") == (989e12, 3.35e12)
    assert roofline.find_sheet("NVIDIA H100 PCIe") is roofline.find_sheet("NVIDIA A100-SXM4-80GB") is None


@pytest.mark.parametrize("name", ["reference", "eager", "compiled"])
def test_an_arm_trains_as_five_plain_lines(name, monkeypatch):
    """Without the roundings of autocast, and uncompiled, all arms take the same steps."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    pool = speed.make_pool(16, CPU)
    model, expected = arms.build_model("tiny", "imagenet"), []
    optimizer = torch.optim.SGD(model.parameters(), arms.LR, **arms.SGD)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (arms.MEAN, arms.STD))
    for images, labels in [*pool, *pool]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model((images / 255 - mean) / std), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    where = ("tiny", "imagenet", CPU)
    training = arms.build_reference(*where) if name == "reference" else arms.ARMS[name].build(*where, amp=False)
    assert speed.run_steps(training, pool, 4).tolist() == pytest.approx(expected, rel=1e-4)
    for own, plain in zip(training.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-4)


class Diverging(arms.Arm):
    """An arm that trains with a learning rate 10 times as high."""

    def build(self, *where, **more):
        training = super().build(*where, **more)
        training.optimizer.param_groups[0]["lr"] *= 10
        return training


def test_an_arm_that_trains_otherwise_is_not_timed_and_leaves_the_others(monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 2)
    monkeypatch.setattr(speed, "ARMS", {"eager": arms.Arm(), "again": arms.Arm(), "diverging": Diverging()})
    (eager, again, wrong), profile = speed.measure_batch(8, CPU, net="tiny", steps=1)
    assert eager["off"] == again["off"] < speed.MOST_OFF and len(eager["timing"].seconds) == 2
    assert "timing" not in wrong and wrong["error"].startswith("its losses are off by")
    assert "Self CPU" in profile and "conv" in profile


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(speed.machine, "device", lambda: CPU)
    with pytest.raises(LabError, match="no GPU"):
        speed.main()


def test_the_pages_block_is_that_of_the_record(root):
    record = decode((root / speed.RECORD).read_bytes())
    report = speed.write_report(record)
    assert report in (root / "docs" / "performance.md").read_text()
    assert "| 28% (graph 67,022 of 243,106 images/s) | at least 55%: **not kept** |" in report
    record["rows"][1] = {"arm": "graph", "batch": 1024, "error": "CUDA error"}
    assert "| 1,024 | graph | not measured: CUDA error |" in speed.write_report(record)
