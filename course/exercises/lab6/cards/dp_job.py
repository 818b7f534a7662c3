"""Trains a small network with DataParallel over copies in memory: which points of a plane lie outside a circle?"""

import torch
import torch.nn.functional as F

import nodelaunch as launch
from lab_utils.parallel import CpuDataParallel

POINTS, BATCH_SIZE, REPLICAS = 160, 10, 4


class Classifier(torch.nn.Module):
    """Two layers; returns the score of each class for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores, shape (N, 2), of points, shape (N, 2)."""
        return self.layers(points)


def main() -> None:
    """Trains one epoch, beside the same network on one device, and reports what happened."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(POINTS, 2, generator=generator, dtype=torch.float64)
    labels = (points.norm(dim=1) > 1.2).long()

    torch.manual_seed(0)
    model = Classifier().double()
    parallel = CpuDataParallel(model, REPLICAS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    gaps, seen = [], 0
    for inputs, targets in zip(points.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
        alone = torch.autograd.grad(F.cross_entropy(model.layers(inputs), targets), list(model.parameters()))
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), targets)
        loss.backward()
        gaps.append(max(float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), alone, strict=True)))
        optimizer.step()
        seen += len(inputs)

    print(f"{seen} of {POINTS} points seen; gradients differ from one device's by up to {max(gaps):.0e}")
    launch.report({"gap": max(gaps), "seen": seen})


if __name__ == "__main__":
    main()
