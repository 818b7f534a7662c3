"""Trains a network with Horovod: horovodrun --gloo -np 2 python train_horovod.py --epochs 3 --checkpoint run.pt.

Horovod's last release, 0.28.1, is of June 2023: it is here since older projects use it.
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
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

    # Place 1: meet. horovodrun tells each process who it is, and init() reads it; a process takes the GPU of its
    # local rank.
    ### BEGIN SOLUTION
    hvd.init()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ### END SOLUTION
    rank, size = hvd.rank(), hvd.size()

    dataset = data.load(args.data)
    train, valid = (Subset(split, range(len(split))[: args.images]) for split in (dataset.train, dataset.valid))
    # Place 2: share. A sampler divides one shuffled order of all images among the processes; full batches only.
    ### BEGIN SOLUTION
    sampler = DistributedSampler(train, size, rank, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    ### END SOLUTION
    valid = Subset(valid, range(rank, len(valid), size))

    torch.manual_seed(0)
    model = models.build(args.net, num_classes=len(dataset.class_names)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    # Place 3: wrap the optimizer, and not the model. backward() starts to average each gradient, step() waits for all.
    ### BEGIN SOLUTION
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ### END SOLUTION

    # Process 0 has saved, perhaps on a disk that the others do not see: it alone loads.
    first = 0
    if rank == 0 and args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])  # its momentum, too
        first = state["epoch"]
    first = hvd.broadcast_object(first, root_rank=0)
    # Place 4: the same start. Process 0 sends all others what it has: the model's state, and the optimizer's.
    ### BEGIN SOLUTION
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    ### END SOLUTION

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        # Batch norm's statistics, of which each process has its own.
        hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
        counts = count(model, DataLoader(valid, args.batch_size), device)
        # Place 5: add up. Counts of all processes, not a mean of their means: their shares need not be equal.
        ### BEGIN SOLUTION
        counts = hvd.allreduce(counts, op=hvd.Sum)  # without op= it averages
        ### END SOLUTION
        loss, hits, images = counts.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss / images:.4f}, accuracy {hits / images:.4f} on {images:.0f} images")
        if args.checkpoint and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a crash leaves the old one or the new


if __name__ == "__main__":
    main()
