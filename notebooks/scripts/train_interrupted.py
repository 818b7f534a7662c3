"""Trains a small network while its process is killed again and again: train_interrupted.py --mtbf 0.2 --every 40.

Each attempt is its own process. It continues from the checkpoint of the attempt before. SIGKILL ends it after a random
time, without a warning, as the loss of a machine would. Each run prints a report, as JSON.
"""

import argparse
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 32
NOTES = ("attempts", "start_seconds", "saves", "save_seconds", "steps", "step_seconds", "ended")


def build():
    """The network and Adam, whose two moments make the checkpoint three times as large as the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def draw_batch(step):
    """The batch of a step. It depends on nothing else, so that a repeated step sees the same numbers."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 256, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def save(path, model, optimizer, step):
    """Writes the checkpoint beside the old one, then puts it in its place: a kill leaves the old or the new."""
    new = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    new.replace(path)


def train(model, optimizer, path, steps, every, notes, began):
    """Makes one attempt: loads the checkpoint, trains, and saves after every ``every`` steps and at the end."""
    step = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    now = time.monotonic()
    notes[0] += 1
    notes[1] += now - began
    while step < steps:
        inputs, labels = draw_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step, before, now = step + 1, now, time.monotonic()
        notes[4] += 1
        notes[5] += now - before
        if step % every == 0 or step == steps:
            save(path, model, optimizer, step)
            before, now = now, time.monotonic()
            notes[2] += 1
            notes[3] += now - before
    notes[6] = now


def draw_lifetime(mtbf):
    """Seconds until the next kill: exponential, as if a machine were lost at any moment with the same chance."""
    return random.expovariate(1 / mtbf) if mtbf else None


def attempt(seconds, notes, *task):
    """Runs ``train`` in its own process, and kills it after that many seconds. Returns whether it has finished.

    The seconds of a start count from the end of the attempt before: it takes time until a killed process is gone.
    """
    began, (watched, held) = float(notes[6]), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(*task, notes, began)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(held)  # the pipe ends when the child does
    ended = select.select([watched], [], [], seconds)[0]
    os.close(watched)
    if not ended:
        notes[6] = time.monotonic()
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("the training stopped with an error of its own")
    return os.WIFEXITED(status)


def run(args, every, seed):
    """Starts attempts until one reaches the end of the last part. Returns the report."""
    random.seed(seed)
    mtbf = args.mtbf if every else None
    notes = torch.zeros(len(NOTES), dtype=torch.float64).share_memory_()
    model, optimizer = build()  # each attempt has a copy of its own
    kills, began = 0, time.monotonic()
    notes[6] = began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.pt")
        for part in range(1, args.starts + 1):
            task = model, optimizer, path, args.steps * part // args.starts, every or args.steps
            while not attempt(draw_lifetime(mtbf), notes, *task):
                kills += 1
                mtbf = mtbf if time.monotonic() - began < args.limit else None
        seconds = time.monotonic() - began
        weights = torch.load(path)["model"].values()
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()[:16]
    found = dict(zip(NOTES[:-1], notes.tolist(), strict=False))
    return {"every": every, "round": seed, "seconds": seconds, "kills": kills, "weights": digest, **found}


def warm_up():
    """Takes two steps, with a checkpoint between them: imports and allocations happen here, not in each attempt."""
    with tempfile.TemporaryDirectory() as folder:
        for steps in (1, 2):
            train(*build(), Path(folder, "warm.pt"), steps, 1, torch.zeros(len(NOTES)), time.monotonic())


def main():
    """Runs once for each interval and round, the intervals in turn, and prints a line for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, nargs="+", default=[10], help="steps between two checkpoints; 0: no kills")
    parser.add_argument("--mtbf", type=float, help="mean seconds to a kill; if not given, nothing is killed")
    parser.add_argument("--starts", type=int, default=1, help="a run is cut into so many parts, a process each")
    parser.add_argument("--rounds", type=int, default=1, help="the number of the round seeds the times of the kills")
    parser.add_argument("--limit", type=float, default=20, help="seconds of a run after which nothing is killed")
    args = parser.parse_args()

    torch.set_num_threads(1)
    warm_up()
    for seed in range(args.rounds):
        for every in args.every:
            print(json.dumps(run(args, every, seed)), flush=True)


if __name__ == "__main__":
    main()
