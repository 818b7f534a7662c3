"""Each check of lab 2 refuses typical wrong answers with the hint that fits and accepts right ones."""

import nbformat
import pandas as pd
import pytest
import torch
from harness.notebook_rules import find_solutions
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError

pytestmark = pytest.mark.usefixtures("runs")

TAGS = ("loss/train", "acc1/train", "acc5/train", "lr")
COLUMNS = ("images", "loss", "top1", "top5", "lr")


def epoch(
    *,
    steps=lambda first, index: first + index,
    loss=lambda loss, size: loss.item(),
    share=lambda hits, size: hits / size,
    tags=TAGS,
    scheduler_first=False,
    swapped=False,
    forget=(),
    zero_last=False,
    once=False,
    columns=COLUMNS,
    returned=lambda rows, first: (rows, first + len(rows)),
):
    """A training epoch with one thing done differently."""

    def train_epoch(model, batches, optimizer, scheduler, writer, first_step):
        rows = []
        for index, (images, labels) in enumerate(batches):
            if "zero_grad" not in forget:
                optimizer.zero_grad()
            logits = model(images)
            value = F.cross_entropy(logits, labels)
            value.backward()
            optimizer.step()
            if zero_last:
                optimizer.zero_grad()
            best = logits.topk(5, dim=1).indices == labels[:, None]
            hits = [int(best[:, :1].sum()), int(best.sum())]
            if scheduler_first:
                scheduler.step()
            rows.append((len(labels), value.item(), *hits, scheduler.get_last_lr()[0]))
            hits = hits[::-1] if swapped else hits
            values = (loss(value, len(labels)), *(share(h, len(labels)) for h in hits), scheduler.get_last_lr()[0])
            if not once or index == len(batches) - 1:
                for tag, number in zip(tags, values, strict=True):
                    at = steps(first_step, index)
                    writer.add_scalar(tag, number, *([] if at is None else [at]))
            if not scheduler_first:
                scheduler.step()
        return returned(pd.DataFrame(rows, columns=COLUMNS)[[*columns]], first_step)

    return train_epoch


def silent(model, batches, optimizer, scheduler, writer, first_step):
    return pd.DataFrame(range(len(batches))), first_step + len(batches)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (silent, "nothing was logged"),
        (epoch(tags=("train/loss", *TAGS[1:])), "letter by letter"),
        (epoch(steps=lambda first, index: index), "written over the first"),
        (epoch(steps=lambda first, index: first + index + 1), "has step 0"),
        (epoch(steps=lambda first, index: first), "all batches were given one step"),
        (epoch(steps=lambda first, index: None), "give the step, too"),
        (epoch(steps=lambda first, index: (first + index) * 6), "counts batches over all epochs"),
        (epoch(once=True), "inside the loop"),
        (epoch(scheduler_first=True), "before scheduler.step()"),
        (epoch(loss=lambda loss, size: loss.item() * size), "the loss of this very batch"),
        (epoch(share=lambda hits, size: hits), "this is a count"),
        (epoch(share=lambda hits, size: 100 * hits / size), "a fraction from 0 to 1"),
        (epoch(share=lambda hits, size: hits / 6), "the last batch is smaller"),
        (epoch(swapped=True), "top-1 belongs to acc1"),
        (epoch(returned=lambda rows, first: rows), "return the rows as a DataFrame"),
        (epoch(returned=lambda rows, first: (rows, len(rows))), "first_step + len(rows)"),
        (epoch(columns=COLUMNS[:2]), "keep the columns"),
        (epoch(zero_last=True), "zero_grad() comes before backward"),
        (epoch(loss=lambda loss, size: [loss]), "writer.add_scalar(tag, value, step)"),
    ],
)
def test_wrong_epochs_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("2.1", answer)
    assert hint in refused.value.hint
    assert refused.value.yours and refused.value.expected


def grouped(model, batches, optimizer, scheduler, writer, first_step):
    for step, _ in enumerate(batches, first_step):
        writer.add_scalars("loss", {"train": 1.0}, step)


def test_a_run_for_each_number_is_refused():
    with pytest.raises(NotYetError) as refused:
        check.exercise("2.1", grouped)
    assert "makes a new run of each number" in refused.value.yours
    assert "writer.add_scalar(tag, value, step)" in refused.value.hint


RIGHT = (lambda loss, size: loss.item(), lambda loss, size: loss.detach(), lambda loss, size: loss)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("answer", [epoch(loss=loss) for loss in RIGHT])
def test_right_epochs_get_the_tick(answer, capsys):
    check.exercise("2.1", answer)
    assert capsys.readouterr().out.startswith("✔ 2.1 Steps that go on: two epochs")


def test_logging_that_changes_the_training_is_refused():
    def train_twice(model, batches, optimizer, scheduler, writer, first_step):
        result = epoch()(model, batches, optimizer, scheduler, writer, first_step)
        with torch.no_grad():
            model[1].weight.mul_(0.5)
        return result

    with pytest.raises(NotYetError, match=r"must not change\s+the training"):
        check.exercise("2.1", train_twice)


def by_images(place, value=lambda loss: loss, tag="loss/by images"):
    def log_by_images(writer, rows):
        for index in range(len(rows)):
            writer.add_scalar(tag, value(rows.loss[index]), place(rows.images, index))

    return log_by_images


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (by_images(lambda images, index: index), "these are steps"),
        (by_images(lambda images, index: index * images[0]), "do not multiply"),
        (by_images(lambda images, index: images[:index].sum()), "add its images first"),
        (by_images(lambda images, index: images[index]), "sum them up"),
        (by_images(lambda images, index: None), "give the images seen as the step"),
        (by_images(lambda images, index: 7), "over all epochs"),
        (by_images(lambda images, index: images[: index + 1].sum(), tag="loss"), "the tag is"),
        (by_images(lambda images, index: images[: index + 1].sum(), value=lambda loss: 2 * loss), "only the axis"),
        (lambda writer, rows: None, "once for each row"),
        (lambda writer, rows: rows.loss.add(rows["seen"]), "columns"),
    ],
)
def test_wrong_axes_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("2.2", answer)
    assert hint in refused.value.hint


def by_cumsum(writer, rows):
    for seen, loss in zip(rows.images.cumsum(), rows.loss, strict=True):
        writer.add_scalar(tag="loss/by images", scalar_value=loss, global_step=seen)


@pytest.mark.parametrize("answer", [by_cumsum, by_images(lambda images, index: images[: index + 1].sum())])
def test_right_axes_get_the_tick(answer, capsys):
    check.exercise("2.2", answer)
    assert capsys.readouterr().out.startswith("✔ 2.2 Images seen: two runs")


def reduced(*, reduce_on=(0, 1), write_on=(0,), means=False, divide="images", close=True, at=lambda step: step, tags=1):
    """A log of two ranks with one thing done differently."""

    def log_reduced(rank, sums, all_reduce, open_writer, step):
        if means:
            sums = sums / sums[0]
        if rank in reduce_on:
            all_reduce(sums)
        if rank not in write_on:
            return
        images, loss, hits = sums.tolist()
        images = {"images": images, "nothing": 1, "ranks": 2, "both": 2 * images}[divide]
        writer = open_writer()
        writer.add_scalar("loss/valid", loss / images, at(step))
        if tags:
            writer.add_scalar("acc1/valid", hits / images, at(step))
        if close:
            writer.close()

    return log_reduced


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (reduced(write_on=(0, 1)), "only one rank may open a writer"),
        (reduced(write_on=(1,)), "rank 0 has to open the writer"),
        (reduced(reduce_on=(0,)), "all ranks have to call all_reduce"),
        (reduced(reduce_on=()), "the share of rank 0 alone"),
        (reduced(means=True, divide="ranks"), "an average of averages"),
        (reduced(means=True, divide="nothing"), "means were summed"),
        (reduced(divide="nothing"), "this is the sum"),
        (reduced(divide="both"), "do not divide by their number again"),
        (reduced(close=False), "close the writer"),
        (reduced(at=lambda step: None), "value, step)"),
        (reduced(tags=0), "'acc1/valid'"),
        (lambda rank, sums, all_reduce, open_writer, step: all_reduce(sums).tolist(), "in place"),
    ],
)
def test_wrong_logs_of_ranks_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("2.3", answer)
    assert hint in refused.value.hint


def test_what_one_rank_fails_of_is_told_and_not_that_the_other_waits():
    def log_reduced(rank, sums, all_reduce, **_):
        if rank == 0:
            sums.no_such_method()
        all_reduce(sums)

    with pytest.raises(OpenError, match="no_such_method"):
        check.exercise("2.3", log_reduced)


def one_number_at_a_time(rank, sums, all_reduce, open_writer, step):
    parts = [part.clone() for part in sums]
    for part in parts:
        all_reduce(part)
    if rank == 0:
        with open_writer() as writer:
            for tag, part in (("acc1/valid", parts[2]), ("loss/valid", parts[1])):
                writer.add_scalar(tag, part / parts[0], global_step=step)


@pytest.mark.parametrize("answer", [reduced(), one_number_at_a_time])
def test_right_logs_of_ranks_get_the_tick(answer, capsys):
    check.exercise("2.3", answer)
    assert capsys.readouterr().out.startswith("✔ 2.3 One log for all ranks: one writer for two ranks")


def test_the_lab_s_own_solutions_are_right_and_are_all_there_are(root):
    notebook = nbformat.read(root / "notebooks" / "02_tensorboard.ipynb", as_version=4)
    assert set(find_solutions(notebook)) == {"train-epoch", "log-by-images", "log-reduced"}
