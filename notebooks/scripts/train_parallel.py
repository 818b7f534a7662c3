"""Trains on one device, or on two by DP or DDP: torchrun --nproc-per-node=2 train_parallel.py --how ddp --steps 50."""

import argparse
import itertools
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import nodelaunch as launch
from lab_utils import data, models, timing
from lab_utils.parallel import CpuDataParallel


def parse_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", default="single", choices=["single", "dp", "ddp"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="global batch size")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--seconds", type=float, default=5, help="without --steps, in one process: stop then")
    parser.add_argument("--bn", default="batch", choices=["batch", "frozen"], help="whose statistics BatchNorm takes")
    return parser.parse_args()


def wrap(net, how, device):
    """The network as it is trained. DDP also needs a process group, and each process its share of the images."""
    if how == "dp" and device.type == "cuda":
        return nn.DataParallel(net, device_ids=[0, 1])
    if how == "dp":  # without two GPUs an emulation, whose two threads share the cores
        return CpuDataParallel(net, 2, threads=max(1, torch.get_num_threads() // 2))
    return DDP(net) if how == "ddp" else net


def train(args, model, batches, optimizer, device):
    """Trains until --steps or --seconds are over; returns loss and accuracy of each step, and when each ended."""
    curve, ends = [], [time.time()]  # the first one is the beginning
    for epoch in itertools.count():
        batches.set_epoch(epoch)
        for images, labels in batches:
            if args.how == "dp":
                # DDP's rank 0 gets every second image, DP's device 0 the first half: now they are the same images.
                images, labels = (torch.cat([part[::2], part[1::2]]) for part in (images, labels))
            optimizer.zero_grad()
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            curve.append(torch.stack([loss.detach(), (logits.argmax(1) == labels).float().mean()]))
            timing.synchronize(device)  # a GPU runs behind the program: without this the step would not be over
            ends.append(time.time())
            if len(curve) == args.steps or (not args.steps and ends[-1] - ends[0] > args.seconds):
                return torch.stack(curve), ends


def main():
    """Trains, and reports curves, times, each GPU's peak memory, and the share of the processors that others used."""
    args = parse_arguments()
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.how == "ddp":  # device_id: NCCL connects the GPUs now, and not at the first collective; Gloo takes none
        backend, device_id = ("nccl", device) if cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=timedelta(seconds=120), device_id=device_id)
    dataset, share = data.load(), {"device": device, "rank": rank, "world_size": world_size}
    batches = dataset.batches("train", args.batch_size // world_size, drop_last=True, **share)
    torch.manual_seed(0)
    net = models.build(args.net, num_classes=len(dataset.class_names)).train(args.bn == "batch").to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    before = timing.read_usage()
    curve, ends = train(args, wrap(net, args.how, device), batches, optimizer, device)
    others, _ = timing.find_others(before)
    if args.how == "ddp":  # each rank has the means over its half of every batch
        dist.all_reduce(curve)
        dist.destroy_process_group()
    loss, accuracy = (curve / world_size).T.tolist()
    peaks = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
    launch.report({"loss": loss, "accuracy": accuracy, "ends": ends, "peaks": peaks, "others": others})


if __name__ == "__main__":
    main()
