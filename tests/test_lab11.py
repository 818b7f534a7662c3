"""Lab 11 outside of its notebook: layers to cut between, who worked when, schedules simulated and run."""

import copy
import itertools
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course import pipelines
from course.exercises.ranks import run_on_ranks
from lab_utils import models, plots


@pytest.fixture
def gpt(root, monkeypatch):
    """The script, as the notebook imports it."""
    monkeypatch.syspath_prepend(str(root / "notebooks"))
    from scripts import gpt

    return gpt


def list_gpipe(ranks, micro):
    return [[f"{kind}{number}" for kind in "FB" for number in range(micro)]] * ranks


def test_layers_in_a_row_are_the_network(gpt):
    torch.manual_seed(0)
    net, tokens = gpt.GPT(layers=3), torch.randint(256, (2, 16))
    layers = pipelines.list_layers(net)
    assert len(layers) == 5 and torch.equal(layers(tokens), net(tokens))
    assert {*map(id, layers.parameters())} == {*map(id, net.parameters())}
    net, images = models.build("resnet18").eval(), torch.randn(2, 3, 32, 32)
    layers = pipelines.list_layers(net)
    assert torch.equal(layers(images), net(images)) and len(layers) == 10


@pytest.mark.parametrize("begin", range(1, 10))
def test_a_resnet_can_be_cut_between_any_two_layers(begin):
    """Nothing works in place on what a stage has received."""
    layers = pipelines.list_layers(models.build("resnet18"))
    received = layers[:begin](torch.randn(2, 3, 32, 32)).detach().requires_grad_()
    layers[begin:](received).sum().backward()
    assert received.grad is not None


def test_forward_and_backward_are_seen_from_outside():
    stage, backward = nn.Linear(4, 4), torch.autograd.backward
    stage.register_forward_hook(lambda *_: time.sleep(0.01))
    with pipelines.watch(stage) as rows:
        stage(torch.ones(2, 4)).sum().backward()
        torch.autograd.backward(stage(torch.ones(2, 4)).sum())
    assert [row["phase"] for row in rows] == ["forward", "backward"] * 2
    assert all(row["start"] <= row["end"] for row in rows)
    assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(rows))
    stage(torch.ones(2, 4)).sum().backward()
    assert torch.autograd.backward is backward and len(rows) == 4, "after the block nothing is noted"


def test_idle_time_and_held_micro_batches_are_counted():
    rows = [{"phase": "forward", "start": 0, "end": 1}, {"phase": "backward", "start": 2, "end": 4}]
    assert pipelines.find_idle({0: rows}) == pytest.approx(0.25)
    assert pipelines.find_idle({0: rows, 1: [{"phase": "forward", "start": 1, "end": 2}]}) == pytest.approx(0.5)
    phases = ["forward", "forward", "backward", "forward", "backward", "backward"]
    rows = [{"phase": phase, "start": start, "end": start + 1} for start, phase in enumerate(phases)]
    assert pipelines.count_held(rows[::-1]) == 2


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (4, 8), (1, 5)])
def test_the_bubble_of_a_simulated_gpipe_is_that_of_the_formula(ranks, micro):
    seen, waiting = pipelines.simulate(list_gpipe(ranks, micro))
    assert not waiting
    assert pipelines.find_idle(seen) == pytest.approx((ranks - 1) / (micro + ranks - 1))
    assert [pipelines.count_held(rows) for rows in seen.values()] == [micro] * ranks
    plots.timeline(seen, lane="stage")


def test_ranks_that_wait_for_each_other_are_named():
    seen, waiting = pipelines.simulate([["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]])
    assert waiting == [(0, "B0"), (1, "F1")] and len(seen[0]) == 1


def test_a_slow_layer_takes_the_longest():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    layers[1].register_forward_hook(lambda *_: time.sleep(0.05))
    found = pipelines.time_layers(layers, torch.ones(4, 8), repeats=2)
    assert len(found) == 3 and found[1] >= 0.05 > max(found[0], found[2])


@pytest.mark.parametrize(
    "orders",
    [list_gpipe(2, 3), [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "B2"]]],
    ids=["GPipe", "1F1B"],
)
def test_an_order_that_is_run_gives_the_gradients_of_the_whole(orders):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    whole = copy.deepcopy(layers)
    F.cross_entropy(whole(inputs), targets).backward()

    def work(rank):
        stage = layers[2:] if rank else layers[:2]
        pipelines.run_order(orders[rank], stage, inputs.chunk(3), targets.chunk(3), F.cross_entropy, (2, 6))
        return [parameter.grad for parameter in stage.parameters()]

    found = [grad for grads in run_on_ranks(work, work, case="a pipeline") for grad in grads]
    for one, parameter in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)
