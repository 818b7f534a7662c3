"""The lines of labs 0 and 1 that are for a GPU, taken out of the notebooks: precisions, scaler, graph."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from lab_utils import machine, timing

pytestmark = pytest.mark.gpu
LAB0, LAB1 = "00_start_here", "01_mixed_precision"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def lab1(define):
    """Lab 1's steps, with a small network in the place of ResNet-152."""

    def build(name, **options):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 10))

    names = {"torch": torch, "F": F, "GradScaler": GradScaler, "partial": partial, "timing": timing}
    names |= {"NET": "small", "ON_GPU": True, "DEVICE": torch.device("cuda", 0)}
    names |= {"models": type("models", (), {"build": staticmethod(build)})}
    names["PRECISIONS"] = {"fp32": ("ieee", None), "tf32": ("tf32", None)}
    names["PRECISIONS"] |= {name: ("ieee", dtype) for name, dtype in LOW.items()}
    cells = ("baseline", "amp-step", "clipped-step", "setups", "steps", "count-calls", "record-graph")
    return define(LAB1, *cells, **names)


def make_batch(device, size=4):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    images, labels = torch.randn(size, 3, 2, 2).to(device), (torch.arange(size) % 3).to(device)
    return net, images, labels, SGD(net.parameters(), lr=0.1)


def find_autocasts(gpu):
    return [details for name, *details in gpu.calls if name == "autocast"]


# Lab 0.


def test_lab_0_measures_products_and_copies_on_the_device(gpu, define):
    found = define(LAB0, "devices", torch=torch, timing=timing)
    here = torch.ones(2**12)
    there = here.to(gpu.device)
    gpu.calls.clear()
    assert found["measure_product"](gpu.device, 64)["GFLOP/s"] > 0
    assert found["measure_product"](gpu.device, 64, torch.bfloat16)["GFLOP/s"] > 0
    assert found["measure_copy"](there, there.clone())["GB/s"] > 0
    assert not [name for name, *_ in gpu.calls if name == "copy"], "all of that stays on the device"
    assert found["measure_copy"](here.pin_memory(), there, 1)["GB/s"] > 0
    copies = [details for name, *details in gpu.calls if name == "copy"]
    assert len(copies) == 13 and {tuple(one[:2]) for one in copies} == {("cuda", True)}


def test_lab_0s_naive_timer_is_fooled_and_the_solution_is_not(gpu, define):
    found = define(LAB0, "naive", "exercise-time", time=time)
    wait = partial(timing.synchronize, gpu.device)
    naive = found["time_naively"](partial(gpu.launch, 0.02), wait, repeats=3, warmup=0)
    wait()
    honest = found["time_step"](partial(gpu.launch, 0.02), wait, repeats=3, warmup=1)
    assert min(naive) < 0.01 < gpu.least(0.02) <= min(honest)


# Lab 1: what it chooses, and its steps.


@pytest.mark.parametrize(("capability", "names"), [((8, 6), "fp32 tf32 bf16 fp16"), ((7, 5), "fp32 fp16")])
def test_lab_1_chooses_precisions_by_the_gpu(gpu, define, monkeypatch, capability, names):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    given = {"torch": torch, "machine": machine, "DEVICE": gpu.device, "SCALE": "full"}
    found = define(LAB1, "setups", whole=True, **given)
    assert [*found["PRECISIONS"]] == names.split()
    assert found["BATCHES"]["imagenet"][-1] == 4096 and found["NET"] == "resnet152"


@pytest.mark.parametrize("name", LOW)
def test_an_amp_step_casts_on_the_gpu_and_keeps_gradients_in_fp32(gpu, lab1, name):
    batch = make_batch(gpu.device)
    model, before = batch[0], batch[0][1].weight.detach().clone()
    scaler = GradScaler("cuda", 1024.0, enabled=name == "fp16")
    assert scaler.is_enabled() is (name == "fp16")
    gpu.calls.clear()
    loss, logits = lab1["amp_step"](*batch, scaler, LOW[name])
    assert find_autocasts(gpu) == [["cuda", LOW[name], True]]
    assert (logits.dtype, loss.dtype) == (LOW[name], torch.float32)
    assert {one.grad.dtype for one in model.parameters()} == {torch.float32}
    assert {one.device for one in (loss, logits)} == {gpu.device}
    assert not torch.equal(model[1].weight, before), "the step was skipped"


def test_the_norm_that_is_clipped_is_that_of_unscaled_gradients(gpu, lab1):
    norms = []
    for scale in (1.0, 4096.0):
        batch = make_batch(gpu.device)
        scaler = GradScaler("cuda", init_scale=scale)
        norms.append(float(lab1["clipped_amp_step"](*batch, scaler, torch.float16, 1e-3)))
        moved = [one.grad for one in batch[0].parameters()]
        assert torch.stack([one.norm() for one in moved]).norm().item() == pytest.approx(1e-3, rel=0.01)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_set_up_that_does_not_fit_is_told_and_left_out(gpu, define, capsys):
    attempt = define(LAB1, "record-graph", torch=torch)["attempt"]

    def make():
        return {"bf16": partial(torch.empty, 2**47, dtype=torch.uint8, device=gpu.device)}

    assert attempt("batch 9,999", "bf16", make) == {}
    assert "batch 9,999 does not run here: CUDA out of memory" in capsys.readouterr().out
    assert [*attempt("small", "bf16", lambda: {"bf16": partial(torch.empty, 8, device=gpu.device)})] == ["small"]


# CUDA graphs.


def test_a_graph_is_recorded_after_a_warm_up_and_replayed(gpu, lab1):
    """The device is waited for, three steps run on another stream, the next one is captured, and none after it."""
    steps = []

    def step():
        steps.append(torch.cuda.is_current_stream_capturing())
        gpu.launch(0.02)

    gpu.calls.clear()
    replay = lab1["record_graph"](step)
    assert steps == [False, False, False, True]
    names = [name for name, *_ in gpu.calls if name in ("synchronize", "graph begins", "graph ends", "replay")]
    assert names[0] == "synchronize" and names[-2:] == ["graph begins", "graph ends"]
    timing.synchronize(gpu.device)
    one = timing.measure(replay, repeats=2, warmup=0, device=gpu.device)
    assert len(steps) == 4 and ("replay",) in gpu.calls
    assert min(one.seconds) >= gpu.least(0.02), "the replay did nothing"


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_replayed_graph_trains_as_the_step_does(real_gpu, lab1, name):
    weights = []
    for record in (False, True):
        steps = lab1["make_steps"]("imagenet", 8)
        model, *_ = steps[name].args[0]
        step = lab1["record_graph"](steps[name]) if record else steps[name]
        for _ in range(2 if record else 5):  # the warm-up was three, and what is captured is not run
            step()
        torch.cuda.synchronize()
        weights.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    # As lab 1's learning rate is 1e-5, five steps move a weight by less than a thousandth.
    start = torch.cat([one.detach().flatten() for one in lab1["models"].build("").to(real_gpu).parameters()])
    moved = [(one - start).norm() for one in weights]
    assert moved[0] > 0 and (weights[0] - weights[1]).norm() < 0.05 * moved[0]
