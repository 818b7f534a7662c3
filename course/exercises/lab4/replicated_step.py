"""Exercise 4.1: a training step on replicas in threads, beside the same step on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect, refusing

# Replicas and images. With 5 and 9 ``chunk`` makes five chunks, with 5 and 6 three, and with 4 and 1 a single one.
CASES = ((1, 4), (2, 8), (3, 7), (5, 9), (5, 6), (4, 1))
PATIENCE = 2.5  # seconds that a replica waits for the others before we say that none comes


class _Watch:
    """Watches every forward pass of a network and of all its copies, and delays each until the others have started.

    Attributes:
        weights: A weight of each that ran, which is kept so that no later replica gets the same memory.
        alone: True if one of them waited in vain, as the first does if replicas run one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(1)

    def begin(self, parts: int) -> None:
        """Clears the notes; ``parts`` passes have to meet."""
        self.weights: list[torch.Tensor] = []
        self.alone, self._parts, self._complete = False, parts, threading.Event()

    def __deepcopy__(self, memo: dict) -> _Watch:
        return self  # the copies of a network report to the same watch

    def note(self, weight: torch.Tensor) -> None:
        """Notes a forward pass, and waits in it for the others."""
        with self._lock:
            self.weights.append(weight)
            number = len(self.weights)
        if number >= self._parts:
            self._complete.set()
        if not self._complete.wait(PATIENCE):
            self.alone = True
            self._complete.set()  # once is enough: whoever comes later does not wait again


class _Net(nn.Module):
    """A small classifier that reports each forward pass, also those of its copies, to a :class:`_Watch`."""

    def __init__(self, watch: _Watch | None) -> None:
        super().__init__()
        self.watch = watch
        with torch.random.fork_rng(devices=[]):  # leaves the random numbers of the learner's notebook as they are
            torch.manual_seed(0)
            self.convolution, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 5)
            self.norm = nn.BatchNorm2d(6)
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (N, 3, H, W) images to (N, 5) logits."""
        if self.watch and len(images):
            self.watch.note(self.convolution.weight)
        return self.head(torch.relu(self.norm(self.convolution(images))).mean((2, 3)))


def _make_trial(watch: _Watch | None, batch: int) -> dict:
    """A network in float64, a batch of distinct images, and an optimizer; the same numbers each time.

    The network is in evaluation mode: in training BatchNorm's statistics would be those of a chunk, and the step would
    rightly differ from one device's.
    """
    generator = torch.Generator().manual_seed(1)
    model = _Net(watch).double().eval()
    return {
        "model": model,
        "images": torch.randn(batch, 3, 4, 4, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 5, (batch,), generator=generator),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    }


def _join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of the tensors as one vector without a graph."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _join_gradients(model: nn.Module) -> torch.Tensor:
    """The gradients as one vector, those that are missing as zeros."""
    return _join(torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters())


def verify_data_parallel_step(data_parallel_step: Callable) -> str:
    """Takes two steps for each number of replicas, beside one device."""
    for count, batch in CASES:
        _compare_steps(data_parallel_step, count, batch)
    where = "on 1, 2, 3 and 5 replicas, for uneven batches too"
    return f"loss, gradients and weights equal one device's in float64, {where}"


def _compare_steps(answer: Callable, count: int, batch: int) -> None:
    watch, earlier = _Watch(), 0.0
    ours, theirs = _make_trial(watch, batch), _make_trial(None, batch)
    model, twin, images, labels = ours["model"], theirs["model"], ours["images"], ours["labels"]
    chunks, before = images.chunk(count), _join(model.parameters())
    hints = {
        "channels": "split along dimension 0, the images, as images.chunk(count) does",
        "batch_size": "the outputs do not fit the labels: replica number i gets images.chunk(count)[i], which leaves "
        "no remainder",
    }
    if len(chunks) < count:
        hints["NoneType"] = (
            "there are fewer chunks than `count`: a replica without a chunk has no gradient, leave it out"
        )
    for number in (1, 2):  # what the first leaves behind shows in the second
        case = f"{batch} image{'s' * (batch > 1)} on {count} replica{'s' * (count > 1)}, step {number}"
        parts = [_differentiate(twin, *pair) for pair in zip(chunks, labels.chunk(count), strict=True)]
        loss, gradient = _differentiate(twin, images, labels)
        watch.begin(len(chunks))
        with refusing(RuntimeError, ValueError, TypeError, case=case, expected="a step", hints=hints):
            returned = answer(**ours, count=count)
        _expect_replicas(case, watch, len(chunks), count)
        scalar = isinstance(returned, torch.Tensor) and returned.dim() == 0 and not returned.requires_grad
        hint = "end with: return loss.detach(); with its graph it would keep all replicas in memory"
        what = "a loss that still holds its graph" if isinstance(returned, torch.Tensor) else type(returned).__name__
        expected = "the loss, a tensor of one number without its graph"
        expect(scalar, f"{case}: what the function returns", yours=what, expected=expected, hint=hint)
        losses, gradients = zip(*parts, strict=True)
        _judge_loss(f"{case}: the loss", returned, loss, losses, chunks)
        _judge_gradient(f"{case}: the gradients", _join_gradients(model), gradient, earlier, gradients, chunks)
        theirs["optimizer"].zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        theirs["optimizer"].step()
        wrong = {"nothing moved: optimizer.step() of the model takes the step, and the replicas are dropped": before}
        hint = "one optimizer.step() of the model, for the whole batch; do not change the model's weights after it"
        right, name = _join(twin.parameters()), f"{case}: the weights after the step"
        judge(_join(model.parameters()), right=right, case=name, wrong=wrong, hint=hint)
        earlier, before = gradient, right


def _differentiate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of some images on one device, and its gradient as one vector."""
    loss = F.cross_entropy(model(images), labels)
    return loss.detach(), _join(torch.autograd.grad(loss, list(model.parameters())))


def _expect_replicas(case: str, watch: _Watch, parts: int, count: int) -> None:
    """Looks at how many ran, at the same time, with weights of their own."""
    ran = len(watch.weights)
    hint = "as many chunks as images.chunk(count) makes, at most count, and a forward pass of a replica for each"
    expected = parts if parts == count else f"{parts} to {count}"
    expect(parts <= ran <= count, f"{case}: forward passes", yours=ran, expected=expected, hint=hint)
    hint = "start all threads before you wait for any: ThreadPoolExecutor(len(chunks)).map(run, replicas, chunks)"
    name, yours = f"{case}: the forward passes", "the replicas run one after the other"
    expect(not watch.alone, name, yours=yours, expected=f"{ran} at the same time", hint=hint)
    hint = "a replica for each thread, copy.deepcopy(model): each GPU needs the weights in its own memory"
    owners = len({weight.data_ptr() for weight in watch.weights})
    expect(owners == ran, f"{case}: replicas with weights of their own", yours=owners, expected=ran, hint=hint)


def _weigh(means: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor]) -> AnyOf:
    """The values of one chunk alone: its mean, or its part of the mean over the whole batch."""
    images = sum(map(len, chunks))
    return AnyOf((*means, *(mean * len(chunk) / images for mean, chunk in zip(means, chunks, strict=True))))


def _judge_loss(case: str, yours: torch.Tensor, right: torch.Tensor, means: Sequence, chunks: Sequence) -> None:
    wrong = {
        "a mean of means: the chunks differ in size. Take one mean over the whole batch": sum(means) / len(means),
        "the chunks' means were added up: take one mean over the whole batch": sum(means),
        "this is the loss of one replica's chunk alone: gather the outputs of all": _weigh(means, chunks),
    }
    hint = "one loss of the whole batch, in the order of the chunks: F.cross_entropy(torch.cat(outputs), labels)"
    judge(yours, right=right, case=case, wrong=wrong, hint=hint)


def _judge_gradient(
    case: str,
    yours: torch.Tensor,
    right: torch.Tensor,
    earlier: torch.Tensor | float,
    means: Sequence,
    chunks: Sequence,
) -> None:
    total = sum(means)
    wrong = {
        "none is there: parameter.grad = the sum of the copies'; zero_grad() comes before backward()": 0 * right,
        "the loss is the mean over the whole batch already, so the parts add up": right / len(chunks),
        "the gradient of the step before is still in it: assign parameter.grad, or clear it first": right + earlier,
        "these are one replica's gradients alone: add up those of all replicas": _weigh(means, chunks),
        "each replica's loss was a mean over its own chunk, not the whole batch": AnyOf((total, total / len(means))),
    }
    hint = "for each parameter of the model the sum of the gradients of its copies: zip(model.parameters(), ...)"
    judge(yours, right=right, case=case, wrong=wrong, hint=hint)
