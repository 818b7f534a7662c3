"""Trains a small network in a job that may be preempted and started again: which points lie outside a circle?"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import nodelaunch as launch

POINTS, BATCH_SIZE, EPOCHS = 256, 16, 6


class Classifier(torch.nn.Module):
    """Two layers; returns the score of each class for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores, shape (N, 2), of points, shape (N, 2)."""
        return self.layers(points)


def train_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    """Trains on each point once, in an order that belongs to the epoch; returns the loss of its last batch."""
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    labels = (points.norm(dim=1) > 1.2).long()
    for batch in torch.randperm(POINTS, generator=torch.Generator().manual_seed(epoch)).split(BATCH_SIZE):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    return loss.item()


def save(state: dict, path: Path) -> None:
    """Writes a checkpoint; whoever reads it never finds half of one."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    """Trains until Slurm wants the node back, or until all epochs are done, and reports what happened."""
    folder = Path(sys.argv[1])
    # A job that is put back into the queue keeps its id, and is started again.
    job, start = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    # In place of Slurm's signal: for how many epochs the node is ours at this start.
    allowed = int(os.environ.get("PREEMPT_AFTER", EPOCHS))

    torch.manual_seed(0)
    model, begin = Classifier(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = folder / f"checkpoint-{job}.pt"
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epochs"]

    trained = []
    for epoch in range(begin, EPOCHS):
        if len(trained) == allowed:
            print(f"start {start}: preempted before epoch {epoch}", flush=True)
            break
        loss = train_epoch(model, optimizer, epoch)
        trained.append(epoch)
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}, path)
        print(f"start {start}: epoch {epoch}, loss {loss:.6f}, saved in {path.name}", flush=True)

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    launch.report({"start": start, "trained": trained, "weights": weights.tolist()})


if __name__ == "__main__":
    main()
