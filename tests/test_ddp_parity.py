"""DistributedDataParallel against one process: the same gradients and the same weights, in float64, to 1e-10.

Real processes, connected by gloo. BatchNorm takes its stored statistics here (``eval``), because a batch's own ones
change when the batch is divided; that they do is shown as well.
"""

import copy
import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from lab_utils import models

WORLD_SIZES = (1, 2, 3, 4)
STEPS, CLOSE = 3, 1e-10


@functools.cache
def make_model():
    """A model that nobody changes: each training has a copy. Made before the fork, it is there for all ranks."""
    torch.manual_seed(0)
    model = models.build("tiny", stem="cifar").double().eval()
    # Statistics that are not 0 and 1, as after some training.
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1, generator=generator)
            module.running_var.uniform_(2.0, 3.0, generator=generator)
    return model


def make_images(count):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS, count, 3, 32, 32, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 10, (STEPS, count), generator=generator)


def train(model, images, labels, *, loss=F.cross_entropy, rank=0, world_size=1, passes=1, steps=STEPS):
    """Trains on this rank's share of each step's images; returns all gradients and at last the weights."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            part = slice(rank + world_size * number, None, world_size * passes)
            further = number < passes - 1 and isinstance(model, DistributedDataParallel)
            logits_and_labels = model, images[step][part], labels[step][part]
            if further:
                with model.no_sync():
                    backward(*logits_and_labels, loss, passes)
            else:
                backward(*logits_and_labels, loss, passes)
        # Before the step: what DDP did, it did in backward().
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        optimizer.step()
    return [*found, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])]


def backward(model, images, labels, loss, passes):
    (loss(model(images), labels) / passes).backward()


def compare(model, images, labels, *, loss=F.cross_entropy, **share):
    """Returns how far DDP is from one process, and whether all ranks have the same bits; leaves the model as it was."""
    ours = train(DistributedDataParallel(copy.deepcopy(model)), images, labels, loss=loss, **share)
    digests, digest = [None] * share["world_size"], hashlib.sha256()
    for one in ours:
        digest.update(one.numpy())
    dist.all_gather_object(digests, digest.hexdigest())
    difference = None
    if share["rank"] == 0:
        alone = train(copy.deepcopy(model), images, labels)
        pairs = zip(ours, alone, strict=True)
        difference = max(float((one - other).abs_().max() / other.abs().max().clamp(min=1)) for one, other in pairs)
    return {"difference": difference, "same_on_all_ranks": len(set(digests)) == 1}


def run(rank, world_size, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    share = {"rank": rank, "world_size": world_size}
    tiny, (images, labels) = make_model(), make_images(24)
    found = {
        "even": compare(tiny, images, labels, **share),
        "accumulated": compare(tiny, images, labels, passes=2, **share),
        "batch statistics": compare(copy.deepcopy(tiny).train(), images, labels, **share),
    }
    # 13 images: ranks have 13; 7 and 6; 5, 4 and 4; 4, 3, 3 and 3.
    few, few_labels = make_images(13)

    def weighted(logits, labels):
        # DDP divides the sum over ranks by their number; the mean over all images divides by the images.
        return F.cross_entropy(logits, labels, reduction="sum") * world_size / 13

    found["uneven, weighted"] = compare(tiny, few, few_labels, loss=weighted, **share)
    found["uneven, mean of means"] = compare(tiny, few, few_labels, **share)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs all cases for all numbers of processes; forked from one that has imported torch, saving seconds each."""
    folders = {world_size: tmp_path_factory.mktemp(f"parity{world_size}") for world_size in WORLD_SIZES}
    command = [sys.executable, __file__, *map(str, folders.values())]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert child.returncode == 0, child.stdout
    return folders


@pytest.fixture(params=WORLD_SIZES, ids=lambda size: f"{size} processes")
def found(request, folders):
    return request.param, json.loads((folders[request.param] / "found.json").read_text())


@pytest.mark.parametrize("case", ["even", "uneven, weighted", "accumulated"])
def test_gradients_and_weights_are_those_of_one_process(found, case):
    _, cases = found
    assert cases[case]["same_on_all_ranks"]
    assert cases[case]["difference"] <= CLOSE


def test_a_mean_of_means_is_not_the_mean_where_shares_are_uneven(found):
    world_size, cases = found
    case = cases["uneven, mean of means"]
    assert case["same_on_all_ranks"]
    assert (case["difference"] <= CLOSE) == (world_size == 1)
    assert case["difference"] > 1e-6 or world_size == 1


def test_batch_statistics_differ_once_the_batch_is_divided(found):
    world_size, cases = found
    case = cases["batch statistics"]
    assert case["same_on_all_ranks"]  # the weights; each rank has statistics of its own
    assert case["difference"] > 1e-3 or world_size == 1
    assert case["difference"] <= CLOSE or world_size > 1


if __name__ == "__main__":
    train(copy.deepcopy(make_model()), *make_images(1), steps=1)  # loads what torch loads late
    for world_size, folder in zip(WORLD_SIZES, sys.argv[1:], strict=True):
        multiprocessing.start_processes(run, (world_size, folder), nprocs=world_size, start_method="fork")
