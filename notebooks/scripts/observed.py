"""Runs a training script, and notes from outside what it does: observed.py [--exact] train_ddp.py --epochs 1.

The script is beside this one and is not changed. Torch's hooks, and note-taking replacements for a few functions, see
each batch, loss, gradient and step; the notes are this process's result.
"""

import argparse
import hashlib
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import nodelaunch as launch
from lab_utils import data, models
from lab_utils.timing import Timeline

parser = argparse.ArgumentParser()
parser.add_argument("--exact", action="store_true", help="float64, and batch norm with its stored statistics")
parser.add_argument("--timeline", action="store_true", help="note each step's phases; slows a GPU down")
parser.add_argument("--keep", type=Path, help="a folder for the weights and gradients of each step, rank by rank")
parser.add_argument("script")
parser.add_argument("arguments", nargs=argparse.REMAINDER)


class Notes:
    """Notes on a training script, step by step."""

    def __init__(self, *, exact, timeline, keep):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.timeline, self.exact, self.keep = Timeline(device, enabled=timeline), exact, keep
        self.dataset = self.model = None
        # For each step, of which the last one has just begun: which images it took, and its losses.
        self.images, self.losses = [[]], [[]]
        self.seconds, self.states, self.gradients = [], [], {}
        self.saves = []  # after how many steps something was saved
        self.began, self.span = time.perf_counter(), []

    def name_tensors(self, choose):
        """Returns a copy of something of each parameter, by the parameter's name."""
        named = self.model.named_parameters() if self.model else ()
        return {name: choose(one).detach().cpu().clone() for name, one in named if choose(one) is not None}

    def is_trained_on(self, dataset):
        """Returns True if this is the train split, or a part of it."""
        while hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        return self.dataset is not None and dataset is self.dataset.train

    def before_step(self, optimizer, args, kwargs):
        """Notes the gradients, which are complete now, and the weights after the last step."""
        if self.exact:
            self.gradients = self.name_tensors(lambda parameter: parameter.grad)
        if self.keep:
            self.states.append({"weights": self.name_tensors(lambda parameter: parameter), "gradients": self.gradients})
        self.timeline.begin()

    def after_step(self, optimizer, args, kwargs):
        """Ends the notes of a step, and begins the next."""
        self.timeline.end("step")
        self.seconds.append(time.perf_counter() - self.began)
        self.span[1:] = [time.time()]
        self.began, self.timeline.step = time.perf_counter(), len(self.seconds)
        self.images.append([])
        self.losses.append([])

    def hook_in(self):
        """Wraps each function that a script calls for a step in one that takes notes."""
        load, build = data.load, models.build
        fetch, deal, backward = data.Split.__getitems__, DataLoader.__iter__, torch.Tensor.backward
        save = torch.save

        def note_dataset(*args, **options):
            self.dataset = load(*args, **options)
            return self.dataset

        def note_model(*args, **options):
            self.model = build(*args, **options)
            return self.model

        def note_images(split, chosen):
            if self.is_trained_on(split):
                self.images[-1] += [int(index) for index in chosen]
            return fetch(split, chosen)

        def note_batches(loader):
            batches, training = deal(loader), self.is_trained_on(loader.dataset)
            while True:
                if training and not self.losses[-1]:
                    self.began = time.perf_counter()
                    self.span = self.span or [time.time()]
                self.timeline.begin()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if training:
                    self.timeline.end("data")
                yield batch

        def note_loss(loss, *args, **options):
            self.timeline.end("forward")
            self.losses[-1].append(loss.detach())
            backward(loss, *args, **options)
            self.timeline.end("backward")

        def note_save(*args, **options):
            self.saves.append(len(self.seconds))
            return save(*args, **options)

        data.load, models.build, torch.save = note_dataset, note_model, note_save
        data.Split.__getitems__, DataLoader.__iter__, torch.Tensor.backward = note_images, note_batches, note_loss
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def report(self):
        """Reports the notes; kept tensors go to a file."""
        weights = self.name_tensors(lambda parameter: parameter)
        if self.keep:
            self.states.append({"weights": weights, "gradients": {}})
            torch.save(self.states, self.keep / f"rank{os.environ['RANK']}.pt")
        bits = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
        steps = len(self.seconds)
        launch.report(
            {
                "images": self.images[:steps],
                # The mean over a step's backward passes.
                "losses": [float(sum(losses) / len(losses)) for losses in self.losses[:steps] if losses],
                "seconds": self.seconds,
                "saves": self.saves,
                # When the first step began and the last one ended, in seconds since 1970 by this machine's clock.
                "span": self.span,
                "timeline": self.timeline.as_rows(),
                "device": "cuda" if torch.cuda.is_available() else "cpu",
                # One number for all weights: two runs are the same, bit by bit, exactly if it is.
                "sha256": hashlib.sha256(bits).hexdigest(),
                "weights": flatten(weights) if self.exact else [],
                "gradients": flatten(self.gradients),
            }
        )


def flatten(tensors):
    """Returns all numbers of some tensors, as a list that can be reported."""
    return [number for tensor in tensors.values() for number in tensor.flatten().tolist()]


def compute_exactly():
    """Makes two processes comparable with one: float64, and nothing that depends on how a batch is divided."""
    torch.set_default_dtype(torch.float64)

    def normalise(self, images):
        stored = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(images, *stored, training=False, eps=self.eps)

    nn.BatchNorm2d.forward = normalise
    prepare = DataLoader.__init__

    def prepare_alone(self, *args, **options):
        # A worker's notes would stay in the worker.
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            options.pop(name, None)
        prepare(self, *args, **options)

    DataLoader.__init__ = prepare_alone


if __name__ == "__main__":
    args = parser.parse_args()
    notes = Notes(exact=args.exact, timeline=args.timeline, keep=args.keep)
    if args.exact:
        compute_exactly()
    notes.hook_in()
    script = Path(__file__).parent / args.script
    sys.argv = [str(script), *args.arguments]
    runpy.run_path(str(script), run_name="__main__")
    notes.report()
