"""Times a step on one device, on two under DataParallel, and on two under DDP, in turn, on the same global batch.

torchrun --nproc-per-node=2 compare_parallel.py --net resnet18 --batch-sizes 16 64
"""

import argparse
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import nodelaunch as launch
from lab_utils import machine, models, timing
from lab_utils.parallel import CpuDataParallel


def parse_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--net", default="resnet18", choices=models.NAMES)
    parser.add_argument("--stem", default="imagenet", choices=["imagenet", "cifar"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[16], help="global batch size")
    parser.add_argument("--repeats", type=int, default=6)
    return parser.parse_args()


def train_step(model, optimizer, images, labels):
    """One training step; the three set-ups differ in `model` only."""
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def infer_step(model, images):
    """One pass without gradients."""
    with torch.no_grad():
        model(images)


def meet(device):
    """All processes leave a step together, so that each one's seconds are the whole step's."""
    timing.synchronize(device)
    # A number in main memory: waiting in NCCL would keep the GPU busy that another process is to be timed on.
    dist.all_reduce(torch.zeros(1))


def measure_case(args, batch_size, device, cores):
    """Times the set-ups for one global batch; `cores` is how many one process may use while the others wait."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    each = max(1, cores // world_size)
    torch.manual_seed(0)  # the same weights and images in all processes
    net = models.build(args.net, stem=args.stem).to(device)
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)
    share = images.chunk(world_size)[rank], labels.chunk(world_size)[rank]
    # All three have the parameters of one network: only the wrapper differs.
    if args.device == "cuda":
        dp = nn.DataParallel(net, device_ids=list(range(world_size))) if rank == 0 else None
    else:
        dp = CpuDataParallel(net, world_size, threads=each)
    ddp = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)  # no momentum: two processes have to fit beside a notebook

    def make_step(function, model, threads, alone, *batch):
        """One device and DataParallel are one process's work; the others wait for it."""

        def step():
            torch.set_num_threads(threads)
            if rank == 0 or not alone:
                function(model, *batch)
            meet(device)

        return step

    train = partial(train_step, optimizer=optimizer)
    measure = partial(timing.interleave, images=batch_size, repeats=args.repeats, warmup=4, device=device)

    def run(model, images, labels):
        train(model, images=images, labels=labels)

    training = {
        "1 device": make_step(run, net, cores, True, images, labels),
        "DP": make_step(run, dp, cores, True, images, labels),
        "DDP": make_step(run, ddp, each, False, *share),
        # What two devices would take if nothing had to be sent: the bare network, on all at once.
        "half the batch": make_step(run, net, each, False, *share),
    }
    inference = {
        "1 device": make_step(infer_step, net, cores, True, images),
        "DP": make_step(infer_step, dp, cores, True, images),
        # Nothing is averaged, so each process runs the bare network on its share.
        "two processes, as in DDP": make_step(infer_step, net, each, False, share[0]),
    }
    result = {"batch": batch_size, "training": tag(measure(training, progress=False))}
    net.eval()
    result["inference"] = tag(measure(inference, progress=False))
    if rank == 0:
        print(f"batch {batch_size}: measured", flush=True)
    return result


def tag(timings):
    """In the form that ``timing.Records`` reads as Timings, so that it measures again what was noise."""
    return [{"Timing": timing.as_record()} for timing in timings]


def measure_links(args, device):
    """Times a copy of all weights to the other device, as in DataParallel, and their all-reduce, as in DDP."""
    size = sum(parameter.numel() for parameter in models.build(args.net, stem=args.stem).parameters())
    weights = torch.zeros(size, device=device)
    last = f"cuda:{dist.get_world_size() - 1}" if args.device == "cuda" else "cpu"
    other = torch.zeros(size, device=last)

    def copy():
        if dist.get_rank() == 0:
            other.copy_(weights)
        meet(device)

    def all_reduce():
        dist.all_reduce(weights)
        meet(device)

    steps = {"copy": copy, "all_reduce": all_reduce, "meeting": partial(meet, device)}
    timings = timing.interleave(steps, repeats=2 * args.repeats, warmup=2, device=device, progress=False)
    # Not tagged: times as short as these often jump, and would have everything measured again.
    return {"weights_bytes": 4 * size, "links": [timing.as_record() for timing in timings]}


def main():
    """Measures everything that was asked for, and reports it."""
    args = parse_arguments()
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # device_id: NCCL connects the GPUs now, and not at the first collective. Gloo takes none.
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(seconds=120), device_id=device_id)
    share, cores = torch.get_num_threads(), machine.describe().cores  # one process alone takes all of them
    cases = [measure_case(args, batch_size, device, cores) for batch_size in args.batch_sizes]
    torch.set_num_threads(share)
    launch.report({"cores": cores, "cases": cases, **measure_links(args, device)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
