"""The exercises of lab 4: data parallelism by hand, the running mean that survives, the smallest chunk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import torch
from torch import nn

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect, refusing
from course.exercises.lab4.replicated_step import verify_data_parallel_step
from lab_utils.parallel import CpuDataParallel

# Devices, images, momentum.
MEAN_CASES = ((1, 4, 0.1), (2, 7, 0.1), (3, 7, 0.3), (4, 10, 0.3), (5, 6, 0.1), (2, 8, 0.3))


def verify_predict_running_mean(predict_running_mean: Callable) -> str:
    """Compares with a forward pass of the emulation of DataParallel."""
    generator = torch.Generator().manual_seed(2)
    for count, batch, momentum in MEAN_CASES:
        images = torch.randn(batch, 3, 2, 5, generator=generator, dtype=torch.float64)
        images += torch.arange(batch).view(-1, 1, 1, 1)  # no two chunks alike
        batch_norm = nn.BatchNorm2d(3, momentum=momentum).double()
        batch_norm.running_mean.copy_(torch.tensor([4.0, -2.0, 1.0]))
        module, old = copy.deepcopy(batch_norm), batch_norm.running_mean
        CpuDataParallel(module, count, threads=1)(images)
        case = f"{batch} images on {count} device{'s' * (count > 1)}, momentum {momentum}: the running mean"
        hint = "one mean for each channel, over images, height and width: first.mean((0, 2, 3))"
        with refusing(RuntimeError, case=case, expected="a tensor of 3 numbers", hint=hint):
            yours = predict_running_mean(copy.deepcopy(batch_norm), images, count)
        means = [chunk.mean((0, 2, 3)) for chunk in images.chunk(count)]
        moved, every = [old + momentum * (mean - old) for mean in means], old
        for mean in means:
            every = every + momentum * (mean - every)
        wrong = {
            "these are statistics of the whole batch, as SyncBatchNorm keeps them; DataParallel never joins the "
            "chunks'": old + momentum * (images.mean((0, 2, 3)) - old),
            "the replicas' statistics are not averaged: all but replica 0's go with the replica": sum(moved)
            / len(moved),
            "momentum was left out: the running mean moves towards the new mean, it does not become it": means[0],
            "PyTorch's momentum weighs the new value, 1 - momentum the old one": means[0] + momentum * (old - means[0]),
            "one update per step, not one per chunk: the others write into buffers that are dropped": every,
        }
        hint = "(1 - momentum) * batch_norm.running_mean + momentum * images.chunk(count)[0].mean((0, 2, 3))"
        judge(yours, right=module.running_mean, case=case, wrong=wrong, hint=hint, within=1e-8)
    return "only replica 0's share of the batch reaches the running mean, as the emulation of DataParallel leaves it"


# Images, batch size, devices, drop_last; after those that have something to say come many more, against luck.
CHUNK_CASES = (
    (96, 10, 4, True),
    (101, 10, 4, False),
    (10_000, 64, 2, False),
    (9, 4, 2, False),
    (9, 4, 2, True),
    *(
        case
        for case in product(range(1, 14), range(1, 7), range(1, 6), (False, True))
        if not case[3] or case[0] >= case[1]  # else there is no batch at all
    ),
)


def _find_smallest(count: int, *batches: int) -> int:
    """The smallest chunk that torch makes of these batches."""
    return min(len(chunk) for batch in batches if batch for chunk in torch.empty(batch).chunk(count))


def verify_find_smallest_chunk(find_smallest_chunk: Callable) -> str:
    """Compares with what ``Tensor.chunk`` makes of the batches."""
    for images, size, count, drop_last in CHUNK_CASES:
        case = f"{images} images in batches of {size} on {count} device{'s' * (count > 1)}, drop_last={drop_last}"
        full, rest = size if images >= size else 0, images % size
        batches = [full, 0 if drop_last else rest]
        yours, right = find_smallest_chunk(images, size, count, drop_last), _find_smallest(count, *batches)
        hint = "return a whole number of images, an int"
        expect(type(yours) is int, case, yours=repr(yours), expected=right, hint=hint)
        if drop_last:
            wrong = {"with drop_last the last, smaller batch is left out": _find_smallest(count, full, rest)}
        else:
            wrong = {
                "without drop_last the last batch is smaller, and it is split, too": _find_smallest(count, size),
                "a full batch can also have a small last chunk": _find_smallest(count, rest or full),
            }
        wrong |= {
            "a device that gets no chunk runs no replica, and does not count: the least is one image": 0,
            "chunk rounds up, and the last gets what is left: 10 images on 4 are 3, 3, 3, 1, not 2 or 3": AnyOf(
                (size // count, -(-size // count))
            ),
        }
        hint = "for the full batch and for the last one: min(len(chunk) for chunk in torch.empty(batch).chunk(count))"
        judge(yours, right=right, case=case, wrong=wrong, hint=hint)
    return f"the sizes that torch's chunk makes, in {len(CHUNK_CASES)} cases"


EXERCISES = {
    "4.1": Exercise("Data parallelism by hand", verify_data_parallel_step),
    "4.2": Exercise("Which statistics survive", verify_predict_running_mean),
    "4.3": Exercise("The last chunk of one image", verify_find_smallest_chunk),
}
