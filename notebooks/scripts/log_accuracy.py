"""Logs one network's accuracy in several ways: log_accuracy.py WEIGHTS.ckpt, or under torchrun with --devices 2."""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.functional.classification import multiclass_f1_score
from train_lightning import QUIET, Classifier

import nodelaunch as launch
from lab_utils import data


class Logged(Classifier):
    """The learner's network, and other ways to log its correct answers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.accuracy, self.f1 = MulticlassAccuracy(10, average="micro"), MulticlassF1Score(10)
        self.pairs = []  # what read_logs of exercise 12.2 takes

    def validation_step(self, batch, batch_idx):
        """Logs one batch's numbers, each in its way."""
        images, labels, indices = batch
        logits = self.model(images)
        hits = logits.argmax(1) == labels
        self.log("self.log", hits.float().mean())
        self.log("sync_dist=True", hits.float().mean(), sync_dist=True)
        self.accuracy(logits, labels)
        self.log("torchmetrics", self.accuracy)
        self.log("F1, mean of batches", multiclass_f1_score(logits, labels, 10), sync_dist=True)
        self.f1(logits, labels)
        self.log("F1, torchmetrics", self.f1)
        self.pairs.append(list(zip(indices.tolist(), hits.tolist(), strict=True)))


class Indexed(torch.utils.data.Dataset):
    """Images and labels, and each one's index."""

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        return *self.split[index], index


def main():
    """Evaluates, and reports what was logged and what each rank took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--images", type=int, default=1001)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    dataset = data.load(args.data)
    valid = Indexed(Subset(dataset.valid, range(args.images)))
    model = Logged("tiny", len(dataset.class_names), 0.05)
    saved = torch.load(args.checkpoint, map_location="cpu")["state_dict"]
    model.load_state_dict(saved)
    trainer = L.Trainer(devices=args.devices, **QUIET)
    (logged,) = trainer.validate(model, DataLoader(valid, 64), verbose=False)
    launch.report({"logged": logged, "batches": model.pairs})


if __name__ == "__main__":
    main()
