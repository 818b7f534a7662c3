"""Batches on a GPU: from page-locked memory, without waiting, and the same as on a CPU."""

from __future__ import annotations

import pytest
import torch

from lab_utils.data.batches import Batches

pytestmark = pytest.mark.gpu


def make_batches(device="cpu", *, train=True, count=50, size=16):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 10
    return Batches(images, labels, size, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25), device=device, train=train)


@pytest.mark.parametrize("train", [True, False])
def test_batches_are_on_the_device_and_those_of_a_cpu(gpu, train):
    here, there = make_batches(train=train), make_batches(gpu.device, train=train)
    for (images, labels), (images_there, labels_there) in zip(here, there, strict=True):
        assert (images_there.device, labels_there.device) == (gpu.device, gpu.device)
        assert (images_there.dtype, labels_there.dtype) == (torch.float32, torch.int64)
        assert torch.allclose(images_there.cpu(), images, atol=1e-6) and torch.equal(labels_there.cpu(), labels)
        assert torch.equal(here.chosen, there.chosen) and there.chosen.device.type == "cpu"


def test_images_and_labels_come_from_pinned_memory_without_waiting(gpu):
    batches = iter(make_batches(gpu.device))
    next(batches)  # one-time work
    gpu.calls.clear()
    count = len(list(batches))
    copies = [details for name, *details in gpu.calls if name == "copy"]
    assert {(target, non_blocking) for target, _, non_blocking in copies} == {("cuda", True)}
    # Beside them, the shifts and mirrors of a batch: a few hundred bytes, which are not worth a buffer.
    assert [pinned for _, pinned, _ in copies] == [True, False, False, True] * count


@pytest.mark.parametrize("train", [True, False])
def test_nothing_waits_for_a_batch(gpu, train):
    waiting = iter(make_batches(gpu.device, train=train))
    next(waiting)  # one-time work
    with gpu.no_waits():
        assert len(list(waiting)) == 3


def test_pinned_memory_is_not_used_again_before_it_was_read(real_gpu):
    """The copies stand in a queue behind other work, while the program gathers one batch after the other."""
    expected = list(make_batches(count=400))
    there = iter(make_batches(real_gpu, count=400))
    next(there)
    torch.cuda._sleep(400_000_000)
    made = list(there)
    for (images, labels), (images_there, labels_there) in zip(expected[1:], made, strict=True):
        assert torch.allclose(images_there.cpu(), images, atol=1e-6) and torch.equal(labels_there.cpu(), labels)
