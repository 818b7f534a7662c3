"""Trains a small network whose weights are sharded over the ranks: which points of a plane lie outside a circle?"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import nodelaunch as launch

POINTS, BATCH_SIZE, EPOCHS, UNITS = 256, 16, 3, 32


class Classifier(torch.nn.Module):
    """Two layers; returns the score of each class for each point."""

    def __init__(self) -> None:
        super().__init__()
        # In each of them, a row for each hidden unit.
        self.inner = torch.nn.Parameter(torch.randn(UNITS, 2))
        self.bias = torch.nn.Parameter(torch.randn(UNITS))
        self.outer = torch.nn.Parameter(0.1 * torch.randn(UNITS, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores, shape (N, 2), of points, shape (N, 2)."""
        return F.linear(points, self.inner, self.bias).relu() @ self.outer


def main() -> None:
    """Trains, saves a checkpoint, looks at its accuracy, and reports what happened."""
    path = Path(sys.argv[1], "model.pt")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    labels = (points.norm(dim=1) > 1.2).long()

    torch.manual_seed(0)
    model = Classifier()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(EPOCHS):
        for batch in torch.randperm(POINTS).split(BATCH_SIZE):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(model(points[mine]), labels[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            scores = model(points)
        losses.append(F.cross_entropy(scores, labels).item())
        accuracy = (scores.argmax(1) == labels).float().mean()
        print(f"epoch {epoch}: of all points loss {losses[epoch]:.6f}, accuracy {accuracy:.3f}", flush=True)

    own, saved = {name: parameter.to_local() for name, parameter in model.named_parameters()}, {}
    print(f"this rank holds {sum(map(torch.numel, own.values()))} parameters", flush=True)
    weights = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, path)
        saved = torch.load(path)
        with torch.device("meta"):  # a network without memory of its own
            empty = Classifier()
        accuracy = (functional_call(empty, saved, points).argmax(1) == labels).float().mean()
        print(f"checkpoint: {sum(map(torch.numel, saved.values()))} parameters, accuracy {accuracy:.3f}")
    own, saved = ({name: tensor.tolist() for name, tensor in part.items()} for part in (own, saved))
    launch.report({"losses": losses, "own": own, "saved": saved})
    dist.barrier()  # no rank ends while another one still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
