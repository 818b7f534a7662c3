"""torch's DataParallel over copies in memory: what it computes, what it loses, and in which threads."""

import copy
import threading

import pytest
import torch
from harness.drawn import assert_explains
from torch import nn
from torch.nn import functional as F

from lab_common import LabError
from lab_utils import models
from lab_utils.parallel import CpuDataParallel
from scripts.replicas import InThreads, note_phases, step_in_threads


def make_batch(count, **options):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, 32, 32, generator=generator, **options), torch.arange(count) % 10


def leave_gradients(model, net, images, labels):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()]), loss.detach()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 6, 7])
@pytest.mark.parametrize("net", ["tiny", "plain"])
def test_the_gradients_equal_one_devices(count, batch, net):
    """Without BatchNorm in training, and with BatchNorm that uses what it has stored."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30 * 30, 10))
    one = (models.build("tiny").eval() if net == "tiny" else plain).double()
    several = copy.deepcopy(one)
    images, labels = make_batch(batch, dtype=torch.float64)
    right, loss = leave_gradients(one, one, images, labels)
    gradients, same = leave_gradients(CpuDataParallel(several, count), several, images, labels)
    assert (gradients - right).abs().max() < 1e-12 * right.abs().max()
    assert (loss - same).abs() < 1e-12


@pytest.mark.parametrize("batch", [1, 6, 7])
@pytest.mark.parametrize("way", ["no copies", "a backward in each thread"])
def test_so_do_those_of_a_step_with_one_thing_changed(way, batch):
    one = models.build("tiny").eval().double()
    several, before, seen = copy.deepcopy(one), torch.get_num_threads(), []
    several.register_forward_hook(lambda module, *_: seen.append(module is several))
    images, labels = make_batch(batch, dtype=torch.float64)
    right, _ = leave_gradients(one, one, images, labels)
    if way == "no copies":
        found, _ = leave_gradients(InThreads(several, 2), several, images, labels)
    else:
        optimizer = torch.optim.SGD(several.parameters(), lr=1.0)
        step_in_threads(CpuDataParallel(several, 2), images, labels, optimizer)
        found = torch.cat([parameter.grad.flatten() for parameter in several.parameters()])
        moved = [a.flatten() - b.flatten() for a, b in zip(one.parameters(), several.parameters(), strict=True)]
        assert torch.allclose(torch.cat(moved), right, atol=1e-12), "the optimizer made a step"
    assert seen == [way == "no copies"] * min(batch, 2)
    assert (found - right).abs().max() < 1e-12 * right.abs().max()
    assert torch.get_num_threads() == before


def test_the_phases_of_each_copy_are_noted_with_their_threads():
    """Also of copies that are made after the hooks."""
    net = models.build("tiny")
    rows, images = note_phases(net), make_batch(4)[0].requires_grad_()
    copies = [copy.deepcopy(net) for _ in range(2)]
    outputs = [one(images) for one in copies]
    sum(output.sum() for output in outputs).backward()
    assert len({key for key, _ in rows}) == 2
    assert [row["phase"] for _, row in rows] == ["forward"] * 2 + ["backward"] * 2
    assert all(row["start"] < row["end"] and row["thread"] == threading.get_ident() for _, row in rows)


def test_each_thread_runs_its_own_backward():
    net, threads, meeting = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)), [], threading.Barrier(2)
    # Else one thread might do both, in turn.
    net.register_forward_hook(lambda module, args, output: output + 0 * meeting.wait(10))
    net.register_full_backward_pre_hook(lambda *_: threads.append(threading.get_ident()))
    images, labels = make_batch(4)
    step_in_threads(CpuDataParallel(net, 2), images, labels, torch.optim.SGD(net.parameters(), lr=0.1))
    assert len({*threads} - {threading.get_ident()}) == 2


def test_each_image_goes_through_one_replica_in_a_thread_of_its_own():
    seen, meeting = [], threading.Barrier(3)
    net = nn.Linear(2, 2)

    def note(module, args, output):
        meeting.wait(10)  # passes only where all three run at the same time
        seen.append((threading.get_ident(), args[0][:, 0].tolist()))

    net.register_forward_hook(note)
    output = CpuDataParallel(net, 3)(torch.arange(14.0).view(7, 2))
    assert sorted(rows for _, rows in seen) == [[0, 2, 4], [6, 8, 10], [12]]
    assert len({thread for thread, _ in seen} | {threading.get_ident()}) == 4
    assert torch.allclose(output, F.linear(torch.arange(14.0).view(7, 2), net.weight, net.bias)), "in their order"


def test_only_replica_0s_statistics_survive_in_training():
    wrapped = models.build("tiny")
    alone = copy.deepcopy(wrapped)
    images, _ = make_batch(7)
    CpuDataParallel(wrapped, 2)(images)
    alone(images[:4])
    assert all(torch.equal(*pair) for pair in zip(wrapped.buffers(), alone.buffers(), strict=True))


def test_threads_are_set_for_the_replicas_alone():
    seen, net, before = [], nn.Linear(2, 2), torch.get_num_threads()
    net.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        CpuDataParallel(net, 2, threads=1)(torch.ones(4, 2))
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen[-1] == 2, "threads that come later have as many as before"
    finally:
        torch.set_num_threads(before)


def test_an_error_of_a_replica_reaches_the_caller():
    """With the ImageNet stem a chunk of one image has a single number per channel in the last layers."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        CpuDataParallel(models.build("resnet18"), 2)(make_batch(3)[0])


def test_no_replicas_are_refused():
    with pytest.raises(LabError) as caught:
        CpuDataParallel(nn.Linear(2, 2), 0)
    assert_explains(caught.value, "replicas must be at least 1", "replicas=2")
