"""One epoch of training or evaluation, with the time for data told from the time for computing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from lab_common import LabError
from lab_utils.bars import open_bar
from lab_utils.timing import synchronize

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lab_utils.data import Batches

Step = Callable[[nn.Module, torch.Tensor, torch.Tensor, "Optimizer"], tuple[torch.Tensor, torch.Tensor]]
# Reading the loss makes the program wait for the device, so it is read only now and then.
CHECK_EVERY = 20


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch, or of the part of it that was run.

    Args:
        loss: Mean loss per image.
        top1: Fraction of images whose label had the highest logit.
        top5: Fraction of images whose label was among the five highest.
        images: Number of images, on this rank.
        data_seconds: Seconds from the end of one step until the next batch was there, summed.
        compute_seconds: Seconds from then until the step was done, summed.
    """

    loss: float
    top1: float
    top5: float
    images: int
    data_seconds: float
    compute_seconds: float

    @property
    def images_per_second(self) -> float:
        """Images per second, waiting for data included."""
        return self.images / (self.data_seconds + self.compute_seconds)


def count_topk(logits: torch.Tensor, labels: torch.Tensor, *, ks: tuple[int, ...] = (1, 5)) -> torch.Tensor:
    """Counts the images whose label is among the k highest logits; sums add up over batches and ranks, means do not.

    Args:
        logits: float (N, classes).
        labels: int64 (N,).
        ks: The numbers k, each from 1 to the number of classes.

    Returns:
        int64 (len(ks),) on the device of the logits, which nothing waits for.

    Raises:
        LabError: A k is smaller than 1 or larger than the number of classes.
    """
    classes = logits.shape[1]
    if not all(1 <= k <= classes for k in ks):
        raise LabError(
            f"Top-k needs k from 1 to the number of classes, {classes}.", where=f"count_topk(ks={ks})", fix="ks=(1, 5)"
        )
    guesses = logits.topk(max(ks), dim=1).indices
    hits = guesses == labels[:, None]
    return torch.stack([hits[:, :k].sum() for k in ks])


def plain_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, optimizer: Optimizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on one batch in fp32 and returns the mean loss and the logits (N, classes)."""
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss, logits


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: Optimizer,
    *,
    scheduler: LRScheduler | None = None,
    step: Step | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> Epoch:
    """Trains for one epoch.

    The seconds are the device's own. On CUDA they are taken from events on its stream, so that nothing waits for a
    batch to be measured; a device that idles because the program is late counts the wait to what it waited for. Loss
    and counts stay on the device and are read every 20 steps, which is the only time that the program waits for it.

    Args:
        model: The network, on the device of the batches.
        batches: Yields images float32 (N, 3, H, W) and labels int64 (N,).
        optimizer: Over the model's parameters.
        scheduler: Stepped after every batch, so its length counts batches.
        step: Trains on one batch as :func:`plain_step` does; that one where None.
        limit: Stops after this many batches.
        progress: Whether to show a bar.

    Raises:
        LabError: The loss is no longer a finite number (noticed within 20 steps), or there are no batches.
    """
    train = step or plain_step

    def run(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = train(model, images, labels, optimizer)
        if scheduler is not None:
            scheduler.step()
        return loss, logits

    model.train()
    return _run_epoch(run, batches, limit=limit, progress=progress, title="training")


def evaluate(model: nn.Module, batches: Batches, *, progress: bool = True) -> Epoch:
    """Measures loss and accuracy without training, and leaves the model in the mode it was in.

    Raises:
        LabError: The loss is not a finite number, or there are no batches.
    """

    def run(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(images)
        return F.cross_entropy(logits, labels), logits

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _run_epoch(run, batches, progress=progress, title="evaluating")
    finally:
        model.train(training)


def _run_epoch(run: Callable, batches: Batches, *, limit: int | None = None, progress: bool, title: str) -> Epoch:
    total = len(batches) if isinstance(batches, Sized) else None
    total = min((number for number in (total, limit) if number is not None), default=None)
    sums, clock, seen, number = _Sums(), _Clock(), 0, 0
    with open_bar(total, title, show=progress, unit="batch", leave=False) as bar:
        for number, (images, labels) in enumerate(itertools.islice(batches, limit), start=1):
            clock.mark_ready(images.device)
            loss, logits = run(images, labels)
            sums.add(loss.detach(), logits.detach(), labels)
            clock.mark_done()
            seen += len(labels)
            if number % CHECK_EVERY == 0 or number == total:
                mean_loss = _check_loss(sums.read()[0] / seen, number)
                clock.settle()
                bar.set_postfix(loss=f"{mean_loss:.3f}", refresh=False)
            bar.update()
    if not seen:
        fix = "a smaller batch size, or a limit of 1 or more"
        raise LabError("There is nothing to train or evaluate on.", cause=f"no batches (limit={limit})", fix=fix)
    clock.settle()
    loss, top1, top5 = (value / seen for value in sums.read())
    return Epoch(_check_loss(loss, number), top1, top5, seen, clock.data_seconds, clock.compute_seconds)


def _check_loss(mean_loss: float, number: int) -> float:
    if math.isfinite(mean_loss):
        return mean_loss
    raise LabError(
        f"The loss is no longer a finite number at step {number}.",
        where=f"between step {max(1, number - CHECK_EVERY + 1)} and step {number} of this epoch",
        cause="the learning rate is too high, or fp16 gradients overflowed without a GradScaler",
        fix="load the last checkpoint (or build a new model) and lower the learning rate",
    )


class _Sums:
    """Sums over images of loss, top-1 and top-5 hits; the parts stay on the device until the sums are read."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]
        self._pending: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        # With fewer than five classes every label is among the five highest.
        self._pending.append((loss, count_topk(logits, labels, ks=(1, min(5, logits.shape[1]))), len(labels)))

    def read(self) -> list[float]:
        if self._pending:
            losses, hits, sizes = zip(*self._pending, strict=True)
            loss = sum(loss * size for loss, size in zip(torch.stack(losses).tolist(), sizes, strict=True))
            parts = [loss, *torch.stack(hits).sum(0).tolist()]
            self._sums = [total + part for total, part in zip(self._sums, parts, strict=True)]
            self._pending.clear()
        return self._sums


class _Clock:
    """Adds up the time until a batch is ready and the time until its step is done, on the device's own time line."""

    def __init__(self) -> None:
        self.data_seconds = self.compute_seconds = 0.0
        # Until the first batch tells the device, there is no stream to put an event on.
        self._start, self._device, self._last, self._marks = time.perf_counter(), torch.device("cpu"), None, []

    def mark_ready(self, device: torch.device) -> None:
        if self._last is None:
            self._device = device
            synchronize(device)
            self.data_seconds += time.perf_counter() - self._start
            self._last = self._mark()
        self._marks.append(self._mark())

    def mark_done(self) -> None:
        self._marks.append(self._mark())

    def settle(self) -> None:
        """Turns the marks so far into seconds; on CUDA this waits for the last of them."""
        if self._device.type == "cuda" and self._marks:
            self._marks[-1].synchronize()
        for ready, done in zip(self._marks[::2], self._marks[1::2], strict=True):
            self.data_seconds += self._between(self._last, ready)
            self.compute_seconds += self._between(ready, done)
            self._last = done
        self._marks.clear()

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
