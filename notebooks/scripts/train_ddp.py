"""Trains a network in several processes: torchrun --nproc-per-node=2 train_ddp.py --epochs 3 --checkpoint run.pt."""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lab_utils import data, models


@torch.no_grad()
def count(model, loader, device):
    """Three sums over the images that a loader gives: loss, hits, and their number."""
    model.eval()
    counts = torch.zeros(3, device=device)
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        counts += torch.stack([loss, (logits.argmax(1) == labels).sum(), loss.new_tensor(len(labels))])
    return counts


def main():
    """Trains, from the checkpoint if there is one, and saves one after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="shapes10, cinic10, ...; if not given, what is there")
    parser.add_argument("--images", type=int, help="only so many of each split")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", type=Path, help="the file to save to, and to go on from")
    args = parser.parse_args()

    # Place 1: meet. torchrun tells each process who it is; without a timeout it waits for others up to half an hour.
    ### BEGIN SOLUTION
    local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=device_id)
    ### END SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()

    dataset = data.load(args.data)
    train, valid = (Subset(split, range(len(split))[: args.images]) for split in (dataset.train, dataset.valid))
    # Place 2: share. A sampler divides one shuffled order of all images among the processes; full batches only.
    ### BEGIN SOLUTION
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    ### END SOLUTION
    valid = Subset(valid, range(rank, len(valid), world_size))

    torch.manual_seed(0)
    model = models.build(args.net, num_classes=len(dataset.class_names)).to(device)
    # Place 3: wrap. From here on backward() averages the gradients over all processes.
    ### BEGIN SOLUTION
    model = DDP(model, device_ids=[local_rank] if cuda else None)
    ### END SOLUTION
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    # Process 0 has saved, perhaps on a disk that the others do not see: it tells them what it found.
    found = rank == 0 and args.checkpoint and args.checkpoint.exists()
    box = [torch.load(args.checkpoint, map_location="cpu") if found else None]
    dist.broadcast_object_list(box)
    first = 0
    if state := box[0]:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])  # its momentum, too
        first = state["epoch"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        for buffer in model.buffers():  # batch norm's statistics, of which each process has its own
            dist.broadcast(buffer, src=0)
        counts = count(model.module, DataLoader(valid, args.batch_size), device)
        # Place 4: add up. Counts of all processes, not a mean of their means: their shares need not be equal.
        ### BEGIN SOLUTION
        dist.all_reduce(counts)
        ### END SOLUTION
        loss, hits, images = counts.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss / images:.4f}, accuracy {hits / images:.4f} on {images:.0f} images")
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        # Place 5: save `state` to args.checkpoint, if that is given. One process writes (safer: to another name first).
        ### BEGIN SOLUTION
        if args.checkpoint and rank == 0:
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a crash leaves the old one or the new
        ### END SOLUTION
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
