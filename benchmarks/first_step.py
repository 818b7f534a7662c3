"""The smallest job of two nodes: its rank 0 writes two numbers into the file that is named to it.

When its first step was done, and the CPU seconds that it had taken until then.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
done = time.time(), time.process_time()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(" ".join(map(repr, done)))
dist.destroy_process_group()
