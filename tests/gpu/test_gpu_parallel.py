"""``DataParallel`` with one GPU, and the emulation, which takes none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab_utils import models
from lab_utils.parallel import CpuDataParallel

pytestmark = pytest.mark.gpu


def leave_gradients(model, net, images, labels):
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([one.grad.flatten() for one in net.parameters()])


def test_the_emulation_takes_no_gpu_where_there_is_one(gpu):
    net, images, labels = models.build("tiny").double().eval(), torch.randn(6, 3, 32, 32).double(), torch.arange(6)
    twin = copy.deepcopy(net)
    wrapped = CpuDataParallel(net, 3)
    gradients = leave_gradients(wrapped, net, images, labels)
    assert wrapped.device_ids == [0, 1, 2] and gradients.device.type == "cpu"
    assert torch.allclose(gradients, leave_gradients(twin, twin, images, labels), atol=1e-12)
    assert not [name for name, *_ in gpu.calls if name == "copy"]


def test_data_parallel_with_one_gpu_is_one_call(real_gpu, define):
    """Lab 4's first cell: the network is called with the whole batch."""
    names = {"models": models, "torch": torch, "nn": nn, "DEVICE": real_gpu}
    found = define("04_data_parallel", "one-line", whole=True, **names)
    count = torch.cuda.device_count()
    assert found["wrapped"].device_ids == list(range(count))
    assert found["seen"] == [len(chunk) for chunk in torch.empty(8).chunk(count)]


def test_data_parallel_and_the_emulation_leave_the_same_gradients(real_gpu):
    net = models.build("tiny").double().eval().to(real_gpu)
    twin = copy.deepcopy(net).cpu()
    images, labels = torch.randn(7, 3, 32, 32).double(), torch.arange(7)
    count = torch.cuda.device_count()
    torchs = leave_gradients(nn.DataParallel(net), net, images.to(real_gpu), labels.to(real_gpu))
    ours = leave_gradients(CpuDataParallel(twin, count), twin, images, labels)
    assert (torchs.cpu() - ours).abs().max() < 1e-10
