"""``lab_utils.training`` on a GPU: an epoch's seconds are the device's own, nothing waits, and states come back."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

from lab_common import LabError
from lab_utils import training
from lab_utils.training.loop import CHECK_EVERY

pytestmark = pytest.mark.gpu


def make_model(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).to(
        device
    )


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def draw(device, count, size=8):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(count)
    ]
    return [(images.to(device), labels.to(device)) for images, labels in batches]


def in_ieee_float32():
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_an_epochs_seconds_are_the_devices_own(gpu):
    model, batches = make_model(gpu.device), draw(gpu.device, 3)

    def feed():
        for batch in batches:
            gpu.launch(0.03)
            yield batch

    def step(*arguments):
        loss, logits = training.plain_step(*arguments)
        gpu.launch(0.02)  # last: it is not done when the program comes to the end of the epoch
        return loss, logits

    start = time.perf_counter()
    epoch = training.train_epoch(model, feed(), make_optimizer(model), step=step, progress=False)
    wall = time.perf_counter() - start
    assert epoch.data_seconds >= gpu.least(0.09) and epoch.compute_seconds >= gpu.least(0.06)
    assert epoch.data_seconds + epoch.compute_seconds <= wall + 1e-3


def test_a_training_loop_waits_once_in_twenty_steps(gpu):
    """From the second batch on until the losses are read: no operation has to be waited for."""
    model, batches = make_model(gpu.device), draw(gpu.device, CHECK_EVERY)

    def feed():
        with contextlib.ExitStack() as stack:
            for number, batch in enumerate(batches, start=1):
                if number == 2:
                    stack.enter_context(gpu.no_waits())
                if number == CHECK_EVERY:
                    stack.close()
                yield batch

    epoch = training.train_epoch(model, feed(), make_optimizer(model), progress=False)
    assert epoch.images == 8 * CHECK_EVERY


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_loss_that_is_no_number_is_found_within_twenty_steps(gpu, bad):
    model, batches, steps = make_model(gpu.device), draw(gpu.device, 2 * CHECK_EVERY, size=2), []

    def step(*arguments):
        loss, logits = training.plain_step(*arguments)
        steps.append(loss)
        return loss + bad if len(steps) == 5 else loss, logits

    with pytest.raises(LabError, match=f"at step {CHECK_EVERY}"):
        training.train_epoch(model, batches, make_optimizer(model), step=step, progress=False)
    assert len(steps) == CHECK_EVERY


def test_an_epoch_trains_as_on_a_cpu(gpu):
    in_ieee_float32()
    epochs, weights = [], []
    for device in ("cpu", gpu.device):
        model = make_model(device)
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        epochs.append(training.train_epoch(model, draw(device, 6), optimizer, scheduler=scheduler, progress=False))
        weights.append(torch.cat([one.detach().cpu().flatten() for one in model.parameters()]))
    assert epochs[1].loss == pytest.approx(epochs[0].loss, abs=1e-3)
    assert torch.allclose(*weights, atol=1e-3)


def test_a_run_goes_on_from_a_checkpoint_on_the_device(gpu, tmp_path):
    """Loaded to main memory, whatever device it was saved from, the states go where the model is."""
    in_ieee_float32()
    batches, checkpoints = draw(gpu.device, 6), training.Checkpoints(tmp_path)
    first = make_model(gpu.device)
    optimizer = make_optimizer(first)
    for number, batch in enumerate(batches):
        if number == 3:
            checkpoints.save(3, {"model": first.state_dict(), "optimizer": optimizer.state_dict()})
        training.plain_step(first, *batch, optimizer)
    step, state = checkpoints.load()
    assert step == 3 and {one.device.type for one in state["model"].values()} == {"cpu"}
    second = make_model(gpu.device, seed=1)
    optimizer = make_optimizer(second)
    second.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    buffers = [one["momentum_buffer"] for one in optimizer.state.values()]
    assert {one.device for one in (*second.parameters(), *buffers)} == {gpu.device}
    for batch in batches[3:]:
        training.plain_step(second, *batch, optimizer)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_saving_a_checkpoint_puts_nothing_on_the_gpu(gpu, tmp_path):
    """A model that fills the GPU can be saved."""
    model = make_model(gpu.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.Checkpoints(tmp_path).save(1, {"model": model.state_dict()})
    assert torch.cuda.max_memory_allocated() == before
