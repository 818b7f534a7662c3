"""Trains a small network on pictures that a DataLoader's worker reads from a file: which half has the bright column?"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import nodelaunch as launch

PICTURES, EPOCHS, SIDE = 192, 3, 64
BATCH_SIZE = 16
SHARED_MEMORY = 128 * 1024  # bytes of a tensor that a worker shares


def limit(worker_id: int) -> None:
    """Emulates a container, which has little shared memory in /dev/shm."""
    # A limit on files holds for those in /dev/shm, too; of the whole, a container limits the sum.
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHARED_MEMORY, SHARED_MEMORY))


def to_bytes(pixels: bytes) -> torch.Tensor:
    """A picture, uint8 (SIDE, SIDE)."""
    return torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)


class Pictures(Dataset):
    """Pictures in one file, each a byte for its label and then its pixels."""

    def __init__(self, path: Path, transform: Callable) -> None:
        self.path, self.transform, self.file = path, transform, None

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> tuple:
        """The index, the picture and its label."""
        if self.file is None:  # the worker opens it
            self.file = self.path.open("rb")
        self.file.seek(index * (1 + SIDE * SIDE))
        label, *pixels = self.file.read(1 + SIDE * SIDE)
        picture = self.transform(pixels)
        return index, picture, label


def write_pictures(path: Path) -> None:
    """Writes pictures with one bright column each; the label says whether it is in the right half."""
    columns = torch.randint(0, SIDE, (PICTURES,), generator=torch.Generator().manual_seed(0))
    pictures = F.one_hot(columns, SIDE).to(torch.uint8).mul(255)[:, None].repeat(1, SIDE, 1)
    records = torch.cat([(columns >= SIDE // 2).to(torch.uint8)[:, None], pictures.flatten(1)], dim=1)
    path.write_bytes(records.numpy().tobytes())


def main() -> None:
    """Trains for EPOCHS epochs, and reports which pictures came in each."""
    path = Path(sys.argv[1], "pictures.bin")
    write_pictures(path)
    dataset = Pictures(path, to_bytes)
    # A forked worker cannot use CUDA once this process has used it; a spawned one starts anew.
    loader = DataLoader(
        dataset,
        BATCH_SIZE,
        shuffle=True,
        num_workers=1,
        worker_init_fn=limit,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(SIDE * SIDE, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, right = [[] for _ in range(EPOCHS)], 0
    for epoch in range(EPOCHS):
        for indices, pictures, labels in loader:
            seen[epoch] += indices.tolist()
            scores = model(pictures.flatten(1) / 255)
            optimizer.zero_grad()
            F.cross_entropy(scores, labels).backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
        print(f"epoch {epoch}: {len(seen[epoch])} pictures, accuracy so far {right / sum(map(len, seen)):.2f}")
    accuracy = right / sum(map(len, seen))
    launch.report({"seen": seen, "accuracy": accuracy, "workers": loader.num_workers})


if __name__ == "__main__":
    main()
