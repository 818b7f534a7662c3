"""Trains a small network on several ranks: which points of a plane lie outside a circle?"""

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nodelaunch as launch

POINTS, BATCH_SIZE, EPOCHS = 257, 16, 3
SECONDS_TO_PREPARE, SECONDS_TO_SAVE = 1, 0.3


class Classifier(torch.nn.Module):
    """Two layers; returns the score of each class for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores, shape (N, 2), of points, shape (N, 2)."""
        return self.layers(points)


def prepare(folder: Path) -> None:
    """Writes the points to a disk that all nodes see, as a download would: slowly."""
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    torch.save((points, (points.norm(dim=1) > 1.2).long()), folder / "draft.pt")
    time.sleep(SECONDS_TO_PREPARE)
    (folder / "draft.pt").rename(folder / "points.pt")  # all of it at once


def save(model: torch.nn.Module, folder: Path) -> None:
    """Writes a checkpoint to that disk, slowly; whoever reads it never finds half of one."""
    print("saving model.pt", flush=True)
    torch.save(model.state_dict(), folder / "model.tmp")
    time.sleep(SECONDS_TO_SAVE)
    (folder / "model.tmp").rename(folder / "model.pt")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A checksum of the weights, to compare with those of other ranks."""
    numbers = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(numbers).hexdigest()[:8]


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
    model = DDP(Classifier().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passed = []  # how many points went through the network on this rank
    model.module.layers.register_forward_hook(lambda _, inputs, __: passed.append(len(inputs[0])))

    orders, own, accuracies, weights = [], [], [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        orders.append([])
        began, used = time.perf_counter(), time.thread_time()
        for indices, inputs, targets in loader:
            orders[epoch] += indices.tolist()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
        took, used = time.perf_counter() - began, time.thread_time() - used

        # Each rank looks at its part of all points.
        mine = slice(rank * POINTS // world_size, (rank + 1) * POINTS // world_size)
        with torch.no_grad():
            hits = model.module(points[mine].to(device)).argmax(1).cpu() == labels[mine]
        counts = torch.tensor([hits.sum().item(), len(hits)])
        own.append(counts.tolist())
        dist.all_reduce(counts)
        accuracies.append(counts[0].item() / counts[1].item())
        weights.append(digest(model.parameters()))
        words = f"accuracy {accuracies[epoch]:.3f}; weights {weights[epoch]}; computed {used:.3f} of {took:.3f} s"
        print(f"epoch {epoch}: first points {orders[epoch][:4]}; {words}", flush=True)

    if rank == 0:
        save(model.module, folder)
    launch.report(
        {
            "orders": orders,
            "own": own,
            "accuracies": accuracies,
            "device": str(device),
            "weights": weights,
            "trained": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(),
            "passed": sum(passed),
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
