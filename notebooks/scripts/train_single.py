"""Trains a network in one process: python train_single.py --epochs 3 --checkpoint run.pt."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from lab_utils import data, models


@torch.no_grad()
def count(model, loader, device):
    """Three sums over the images that a loader gives: loss, hits, and their number."""
    model.eval()
    counts = torch.zeros(3, device=device)
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        counts += torch.stack([loss, (logits.argmax(1) == labels).sum(), loss.new_tensor(len(labels))])
    return counts


def main():
    """Trains, from the checkpoint if there is one, and saves one after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="shapes10, cinic10, ...; if not given, what is there")
    parser.add_argument("--images", type=int, help="only so many of each split")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", type=Path, help="the file to save to, and to go on from")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    dataset = data.load(args.data)
    train, valid = (Subset(split, range(len(split))[: args.images]) for split in (dataset.train, dataset.valid))
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    model = models.build(args.net, num_classes=len(dataset.class_names)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])  # its momentum, too
        first = state["epoch"]

    for epoch in range(first, args.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        loss, hits, images = count(model, DataLoader(valid, args.batch_size), device).tolist()
        print(f"epoch {epoch + 1}: loss {loss / images:.4f}, accuracy {hits / images:.4f} on {images:.0f} images")
        if args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a crash leaves the old one or the new


if __name__ == "__main__":
    main()
