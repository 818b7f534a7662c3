"""The expected result of exercise 12.1: Lightning's training, written out in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lab_utils import data, models

# Another rate than the default of train_single.py, so that one that stands fixed in a script shows; its momentum.
LR, MOMENTUM = 0.06, 0.9
# Of each batch that a rank evaluates: the loss, the accuracy, and the batch's size.
Means = tuple[tuple[float, float, int], ...]


@contextmanager
def _alone() -> Iterator[None]:
    """Uses one thread, as the script does, and its own random numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def train(dataset: data.Dataset, *, batch_size: int, epochs: int, ranks: int = 1) -> list[nn.Module]:
    """Trains the tiny network from seed 0, as ``train_single.py`` does, or as ``train_ddp.py`` on several ranks.

    Args:
        dataset: The data set, whose train split is used.
        batch_size: Images per rank and step.
        epochs: Number of epochs.
        ranks: Number of ranks; several share the images by torch's DistributedSampler.

    Returns:
        The network of each rank. They differ in batch norm's statistics, which come from each rank's own images; DDP
        copies rank 0's to all ranks from time to time, and steps never use the others.
    """
    with _alone():
        torch.manual_seed(0)
        drawn = models.build("tiny", num_classes=len(dataset.class_names)).train()
        nets = [copy.deepcopy(drawn) for _ in range(ranks)]
        optimizers = [torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM) for net in nets]
        loaders = [DataLoader(dataset.train, batch_size, shuffle=True, drop_last=True)]
        if ranks > 1:
            samplers = [DistributedSampler(dataset.train, ranks, rank) for rank in range(ranks)]
            loaders = [DataLoader(dataset.train, batch_size, sampler=one, drop_last=True) for one in samplers]
        for epoch in range(epochs):
            for one in samplers if ranks > 1 else ():
                one.set_epoch(epoch)
            for batches in zip(*loaders, strict=True):
                for net, (images, labels) in zip(nets, batches, strict=True):
                    net.zero_grad()
                    F.cross_entropy(net(images), labels).backward()
                for parameters in zip(*(net.parameters() for net in nets), strict=True):
                    gradient = sum(parameter.grad / ranks for parameter in parameters)
                    for parameter in parameters:
                        parameter.grad = gradient.clone()
                for optimizer in optimizers:
                    optimizer.step()
            # Each pass over a loader draws a random number, and the script has evaluated here.
            list(DataLoader(dataset.valid, batch_size))
        return nets


@torch.no_grad()
def evaluate(net: nn.Module, split: data.Split, *, batch_size: int, rank: int = 0, ranks: int = 1) -> Means:
    """Returns the values that ``validation_step`` logs on a rank, batch by batch."""
    with _alone():
        net.eval()
        sampler = DistributedSampler(split, ranks, rank, shuffle=False)
        found = []
        for images, labels in DataLoader(split, batch_size, sampler=sampler):
            logits = net(images)
            hits = (logits.argmax(1) == labels).float().mean()
            found.append((float(F.cross_entropy(logits, labels)), float(hits), len(labels)))
    return tuple(found)
