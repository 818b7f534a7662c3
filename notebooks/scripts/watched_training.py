"""A small training that TensorBoard and wandb watch, and wandb once more with all its defaults. Lab 3 kills it.

Every step prints a line, so that whoever kills the program knows how far it was. The last line says what the trackers
cost. No data set is needed: step n always sees the same drawn batch, so that a resumed training can be compared with
one that was never interrupted, number by number.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from lab_common.files import write_atomically
from lab_utils import models, training, wandb_runs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=40, help="the last step")
parser.add_argument("--pause", type=float, default=0.04, help="seconds of rest in each logged step")
parser.add_argument("--start-from", type=int, default=0, help="the checkpoint to load; 0 begins anew")
parser.add_argument("--log-from", type=int, default=1, help="the first step to log")
parser.add_argument("--id", default=None, help="the run to go on with")
arguments = parser.parse_args()
folder = arguments.folder
seconds = {}  # what each tracker took: to import, to start, for each row, to finish


def spend(what, tracker, action):
    """Runs an action and notes its seconds; returns what the action returned."""
    start = time.perf_counter()
    result = action()
    seconds.setdefault(what, {}).setdefault(tracker, []).append(time.perf_counter() - start)
    return result


def import_writer():
    """Loads TensorBoard's writer, which is timed, too."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def open_run(name, **options):
    """A wandb run in its own folder; "create_new", since two of them are open in this one process."""
    (folder / name / "wandb").mkdir(parents=True, exist_ok=True)
    settings = {"silent": True} if name == "wandb, as it comes" else connection.options["settings"]
    where = {"dir": str(folder / name), "mode": connection.mode, "settings": settings}
    return wandb.init(project="labs", name=name, reinit="create_new", **where, **options)


# TensorBoard's writer as it comes, too: each record is appended to the file at once.
SummaryWriter = spend("import", "TensorBoard", import_writer)
board = spend("start", "TensorBoard", lambda: SummaryWriter(str(folder / "TensorBoard")))
connection = spend("import", "wandb", lambda: wandb_runs.connect(folder))
import wandb  # noqa: E402 - connect has loaded it, which was to be timed

open_run("warm-up").finish()  # the first run of a process takes longer to open, whatever its settings are

resume = {"id": arguments.id, "resume": "allow"} if arguments.id else {}
runs = {
    "wandb": spend("start", "wandb", lambda: open_run("wandb", **resume)),
    "wandb, as it comes": spend("start", "wandb, as it comes", lambda: open_run("wandb, as it comes")),
}


def log_numbers(row, step):
    """TensorBoard takes one number a call, wandb a row; what is timed is a row of five numbers in both."""
    for tag, value in row.items():
        board.add_scalar(tag, value, step)


loggers = {"TensorBoard": log_numbers} | {name: run.log for name, run in runs.items()}

# The model and its optimizer, from a checkpoint where one is named. Both belong in it: momentum is state, too.
torch.manual_seed(0)
model = models.build("tiny")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if arguments.start_from:
    state = torch.load(folder / f"step-{arguments.start_from}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

for step in range(arguments.start_from + 1, arguments.steps + 1):
    # Everything random depends on the step alone. A generator that merely ran on would be at another place after a
    # resumption, and the curve would have a kink that no checkpoint explains.
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (32,), generator=draw)
    images = torch.randn(32, 3, 32, 32, generator=draw) + labels.view(-1, 1, 1, 1) / 5
    begin = time.perf_counter()
    loss, logits = training.plain_step(model, images, labels, optimizer)
    top1, top5 = (training.count_topk(logits, labels) / len(labels)).tolist()
    row = {"loss": loss.item(), "acc1": top1, "acc5": top5, "lr": optimizer.param_groups[0]["lr"]}
    row["images_per_s"] = len(labels) / (time.perf_counter() - begin)
    row = {f"{name}/train": value for name, value in row.items()}
    if step >= arguments.log_from:  # earlier steps are trained again, and are in the record already
        for name in loggers:
            spend("row", name, lambda name=name, row=row, step=step: loggers[name](row, step))
            time.sleep(arguments.pause / 3)  # or its own thread would run in the time of the next one's call
    if step % 10 == 0:
        with write_atomically(folder / f"step-{step}.pt") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    print(json.dumps({"step": step, "time": time.time()}), flush=True)

spend("finish", "TensorBoard", board.close)
for name, run in runs.items():
    spend("finish", name, run.finish)
print(json.dumps({"id": runs["wandb"].id, "seconds": seconds}), flush=True)
