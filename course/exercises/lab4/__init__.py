"""The exercises of lab 4: data parallelism by hand, the running mean that survives, the smallest chunk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import torch
from torch import nn

from course.check.verdicts import Exercise, NotYetError, expect, refusing
from course.exercises.lab4.replicas import is_close
from course.exercises.lab4.replicated_step import verify_data_parallel_step
from lab_utils.parallel import CpuDataParallel

# Devices, images, momentum.
MEAN_CASES = ((1, 4, 0.1), (2, 7, 0.1), (3, 7, 0.3), (4, 10, 0.3), (5, 6, 0.1), (2, 8, 0.3))

WHOLE_BATCH = (
    "these are statistics of the whole batch, as SyncBatchNorm keeps them; DataParallel never joins the chunks', and "
    "the module keeps those of replica 0"
)


def verify_predict_running_mean(predict_running_mean: Callable) -> str:
    """Compares with a forward pass of the emulation of DataParallel."""
    generator = torch.Generator().manual_seed(2)
    for count, batch, momentum in MEAN_CASES:
        images = torch.randn(batch, 3, 2, 5, generator=generator, dtype=torch.float64)
        images += torch.arange(batch).view(-1, 1, 1, 1)  # no two chunks alike
        batch_norm = nn.BatchNorm2d(3, momentum=momentum).double()
        batch_norm.running_mean.copy_(torch.tensor([4.0, -2.0, 1.0]))
        module = copy.deepcopy(batch_norm)
        CpuDataParallel(module, count, threads=1)(images)
        case = f"{batch} images on {count} device{'s' * (count > 1)}, momentum {momentum}: the running mean"
        shape = "one mean for each channel, over images, height and width: first.mean((0, 2, 3))"
        with refusing(RuntimeError, case=case, expected="a tensor of 3 numbers", hint=shape):
            yours = predict_running_mean(copy.deepcopy(batch_norm), images, count)
        is_mean = isinstance(yours, torch.Tensor) and yours.shape == (3,)
        found = getattr(yours, "shape", type(yours).__name__)
        expect(is_mean, case, yours=found, expected="a tensor of 3 numbers", hint=shape)
        expect(
            is_close(yours, module.running_mean),
            case,
            yours=_format(yours),
            expected=_format(module.running_mean),
            hint=_explain_mean(yours, batch_norm, images, count),
        )
    return "only replica 0's share of the batch reaches the running mean, as the emulation of DataParallel leaves it"


def _format(mean: torch.Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in mean.tolist())}]"


def _explain_mean(yours: torch.Tensor, batch_norm: nn.BatchNorm2d, images: torch.Tensor, count: int) -> str:
    """The hint that fits a wrong running mean: of which images it is, or how it was mixed with the old one."""
    old, momentum = batch_norm.running_mean, batch_norm.momentum
    if is_close(yours, old):
        return "it does change: replica 0 shares its buffers with the module, so what it writes there stays"
    chunks = images.chunk(count)
    first, *_, last = means = [chunk.mean((0, 2, 3)) for chunk in (*chunks, chunks[-1])]
    sizes = [len(chunk) for chunk in chunks]
    sources = [
        ("", first),
        (WHOLE_BATCH, images.mean((0, 2, 3))),
        (
            "the replicas' statistics are not averaged: all but replica 0's go with the replica",
            sum(means[:-1]) / len(chunks),
        ),
        ("not the last replica, the first: it shares its buffers with the module, the others are copies", last),
        (
            f"chunk rounds up, {len(images)} images on {count} give {sizes}: take images.chunk(count)[0]",
            images[: len(images) // count].mean((0, 2, 3)),
        ),
    ]
    for source, mean in sources:
        mixtures = [
            ("", (1 - momentum) * old + momentum * mean),
            ("momentum was left out: the running mean moves towards the new mean, it does not become it", mean),
            (
                "PyTorch's momentum weighs the new value, 1 - momentum the old one",
                momentum * old + (1 - momentum) * mean,
            ),
        ]
        for mixture, candidate in mixtures:
            if is_close(yours, candidate) and (source or mixture):
                return source or mixture
    every = old
    for mean in means[:-1]:
        every = (1 - momentum) * every + momentum * mean
    if is_close(yours, every):
        return "one update per step, not one per chunk: all replicas but replica 0 write into buffers that are dropped"
    return "(1 - momentum) * batch_norm.running_mean + momentum * images.chunk(count)[0].mean((0, 2, 3))"


# Images, batch size, devices, drop_last; after those that have something to say come many more, against luck.
CHUNK_CASES = (
    (10_000, 64, 2, False),
    (96, 10, 4, True),
    (9, 4, 2, False),
    (100, 9, 4, False),
    (9, 4, 2, True),
    *(
        case
        for case in product(range(1, 14), range(1, 7), range(1, 6), (False, True))
        if not case[3] or case[0] >= case[1]  # else there is no batch at all
    ),
)


def _find_chunks(images: int, count: int) -> list[int]:
    """The sizes of the chunks that torch makes."""
    return [len(chunk) for chunk in torch.empty(images).chunk(count)]


def _find_batches(images: int, batch_size: int, drop_last: bool) -> list[int]:
    """The different sizes of the batches of an epoch."""
    full, rest = divmod(images, batch_size)
    return [batch_size] * (full > 0) + [rest] * (rest > 0 and not drop_last)


def verify_find_smallest_chunk(find_smallest_chunk: Callable) -> str:
    """Compares with what ``Tensor.chunk`` makes of the batches."""
    wanted = [_choose(_find_batches(n, size, drop), _find_chunks, count) for n, size, count, drop in CHUNK_CASES]
    answers = [find_smallest_chunk(*case) for case in CHUNK_CASES]
    for case, yours, expected in zip(CHUNK_CASES, answers, wanted, strict=True):
        images, batch_size, count, drop_last = case
        name = f"{images} images in batches of {batch_size} on {count} device{'s' * (count > 1)}, drop_last={drop_last}"
        is_count = isinstance(yours, int) and not isinstance(yours, bool)
        hint = "return a whole number of images, an int"
        expect(is_count, name, yours=repr(yours), expected=expected, hint=hint)
        if yours != expected:
            raise NotYetError(name, yours=yours, expected=expected, hint=_explain_chunk(answers, case, yours))
    return f"the sizes that torch's chunk makes, in {len(CHUNK_CASES)} cases"


def _choose(batches: list[int], split: Callable[[int, int], list[int]], count: int) -> int:
    return min(size for batch in batches for size in split(batch, count))


def _pad_chunks(images: int, count: int) -> list[int]:
    """The same with a zero for each device that gets none."""
    sizes = _find_chunks(images, count)
    return sizes + [0] * (count - len(sizes))


# How a batch might be split, and which batches might be looked at, each with what is wrong with it.
SPLITS: tuple[tuple[str, Callable[[int, int], list[int]]], ...] = (
    ("", _find_chunks),
    ("a device that gets no chunk runs no replica, and does not count: the least is one image", _pad_chunks),
    (
        "chunk rounds the size up, and the last chunk gets what is left: 10 images on 4 are 3, 3, 3, 1, not 10 // 4",
        lambda n, count: [n // count],
    ),
    (
        "the last chunk gets what is left, which can be less: 10 images on 4 are 3, 3, 3, 1",
        lambda n, count: [-(-n // count)],
    ),
    (
        "chunk does not spread them evenly, as tensor_split would: 10 images on 4 are 3, 3, 3, 1, not 3, 3, 2, 2",
        lambda n, count: [max(1, n // count)],
    ),
)
BATCHES: tuple[tuple[str, Callable[[int, int, bool], list[int]]], ...] = (
    ("", _find_batches),
    (
        "without drop_last the last batch of an epoch is smaller, images % batch_size, and it is split too",
        lambda images, size, drop: [size],
    ),
    (
        "with drop_last the last, smaller batch is left out",
        lambda images, size, drop: _find_batches(images, size, False),
    ),
    (
        "a data set smaller than a batch has no full batch: without drop_last all of it is one batch, with it none",
        lambda images, size, drop: [size, *_find_batches(images, size, drop)],
    ),
    (
        "a full batch can also have a small last chunk",
        lambda images, size, drop: _find_batches(images, size, drop)[-1:],
    ),
)


def _explain_chunk(answers: list[object], case: tuple[int, int, int, bool], yours: int) -> str:
    """Returns the hint for a wrong answer: preferably the mistake behind all answers, otherwise one behind this one."""
    wrong = [
        (about_split or about_batches, split, find)
        for (about_split, split), (about_batches, find) in product(SPLITS, BATCHES)
        if about_split or about_batches
    ]
    for tried, given in ((CHUNK_CASES, answers), ([case], [yours])):
        for hint, split, find in wrong:
            if given == [_choose(find(n, size, drop), split, count) for n, size, count, drop in tried]:
                return hint
    return "for the full batch and for the last one: min(len(chunk) for chunk in torch.empty(batch).chunk(count))"


EXERCISES = {
    "4.1": Exercise("Data parallelism by hand", verify_data_parallel_step),
    "4.2": Exercise("Which statistics survive", verify_predict_running_mean),
    "4.3": Exercise("The last chunk of one image", verify_find_smallest_chunk),
}
