"""The checks of lab 2 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

import pandas as pd
import pytest
from harness.answers import load_answer, refuse_edited
from torch.nn import functional as F

from course import check
from course.check import OpenError

pytestmark = pytest.mark.usefixtures("runs")

LOSS = 'writer.add_scalar("loss/train", loss.item(), step)'
RETURN = "return pd.DataFrame(rows, columns=COLUMNS), first_step + len(rows)"
SEEN, POINT = "seen += images\n        ", 'writer.add_scalar("loss/by images", loss, seen)'
REDUCE, WRITE = "    all_reduce(sums)\n    if rank == 0:", "with open_writer() as writer:"


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("2.1", '"loss/train"', '"train/loss"', "letter by letter"),
        ("2.1", LOSS, LOSS.replace("loss.item()", "[loss]"), "writer.add_scalar(tag, value, step)"),
        ("2.1", LOSS, 'writer.add_scalars("loss", {"train": 1.0}, step)', "writer.add_scalar(tag, value, step)"),
        ("2.1", LOSS, LOSS.replace("loss.item()", "loss.item() * len(labels)"), "the loss of this very batch"),
        ("2.1", LOSS, LOSS.replace(", step", ", 6 * step"), "counts batches over all epochs"),
        ("2.1", "lr = ", "lr = 0.8 * ", "before scheduler.step()"),
        ("2.1", "top1, top5 =", "top5, top1 =", "top-1 belongs to acc1"),
        ("2.1", RETURN, "return pd.DataFrame(rows, columns=COLUMNS)", "return the rows as a DataFrame"),
        ("2.1", RETURN, "return pd.DataFrame(rows, columns=COLUMNS), len(rows)", "first_step + len(rows)"),
        ("2.1", RETURN, "return pd.DataFrame(rows), first_step + len(rows)", "the columns"),
        ("2.1", RETURN, f"optimizer.zero_grad()\n    {RETURN}", "zero_grad() comes before backward"),
        ("2.1", "    return pd", "    optimizer.step()\n    return pd", "must not change the training"),
        ("2.2", SEEN + POINT, POINT.replace("seen", "7"), "over all epochs"),
        ("2.2", '"loss/by images"', '"loss"', "the tag is"),
        ("2.2", POINT, "pass", "once for each row"),
        ("2.2", ", loss, ", ", 2 * loss, ", "only the axis"),
        ("2.3", REDUCE, REDUCE.replace("if rank == 0", "if True"), "rank 0 has to open the writer"),
        ("2.3", REDUCE, "    if rank == 0:\n        all_reduce(sums)", "all ranks call all_reduce"),
        ("2.3", "all_reduce(sums)", "sums = all_reduce(sums).clone()", "in place"),
        ("2.3", WRITE, "writer = open_writer()\n        if True:", "close the writer"),
        ("2.3", "loss / images, step", "loss / images", "value, step)"),
        ("2.3", 'writer.add_scalar("acc1/valid", hits / images, step)', "pass", "'acc1/valid'"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def test_what_one_rank_fails_of_is_told_and_not_that_the_other_waits():
    edit = ("    all_reduce(sums)", "    if rank == 0:\n        sums.no_such_method()\n    all_reduce(sums)")
    with pytest.raises(OpenError, match="no_such_method"):
        check.exercise("2.3", load_answer("2.3", edit))


def train_and_log_tensors(model, batches, optimizer, scheduler, writer, first_step):
    table = pd.DataFrame(columns=["images", "loss", "top1", "top5", "lr", "seconds"])
    for images, labels in batches:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = logits.argsort(descending=True)[:, :5] == labels[:, None]
        lr, hits = optimizer.param_groups[0]["lr"], best.sum(0).cumsum(0)
        step = first_step + len(table)
        writer.add_scalar(tag="lr", scalar_value=lr, global_step=step)
        writer.add_scalar("loss/train", loss, step)
        for name, place in (("acc1/train", 0), ("acc5/train", 4)):
            writer.add_scalar(name, hits[place] / len(labels), step)
        table.loc[len(table)] = [len(labels), loss.item(), int(hits[0]), int(hits[4]), lr, 0.0]
        scheduler.step()
    return table, first_step + len(table)


def log_by_cumsum(writer, rows):
    for seen, loss in zip(rows.images.cumsum(), rows.loss, strict=True):
        writer.add_scalar(tag="loss/by images", scalar_value=loss, global_step=seen)


def reduce_one_number_at_a_time(rank, sums, all_reduce, open_writer, step):
    parts = [part.clone() for part in sums]
    for part in parts:
        all_reduce(part)
    if rank == 0:
        writer = open_writer()
        for tag, part in (("acc1/valid", parts[2]), ("loss/valid", parts[1])):
            writer.add_scalar(tag, part / parts[0], global_step=step)
        writer.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("number", "answer"),
    [("2.1", train_and_log_tensors), ("2.2", log_by_cumsum), ("2.3", reduce_one_number_at_a_time)],
)
def test_right_answers_get_the_tick(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} ")
