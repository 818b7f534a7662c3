"""The pretended GPU refuses what a GPU refuses: else what is rehearsed on it would prove nothing."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import CUDA, Pretence
from torch import nn

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda(monkeypatch):
    """A pretended GPU of 1 MiB, on a machine with a GPU, too."""
    with Pretence(total=2**20).installed(monkeypatch) as device:
        yield device


def test_devices_are_not_mixed(cuda):
    net, images = nn.Linear(4, 2).to(CUDA), torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        net(images)
    net(images.to(CUDA)).sum().backward()
    assert net.weight.grad.device == CUDA and (net.weight * torch.tensor(2.0)).device == CUDA
    with pytest.raises(TypeError, match="can't convert"):
        net.weight.detach().numpy()
    assert net.weight.detach().cpu().numpy().shape == (2, 4)


def test_its_memory_is_counted_and_may_run_out(cuda):
    held = torch.empty(2**19, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**19 + 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([held, held])
    assert torch.cuda.memory_allocated() == 2**19
    del held
    assert torch.cuda.memory_allocated() == 0


def test_an_event_is_not_read_before_its_work_is_done(cuda):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    cuda.launch(0.05)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 50


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero])
def test_reading_waits_and_is_found_where_it_may_not(cuda, read):
    number = torch.ones(1, device="cuda")
    with cuda.no_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        read(number)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        read(number)
    read(number)


def test_a_copy_waits_unless_it_is_told_not_to(cuda):
    with cuda.no_waits():
        there = torch.ones(4).pin_memory().to(CUDA, non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(4).to(CUDA)
        with pytest.raises(RuntimeError, match="synchronizing"):
            there.copy_(torch.ones(4))
    copies = [details for name, *details in cuda.calls if name == "copy"]
    assert copies == [["cuda", True, True], ["cuda", False, False], ["cuda", False, False]]
