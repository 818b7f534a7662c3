"""Parts of the GPU paths that need no GPU: NCCL's words, capabilities, a scaler's skipped step."""

from types import SimpleNamespace

import pytest
import torch
from harness.answers import load_answer
from torch import nn

from lab_utils import machine
from nodelaunch.failure import look_up
from nodelaunch.node.errors import failed_as_consequence

# In the form of verl-project/verl#161. The last line is NCCL's own, there that of 2.20.5; the other one is in 2.30.7.
NCCL = "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, {}\n{}"
TWO_RANKS = (
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000",
    "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
)
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n{}"


@pytest.mark.parametrize("words", TWO_RANKS)
def test_two_ranks_on_one_gpu_are_a_cause_and_told_in_words(words):
    message = NCCL.format("invalid usage (run with NCCL_DEBUG=WARN for details)", USAGE.format(words))
    assert not failed_as_consequence(message)
    cause, fix = look_up(message)
    assert "same GPU" in cause and "nproc_per_node" in fix


def pretend_gpus(monkeypatch, *capabilities):
    """Makes torch name this many GPUs."""
    properties = [
        SimpleNamespace(name="NVIDIA Pretended", total_memory=2**34, major=major, minor=minor)
        for major, minor in capabilities
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])


@pytest.mark.parametrize(("capability", "units"), [((9, 0), True), ((8, 0), True), ((7, 5), False)])
def test_bf16_is_fast_from_ampere_on(monkeypatch, capability, units):
    pretend_gpus(monkeypatch, capability)
    assert machine.has_fast_bf16(machine.describe()) is units


def test_the_scaler_skips_a_step_whose_gradients_are_infinite(monkeypatch):
    """Lab 1's own step, in float16: the scale is halved, and the step after it is taken where that is low enough."""
    step = load_answer("1.1")
    monkeypatch.setitem(step.__globals__, "DEVICE", torch.device("cpu"))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = net, torch.randn(4, 3, 2, 2), torch.arange(4) % 3, torch.optim.SGD(net.parameters(), lr=0.1)
    weights = [one.detach().clone() for one in net.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    step(*batch, scaler, torch.float16)
    assert scaler.get_scale() == pytest.approx(1.5e38)
    assert all(torch.equal(*pair) for pair in zip(weights, net.parameters(), strict=True))
    scaler.update(256.0)
    step(*batch, scaler, torch.float16)
    assert not torch.equal(weights[0], net[1].weight) and scaler.get_scale() == 256.0
