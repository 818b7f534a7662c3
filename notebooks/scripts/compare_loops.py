"""Times a training step of one network in four loops, in turn: compare_loops.py --batch-size 32, or under torchrun."""

import argparse
import itertools
import os
import statistics
import time
from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from train_lightning import QUIET, Classifier

import nodelaunch as launch
from lab_utils import models, timing

STEPS, WARMUP = 25, 5  # of each round; the first ones are dropped
RANKS = int(os.environ.get("WORLD_SIZE", 1))


class Clock(L.Callback):
    """Notes when each step ends: wall-clock and CPU seconds."""

    def __init__(self):
        self.ends = []

    def note(self):
        """A step ends now."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def find_middle(self):
        """The median step in wall-clock and in CPU seconds: the steps of one round are not independent."""
        pairs = itertools.pairwise(self.ends[WARMUP:])
        steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]
        return tuple(map(statistics.median, zip(*steps, strict=True)))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Lightning calls this after each step."""
        self.note()


def make(args):
    """The network, its optimizer and a loader, the same for all loops."""
    torch.manual_seed(0)
    count = args.batch_size * STEPS
    images, labels = torch.randn(count, 3, 32, 32), torch.arange(count) % 10
    model = models.build(args.net, num_classes=10)
    loader = DataLoader(TensorDataset(images, labels), args.batch_size)
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader


def run_ours(args, clock):
    """The loop of lab 5."""
    model, optimizer, loader = make(args)
    model = DDP(model) if RANKS > 1 else model
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        clock.note()


def run_fabric(args, clock):
    """The same loop with Lightning Fabric."""
    model, optimizer, loader = make(args)
    fabric = L.Fabric(accelerator="cpu", devices=RANKS)  # NEW
    fabric.launch()  # NEW: joins the ranks that torchrun has started
    model, optimizer = fabric.setup(model, optimizer)  # NEW: wraps and moves the model
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)  # NEW: batches come to the device
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)  # NEW: for mixed precision
        optimizer.step()
        clock.note()


def run_accelerate(args, clock):
    """The same loop with Hugging Face Accelerate."""
    model, optimizer, loader = make(args)
    accelerator = Accelerator(cpu=True)  # NEW
    model, optimizer = accelerator.prepare(model, optimizer)  # NEW: with the loader, it would divide it, too
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)  # NEW: for mixed precision
        optimizer.step()
        clock.note()


def run_lightning(args, clock):
    """Lightning's own loop."""
    model, optimizer, loader = make(args)
    classifier = Classifier(args.net, 10, 0.05)
    classifier.model, classifier.configure_optimizers = model, lambda: optimizer
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=RANKS, use_distributed_sampler=False, callbacks=[clock], **QUIET
    )
    trainer.fit(classifier, loader)


LOOPS = {"lab 5": run_ours, "Fabric": run_fabric, "Accelerate": run_accelerate, "Lightning": run_lightning}


def measure(args):
    """The seconds of each loop's middle step, round by round; each round begins with another loop."""
    seconds, before = {name: [] for name in LOOPS}, timing.read_usage()
    for round_number in range(args.rounds + 1):
        start = round_number % len(LOOPS)
        names = [*LOOPS][start:] + [*LOOPS][:start]
        for name in names[:: -1 if round_number % 2 else 1]:
            clock = Clock()
            LOOPS[name](args, clock)
            if round_number:  # the first round is dropped
                seconds[name].append(clock.find_middle())
    others, busiest = timing.find_others(before)
    rank = dist.get_rank() if RANKS > 1 else None
    return [
        timing.Timing(
            name, *zip(*pairs, strict=True), images=args.batch_size, rank=rank, others=others, busiest=busiest
        )
        for name, pairs in seconds.items()
    ]


def main():
    """Reports each loop's timing on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    if RANKS > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    launch.report([{"Timing": one.as_record()} for one in measure(args)])
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
