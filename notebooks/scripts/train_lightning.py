"""Trains a network with Lightning: python train_lightning.py --epochs 3 --checkpoint run.ckpt."""

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from lab_utils import data, models

# What would also be written: curves, the last epoch's checkpoint, a bar, a table of the network's parts.
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Classifier(L.LightningModule):
    """Our part: the network, the loss, the logged values, the optimizer."""

    def __init__(self, net: str, num_classes: int, lr: float):
        super().__init__()
        # Place 1: keep the network, as `self.model`, and the learning rate.
        ### BEGIN SOLUTION
        self.model = models.build(net, num_classes=num_classes)
        self.lr = lr
        ### END SOLUTION

    def training_step(self, batch, batch_idx):
        """Returns the loss of one batch."""
        # Place 2: forward. No zero_grad, backward or step: Lightning calls them. The batch is on the device already.
        ### BEGIN SOLUTION
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)
        ### END SOLUTION

    def validation_step(self, batch, batch_idx):
        """Logs `loss` and `accuracy` of one batch."""
        images, labels = batch
        logits = self.model(images)
        # Place 3: log both means, so that each is that of all ranks. Lightning weighs batches by their sizes.
        ### BEGIN SOLUTION
        self.log("loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)
        ### END SOLUTION

    def configure_optimizers(self):
        """Returns the optimizer of all parameters."""
        # Place 4: return the optimizer of train_single.py.
        ### BEGIN SOLUTION
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        ### END SOLUTION


def main():
    """Trains, from the checkpoint if every process sees one, and saves one at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="shapes10, cinic10, ...; if not given, what is there")
    parser.add_argument("--images", type=int, help="only so many of each split")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    # NEW: how many processes there are; torchrun starts as many, and Lightning does where nobody has.
    parser.add_argument("--devices", type=int, default=1, help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="the file to save to, and to go on from")
    args = parser.parse_args()

    dataset = data.load(args.data)
    train, valid = (Subset(split, range(len(split))[: args.images]) for split in (dataset.train, dataset.valid))
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)

    L.seed_everything(0)
    classifier = Classifier(args.net, len(dataset.class_names), args.lr)
    # Place 5: make the `trainer`, an L.Trainer: epochs, devices (processes on each node), nodes, and **QUIET.
    ### BEGIN SOLUTION
    trainer = L.Trainer(max_epochs=args.epochs, devices=args.devices, num_nodes=args.nodes, **QUIET)
    ### END SOLUTION
    found = args.checkpoint if args.checkpoint and args.checkpoint.exists() else None
    trainer.fit(classifier, loader, DataLoader(valid, args.batch_size), ckpt_path=found)
    logged = trainer.callback_metrics  # empty where the checkpoint had all epochs
    if trainer.is_global_zero and logged:
        print(f"epoch {trainer.current_epoch}: loss {logged['loss']:.4f}, accuracy {logged['accuracy']:.4f}")
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)


if __name__ == "__main__":
    main()
