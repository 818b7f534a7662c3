"""Several processes evaluate their shares of some images and log the result once, with a function of the notebook.

torchrun starts it; `answer.py` beside it holds the learner's `log_reduced`.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from answer import log_reduced
from torch.nn import functional as F

import nodelaunch as launch
from lab_utils import data, models, training

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="shapes10")
parser.add_argument("--images", type=int, default=33, help="an odd number, so that two shares differ")
parser.add_argument("--logdir", required=True)
args = parser.parse_args()


def open_writer():
    """Opens the event file; the import is here because the other ranks need no TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(args.logdir)


dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world_size = dist.get_rank(), dist.get_world_size()

dataset = data.load(args.data)
valid = dataset.batches("valid", 16, rank=rank, world_size=world_size)
valid.set_epoch(0, start=len(dataset.valid) - args.images)  # the last few images are enough here
torch.manual_seed(0)  # the same untrained network on every rank, as DDP would have it
model = models.build("tiny").eval()

# Images, summed loss, top-1 hits: sums add up over batches and ranks, means do not.
sums = torch.zeros(3, dtype=torch.float64)
with torch.no_grad():
    for images, labels in valid:
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.tensor([len(labels), loss.item(), training.count_topk(logits, labels)[0].item()])

launch.report({"rank": rank, "sums": sums.tolist()})
log_reduced(rank, sums, dist.all_reduce, open_writer, 1)
dist.destroy_process_group()
