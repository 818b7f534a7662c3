"""Each check of lab 11 refuses typical wrong answers with the hint that fits, accepts right ones, ends its ranks."""

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from harness.answers import load_answer, refuse_edited

from course import check
from course import ranks as forks
from course.exercises.lab11 import gpipe

pytestmark = pytest.mark.usefixtures("runs", "no_fork_is_left")


@pytest.fixture
def quick(monkeypatch):
    """Ranks that wait for each other in vain do not wait long in a test."""
    monkeypatch.setattr(forks, "GRACE", 0.1)
    monkeypatch.setattr(gpipe, "LIMIT", 1.5)
    monkeypatch.setattr(gpipe, "PATIENCE", 0.3)


# 11.1: edits of the lab's solution

RANK = "rank, last = dist.get_rank(), dist.get_world_size() - 1\n"
TAKE = "x = receive(shape, rank - 1).requires_grad_()"
SEND = "dist.send(output.detach(), rank + 1)"
LOSS = "output = find_loss(output, target) / len(inputs)"
KEPT = "outputs.append(output)\n"
PAIRS = "zip(received, outputs, strict=True)"
BACKWARD = "output.backward(receive(shape, rank + 1) if rank < last else None)"
BACK = "dist.send(x.grad, rank - 1)"

WRONG_STEPS = [
    (LOSS, f"{LOSS} ** 2", "divided by len(inputs)"),
    ("zip(inputs, targets,", "zip(inputs, targets[::-1],", "of the same micro-batch"),
    (TAKE, "x = receive(shape, rank - 1)", "after dist.recv call x.requires_grad_()"),
    (TAKE, "dist.irecv(x := torch.empty(shape), rank - 1); x.requires_grad_()", "wait() for every isend and irecv"),
    (
        f"{RANK}    received, outputs = [], []\n",
        f"{RANK}    received, outputs = [], []\n    inputs, targets = [torch.cat(inputs)], [torch.cat(targets)]\n"
        "    shape = (len(inputs[0]), *shape[1:])\n",
        "one message of the given shape for each micro-batch",
    ),
    (PAIRS, "[*zip(received, outputs)][:: -1 if rank == last else 1]", "in the same order of micro-batches"),
    (PAIRS, "[*zip(received, outputs)][-1:]", "one backward for each"),
    (KEPT, "outputs.append(output.detach())\n", "call backward of output itself"),
    (BACKWARD, "output.backward()", "output.backward(gradient), with what came from rank + 1"),
    (BACKWARD, BACKWARD.replace("None", "torch.ones(2, 4)"), "the loss on the last rank is one number"),
    # What waits in vain.
    (SEND, "pass", "rank 1 got no output"),
    (BACK, "pass", "rank 0 got no gradient"),
    ("dist.get_world_size() - 1", "1", "rank 2 got no output: each rank but the last, world_size − 1"),
    (RANK, f"{RANK}    while True:\n        pass\n", "a loop does not end"),
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("old", "new", "hint"), WRONG_STEPS)
def test_wrong_steps_are_refused(old, new, hint):
    assert hint in refuse_edited("11.1", (old, new))


@pytest.mark.usefixtures("quick")
def test_one_buffer_for_all_micro_batches_is_refused():
    take = (TAKE, "dist.recv(buffer, rank - 1)\n            x = buffer.requires_grad_()")
    assert "tensors of its own" in refuse_edited("11.1", (RANK, f"{RANK}    buffer = torch.empty(shape)\n"), take)


def gpipe_without_waiting(stage, inputs, targets, find_loss, shape):
    """Right: sends that are waited for at the end, receives that are posted at the beginning, no names for ranks."""
    rank, count, n = dist.get_rank(), dist.get_world_size(), len(inputs)
    works, kept = [], []
    if rank:
        inputs = [torch.zeros(shape, requires_grad=True) for _ in range(n)]
        receives = [dist.irecv(x, src=rank - 1) for x in inputs]
    for number in range(n):
        if rank:
            receives[number].wait()
        kept.append(stage.forward(inputs[number]))
        if rank != count - 1:
            works.append((message := kept[-1].detach().clone(), dist.isend(message, dst=rank + 1)))
    for number in range(n):
        if rank == count - 1:
            (find_loss(kept[number], targets[number]) / n).backward()
        else:
            gradient = torch.zeros(shape)
            dist.irecv(gradient).wait()
            torch.autograd.backward([kept[number]], [gradient])
        if rank:
            works.append((inputs[number].grad, dist.isend(inputs[number].grad, rank - 1)))
    for _, work in works:
        work.wait()


def test_right_steps_are_accepted(capsys):
    """As in the paper, with backward in reverse order, and with outputs that are not detached, too."""
    for answer in (
        gpipe_without_waiting,
        load_answer("11.1", (PAIRS, "[*zip(received, outputs)][::-1]")),
        load_answer("11.1", (SEND, "dist.send(output, rank + 1)")),
    ):
        check.exercise("11.1", answer)
        assert capsys.readouterr().out.splitlines()[-1] == (
            "✔ 11.1 A step of GPipe: the gradients of the whole network on 2 and on 3 ranks, and neighbours work at "
            "the same time"
        )


# 11.2 to 11.4: edits of the lab's solutions

WARM = "min(ranks - 1 - rank, micro)"
REST = ' + [f"B{number}" for number in range(micro - warm, micro)]'
TURN = '[f"F{warm + number}", f"B{number}"]'
GIVE = "return [end - begin for begin, end in itertools.pairwise(best)]"
PIPELINE = "return 2 * 2 * activations"

WRONG_PLANS = [
    ("11.2", WARM, "micro", "too many forward passes before a backward"),
    ("11.2", WARM, "min(max(ranks - 2 - rank, 0), micro)", "a rank waits where it could work"),
    ("11.2", TURN, '[f"B{number}", f"F{warm + number}"]', "comes after its forward"),
    ("11.2", TURN, '[f"f{warm + number}", f"b{number}"]', "one list of strings"),
    (
        "11.2",
        "range(micro - warm, micro)]",
        "reversed(range(micro - warm, micro))]",
        "in the order of the micro-batches",
    ),
    ("11.2", REST, f"{REST} + ['B0']", "each pass once"),
    ("11.3", "min(cuts", "max(cuts", "the largest sum of seconds counts"),
    ("11.3", "places = ", "times = sorted(times)\n    places = ", "the largest sum of seconds counts"),
    ("11.3", GIVE, f"{GIVE}[::-1]", "the largest sum of seconds counts"),
    ("11.3", GIVE, "return find_slowest(best)", "return how many layers each stage gets, as a list"),
    ("11.3", GIVE, "return [sum(times[begin:end]) for begin, end in itertools.pairwise(best)]", "how many layers"),
    ("11.4", "2 * (ranks - 1) / ranks,", "2 * (ranks - 1) / ranks if ranks > 1 else 2,", "the factor is"),
    ("11.4", "return 2 * ring * weights", "return 2 * ring * weights * layers", "one all-reduce of weights numbers"),
    ("11.4", "layers * ring * activations", "layers * ring * weights", "each of tokens · width numbers"),
    ("11.4", PIPELINE, f"{PIPELINE} * ranks", "to the two neighbours"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), WRONG_PLANS)
def test_wrong_plans_are_refused(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def order_by_counting(rank, ranks, micro):
    """Backward as soon as the rank holds as many as it may."""
    order, forward, backward = [], 0, 0
    while backward < micro:
        if forward < micro and forward - backward < ranks - rank:
            order.append(f"F{forward}")
            forward += 1
        else:
            order.append(f"B{backward}")
            backward += 1
    return tuple(order)


def cut_by_recursion(times, stages):
    """The best first stage, and the best rest after it."""

    @lru_cache
    def best(begin, stages):
        if stages == 1:
            return sum(times[begin:]), (len(times) - begin,)
        found = []
        for end in range(begin + 1, len(times) - stages + 2):
            slowest, counts = best(end, stages - 1)
            found.append((max(sum(times[begin:end]), slowest), (end - begin, *counts)))
        return min(found)

    return best(0, stages)[1]


def sent_by_parts(way, ranks, weights, tokens, width, layers):
    """Whole bytes, in messages of a ring."""
    match way:
        case "data":
            size, times = 2 * weights, 1
        case "tensor":
            size, times = 2 * tokens * width, 4 * layers
        case _:
            return 4 * width * tokens
    return times * 2 * (ranks - 1) * size // ranks


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("11.2", order_by_counting),
        ("11.3", cut_by_recursion),
        ("11.4", sent_by_parts),
    ],
)
def test_right_plans_are_accepted(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} ")
