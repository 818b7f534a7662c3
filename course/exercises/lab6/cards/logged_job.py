"""Trains a small network on all ranks, and rank 0 keeps a log: which points of a plane lie outside a circle?"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import nodelaunch as launch

POINTS, BATCH_SIZE, EPOCHS = 256, 16, 3


class Classifier(torch.nn.Module):
    """Two layers; returns the score of each class for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores, shape (N, 2), of points, shape (N, 2)."""
        return self.layers(points)


def main() -> None:
    """Trains, writes a line after each epoch, and reports what happened."""
    log = Path(sys.argv[1], "metrics.csv")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    labels = (points.norm(dim=1) > 1.2).long()

    torch.manual_seed(0)
    model = DDP(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    for epoch in range(EPOCHS):
        trained.append([])
        for batch in torch.randperm(POINTS, generator=torch.Generator().manual_seed(epoch)).split(BATCH_SIZE):
            mine = batch[rank::world_size]
            trained[epoch] += mine.tolist()
            optimizer.zero_grad()
            F.cross_entropy(model(points[mine]), labels[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            scores = model.module(points)
        loss, accuracy = F.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{epoch},{loss:.6f},{accuracy:.4f}\n")
            print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}", flush=True)

    dist.barrier()  # all ranks have come to their end
    lines = []
    if rank == 0:
        lines = log.read_text().splitlines()
        print(f"{log.name}: {len(lines)} lines for {EPOCHS} epochs", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    launch.report(
        {
            "rank": rank,
            "world_size": world_size,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "trained": trained,
            "weights": weights.tolist(),
            "log": lines,
        }
    )
    dist.barrier()  # no rank ends while another one still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
