"""Two ranks of one job, watched: first as one run of reduced values, then as one run per rank in a group.

The arguments of each rank for wandb.init are in plans.json, in the given folder: a list with one entry per rank, each a
list of two plans. None means that the rank opens no run.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch.nn import functional as F

import nodelaunch as launch
from lab_utils import models, training, wandb_runs

folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
plans = json.loads((folder / "plans.json").read_text())[rank]
where = wandb_runs.connect(folder).options  # mode, dir and settings

torch.manual_seed(0)  # the same weights on every rank
model = models.build("tiny").eval()
rows, means = [], []
for reducing, plan in zip((True, False), plans, strict=True):
    run = wandb.init(project="labs", **where, **plan) if plan else None
    for step in range(1, 6):
        # The last batch of an epoch is rarely full, and the ranks' parts of it can differ: here rank 1 has fewer.
        draw = torch.Generator().manual_seed(100 * step + rank)
        count = 48 if rank == 0 else 16
        images, labels = torch.randn(count, 3, 32, 32, generator=draw), torch.randint(10, (count,), generator=draw)
        with torch.no_grad():
            logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        mine = torch.tensor([loss, *training.count_topk(logits, labels), count], dtype=torch.float64)
        # Sums and counts are added over the ranks, and divided once. Every rank has to take part in the addition,
        # also one that logs nothing: it stands outside the `if`.
        total = mine.clone()
        dist.all_reduce(total)
        reduced = dict(zip(("loss", "acc1", "acc5"), (total[:3] / total[3]).tolist(), strict=True))
        own = dict(zip(("loss", "acc1", "acc5"), (mine[:3] / mine[3]).tolist(), strict=True))
        # In the group each run shows its own rank, which is what one looks at when a rank is slow or has odd data.
        if run is not None:
            run.log(reduced if reducing else own, step=step)
        if reducing:
            rows.append(reduced)
            means.append(own["loss"])
    if run is not None:
        run.finish()
launch.report({"rank": rank, "rows": rows, "own_loss": means})
dist.destroy_process_group()
