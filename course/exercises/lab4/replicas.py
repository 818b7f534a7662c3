"""A small network whose copies all report to one watch, and the step that they should take together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

PATIENCE = 2.5  # seconds that a replica waits for the others before we say that none comes


class Fault(RuntimeError):
    """An error that a replica raises on purpose, to see who receives it."""


@dataclass(frozen=True)
class Call:
    """One forward pass of one replica.

    Attributes:
        images: Its input.
        weight: A weight of the replica itself, which is kept so that no later replica gets the same memory.
        fresh: True if its parameters equal the model's when the step began.
        training: The mode in which it ran.
    """

    images: torch.Tensor
    weight: torch.Tensor
    fresh: bool
    training: bool


class Watch:
    """Watches every forward pass of a network and of all its copies, and delays each until the others have started.

    Attributes:
        calls: The forward passes since ``begin``, in order of arrival, except those without images.
        alone: True if one of them waited in vain, as the first does if replicas run one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin((), 1)

    def begin(self, parameters: Sequence[torch.Tensor], parts: int, *, failing: int | None = None) -> None:
        """Clears the notes; ``parts`` passes have to meet, and the pass with the number ``failing`` raises."""
        self.calls: list[Call] = []
        self.alone = False
        self._parts, self._failing = parts, failing
        self._weights = [parameter.detach().clone() for parameter in parameters]
        self._complete = threading.Event()

    def __deepcopy__(self, memo: dict) -> Watch:
        return self  # the copies of a network report to the same watch

    def note(self, net: Net, images: torch.Tensor) -> None:
        """Notes a forward pass, and waits in it for the others.

        Raises:
            Fault: This pass is the one that should fail.
        """
        if not isinstance(images, torch.Tensor) or not len(images):
            return
        weights = net.list_weights()
        fresh = all(torch.equal(mine, model) for mine, model in zip(weights, self._weights, strict=True))
        call = Call(images.detach(), weights[0], fresh, net.training)
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
        if number == self._failing:
            raise Fault(f"replica {number - 1} was made to fail")
        if number >= self._parts:
            self._complete.set()
        if not self._complete.wait(PATIENCE):
            self.alone = True
            self._complete.set()  # once is enough: whoever comes later does not wait again


class Net(nn.Module):
    """A small classifier that reports each forward pass, also those of its copies, to a :class:`Watch`."""

    def __init__(self, watch: Watch | None, *, normalized: bool) -> None:
        super().__init__()
        self.watch = watch
        with torch.random.fork_rng(devices=[]):  # leaves the random numbers of the learner's notebook as they are
            torch.manual_seed(0)
            self.convolution, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 5)
            self.norm = nn.BatchNorm2d(6) if normalized else nn.Identity()
            if normalized:
                self.norm.running_mean.uniform_(-1, 1)
                self.norm.running_var.uniform_(0.5, 2)

    def list_weights(self) -> list[torch.Tensor]:
        """Returns its weights, which torch's own replicas have as attributes and not as parameters."""
        return [self.convolution.weight, self.convolution.bias, self.head.weight, self.head.bias]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (N, 3, H, W) images to (N, 5) logits."""
        if self.watch:
            self.watch.note(self, images)
        return self.head(torch.relu(self.norm(self.convolution(images))).mean((2, 3)))


def make_trial(watch: Watch | None, batch: int, *, normalized: bool) -> dict:
    """Returns a network in float64, a batch of distinct images, and an optimizer; the same numbers each time.

    With ``normalized`` the network has a BatchNorm, in evaluation mode: in training its statistics would be those of
    a chunk, and the step would rightly differ from one device's.
    """
    generator = torch.Generator().manual_seed(1)
    model = Net(watch, normalized=normalized).double()
    return {
        "model": model.eval() if normalized else model,
        "images": torch.randn(batch, 3, 4, 4, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 5, (batch,), generator=generator),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    }


@dataclass(frozen=True)
class Step:
    """A step as one device would take it, with the data to explain a different outcome.

    Attributes:
        case: The test case, in a few words.
        start: The model as the step finds it.
        images: The batch.
        labels: Its labels.
        earlier: The gradient of the step before, None in the first.
    """

    case: str
    start: Net
    images: torch.Tensor
    labels: torch.Tensor
    earlier: torch.Tensor | None

    def find_share(self, call: Call) -> list[int]:
        """Returns the indices of the images that a replica got; -1 for one that is not in the batch."""
        numbers = {float(image[0, 0, 0]): number for number, image in enumerate(self.images)}
        return [numbers.get(float(image[0, 0, 0]), -1) for image in call.images]

    def differentiate(self, share: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss of some of the images on one device, and its gradient as one vector."""
        model = copy.deepcopy(self.start)
        loss = F.cross_entropy(model(self.images[share]), self.labels[share])
        return loss.detach(), join(torch.autograd.grad(loss, list(model.parameters())))


def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of the tensors as one vector without a graph."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def is_close(yours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns True if two results agree up to the order of their sums in float64."""
    return torch.allclose(yours.detach().double(), expected, rtol=1e-8, atol=1e-12)
