"""The loop: the arithmetic of a loop written by hand, honest counts and times, and a stop when the loss is lost."""

import time
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F

from lab_common import LabError
from lab_utils import models, training


def make_batches(sizes=(8, 8, 5), *, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for size in sizes
    ]


def make_model(classes=10):
    torch.manual_seed(1)
    return models.build("tiny", num_classes=classes)


def make_optimizer(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def count_by_hand(logits, labels, k):
    ranks = [
        sorted(range(len(row)), key=lambda c: -row[c]).index(label) for row, label in zip(logits, labels, strict=True)
    ]
    return sum(rank < k for rank in ranks)


def test_an_epoch_equals_a_loop_written_by_hand_bit_for_bit():
    batches = make_batches()
    by_hand, losses, hits = make_model(), [], {1: 0, 5: 0}
    optimizer = make_optimizer(by_hand)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for images, labels in batches:
        optimizer.zero_grad()
        logits = by_hand(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item() * len(labels))
        for k in hits:
            hits[k] += count_by_hand(logits.tolist(), labels.tolist(), k)

    model = make_model().eval()  # the loop must put it into training mode
    other = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=3)
    epoch = training.train_epoch(model, batches, other, scheduler=schedule, progress=False)
    for (name, ours), theirs in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0)
    assert epoch.images == 21
    assert epoch.loss == pytest.approx(sum(losses) / 21, rel=1e-12)
    assert (epoch.top1, epoch.top5) == (hits[1] / 21, hits[5] / 21)
    with pytest.raises(FrozenInstanceError):
        epoch.loss = 0.0


def test_a_step_of_ones_own_takes_the_place_of_the_plain_one():
    seen = []

    def step(model, images, labels, optimizer):
        seen.append(len(labels))
        logits = torch.zeros(len(labels), 10)
        logits[:, 3] = 1.0
        return torch.tensor(float(len(labels))), logits

    batches = make_batches()
    model = make_model()
    before = [parameter.clone() for parameter in model.parameters()]
    epoch = training.train_epoch(model, batches, make_optimizer(model), step=step, progress=False)
    assert seen == [8, 8, 5]
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert epoch.loss == pytest.approx((8 * 8 + 8 * 8 + 5 * 5) / 21)
    assert epoch.top1 == sum((labels == 3).sum().item() for _, labels in batches) / 21


def test_the_limit_counts_batches_and_takes_no_batch_more_than_it_says():
    taken = []

    def batches():
        for batch in make_batches():
            taken.append(1)
            yield batch

    model = make_model()
    epoch = training.train_epoch(model, batches(), make_optimizer(model), limit=2, progress=False)
    assert epoch.images == 16
    assert len(taken) == 2


def test_waiting_for_data_is_told_from_computing():
    class Slow(list):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.03)
                yield batch

    def step(model, images, labels, optimizer):
        time.sleep(0.01)
        return torch.tensor(1.0), torch.zeros(len(labels), 10)

    model = make_model()
    start = time.perf_counter()
    # More batches than lie between two readings of the loss, so that the marks are added up more than once.
    batches = Slow(make_batches((2,) * 22))
    epoch = training.train_epoch(model, batches, make_optimizer(model), step=step, progress=False)
    wall = time.perf_counter() - start
    assert epoch.data_seconds >= 22 * 0.03
    assert epoch.compute_seconds >= 22 * 0.01
    # No bound from above in seconds: on a busy machine each sleep is longer than it was asked to be.
    assert 0.7 * wall < epoch.data_seconds + epoch.compute_seconds <= wall
    assert epoch.images_per_second == 44 / (epoch.data_seconds + epoch.compute_seconds)


def test_a_loss_that_is_lost_stops_the_epoch_within_twenty_steps():
    calls = []

    def step(model, images, labels, optimizer):
        calls.append(1)
        loss = torch.tensor(float("nan") if len(calls) == 23 else 1.0)
        return loss, torch.zeros(len(labels), 10)

    model = make_model()
    with pytest.raises(LabError, match="no longer a finite number at step 40") as caught:
        training.train_epoch(model, make_batches((2,) * 60), make_optimizer(model), step=step, progress=False)
    assert len(calls) == 40
    assert "between step 21 and step 40" in caught.value.where and "load the last checkpoint" in caught.value.fix


def test_a_real_divergence_is_noticed_at_the_end_of_a_short_epoch():
    model = make_model()
    with pytest.raises(LabError, match="no longer a finite number"):
        training.train_epoch(model, iter(make_batches((8,) * 6)), make_optimizer(model, lr=1e30), progress=False)


def test_the_loss_is_read_from_the_device_only_every_twenty_steps(monkeypatch):
    reads = []
    read = training.loop._Sums.read
    monkeypatch.setattr(training.loop._Sums, "read", lambda sums: reads.append(1) or read(sums))
    model = make_model()
    # An iterator without a length, so that the only readings are the one at step 20 and the one at the end.
    training.train_epoch(model, iter(make_batches((2,) * 39)), make_optimizer(model), progress=False)
    assert len(reads) == 2


def test_no_batches_is_an_error():
    model = make_model()
    with pytest.raises(LabError, match="nothing to train or evaluate on"):
        training.train_epoch(model, [], make_optimizer(model), progress=False)


def test_evaluating_changes_nothing_and_leaves_the_mode_as_it_was():
    batches = make_batches()
    model = make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    recording = []
    model.register_forward_hook(lambda module, inputs, logits: recording.append(logits.requires_grad))
    epoch = training.evaluate(model, batches, progress=False)
    assert recording == [False] * 3
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(torch.cat([images for images, _ in batches]))
    labels = torch.cat([labels for _, labels in batches])
    assert epoch.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert epoch.top1 == count_by_hand(logits.tolist(), labels.tolist(), 1) / 21
    assert epoch.images == 21
    training.evaluate(model, batches, progress=False)
    assert not model.training


def test_with_fewer_than_five_classes_top5_is_certain():
    model = make_model(classes=3)
    epoch = training.evaluate(model, make_batches(classes=3), progress=False)
    assert epoch.top5 == 1.0 and epoch.top1 < 1.0


@pytest.mark.parametrize("ks", [(1, 5), (5, 1, 10)])
def test_top_k_counts_equal_a_count_by_hand(ks):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 10, generator=generator), torch.randint(0, 10, (200,), generator=generator)
    counts = training.count_topk(logits, labels, ks=ks)
    assert counts.dtype == torch.int64 and counts.shape == (len(ks),)
    assert counts.tolist() == [count_by_hand(logits.tolist(), labels.tolist(), k) for k in ks]


@pytest.mark.parametrize("ks", [(1, 11), (0,)])
def test_a_k_that_cannot_be_is_refused(ks):
    with pytest.raises(LabError, match="from 1 to the number of classes, 10"):
        training.count_topk(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64), ks=ks)
