"""The exercises of lab 2: steps that go on, an axis on which runs compare, and one log for all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, NotYetError, expect, refusing

TAGS = ("loss/train", "acc1/train", "acc5/train", "lr")
COLUMNS = ["images", "loss", "top1", "top5", "lr"]
SIZES = (6, 6, 4)  # the last batch is smaller, as it mostly is
CLOSE = 1e-5
# For wrong values of a tag, and of a share.
VALUES = {
    "loss/train": "log the loss of this very batch, loss.item(), neither summed nor averaged over the epoch",
    "lr": "log the learning rate that this batch was trained with: before scheduler.step()",
}
SHARE = "top-1 belongs to acc1, top-5 to acc5; each is the hits of this batch by its images"


class Recorder:
    """Stands in for a SummaryWriter: keeps what it is given instead of writing it.

    Attributes:
        records: Tag, value and step of each scalar, in order; step -1 if none was given.
        closed: True if ``close`` was called, or the ``with`` block left.
    """

    def __init__(self) -> None:
        self.records: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: object, global_step: object = None, *_: object, **__: object) -> None:
        """Takes the arguments of ``SummaryWriter.add_scalar``."""
        value = scalar_value.detach() if isinstance(scalar_value, torch.Tensor) else scalar_value
        self.records.append((tag, float(value), -1 if global_step is None else int(global_step)))

    def add_scalars(self, *_: object, **__: object) -> NoReturn:
        """Refuses: a SummaryWriter would open a run of its own for each number."""
        raise TypeError("add_scalars makes a new run of each number; add_scalar logs one number to this run")

    def flush(self) -> None:
        """Does nothing, as there is no file."""

    def close(self) -> None:
        """Notes that it was called."""
        self.closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, tag: str) -> tuple[list[float], list[int]]:
        """Values and steps of the records with this tag."""
        found = [(value, step) for name, value, step in self.records if name == tag]
        return [value for value, _ in found], [step for _, step in found]


def _make_run() -> dict:
    """A linear model, two epochs of three batches, and a learning rate that is different in every step."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 3, 4, 4, generator=generator), torch.randint(0, 10, (n,), generator=generator)) for n in SIZES
    ]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    with torch.no_grad():
        model[1].weight.copy_(0.1 * torch.randn(10, 48, generator=generator))
        model[1].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return {"model": model, "batches": batches, "optimizer": optimizer, "scheduler": scheduler}


def _train_reference(model: nn.Module, batches: Sequence, optimizer, scheduler) -> dict[str, list[float]]:
    """One epoch as the lab's loop does it; returns what there is to log, by tag."""
    found: dict[str, list[float]] = {tag: [] for tag in TAGS}
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        best = logits.topk(5, dim=1).indices == labels[:, None]
        shares = (best[:, :1].sum().item() / len(labels), best.sum().item() / len(labels))
        for tag, value in zip(TAGS, (loss.item(), *shares, scheduler.get_last_lr()[0]), strict=True):
            found[tag].append(value)
        scheduler.step()
    return found


def verify_train_epoch(train_epoch: Callable) -> str:
    """Runs two epochs beside the reference and compares steps, values, and the training itself."""
    ours, theirs, number = _make_run(), _make_run(), len(SIZES)
    for epoch in (1, 2):
        case, writer, first = f"epoch {epoch}", Recorder(), number * (epoch - 1)
        expected = _train_reference(**theirs)
        protocol = "writer.add_scalar(tag, value, step), the value a number or a tensor of one element"
        with refusing(TypeError, AttributeError, ValueError, case=case, expected="scalars", hint=protocol):
            returned = train_epoch(**ours, writer=writer, first_step=first)
        hint = "these four names, letter by letter: what stands before the slash becomes a heading in TensorBoard"
        wrong = {"nothing was logged: writer.add_scalar(...) belongs into the loop": []}
        judge(sorted({tag for tag, *_ in writer.records}), right=sorted(TAGS), case=case, hint=hint, wrong=wrong)
        for tag in TAGS:
            values, steps = writer.read(tag)
            _judge_steps(f"{case}: the steps of {tag!r}", steps, [*range(first, first + number)])
            _judge_values(f"{case}: the values of {tag!r}", tag, values, expected[tag])
        rows, following = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        columns = [name for name in COLUMNS if name in getattr(rows, "columns", ())]
        judge(
            {"columns": columns, "rows": len(rows) if columns else 0, "next step": following},
            right={"columns": COLUMNS, "rows": number, "next step": first + number},
            case=f"{case}: what the function returns",
            hint="return the rows as a DataFrame with the columns of the loop above, and the step of the next epoch's "
            "first batch: first_step + len(rows)",
        )
        trained, right = (list(one["model"].parameters()) for one in (ours, theirs))
        hint = "keep the lines of the loop as they are, and once each: logging must not change the training"
        judge(trained, right=right, case=f"{case}: the weights afterwards", hint=hint, within=CLOSE)
        trained, right = ([one.grad for one in parameters] for parameters in (trained, right))
        hint = "optimizer.zero_grad() comes before backward, as in the loop above: a later cell reads the gradients"
        judge(trained, right=right, case=f"{case}: the gradients afterwards", hint=hint, within=CLOSE)
    return "two epochs, one after the other on the axis; every value is that of its own step"


def _judge_steps(case: str, yours: list[int], right: list[int]) -> None:
    first, number = right[0], len(right)
    wrong = {
        "give the step, too: without it TensorBoard stacks all points of a curve on one place": [-1] * number,
        "log once in each step, inside the loop": AnyOf((right[-1:], [first + number])),
        "the second epoch was written over the first: begin to count at first_step": [*range(number)],
        "the first batch of all has step 0: first_step + the batches before this one": [step + 1 for step in right],
        "all batches were given one step: enumerate(batches, first_step) counts on": [first] * number,
    }
    hint = "the step counts batches over all epochs: 0, 1, 2, …, and on from first_step in the next epoch"
    judge(yours, right=right, case=case, wrong=wrong, hint=hint)


def _judge_values(case: str, tag: str, yours: list[float], right: list[float]) -> None:
    wrong = {}
    if tag.startswith("acc"):
        counts = [round(value * size) for value, size in zip(right, SIZES, strict=True)]
        wrong = {
            "this is a count: divide by the images of this batch, len(labels)": counts,
            "log a fraction from 0 to 1, so that all accuracies share one axis": [100 * value for value in right],
            "the last batch is smaller: divide by len(labels) of this batch": [count / SIZES[0] for count in counts],
        }
    judge(yours, right=right, case=case, wrong=wrong, hint=VALUES.get(tag, SHARE), within=CLOSE)


def verify_log_by_images(log_by_images: Callable) -> str:
    """Hands over two epochs of uneven batches, and a run of other batches that has to end at the same place."""
    import pandas as pd

    for sizes in ((4, 4, 2, 4, 4, 2), (10, 10)):
        writer, losses = Recorder(), [2.3 - 0.1 * index for index in range(len(sizes))]
        case = f"batches of {', '.join(map(str, sizes))} images"
        hint = "rows.images and rows.loss are columns; zip(rows.images, rows.loss) goes through them together"
        with refusing(TypeError, AttributeError, KeyError, IndexError, case=case, expected="scalars", hint=hint):
            log_by_images(writer, pd.DataFrame({"images": sizes, "loss": losses}))
        values, places = writer.read("loss/by images")
        hint = "the tag is 'loss/by images', once for each row"
        judge(len(places), right=len(sizes), case=f"{case}: the points of 'loss/by images'", hint=hint)
        seen, steps = [*accumulate(sizes)], range(len(sizes))
        wrong = {
            "give the images seen as the step: writer.add_scalar(tag, value, seen)": [-1] * len(sizes),
            "these are steps: a step of a large batch has seen more images": AnyOf((steps, [one + 1 for one in steps])),
            "the loss of a batch is known when it has been seen: add its images first, then log": [0, *seen[:-1]],
            "the last batch of an epoch is smaller: add up rows.images, do not multiply": AnyOf(
                tuple([(index + more) * sizes[0] for index in steps] for more in (0, 1))
            ),
            "these are the images of one batch: sum them up, from the first row to this one": sizes,
        }
        hint = "sum up the images of all batches so far, over all epochs, this batch included"
        judge(places, right=seen, case=f"{case}: where the points lie", wrong=wrong, hint=hint)
        hint = "only the axis changes: the value is the row's loss, as it is"
        judge(values, right=losses, case=f"{case}: the values", hint=hint, within=CLOSE)
    return "two runs over the same images end at the same place, whatever their batches"


# Images, summed loss and top-1 hits of two ranks: shares of different size, so that a mean of means is not the mean.
SHARES = ((17.0, 34.0, 5.0), (16.0, 40.0, 12.0))
PATIENCE = 2.0  # seconds that a rank waits for the other before we call it a hang


def _log_on_ranks(log_reduced: Callable, step: int) -> tuple[list[list[Recorder]], list[Exception]]:
    """Calls the answer as two ranks at once, which are threads; returns the writers of each rank, and the errors."""
    barrier, brought, writers = threading.Barrier(len(SHARES)), {}, [[] for _ in SHARES]

    def run(rank: int) -> Exception | None:
        def all_reduce(tensor: torch.Tensor) -> None:
            brought[rank] = tensor.clone()
            barrier.wait(PATIENCE)
            total = sum(brought.values())
            barrier.wait(PATIENCE)  # none goes on to its next call before all have read
            tensor.copy_(total)

        def open_writer() -> Recorder:
            writers[rank].append(Recorder())
            return writers[rank][-1]

        sums = torch.tensor(SHARES[rank], dtype=torch.float64)
        try:
            log_reduced(rank=rank, sums=sums, all_reduce=all_reduce, open_writer=open_writer, step=step)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(SHARES)) as pool:
        return writers, [error for error in pool.map(run, range(len(SHARES))) if error]


def verify_log_reduced(log_reduced: Callable) -> str:
    """Calls it on two ranks, and looks at who opened a writer, and at what was logged."""
    step = 7
    writers, errors = _log_on_ranks(log_reduced, step)
    case = f"two ranks with {SHARES[0][0]:.0f} and {SHARES[1][0]:.0f} images"
    hint = "all_reduce(sums) works in place, on the tensor of three numbers, and returns nothing"
    # One rank that fails leaves the other waiting: what it failed of comes first.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        if isinstance(error, threading.BrokenBarrierError):
            hint = "all ranks call all_reduce(sums), before any `if rank == 0`: those who call wait for the others"
            raise NotYetError(f"{case}: all_reduce", yours="one rank waits for ever", expected="all call it", hint=hint)
        with refusing(TypeError, AttributeError, RuntimeError, ValueError, case=case, expected="scalars", hint=hint):
            raise error
    opened = [rank for rank, some in enumerate(writers) for _ in some]
    hint = "rank 0 has to open the writer, and no other: two files in one directory become one run, mixed or with gaps"
    judge(opened, right=[0], case=f"{case}: the ranks that opened a writer", hint=hint)
    (writer,) = writers[0]
    images, *totals = (sum(parts) for parts in zip(*SHARES, strict=True))
    for index, (tag, total) in enumerate(zip(("loss/valid", "acc1/valid"), totals, strict=True), start=1):
        values, steps = writer.read(tag)
        hint = f"writer.add_scalar({tag!r}, value, step), once"
        judge(steps, right=[step], case=f"{case}: the points of {tag!r}", hint=hint)
        means = [share[index] / share[0] for share in SHARES]
        wrong = {
            "sum the counts over all ranks, then divide once: the shares differ in size": AnyOf(
                (sum(means) / len(means), sum(means))
            ),
            "this is the share of rank 0 alone: all_reduce(sums) first, then divide": means[0],
            "this is the sum: divide by the images of all ranks, sums[0]": total,
            "the images of all ranks are in the sum: do not divide by the ranks again": total / images / len(SHARES),
        }
        hint = "all_reduce(sums), then loss / images and hits / images"
        judge(values[0], right=total / images, case=f"{case}: {tag!r}", wrong=wrong, hint=hint, within=1e-6)
    hint = "close the writer, best by `with open_writer() as writer:`: what its queue still holds can be lost"
    expect(writer.closed, f"{case}: the writer at the end", yours="open", expected="closed", hint=hint)
    return "one writer for two ranks; the means are those over all images"


EXERCISES = {
    "2.1": Exercise("Steps that go on", verify_train_epoch),
    "2.2": Exercise("Images seen", verify_log_by_images),
    "2.3": Exercise("One log for all ranks", verify_log_reduced),
}
