"""Trains, stops at SIGTERM, and continues later: torchrun --nproc-per-node=2 train_preempted.py --checkpoint run.pt."""

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lab_utils import data, models


def main():
    """Trains from the checkpoint, if there is one, to the end, or until a process is told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="shapes10, cinic10, ...; if not given, what is there")
    parser.add_argument("--images", type=int, help="only so many of the train split")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--pause", type=float, default=0, help="seconds to wait after each step, to have time to watch")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to save to, and to go on from")
    args = parser.parse_args()

    # Place 1: SIGTERM says "stop soon". The handler may run between any two lines, and twice: it only takes a note.
    ### BEGIN SOLUTION
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    ### END SOLUTION

    local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, device_id=device_id, timeout=timedelta(minutes=2))
    rank = dist.get_rank()

    dataset = data.load(args.data)
    train = Subset(dataset.train, range(len(dataset.train))[: args.images])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = models.build(args.net, num_classes=len(dataset.class_names)).to(device)
    model = DDP(model, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    found = rank == 0 and args.checkpoint.exists()
    box = [torch.load(args.checkpoint, map_location="cpu") if found else None]
    dist.broadcast_object_list(box)
    first, done = 0, 0  # the epoch to begin with, and how many of its steps are done
    if state := box[0]:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["epoch"], state["step"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # the same order as before the stop
        model.train()
        for step, (images, labels) in enumerate(loader, start=1):
            if epoch == first and step <= done:
                continue  # the model has seen these images
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"{time.time():.2f} step {epoch * len(loader) + step}: loss {loss.item():.4f}", flush=True)
            time.sleep(args.pause)

            # Place 2: agree. One tensor, `stop`: above 0 on all processes, if any of them was told to stop.
            ### BEGIN SOLUTION
            stop = torch.tensor(len(told), device=device)
            dist.all_reduce(stop)
            ### END SOLUTION
            if stop or step == len(loader):
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"epoch": epoch, "step": step}
                # Place 3: save `state`: one process, to another name first. Then all leave, if they were told to.
                ### BEGIN SOLUTION
                if rank == 0:
                    torch.save(state, args.checkpoint.with_suffix(".new"))
                    args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a kill leaves the old or the new
                if stop:
                    dist.destroy_process_group()
                    return
                ### END SOLUTION
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
