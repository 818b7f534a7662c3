"""Fits a small network with the learner's callback, and notes from outside how long each step took.

It runs under torchrun, in a Python that has Lightning: timed_fit.py slowest_rank.py '[[[0.1, 0.5], …], …]'. The numbers
are the seconds that each step of each epoch sleeps, rank by rank. It reports the least and the most that each step can
have taken, and the logged values.
"""

import json
import runpy
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

import nodelaunch as launch


class Clock(L.Callback):
    """Notes when Lightning calls it, before or after the learner's callback."""

    def __init__(self):
        self.starts, self.ends, self.logged = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """A step begins."""
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """A step has ended."""
        self.ends.append(time.perf_counter())

    def on_train_epoch_start(self, trainer, pl_module):
        """Keeps the last epoch's logged values, which are there until this epoch logs."""
        if trainer.current_epoch:
            self.note(trainer)

    def note(self, trainer):
        """Keeps the values that are logged now."""
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Sleeper(L.LightningModule):
    """A network whose steps last as long as requested, and send nothing, so that no rank waits for another."""

    def __init__(self, seconds):
        super().__init__()
        self.net, self.seconds, self.automatic_optimization = torch.nn.Linear(1, 1), seconds, False

    def training_step(self, batch, batch_idx):
        """Sleeps, and takes a step without gradients, which changes nothing."""
        time.sleep(self.seconds[self.current_epoch][batch_idx])
        self.optimizers().step()

    def configure_optimizers(self):
        """Returns an optimizer, only so that steps are counted."""
        return torch.optim.SGD(self.parameters(), 0.1)


def main():
    """Fits the network and reports."""
    callback = runpy.run_path(str(Path(__file__).with_name(sys.argv[1])))["SlowestRank"]()
    seconds = json.loads(sys.argv[2])  # by rank, epoch and step
    ranks, epochs, steps = len(seconds), len(seconds[0]), len(seconds[0][0])
    before, after = Clock(), Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=epochs,
        callbacks=[before, callback, after],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # global_rank is known as soon as the Trainer is made.
    trainer.fit(Sleeper(seconds[trainer.global_rank]), DataLoader(torch.zeros(ranks * steps, 1)))
    before.note(trainer)
    rows = [
        {"least": last - first, "most": end - begin}
        for begin, first, last, end in zip(before.starts, after.starts, before.ends, after.ends, strict=True)
    ]
    launch.report({"steps": rows, "logged": before.logged})


if __name__ == "__main__":
    main()
