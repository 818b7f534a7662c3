"""The exercises of lab 2: steps that go on, an axis on which runs compare, and one log for all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from course.check.verdicts import Exercise, expect, refusing
from course.exercises.lab2.recorder import Recorder
from course.exercises.lab2.reduced import verify_log_reduced

TAGS = ("loss/train", "acc1/train", "acc5/train", "lr")
COLUMNS = ("images", "loss", "top1", "top5", "lr")
SIZES = (6, 6, 4)  # the last batch is smaller, as it mostly is


def _show(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values) or "nothing"


def _close(yours: Sequence[float], expected: Sequence[float], factor: float = 1.0) -> bool:
    return len(yours) == len(expected) and all(
        math.isclose(a, factor * b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(yours, expected, strict=True)
    )


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
    ours, theirs, step, number = _make_run(), _make_run(), 0, len(SIZES)
    for epoch in (1, 2):
        case, writer = f"epoch {epoch}", Recorder()
        expected = _train_reference(**theirs)
        protocol = "writer.add_scalar(tag, value, step), the value a number or a tensor of one element"
        with refusing(TypeError, AttributeError, ValueError, case=case, expected="scalars", hint=protocol):
            returned = train_epoch(**ours, writer=writer, first_step=step)
        _expect_tags(case, writer)
        steps = list(range(step, step + number))
        for tag in TAGS:
            values = [value for value, _ in writer.of(tag)]
            yours = [at for _, at in writer.of(tag)]
            expect(
                yours == steps,
                f"{case}: the steps of {tag!r}",
                yours=yours,
                expected=steps,
                hint=_explain_steps(yours, steps, step),
            )
            expect(
                _close(values, expected[tag]),
                f"{case}: the values of {tag!r}",
                yours=_show(values),
                expected=_show(expected[tag]),
                hint=_explain_values(tag, values, expected[tag]),
            )
        step += number
        _expect_returned(case, returned, step)
        same = all(map(torch.allclose, ours["model"].parameters(), theirs["model"].parameters()))
        hint = "keep the lines of the loop as they are, and once each: logging must not change the training"
        expect(same, f"{case}: the weights afterwards", yours="others", expected="the same as unlogged", hint=hint)
        pairs = zip(ours["model"].parameters(), theirs["model"].parameters(), strict=True)
        same = all(one.grad is not None and torch.allclose(one.grad, other.grad) for one, other in pairs)
        hint = "optimizer.zero_grad() comes before backward, as in the loop above: a later cell reads the gradients"
        expect(same, f"{case}: the gradients afterwards", yours="others, or none", expected="the last ones", hint=hint)
    return "two epochs, one after the other on the axis; every value is that of its own step"


def _expect_tags(case: str, writer: Recorder) -> None:
    yours = sorted({tag for tag, _, _ in writer.records})
    hint = "these four names, letter by letter: what stands before the slash becomes a heading in TensorBoard"
    if not yours:
        hint = "nothing was logged: writer.add_scalar(...) belongs into the loop"
    expect(yours == sorted(TAGS), f"{case}: the tags", yours=yours, expected=sorted(TAGS), hint=hint)


def _expect_returned(case: str, returned: object, step: int) -> None:
    pair = isinstance(returned, tuple) and len(returned) == 2
    next_step = returned[1] if pair else returned
    hint = "return the rows as a DataFrame, and the step of the next epoch's first batch: first_step + len(rows)"
    expect(
        pair and hasattr(returned[0], "columns") and len(returned[0]) == len(SIZES),
        f"{case}: what the function returns",
        yours=f"({type(returned[0]).__name__}, {next_step})" if pair else type(returned).__name__,
        expected=f"(DataFrame, {step}), with {len(SIZES)} rows",
        hint=hint,
    )
    columns = [name for name in COLUMNS if name in returned[0].columns]
    keep = "keep the columns of the loop above: cells below read them"
    expect(columns == [*COLUMNS], f"{case}: the columns of the rows", yours=columns, expected=[*COLUMNS], hint=keep)
    expect(next_step == step, f"{case}: the next step", yours=next_step, expected=step, hint=hint)


def _explain_steps(yours: list[int], steps: list[int], first: int) -> str:
    """The hint that fits wrong steps."""
    if not yours or -1 in yours:
        return "give the step, too: without it TensorBoard stacks all points of a curve on one place"
    if len(yours) < len(steps):
        return "log once in each step, inside the loop"
    if first and yours == list(range(len(steps))):
        return "the second epoch was written over the first: begin to count at first_step"
    if yours == [step + 1 for step in steps]:
        return "the first batch of all has step 0: the step is first_step + the number of batches before this one"
    if len(set(yours)) == 1:
        return "all batches were given one step: count on with each, as enumerate(batches, first_step) does"
    return "the step counts batches over all epochs: 0, 1, 2, …, and on from first_step in the next epoch"


def _explain_values(tag: str, yours: list[float], expected: list[float]) -> str:
    """The hint that fits wrong values."""
    if tag == "lr":
        return "log the learning rate that this batch was trained with: before scheduler.step()"
    if tag == "loss/train":
        return "log the loss of this very batch, loss.item(), neither summed nor averaged over the epoch"
    counts = [value * size for value, size in zip(expected, SIZES, strict=True)]
    if _close(yours, counts):
        return "this is a count: divide by the images of this batch, len(labels), and not all batches have equally many"
    if _close(yours, expected, 100):
        return "log a fraction from 0 to 1, so that all accuracies of the lab share one axis"
    if _close(yours, [count / SIZES[0] for count in counts]):
        return "the last batch is smaller: divide by len(labels) of this batch"
    return "top-1 belongs to acc1, top-5 to acc5; each is the hits of this batch by its images"


@dataclass(frozen=True)
class _Row:
    """One step, as the rows of the lab's loop have it."""

    images: int
    loss: float


def verify_log_by_images(log_by_images: Callable) -> str:
    """Hands over two epochs of uneven batches, and a run of other batches that has to end at the same place."""
    import pandas as pd

    for sizes in ((4, 4, 2, 4, 4, 2), (10, 10)):
        writer, losses = Recorder(), [2.3 - 0.1 * index for index in range(len(sizes))]
        rows = pd.DataFrame([_Row(*pair) for pair in zip(sizes, losses, strict=True)])
        case = f"batches of {', '.join(map(str, sizes))} images"
        hint = "rows.images and rows.loss are columns; rows.itertuples() goes through them together"
        with refusing(TypeError, AttributeError, KeyError, IndexError, case=case, expected="scalars", hint=hint):
            log_by_images(writer, rows)
        found = writer.of("loss/by images")
        hint = "the tag is 'loss/by images', once for each row"
        tags = sorted({tag for tag, _, _ in writer.records})
        expect(
            len(found) == len(sizes),
            f"{case}: the points",
            yours=f"{len(found)}, tags {tags}",
            expected=len(sizes),
            hint=hint,
        )
        seen = torch.tensor(sizes).cumsum(0).tolist()
        yours = [step for _, step in found]
        expect(
            yours == seen, f"{case}: where the points lie", yours=yours, expected=seen, hint=_explain_seen(yours, sizes)
        )
        values = [value for value, _ in found]
        hint = "only the axis changes: the value is the row's loss, as it is"
        expect(_close(values, losses), f"{case}: the values", yours=_show(values), expected=_show(losses), hint=hint)
    return "two runs over the same images end at the same place, whatever their batches"


def _explain_seen(yours: list[int], sizes: Sequence[int]) -> str:
    """The hint that fits wrong places."""
    count, seen = range(len(sizes)), torch.tensor(sizes).cumsum(0).tolist()
    if -1 in yours:
        return "give the images seen as the step: writer.add_scalar(tag, value, seen)"
    if yours in (list(count), [index + 1 for index in count]):
        return "these are steps: a step of a large batch has seen more images than one of a small batch"
    if yours == [0, *seen[:-1]]:
        return "the loss of a batch is known when the batch has been seen: add its images first, then log"
    if yours in ([index * sizes[0] for index in count], [(index + 1) * sizes[0] for index in count]):
        return "the last batch of an epoch is smaller: add up rows.images, do not multiply"
    if yours == list(sizes):
        return "these are the images of one batch: sum them up, from the first row to this one"
    return "sum up the images of all batches so far, over all epochs, this batch included"


EXERCISES = {
    "2.1": Exercise("Steps that go on", verify_train_epoch),
    "2.2": Exercise("Images seen", verify_log_by_images),
    "2.3": Exercise("One log for all ranks", verify_log_reduced),
}
