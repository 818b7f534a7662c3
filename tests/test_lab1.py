"""Parts of lab 1 that this machine does not reach by itself: a GPU's remedies and a lesser CPU."""

from functools import partial

import pytest
import torch
from matplotlib import pyplot as plt

from lab_utils import models

pytestmark = pytest.mark.usefixtures("runs")
STEP = ("baseline", "amp-step", "setups", "steps")


@pytest.fixture
def run_cells(run_cells_of):
    yield partial(run_cells_of, "01_mixed_precision")
    plt.close("all")


@pytest.fixture
def small_nets(monkeypatch):
    build = models.build
    monkeypatch.setattr(models, "build", lambda net, **more: build("tiny" if net == "resnet18" else net, **more))


def test_a_cpu_without_fast_bf16_gets_the_whole_lab_on_a_smaller_net(run_cells, small_nets, monkeypatch, capsys):
    """More than one batch, both stems, a warm-up, three rounds and both precisions in turn."""
    monkeypatch.setattr("lab_utils.machine.has_fast_bf16", lambda _: False)
    names = run_cells(*STEP, "sweep", "speed-up", "throughput-figure", "record-graph", "fixes")
    assert names["NET"] == "resnet18" and list(names["throughput"]) == ["imagenet", "cifar"]
    for timings in names["throughput"].values():
        assert len({t.images for t in timings}) > 1 and {t.name for t in timings} == {"fp32", "bf16"}
        assert all(len(t.seconds) >= 3 and t.warmup == 1 for t in timings)
    assert {t.name for t in names["fixes"]} == {
        f"{name}{how}" for name in ("fp32", "bf16") for how in ("", ", channels last")
    }
    out = capsys.readouterr().out
    assert out.count("speed-up ") >= 4


def test_a_remedy_that_does_not_run_here_is_named_and_left_out(run_cells, capsys):
    attempt = run_cells("record-graph")["attempt"]
    steps = []
    assert attempt("good", "bf16", lambda: {"bf16": lambda: steps.append(1)}).keys() == {"good"}
    assert len(steps) == 2, "the second step has the momentum"

    def fail():
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    assert attempt("bad", "bf16", lambda: {"bf16": fail}) == {}

    def refuse(step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert attempt("graph", "bf16", lambda: {"bf16": lambda: None}, refuse) == {}
    out = capsys.readouterr().out
    assert "good runs here" in out and "bad does not run here: GET was unable" in out
    assert "graph does not run here: CUDA out of memory" in out


def test_blocks_that_are_compiled_train_as_those_that_are_not(run_cells, monkeypatch):
    """The path of a GPU, with a backend that compiles nothing; the plain blocks of layer3 are compiled once."""
    seen = []
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **how: (seen.append(how), compile_block(self, backend="eager", **how)),
    )
    monkeypatch.setattr("lab_utils.machine.has_fast_bf16", lambda _: False)
    names = run_cells(*STEP)
    for name, step in names["make_steps"]("imagenet", 4, compiled=True).items():
        step()
        assert name in ("fp32", "bf16")
    assert seen == [{"dynamic": False}] * 2, "resnet18's layer3 has two blocks, and their shapes differ"


def test_tf32_is_what_a_gpu_does_by_default(run_cells):
    """Convolutions in TF32, matrix products in float32."""
    names = run_cells(*STEP)
    seen = []

    def note(*batch):
        seen.append((torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision))

    names["run_step"].__globals__["fp32_step"] = note
    for precision in ("tf32", "ieee"):
        names["run_step"]((), precision, None, None)
    assert seen == [("tf32", "ieee"), ("ieee", "ieee")]
