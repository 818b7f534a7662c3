"""Small networks and images on which lab 9 measures in seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from lab_utils import data


def build_deep(width: int = 128, depth: int = 32) -> nn.Module:
    """Builds a net of many small gradients: ``depth`` linear layers, the same weights on every rank.

    Returns:
        The net, float32, which maps (N, width) to (N, width). Its signal is as large after the last layer as before the
        first one, so that other inputs give other gradients.
    """
    torch.manual_seed(0)
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    for linear, _ in pairs:
        # By torch's default each layer makes the signal smaller, and the biases alone give the last layer's outputs.
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def make_step(install: Callable | None, inputs: torch.Tensor) -> tuple[nn.Module, Callable[[], None]]:
    """Makes a deep net and a function that runs its training step on a rank, without the optimizer.

    Args:
        install: Prepares the net to average its gradients, and returns what has to be called after backward; where
            None, torch's DDP does it, with buckets of half a mebibyte.
        inputs: The rank's own, float32 (N, 128).
    """
    net = build_deep()
    model = net if install else nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.5)
    finish = install(net) if install else lambda: None

    def step() -> None:
        net.zero_grad()
        model(inputs).square().mean().backward()
        finish()

    return net, step


class Odd(nn.Module):
    """Has a tied layer, which forward uses twice, and an unused one; (N, width) to (N, width)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied, self.unused = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Runs the tied layer twice."""
        return self.tied(torch.relu(self.tied(inputs)))


def build_small(seed: int) -> nn.Module:
    """Builds two convolutions with batch norm and two linear layers: 39 thousand weights, drawn by ``seed``.

    Returns:
        The net, float32, which maps (N, 3, 16, 16) images to (N, 10) logits.
    """
    torch.manual_seed(seed)
    first = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()
    last = nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*first, *second, *last)


def load_half_size(split: str, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads images of the labs' data set at half their size, without augmentation.

    Args:
        split: ``train``, ``valid`` or ``test``.
        most: About how many at most: of a larger split every second, third … image is taken.

    Returns:
        Images, float32 (N, 3, 16, 16), and labels, int64 (N,).
    """
    dataset = data.load()
    share = -(-len(getattr(dataset, split)) // most)
    batches = dataset.batches(split, 500, train=False, world_size=share)
    pairs = [(F.avg_pool2d(images, 2), labels) for images, labels in batches]
    images, labels = (torch.cat(column) for column in zip(*pairs, strict=True))
    return images, labels
