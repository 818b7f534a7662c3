"""Ten all-reduces, in which rank 1 goes wrong as --how says: it dies, or stays away from one."""

import argparse
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--how", choices=("die", "skip"), required=True)
args = parser.parse_args()

# How long a rank waits for the others before it gives up; torch's default is half an hour.
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
for step in range(10):
    wrong = dist.get_rank() == 1 and step == 5
    if wrong and args.how == "die":
        os.kill(os.getpid(), signal.SIGKILL)  # as Linux does to the process that takes most memory
    if wrong and args.how == "skip":
        time.sleep(3600)  # as a rank that waits for a file, a lock or an answer, in an `if` that only it enters
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
