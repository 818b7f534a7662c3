"""Four processes, one number each: every one of them gets the sum. The smallest program for torchrun."""

from datetime import timedelta

import torch
import torch.distributed as dist

import nodelaunch as launch

# torchrun has told each process who it is, and where to meet the others. "gloo" talks over the network from a CPU.
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
mine = torch.tensor([rank + 1.0])
total = mine.clone()
dist.all_reduce(total)  # every rank has to call this: it waits here until all ranks have called it
device = "cuda" if torch.cuda.is_available() else "cpu"
launch.report({"rank": rank, "device": device, "had": mine.item(), "has": total.item()})
dist.destroy_process_group()
