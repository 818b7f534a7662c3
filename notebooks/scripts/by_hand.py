"""Two ranks without our launcher: by mp.spawn, by mpirun or by torchrun, and an all-reduce between them.

    python by_hand.py                       # this program starts both ranks itself
    mpirun -np 2 python by_hand.py
    torchrun --nproc-per-node=2 by_hand.py

With --table it measures all-reduces as nccl-tests does: with NCCL if this machine has a GPU for each rank, otherwise
with Gloo.
"""

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world_size):
    """Does the work of one rank: joins the group, and sums a number over all ranks."""
    cuda = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Where to meet stands in MASTER_ADDR and MASTER_PORT; who it is, a rank has to say.
    backend, own_gpu = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=60), device_id=own_gpu)
    x = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(x)
    if rank == 0:
        print(f"sum {x.item():g}", flush=True)
    if "--table" in sys.argv:
        measure(device)
    dist.destroy_process_group()


def measure(device):
    """Prints a table: bytes, microseconds, algorithm and bus bandwidth in GB/s."""
    n = dist.get_world_size()
    for size in [4**power for power in range(2, 14 if device.type == "cuda" else 11)]:
        x, seconds = torch.zeros(size // 4, device=device), []
        for _ in range(10):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            if device.type == "cuda":
                torch.cuda.synchronize()  # the call returned when the work was queued
            seconds.append(time.perf_counter() - start)
        algorithm = size / sorted(seconds)[len(seconds) // 2]
        bus = algorithm * 2 * (n - 1) / n
        if dist.get_rank() == 0:
            print(f"{size:>12,} B {1e6 * size / algorithm:>12.1f} us {algorithm / 1e9:>8.3f} {bus / 1e9:>8.3f}")


def main():
    """Finds out which launcher started it: each passes a rank its number in different variables."""
    if "RANK" in os.environ:  # torchrun, which also sets MASTER_ADDR and MASTER_PORT
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    elif "OMPI_COMM_WORLD_RANK" in os.environ:  # Open MPI's mpirun; the two variables are ours to set
        run(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    elif "PMI_RANK" in os.environ:  # MPICH's mpirun, likewise
        run(int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]))
    else:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        mp.spawn(run, args=(2,), nprocs=2)  # run(rank, 2) in a process for each rank


if __name__ == "__main__":
    main()
