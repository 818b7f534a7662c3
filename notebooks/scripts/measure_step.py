"""Measures a step of DDP and what it is made of: computing, and the sending of each bucket, with and without overlap.

torchrun --nproc-per-node=2 measure_step.py --net resnet18 --stems cifar imagenet --batch-sizes 8 16
"""

import argparse
import gc
import os
import platform
import statistics
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import nodelaunch as launch
from lab_utils import machine, models, timing


def parse_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="resnet18", choices=models.NAMES)
    parser.add_argument("--stems", nargs="+", default=["cifar", "imagenet"])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[8], help="images per process")
    parser.add_argument("--repeats", type=int, default=6)
    return parser.parse_args()


def read_clock(device):
    """Returns the time; on a GPU, the moment when its work reaches this line."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def subtract(begin, end):
    """Seconds between two readings of the clock."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class Buckets:
    """DDP's buckets in one step, from the hook that DDP calls with each full bucket."""

    def __init__(self, device):
        self.device, self.send, self.rows = device, False, []

    def take(self, state, bucket):
        """Returns the bucket unchanged, or the mean over all ranks, as DDP itself would."""
        row = {"buffer": bucket.buffer(), "ready": read_clock(self.device)}
        self.rows.append(row)
        if not self.send:
            future = torch.futures.Future(devices=[self.device] if self.device.type == "cuda" else None)
            future.set_result(row["buffer"])
            return future

        def note_end(future):
            row["end"] = read_clock(self.device)
            return future.value()[0]

        row["buffer"] /= dist.get_world_size()
        return dist.all_reduce(row["buffer"], async_op=True).get_future().then(note_end)

    def send_all(self):
        """The mean over all ranks of each bucket, one after the other."""
        for row in self.rows:
            row["begin"] = read_clock(self.device)
            row["buffer"] /= dist.get_world_size()
            dist.all_reduce(row["buffer"])
            row["end"] = read_clock(self.device)


def meet(device):
    """All processes leave a step together, so that none begins the next one beside another's last."""
    timing.synchronize(device)
    # A number in main memory: waiting in NCCL would keep a GPU busy.
    dist.all_reduce(torch.zeros(1))


class Case:
    """One network and batch size, and the steps that are measured with them."""

    def __init__(self, net_name, stem, batch_size, device):
        torch.manual_seed(0)
        self.device, self.buckets = device, Buckets(device)
        self.net = models.build(net_name, num_classes=10, stem=stem).to(device)
        # Both share the parameters of the bare network; only the one whose forward pass ran takes part in backward.
        self.ddp, self.watched = DDP(self.net), DDP(self.net)
        self.watched.register_comm_hook(None, self.buckets.take)
        self.images = torch.randn(batch_size, 3, 32, 32, device=device)
        self.labels = torch.randint(0, 10, (batch_size,), device=device)
        # No momentum: two processes have to fit beside a notebook.
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)

    def take_step(self, model, *, ranks=(), apart=False, send=False):
        """One step of some ranks, by default all; returns when backward began and ended."""
        self.buckets.rows, self.buckets.send = [], send
        begin = end = None
        if not ranks or dist.get_rank() in ranks:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(model(self.images), self.labels)
            begin = read_clock(self.device)
            loss.backward()
            end = read_clock(self.device)
            if apart:
                self.buckets.send_all()
            self.optimizer.step()
        meet(self.device)
        return begin, end

    def time_steps(self, measure):
        """The seconds of each kind of step, in turn."""
        steps = {
            "alone": partial(self.take_step, self.net, ranks=[0]),
            # All that DDP does but send the gradients (it still broadcasts batch norm's buffers); on all ranks at once,
            # since they may share what their node has.
            "compute": partial(self.take_step, self.watched),
            # Without overlap: first backward, then the sending. (DDP itself never does this.)
            "apart": partial(self.take_step, self.watched, apart=True),
            "ddp": partial(self.take_step, self.ddp),
        }
        found = measure(steps, images=len(self.images))
        # In the form that timing.Records reads as Timings, so that it measures again what was noise.
        return {one.name: {"Timing": one.as_record()} for one in found}

    def draw_step(self, **how):
        """When backward and the sending of each bucket began and ended, in seconds since backward began."""
        begin, end = self.take_step(self.watched, **how)
        since = partial(subtract, begin)
        rows = [("backward", 0.0, since(end))]
        for number, row in enumerate(self.buckets.rows, start=1):
            rows.append((f"bucket {number}", since(row.get("begin", row["ready"])), since(row["end"])))
        return rows

    def measure_buckets(self, repeats):
        """Each bucket's bytes; medians of when it is full and of its sending alone, in seconds, of the slowest rank."""
        full, sending, worked, passed = [], [], 0.0, 0.0
        for _ in range(repeats):
            begin, end = self.take_step(self.watched)
            full.append([subtract(begin, one) for one in (*(row["ready"] for row in self.buckets.rows), end)])
            cpu, wall = time.process_time(), time.perf_counter()
            self.buckets.send_all()
            meet(self.device)
            worked, passed = worked + time.process_time() - cpu, passed + time.perf_counter() - wall
            sending.append([subtract(row["begin"], row["end"]) for row in self.buckets.rows])
        # What this process, while it sends, takes of the cores of its machine.
        mine = [list(map(statistics.median, zip(*seconds, strict=True))) for seconds in (full, sending)]
        mine += [platform.node(), worked / passed / machine.describe().cores]
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        fulls, sendings, hosts, shares = zip(*ranks, strict=True)
        (*full, backward), sending = ([max(one) for one in zip(*lists, strict=True)] for lists in (fulls, sendings))
        # The ranks of a machine share its cores; other programs do not count. A GPU computes by itself.
        busy = [sum(share for host, share in zip(hosts, shares, strict=True) if host == one) for one in hosts]
        busy = min(1.0, max(busy)) if self.device.type == "cpu" else 0.0
        sizes = [row["buffer"].nbytes for row in self.buckets.rows]
        buckets = [
            {"bytes": one, "ready": two, "send": three} for one, two, three in zip(sizes, full, sending, strict=True)
        ]
        return {"buckets": buckets, "backward": backward, "busy": busy}


def measure_case(net_name, stem, batch_size, repeats, device):
    """Makes all measurements of one network and batch size."""
    gc.collect()  # the networks of the case before
    case = Case(net_name, stem, batch_size, device)
    # It keeps the slowest rank's seconds: the job is as fast as that one.
    measure = partial(timing.interleave, repeats=repeats, warmup=2, device=device, progress=False)
    found = {"stem": stem, "batch": batch_size} | case.time_steps(measure) | case.measure_buckets(repeats)
    found["timelines"] = {
        "with overlap": case.draw_step(send=True),
        "first backward, then sending": case.draw_step(apart=True),
    }
    if dist.get_rank() == 0:
        print(f"{stem} stem, batch {batch_size} per process: measured", flush=True)
    return found


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
    repeats = timing.limit_rounds(args.repeats)
    cases = [(args.net, stem, size, repeats, device) for stem in args.stems for size in args.batch_sizes]
    launch.report({"world_size": dist.get_world_size(), "steps": [measure_case(*case) for case in cases]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
