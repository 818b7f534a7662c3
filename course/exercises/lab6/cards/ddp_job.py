"""Trains a small network on several ranks: which points of a plane lie inside a ring?"""

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nodelaunch as launch

POINTS, BATCH_SIZE, EPOCHS = 257, 16, 3


def prepare(folder: Path) -> None:
    """Writes the points to a disk that all nodes see, as a download would: slowly."""
    time.sleep(float(os.environ.get("SECONDS_TO_PREPARE", "1")))
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    torch.save((points, (points.norm(dim=1) > 1.2).long()), folder / "draft.pt")
    (folder / "draft.pt").rename(folder / "points.pt")  # all of it at once


def main() -> None:
    """Trains, measures the accuracy after each epoch, and reports what happened."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])

    # The devices of this node: its GPUs, or a share of its CPU for each process that runs here.
    shares = [torch.device("cpu", index) for index in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    device = (gpus or shares)[local_rank]

    if rank == 0:
        prepare(folder)
    dist.barrier()
    points, labels = torch.load(folder / "points.pt")
    dataset = TensorDataset(torch.arange(POINTS), points, labels)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)

    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    model = DDP(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    orders, own, accuracies = [], [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        orders.append([])
        for indices, inputs, targets in loader:
            orders[epoch] += indices.tolist()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()

        # Each rank looks at its part of all points.
        mine = slice(rank * POINTS // world_size, (rank + 1) * POINTS // world_size)
        with torch.no_grad():
            hits = model.module(points[mine].to(device)).argmax(1).cpu() == labels[mine]
        counts = torch.tensor([hits.sum().item(), len(hits)])
        own.append(counts.tolist())
        dist.all_reduce(counts)
        accuracies.append(counts[0].item() / counts[1].item())
        print(f"epoch {epoch} began with the points {orders[epoch][:4]}; accuracy {accuracies[epoch]:.3f}", flush=True)

    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    launch.report(
        {
            "orders": orders,
            "own": own,
            "accuracies": accuracies,
            "device": str(device),
            "weights": hashlib.sha256(weights).hexdigest(),
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
