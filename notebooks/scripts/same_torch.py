"""Ten steps by DDP, or with --horovod by Horovod: torchrun --nproc-per-node=2 same_torch.py start.npz out.npz."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    """Two convolutions that halve the image, each with a batch norm, and a linear layer."""
    layers = []
    for channels_in, channels in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def train(start, dtype, hvd):
    """Takes a step with each batch of this rank; returns its losses, and the weights at the end."""
    rank = hvd.rank() if hvd else dist.get_rank()
    images = torch.from_numpy(start[f"images{rank}"]).to(dtype)
    labels = torch.from_numpy(start[f"labels{rank}"])
    model = build()
    weights = {name: torch.from_numpy(start[name]) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # not batch norm's averages, which only evaluation needs
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if hvd:
        wrapped, optimizer = model, hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        wrapped = DDP(model)
    losses = []
    for batch, answers in zip(images, labels, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(batch), answers)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses} | {name: one.detach().numpy() for name, one in model.named_parameters()}


def main():
    """Trains in float32 and in float64; rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("start", help="first weights, and the batches of each rank")
    parser.add_argument("out", help="for losses and weights")
    parser.add_argument("--horovod", action="store_true")
    args = parser.parse_args()
    hvd = None
    if args.horovod:
        import horovod.torch as hvd

        hvd.init()
    else:
        dist.init_process_group("gloo")
    start = np.load(args.start)
    found = {
        f"{name}/{key}": value
        for name, dtype in {"float32": torch.float32, "float64": torch.float64}.items()
        for key, value in train(start, dtype, hvd).items()
    }
    if (hvd.rank() if hvd else dist.get_rank()) == 0:
        np.savez(args.out, **found)
    if not hvd:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
