"""A small training that TensorBoard and wandb watch, and wandb once more with its own settings. Lab 3 kills it.

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
seconds = {}  # what each tracker took: to start, for each call, to finish


def spend(what, tracker, action):
    """Runs an action and notes its seconds; returns what the action returned."""
    start = time.perf_counter()
    result = action()
    seconds.setdefault(what, {}).setdefault(tracker, []).append(time.perf_counter() - start)
    return result


def open_board(name, **options):
    """A TensorBoard writer in a folder of its own. The import is part of what a start costs."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / name), **options)


def open_run(name, **options):
    """A wandb run; "create_new", since two of them are open in this one process."""
    connection = wandb_runs.connect(folder / name)
    if name == "wandb, as it comes":
        # Without the lab's interval the SDK waits 15 s before what is logged goes to the disk.
        own = dict(connection.settings)
        del own["x_transaction_log_flush_interval"]
        connection.settings = own
    return connection.start(project="labs", name=name, reinit="create_new", **options)


resume = {"id": arguments.id, "resume": "allow"} if arguments.id else {}
# A flush every second; by itself the writer may keep what it has for two minutes.
board = spend("start", "TensorBoard", lambda: open_board("TensorBoard", flush_secs=1))
runs = {
    "wandb": spend("start", "wandb", lambda: open_run("wandb", **resume)),
    "wandb, as it comes": open_run("wandb, as it comes"),
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
    row = {f"train/{name}": value for name, value in row.items()}
    if step >= arguments.log_from:  # earlier steps are trained again, and are in the record already
        for name in loggers:
            spend("call", name, lambda name=name, row=row, step=step: loggers[name](row, step))
            time.sleep(arguments.pause / 3)  # or its own thread would run in the time of the next one's call
    if step % 10 == 0:
        with write_atomically(folder / f"step-{step}.pt") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    print(json.dumps({"step": step, "time": time.time()}), flush=True)

spend("finish", "TensorBoard", board.close)
for name, run in runs.items():
    spend("finish", name, run.finish)
print(json.dumps({"id": runs["wandb"].id, "seconds": seconds}), flush=True)
