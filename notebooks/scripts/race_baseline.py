"""The race's baseline: torchrun --nproc-per-node=2 race_baseline.py --epochs 4 --checkpoint weights.pt."""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lab_utils import data, models


def main():
    """Trains, and saves the weights after each epoch; the judge's clock stops at the last ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step, of all processes together")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to save to; the judge names it")
    args = parser.parse_args()

    local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=device_id)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    dataset = data.load()  # the lap's own images; its `valid` is a part of `train` that was held out for you
    sampler = DistributedSampler(dataset.train, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset.train, args.batch_size // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = models.build(args.net, num_classes=len(dataset.class_names)).to(device)
    model = DDP(model, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last step {loss.item():.3f}")
            torch.save(model.module.state_dict(), args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
