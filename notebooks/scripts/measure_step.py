"""Measures what a step of DDP is made of: computing, all-reducing messages of several sizes, and both together.

torchrun --nproc-per-node=2 measure_step.py --net resnet18 --stems cifar imagenet --batch-sizes 8 16
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from lab_utils import launch, models, timing

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--net", default="resnet18", choices=models.NAMES)
parser.add_argument("--stems", nargs="+", default=["cifar", "imagenet"])
parser.add_argument("--batch-sizes", nargs="*", type=int, default=[8], help="images per process")
parser.add_argument("--megabytes", nargs="*", type=float, default=[], help="sizes of the messages to all-reduce")
parser.add_argument("--repeats", type=int, default=5)
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
world_size = dist.get_world_size()
quiet = {"repeats": args.repeats, "warmup": 2, "device": device}


def measure(step, **options):
    """The seconds of a step, on the slowest rank: all ranks begin together and wait for the last."""
    return timing.measure(step, **quiet, **options).as_record()


# A message costs a fixed time and a time per byte: measured at a few sizes, both can be read off.
messages = []
for megabytes in args.megabytes:
    message = torch.zeros(max(1, int(megabytes * 1e6 / 4)), device=device)
    timed = measure(lambda: dist.all_reduce(message), name="all_reduce")
    messages.append({"bytes": 4 * message.numel(), "timing": timed})

steps = []
for stem in args.stems:
    torch.manual_seed(0)
    net = models.build(args.net, num_classes=10, stem=stem).to(device)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for batch_size in args.batch_sizes:
        images = torch.randn(batch_size, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (batch_size,), device=device)

        def step(wrapped):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()

        # Computing alone is a step of the bare network, on all ranks at once, since they share what the node has.
        alone = measure(lambda: step(net), name="compute", images=batch_size * world_size)
        together = measure(lambda: step(model), name="DDP", images=batch_size * world_size)
        size = sum(4 * parameter.numel() for parameter in net.parameters())
        steps.append({"stem": stem, "batch": batch_size, "bytes": size, "compute": alone, "ddp": together})

launch.report({"world_size": world_size, "messages": messages, "steps": steps})
dist.destroy_process_group()
