"""The checks of lab 4 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness.answers import load_answer, refuse_edited
from torch.nn import functional as F

from course import check
from course.check import OpenError
from lab_utils.parallel import CpuDataParallel

pytestmark = pytest.mark.usefixtures("runs")

CHUNKS, COPY, RUN = "images.chunk(count)", "copy.deepcopy(model) for", "lambda replica, chunk: replica(chunk)"
POOL = f"list(\n            pool.map({RUN}, replicas, chunks)\n        )"
SUM, STEP = "sum(copy.grad for copy in copies)", "optimizer.step()"
FULL = "torch.empty(batch).chunk(count)"
LOAD = "model.load_state_dict(replicas[0].state_dict())"


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("4.1", CHUNKS, "images.chunk(count, 1)", "dimension 0"),
        ("4.1", CHUNKS, "images.split(len(images) // count)[:count]", "no remainder"),
        ("4.1", CHUNKS, "[images] * count", "images.chunk(count)[i]"),
        ("4.1", CHUNKS, "images.chunk(min(count, 2))", "as many chunks"),
        ("4.1", "for _ in chunks", "for _ in range(count)", "fewer chunks than `count`"),
        ("4.1", f"[{COPY} _ in chunks]", "[model] * len(chunks)\n    model.zero_grad()", "own memory"),
        ("4.1", COPY, "copy.deepcopy(model).train() for", "one loss of the whole batch"),
        ("4.1", POOL, "[replica(chunk) for replica, chunk in zip(replicas, chunks)]", "start all threads"),
        ("4.1", "torch.cat(outputs)", "torch.cat(outputs[::-1])", "in the order of the chunks"),
        ("4.1", f"parameter.grad = {SUM}", "pass", "none is there"),
        ("4.1", STEP, f"{STEP}\n    optimizer.zero_grad()", "none is there"),
        ("4.1", SUM, f"(0 if parameter.grad is None else parameter.grad) + {SUM}", "the step before"),
        ("4.1", STEP, "pass", "nothing moved"),
        ("4.1", STEP, f"{STEP}\n    {STEP}", "one optimizer.step()"),
        ("4.1", STEP, f"{STEP}\n    {LOAD}", "the replicas are dropped"),
        ("4.1", "loss.detach()", "loss", "detach"),
        ("4.1", "return loss.detach()", "", "return loss.detach()"),
        ("4.2", "first.mean((0, 2, 3))", "first.mean(0)", "first.mean((0, 2, 3))"),
        ("4.2", "first = ", "batch_norm.momentum = 0.1\n    first = ", "(1 - momentum) * batch_norm"),
        ("4.2", f"{CHUNKS}[0]", "images[: len(images) // count]", "(1 - momentum) * batch_norm"),
        ("4.3", f"{FULL}\n", "torch.empty(batch).tensor_split(count) if len(chunk)\n", "chunk rounds up"),
        ("4.3", "return min(", "return 1 or min(", "for the full batch and for the last one"),
        ("4.3", "return min(", "return 0.0 + min(", "an int"),
        ("4.3", "set()\n", "{batch_size}\n", "without drop_last"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def test_an_error_that_wrong_chunks_do_not_explain_passes_through():
    edit = (RUN, 'lambda replica, chunk: int("mine")')
    with pytest.raises(OpenError, match="mine"):
        check.exercise("4.1", load_answer("4.1", edit))


def step_with_a_loss_of_each_replica(model, images, labels, optimizer, count):
    shares = list(zip(images.chunk(count), labels.chunk(count), strict=True))
    replicas = [copy.deepcopy(model) for _ in shares]
    losses = {}

    def work(index):
        chunk, own = shares[index]
        loss = F.cross_entropy(replicas[index](chunk), own, reduction="sum") / len(images)
        loss.backward()
        losses[index] = loss.detach()

    with ThreadPoolExecutor(len(shares)) as pool:
        for future in [pool.submit(work, index) for index in range(len(shares))]:
            future.result()
    for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        parameter.grad = sum(one.grad for one in copies)
    optimizer.step()
    return sum(losses.values())


def step_of_torch(model, images, labels, optimizer, count):
    optimizer.zero_grad()
    loss = F.cross_entropy(CpuDataParallel(model, count, threads=1)(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean_by_running_a_copy(batch_norm, images, count):
    module = copy.deepcopy(batch_norm).train()
    with torch.no_grad():
        module(images[: math.ceil(len(images) / count)])
    return module.running_mean.clone()


def chunk_by_arithmetic(images, batch_size, count, drop_last):
    full, rest = divmod(images, batch_size)
    batches = [batch_size] * (full > 0) + [rest] * (rest > 0 and not drop_last)
    sizes = [(-(-batch // count), batch) for batch in batches]
    return min(min(size, batch % size or size) for size, batch in sizes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("4.1", step_with_a_loss_of_each_replica),
        ("4.1", step_of_torch),
        ("4.2", mean_by_running_a_copy),
        ("4.3", chunk_by_arithmetic),
    ],
)
def test_right_answers_get_the_tick(number, answer, capsys):
    seed = torch.initial_seed()
    check.exercise(number, answer)
    out, err = capsys.readouterr()
    assert out.startswith(f"✔ {number} ") and not err
    assert torch.initial_seed() == seed


def test_chunks_of_no_image_are_accepted():
    check.exercise("4.1", load_answer("4.1", (CHUNKS, "images.tensor_split(count)")))
