"""Lab 8: edits of the notebook's solutions are refused with the hint that fits, and other right answers accepted."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.answers import load_answer, refuse, refuse_edited
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend, recv, send

from course import check
from course.check import OpenError
from course.exercises import ranks
from course.exercises.lab8 import reductions

pytestmark = pytest.mark.usefixtures("runs", "no_fork_is_left")
WAIT, ADD = "        for work in works:\n            work.wait()\n", "        x += received\n"
LATE_WAIT = ("chunk.copy_(received)", "chunk.copy_(received)\n        reading.wait()")
# For each: the exercise, what is replaced in its solution, by what, and words of the hint.
EDITS = [
    ("8.1", '"broadcast": [[10, 11, 12, 13]] * 4', '"broadcast": [[0, 1, 2, 3]] * 4', "rank 1's x goes to every rank"),
    ("8.1", "[[10], [11], [12], [13]]", "[[0], [11], [22], [33]]", "the others' x are not used"),
    ("8.1", "[[10], [11], [12], [13]]", '["10", "11", "12", "13"]', "rank r gets part r"),
    ("8.1", '"all_gather": [[0, 10, 20, 30]] * 4', '"all_gather": [[0, 10, 20, 30]] * 3', "every rank gets"),
    ("8.1", '"all_gather": [[0, 10, 20, 30]] * 4', '"all_gather": 7', "every rank gets"),
    ("8.2", "return size / seconds, ", "return ", "two numbers"),
    ("8.3", "    chunks = x.chunk", "    x = x.clone()\n    chunks = x.chunk", "x is as it was"),
    ("8.3", "        work.wait()\n", "", "wait() for every isend"),
    ("8.3", "range(2 * (n - 1))", "range(n - 1)", "the all-gather then sends complete chunks on"),
    ("8.3", "if step < n - 1:", "if True:", "write down for each step"),
    ("8.3", "    chunks = x.chunk(n)", "    return dist.all_reduce(x)", "without a collective of torch's"),
    ("8.3", "dist.recv(received,", "reading = dist.irecv(received,", "NaN"),
    ("8.3", "torch.empty_like(chunks[0])", "torch.empty(1, dtype=x.dtype)", "differ in size or dtype"),
    ("8.4", "    while distance", "    x = x.clone()\n    while distance", "x is as it was"),
    (
        "8.4",
        WAIT + ADD,
        "        works[0].wait()\n" + ADD + "        works[1].wait()\n",
        "changed while it was being sent",
    ),
    ("8.4", WAIT, "        works[0].wait()\n", "wait() for every isend and irecv"),
    ("8.4", "x += received", "x.copy_(received)", "which rank sends which part"),
    ("8.4", "    received = torch", "    return dist.all_reduce(x)\n    received = torch", "without a collective"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), EDITS)
def test_edited_solutions_are_refused(number, old, new, hint, monkeypatch):
    monkeypatch.setattr(ranks, "COLLECTIVE", 2.0)
    assert hint in refuse_edited(number, (old, new), *([LATE_WAIT] if "reading" in new else []))


def send_around(x):
    """Whole tensors go round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    passed, received = x.clone(), torch.empty_like(x)
    for _ in range(n - 1):
        work = dist.isend(passed, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        work.wait()
        x += received
        passed.copy_(received)


def send_first(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(x, (rank + 1) % n)
    dist.recv(x, (rank - 1) % n)


def never_doubles(x):
    while dist.get_world_size():
        pass


@pytest.mark.parametrize(
    ("number", "answer", "hint"),
    [
        ("8.3", send_around, "asked for are 1.5"),
        ("8.3", send_first, "If all send first, none receives"),
        ("8.4", never_doubles, "a loop that does not end"),
    ],
)
def test_other_wrong_answers_are_refused_and_their_ranks_ended(number, answer, hint, monkeypatch):
    monkeypatch.setattr(ranks, "COLLECTIVE", 1.0)
    monkeypatch.setattr(reductions, "LIMIT", 2.0)
    assert hint in refuse(number, answer)


@pytest.mark.parametrize("changes", [{"gather": None}, {"all_to_all": None, "reduce": None}])
def test_a_table_that_is_half_filled_is_no_try(changes):
    right = load_answer("8.1")()
    with pytest.raises(OpenError, match="is not filled in everywhere") as left:
        check.exercise("8.1", lambda: right | changes)
    assert set(left.value.where.split(", ")) == {*changes}


def table_of(change):
    return lambda: {name: change(rows) for name, rows in load_answer("8.1")().items()}


def bandwidths_by_cases(collective, size, seconds, n):
    rate = size / seconds
    if collective == "broadcast":
        return [rate, rate]
    passes = 2 if collective == "all_reduce" else 1
    return np.array([rate, rate * passes - rate * passes / n])


def ring_by_batches(x):
    """Two loops in the other direction around the ring, with batches of operations."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.view(n, -1)
    for adds in (True, False):
        for step in range(n - 1):
            mine = (rank + step + (0 if adds else -1)) % n
            buffer = torch.zeros_like(chunks[0])
            operations = [P2POp(isend, chunks[mine], (rank - 1) % n), P2POp(irecv, buffer, (rank + 1) % n)]
            for work in reversed(batch_isend_irecv(operations)):
                work.wait()
            target = (mine + 1) % n
            chunks[target] = chunks[target] + buffer if adds else buffer


def butterfly_by_bits(x):
    """The largest distance first, and the lower rank sends first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for bit in reversed(range(n.bit_length() - 1)):
        partner, received = rank ^ (1 << bit), torch.empty_like(x)
        if rank < partner:
            send(x, partner)
            recv(received, partner)
        else:
            recv(received, partner)
            send(x, partner)
        x.copy_(x + received)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("8.1", table_of(lambda rows: [None if row is None else torch.tensor(row) for row in rows])),
        ("8.2", bandwidths_by_cases),
        ("8.3", ring_by_batches),
        ("8.4", butterfly_by_bits),
    ],
)
def test_other_right_answers_are_accepted(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number}")
