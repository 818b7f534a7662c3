"""Measures a step on one node, and what one of DDP is made of: computing, messages of several sizes, and both.

torchrun --nproc-per-node=2 measure_step.py --net resnet18 --stems cifar imagenet --batch-sizes 8 16
"""

import argparse
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import nodelaunch as launch
from lab_utils import models, timing


def parse_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="resnet18", choices=models.NAMES)
    parser.add_argument("--stems", nargs="+", default=["cifar", "imagenet"])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[8], help="images per process")
    parser.add_argument("--megabytes", nargs="*", type=float, default=[], help="sizes of the messages to all-reduce")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def measure_messages(megabytes, measure, device):
    """A message costs a fixed time and a time per byte: measured at a few sizes, both can be read off."""
    messages = [torch.zeros(max(1, int(size * 1e6 / 4)), device=device) for size in megabytes]
    steps = [partial(dist.all_reduce, message) for message in messages]
    return [
        {"bytes": 4 * message.numel(), "timing": measure({"all_reduce": step})[0].as_record()}
        for message, step in zip(messages, steps, strict=True)
    ]


def train_step(model, optimizer, images, labels):
    """One step, whether the model is a bare network or wrapped in DDP."""
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def meet(device):
    """All processes leave a step together, so that none begins the next one beside another's last."""
    timing.synchronize(device)
    # A number in main memory: waiting in NCCL would keep a GPU busy.
    dist.all_reduce(torch.zeros(1))


def measure_step(net_name, stem, batch_size, measure, device):
    """The seconds of a step on one node, of one without communication, and of one with it: in turn."""
    torch.manual_seed(0)
    net = models.build(net_name, num_classes=10, stem=stem).to(device)
    model = DDP(net)  # shares the parameters of the bare network
    batch = torch.randn(batch_size, 3, 32, 32, device=device), torch.randint(0, 10, (batch_size,), device=device)
    # No momentum: two processes have to fit beside a notebook.
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def make_step(network, ranks):
        def step():
            if dist.get_rank() in ranks:
                train_step(network, optimizer, *batch)
            meet(device)

        return step

    everyone = range(dist.get_world_size())
    # "compute" is the bare network, on all ranks at once, since they may share what their node has.
    steps = {"alone": make_step(net, [0]), "compute": make_step(net, everyone), "ddp": make_step(model, everyone)}
    size = sum(4 * parameter.numel() for parameter in net.parameters())
    found = {"stem": stem, "batch": batch_size, "bytes": size}
    timings = measure(steps, images=batch_size)
    if dist.get_rank() == 0:
        print(f"{stem} stem, batch {batch_size} per process: measured", flush=True)
    return found | {one.name: one.as_record() for one in timings}


def main():
    """Measures everything that was asked for, and reports it."""
    args = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The notebook's job has hang_timeout=600: the launcher gives up first, and says where each process stands.
    # device_id: NCCL connects the GPUs now, and not at the first collective. Gloo takes none.
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(seconds=900), device_id=device_id)
    # It keeps the slowest rank's seconds: the job is as fast as that one.
    measure = partial(timing.interleave, repeats=args.repeats, warmup=2, device=device, progress=False)
    messages = measure_messages(args.megabytes, measure, device)
    cases = [(stem, size) for stem in args.stems for size in args.batch_sizes]
    steps = [measure_step(args.net, stem, size, measure, device) for stem, size in cases]
    launch.report({"world_size": dist.get_world_size(), "messages": messages, "steps": steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
