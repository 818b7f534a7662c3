"""Tests of ``lab_utils.timing`` on a GPU: when it waits, what it counts, and what happens without memory."""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch
from torch import nn

from lab_utils import timing
from lab_utils.timing.timeline import Timeline

pytestmark = pytest.mark.gpu


def take(gpu, size):
    """Allocates this many bytes on the device."""
    return torch.empty(size, dtype=torch.uint8, device=gpu.device)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_synchronize_waits_for_the_device(gpu, name):
    start = time.perf_counter()
    gpu.launch(0.02)
    timing.synchronize(name)
    assert time.perf_counter() - start >= gpu.least(0.02)


def test_for_a_cpu_synchronize_does_nothing(gpu):
    timing.synchronize("cpu")
    assert ("synchronize",) not in gpu.calls


def test_a_steps_seconds_are_those_of_its_work(gpu):
    queued = []

    def step():
        start = time.perf_counter()
        gpu.launch(0.02)
        queued.append(time.perf_counter() - start)

    one = timing.measure(step, repeats=4, warmup=1, device=gpu.device)
    assert min(one.seconds) >= gpu.least(0.02)
    assert min(queued) < 0.01, "the work was done at once: the test proves nothing"


def test_work_that_was_queued_before_does_not_count(gpu):
    seconds = []
    for _ in range(3):
        gpu.launch(0.05)
        seconds += timing.measure(lambda: None, repeats=1, warmup=0, device=gpu.device).seconds
    assert min(seconds) < gpu.least(0.05) / 2


def test_each_set_up_has_its_own_peak_memory(gpu):
    held = take(gpu, 2**20)
    sizes = {"large": 2**23, "small": 2**21}
    steps = {name: lambda size=size: take(gpu, size) for name, size in sizes.items()}
    large, small = timing.interleave(steps, repeats=2, warmup=1, device=gpu.device)
    assert large.peak_bytes - small.peak_bytes == 2**23 - 2**21
    assert small.peak_bytes == torch.cuda.memory_allocated() + 2**21 >= held.nbytes + 2**21
    assert (large.device, large.out_of_memory) == ("cuda:0", False)


def test_a_set_up_without_memory_has_no_seconds_and_the_next_goes_on(gpu):
    """Its memory is freed, and it is not tried again."""
    tried = []

    def huge():
        tried.append(take(gpu, 2**20).nbytes)
        held = take(gpu, 2**20)
        return held, take(gpu, 2**47)

    gc.collect()  # or what earlier tests left would be freed meanwhile
    before = torch.cuda.memory_allocated()
    steps = {"huge": huge, "fits": lambda: take(gpu, 2**20)}
    lost, fits = timing.interleave(steps, repeats=3, warmup=1, device=gpu.device)
    assert lost.out_of_memory and math.isnan(lost.median) and lost.peak_bytes is None
    assert len(fits.seconds) == 3 and fits.peak_bytes == before + 2**20
    assert len(tried) == 1
    assert torch.cuda.memory_allocated() == before, "the exception still holds the frames of the step"
    assert ("empty_cache",) in gpu.calls


def test_a_convolution_without_room_is_a_lack_of_memory(real_gpu, record_property):
    """Whichever library complains: the output may fit while the workspace or the input's gradients do not."""
    net, whole = nn.Conv2d(64, 64, 3, padding=1).to(real_gpu), torch.cuda.get_device_properties(real_gpu).total_memory
    images = torch.randn(2**11, 64, 32, 32, device=real_gpu, requires_grad=True)
    said = []

    def step():
        try:
            net(images).sum().backward()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}"[:300])
            raise

    for spare in (2**16, 2**22, 2**26):
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + images.nbytes + spare
        torch.cuda.set_per_process_memory_fraction(limit / whole)
        try:
            assert timing.measure(step, repeats=1, warmup=0, device=real_gpu).out_of_memory, said
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    record_property("said", " | ".join(said))
    assert len(said) == 3
    assert not timing.measure(step, repeats=1, device=real_gpu).out_of_memory


def test_among_ranks_a_lack_of_memory_is_an_error(gpu, group):
    """Otherwise the other ranks would wait for the rank that skips its step."""
    with pytest.raises(torch.OutOfMemoryError):
        timing.interleave({"huge": lambda: take(gpu, 2**47)}, repeats=1, warmup=0, device=gpu.device)


def test_a_phase_of_a_timeline_is_as_long_as_its_work(gpu):
    timeline = Timeline(gpu.device)
    for name, seconds in (("forward", 0.02), ("backward", 0.04)):
        timeline.begin()
        gpu.launch(seconds)
        timeline.end(name)
    forward, backward = timeline.as_rows()
    assert forward["end"] - forward["start"] >= gpu.least(0.02)
    assert backward["end"] - backward["start"] >= gpu.least(0.04)
    assert forward["end"] <= backward["start"]
