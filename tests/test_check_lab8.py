"""Each check of lab 8 refuses typical wrong answers with the hint that fits, accepts right ones, and leaves nothing."""

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.notebook_rules import find_solutions
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend, recv, send

from course import check
from course.check import NotYetError, OpenError
from course.exercises.lab8 import reductions

pytestmark = pytest.mark.usefixtures("runs", "no_fork_is_left")


def refuse(number, answer, words):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    assert words in refused.value.hint, refused.value
    return refused.value


@pytest.fixture
def soon(monkeypatch):
    """Shortens the time limit for answers that hang."""
    monkeypatch.setattr(reductions, "LIMIT", 1.0)


# 8.1

FIRST, TOTAL = [0, 10, 20, 30], [60, 64, 68, 72]
RIGHT = {
    "broadcast": [[10, 11, 12, 13]] * 4,
    "scatter": [[10], [11], [12], [13]],
    "gather": [None, FIRST, None, None],
    "all_gather": [FIRST] * 4,
    "reduce": [None, TOTAL, None, None],
    "all_reduce": [TOTAL] * 4,
    "reduce_scatter": [[60], [64], [68], [72]],
    "all_to_all": [[j, 10 + j, 20 + j, 30 + j] for j in range(4)],
}
WRONG_TABLES = {
    "broadcast of rank 0": ({"broadcast": [[0, 1, 2, 3]] * 4}, "rank 1's x goes to every rank"),
    "scatter keeps all": ({"scatter": [[10, 11, 12, 13]] * 4}, "rank r gets part r"),
    "scatter of each rank's own": ({"scatter": [[0], [11], [22], [33]]}, "others' x are not used"),
    "gather as all-gather": ({"gather": [FIRST] * 4}, "only rank 1 gets a result"),
    "gather at rank 0": ({"gather": [FIRST, None, None, None]}, "only rank 1 gets a result"),
    "gather without a result": ({"gather": [None] * 4}, "rank 1 is the root here"),
    "reduce leaves the own": (
        {"reduce": [[0, 1, 2, 3], TOTAL, [20, 21, 22, 23], [30, 31, 32, 33]]},
        "only rank 1 gets a result that counts",
    ),
    "reduce joins": ({"reduce": [None, [*FIRST, *FIRST], None, None]}, "element by element"),
    "all-reduce as a mean": ({"all_reduce": [[15, 16, 17, 18]] * 4}, "every rank gets the sum"),
    "reduce-scatter whole": ({"reduce_scatter": [TOTAL] * 4}, "cut into four parts"),
    "all-to-all as all-gather": ({"all_to_all": [FIRST] * 4}, "rank r gets part r of all"),
    "three entries": ({"all_gather": [FIRST] * 3}, "one entry for each rank"),
    "a number for a table": ({"all_gather": 7}, "one entry for each rank"),
    "text": ({"scatter": ["10", "11", "12", "13"]}, "a list of numbers"),
    "texts in lists": ({"scatter": [["10"], ["11"], ["12"], ["13"]]}, "a list of numbers"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_wrong_tables_are_refused(name):
    changes, words = WRONG_TABLES[name]
    refuse("8.1", lambda: RIGHT | changes, words)


@pytest.mark.parametrize("answer", [None, 3, [], "broadcast"])
def test_an_answer_that_is_no_table_is_refused(answer):
    refuse("8.1", lambda: answer, "return the dictionary")


@pytest.mark.parametrize("changes", [{"gather": None}, {"all_to_all": None, "reduce": None}])
def test_a_table_that_is_half_filled_is_no_try(changes):
    with pytest.raises(OpenError, match="is not filled in everywhere") as left:
        check.exercise("8.1", lambda: RIGHT | changes)
    assert set(left.value.where.split(", ")) == {*changes}
    with pytest.raises(OpenError, match="is not filled in everywhere"):
        check.exercise("8.1", lambda: {name: RIGHT[name] for name in RIGHT.keys() - changes.keys()})


RIGHT_TABLES = {
    "lists": RIGHT,
    "tuples and floats": {
        name: tuple(None if e is None else tuple(map(float, e)) for e in RIGHT[name]) for name in RIGHT
    },
    "tensors": {name: [None if e is None else torch.tensor(e) for e in RIGHT[name]] for name in RIGHT},
    "bare numbers and empty lists": RIGHT | {"scatter": [10, 11, 12, 13], "gather": [[], FIRST, [], []]},
    "one tensor": RIGHT | {"all_gather": torch.tensor([FIRST] * 4)},
    "arrays": {name: [None if e is None else np.array(e) for e in RIGHT[name]] for name in RIGHT},
    "lists of NumPy's numbers": RIGHT | {"all_to_all": [list(10 * np.arange(4) + r) for r in range(4)]},
}


@pytest.mark.parametrize("name", RIGHT_TABLES)
def test_right_tables_are_accepted(name, capsys):
    check.exercise("8.1", lambda: RIGHT_TABLES[name])
    assert "✔ 8.1" in capsys.readouterr().out


# 8.2


def compute(collective, size, seconds, n):
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1}.get(collective, (n - 1) / n)
    return size / seconds, factor * size / seconds


WRONG_BANDWIDTHS = {
    "swapped": (lambda *a: compute(*a)[::-1], "this is the bus bandwidth"),
    "twice the algorithm's": (lambda *a: (compute(*a)[0],) * 2, "this is the algorithm bandwidth"),
    "all-reduce's factor for all": (
        lambda c, s, t, n: (s / t, s / t * (2 * (n - 1) / n if c != "broadcast" else 1)),
        "is all_reduce's",
    ),
    "one pass for all-reduce": (lambda c, s, t, n: (s / t, s / t * (n - 1) / n), "(n − 1)/n is for one pass"),
    "bits": (lambda *a: tuple(8 * value for value in compute(*a)), "bits per second"),
    "seconds per byte": (lambda c, s, t, n: (t / s, t / s), "seconds per byte"),
    "divided": (lambda c, s, t, n: (s / t, (s / t) ** 2 / compute(c, s, t, n)[1]), "do not divide"),
    "the factor for broadcast": (
        lambda c, s, t, n: compute(c if c != "broadcast" else "all_gather", s, t, n),
        "needs the whole tensor",
    ),
    "one number": (lambda *a: compute(*a)[1], "two numbers"),
    "texts": (lambda *a: ("1", "2"), "two numbers"),
    "times n": (lambda c, s, t, n: (n * s / t, s / t), "the tensor's bytes ÷ seconds"),
    "nothing": (lambda *a: None, "two numbers"),
    "gigabytes": (lambda *a: tuple(value / 1e9 for value in compute(*a)), "give bytes"),
    "another factor": (lambda c, s, t, n: (s / t, 3 * s / t), "bus = algorithm ×"),
}


@pytest.mark.parametrize("name", WRONG_BANDWIDTHS)
def test_wrong_bandwidths_are_refused(name):
    refuse("8.2", *WRONG_BANDWIDTHS[name])


def by_cases(collective, size, seconds, n):
    rate = size / seconds
    if collective == "broadcast":
        return [rate, rate]
    passes = 2 if collective == "all_reduce" else 1
    return [rate, rate * passes - rate * passes / n]


def as_array(*arguments):
    return np.array(compute(*arguments))


@pytest.mark.parametrize("answer", [compute, by_cases, as_array])
def test_right_bandwidths_are_accepted(answer, capsys):
    check.exercise("8.2", answer)
    assert "✔ 8.2" in capsys.readouterr().out


# 8.3


def ring(
    *,
    add_before_wait=False,
    wait=True,
    steps=lambda n: 2 * (n - 1),
    first=lambda rank, step: rank - step,
    adds=lambda step, n: step < n - 1,
    like=torch.empty_like,
    in_place=True,
    neighbour=1,
):
    """A ring with one thing done differently."""

    def ring_all_reduce(x):
        rank, n = dist.get_rank(), dist.get_world_size()
        original, x = x, x if in_place else x.clone()
        chunks = list(x.chunk(n))
        for step in range(steps(n)):
            received = like(chunks[0])
            to, source = (rank + neighbour) % n, (rank - neighbour) % n
            works = [dist.isend(chunks[first(rank, step) % n], to), dist.irecv(received, source)]
            chunk = chunks[(first(rank, step) - neighbour) % n]
            if not add_before_wait and wait:
                [work.wait() for work in works]
            if adds(step, n):
                chunk += received
            else:
                chunk.copy_(received)
            if add_before_wait and wait:
                [work.wait() for work in works]
        return x if not in_place else original

    return ring_all_reduce


def send_all_to_next(x):
    """Whole tensors go round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    passed, received = x.clone(), torch.empty_like(x)
    for _ in range(n - 1):
        work = dist.isend(passed, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        work.wait()
        x += received
        passed.copy_(received)


def direct(x):
    """Sends as many bytes as a ring does, but not around a ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks, own = x.chunk(n), x.chunk(n)[rank]
    others = [other for other in range(n) if other != rank]
    works = [dist.isend(chunks[other], other) for other in others]
    buffers = [torch.empty_like(own) for _ in others]
    works += [dist.irecv(buffer, other) for buffer, other in zip(buffers, others, strict=True)]
    [work.wait() for work in works]
    own += sum(buffers)
    works = [dist.isend(own, other) for other in others]
    works += [dist.irecv(chunks[other], other) for other in others]
    [work.wait() for work in works]


def send_first(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(x, (rank + 1) % n)
    dist.recv(x, (rank - 1) % n)


def never_receives(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.isend(x, (rank + 1) % n).wait()


def receives_first(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    recv(x, (rank - 1) % n)
    dist.send(x, (rank + 1) % n)


def doubles_nothing(x):
    n, distance = dist.get_world_size(), 1
    while distance < n:
        distance * 2


def changes_while_sending(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    x += received
    work.wait()


def new_name(x):
    y = x.clone()
    ring()(y)
    x = y


def twos(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty(max(1, len(x) // n - 1), dtype=x.dtype)
    work = dist.isend(x.chunk(n)[0], (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    work.wait()


def ring_by_element(x):
    """A ring with messages of one number each; a chunk here has two or three."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks, received = x.chunk(n), torch.empty_like(x.chunk(n)[0])
    for step in range(2 * (n - 1)):
        for one, other in zip(chunks[(rank - step) % n].split(1), received.split(1), strict=True):
            work = dist.isend(one, (rank + 1) % n)
            dist.recv(other, (rank - 1) % n)
            work.wait()
        chunk = chunks[(rank - step - 1) % n]
        chunk.add_(received) if step < n - 1 else chunk.copy_(received)


WRONG_RINGS = {
    "by element": (ring_by_element, "each message costs its latency"),
    "adds before the wait": (ring(add_before_wait=True), "NaN"),
    "never waits": (ring(wait=False), "wait() for every isend"),
    "reduce-scatter only": (ring(steps=lambda n: n - 1), "the all-gather then sends complete chunks on"),
    "adds in the all-gather": (ring(adds=lambda step, n: True), "chunk"),
    "copies at once": (ring(adds=lambda step, n: False), "step"),
    "the same chunk each time": (ring(first=lambda rank, step: rank), "step"),
    "one step too many": (ring(steps=lambda n: 2 * n - 1), "2(n − 1) messages"),
    "one step short": (ring(steps=lambda n: 2 * n - 3), "which chunk does a rank send"),
    "whole tensors": (send_all_to_next, "asked for are 1.5"),
    "to everyone": (direct, "one neighbour only"),
    "returns it": (ring(in_place=False), "change x itself"),
    "a new name": (new_name, "x is as it was"),
    "nothing": (lambda x: None, "x is as it was"),
    "torch's": (lambda x: dist.all_reduce(x), "without a collective of torch's"),
    "changes while it sends": (changes_while_sending, "changed while it was being sent"),
    "the wrong type": (ring(like=lambda c: torch.empty(c.shape)), "lengths and types"),
    "too short a buffer": (twos, "lengths and types"),
    "the mean": (lambda x: (ring()(x), x.div_(dist.get_world_size())), "this is the mean"),
}
STUCK_RINGS = {
    "all send first": (send_first, "If all send first, none receives"),
    "all receive first": (receives_first, "a message that nobody sends"),
    "nobody receives": (never_receives, "a rank waits for a message"),
    "a loop without an end": (doubles_nothing, "does the loop end?"),
}


@pytest.mark.parametrize("name", WRONG_RINGS)
def test_wrong_rings_are_refused(name):
    refuse("8.3", *WRONG_RINGS[name])


@pytest.mark.parametrize("name", STUCK_RINGS)
def test_rings_that_do_not_end_are_ended(name, soon):
    refused = refuse("8.3", *STUCK_RINGS[name])
    assert "it stands in line" in refused.yours


def test_an_add_before_the_wait_is_refused_each_time():
    for _ in range(4):
        refuse("8.3", ring(add_before_wait=True), "NaN")


def test_an_error_in_the_code_is_no_try():
    def fails(x):
        if dist.get_rank() == 2:
            raise KeyError("chunks")
        dist.recv(x, 2)

    with pytest.raises(OpenError, match="stopped with an error") as stopped:
        check.exercise("8.3", fails)
    assert "rank 2, line" in stopped.value.where and "KeyError" in stopped.value.cause

    def stub(x):
        raise NotImplementedError

    with pytest.raises(OpenError, match="still to be written"):
        check.exercise("8.3", stub)


def by_batches(x):
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


def by_parity(x):
    """Blocking calls; rank 0 receives first. With tags, and chunks that are copies."""
    rank, n = dist.get_rank(), dist.get_world_size()
    size = x.numel() // n
    for step in range(2 * n - 2):
        out, into = (rank - step) % n, (rank - step - 1) % n
        mine, got = x[out * size : (out + 1) * size].clone(), torch.empty(size, dtype=x.dtype)
        order = [
            lambda t=mine, s=step: send(t, (rank + 1) % n, tag=s),
            lambda t=got, s=step: recv(t, (rank - 1) % n, tag=s),
        ]
        for call in order if rank else order[::-1]:
            call()
        x[into * size : (into + 1) * size] = got + (x[into * size : (into + 1) * size] if step < n - 1 else 0)


def into_chunks(x):
    """The all-gather receives where the chunk belongs."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = torch.tensor_split(x, n)
    buffer = torch.empty_like(chunks[0])
    for step in range(n - 1):
        request = torch.distributed.irecv(buffer, src=(rank - 1) % n)
        torch.distributed.send(chunks[(rank - step) % n], dst=(rank + 1) % n)
        request.wait()
        chunks[(rank - step - 1) % n].add_(buffer)
    for step in range(n - 1):
        requests = [dist.irecv(chunks[(rank - step) % n], (rank - 1) % n)]
        requests += [dist.isend(chunks[(rank - step + 1) % n], (rank + 1) % n)]
        for request in requests:
            request.wait()


def take_solution(root, name):
    """Returns the notebook's solution as a function."""
    source = find_solutions(nbformat.read(root / "notebooks" / "08_collectives.ipynb", 4))[name]
    names = {"torch": torch, "dist": dist}
    exec(compile(source.partition("\ncheck.exercise")[0], str(root / "notebooks" / "cell.py"), "exec"), names)
    return names[f"{name}_all_reduce"]


@pytest.mark.parametrize("answer", [ring(), by_batches, by_parity, into_chunks])
def test_right_rings_are_accepted(answer, capsys):
    check.exercise("8.3", answer)
    assert "✔ 8.3" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "name"), [("8.3", "ring"), ("8.4", "butterfly")])
def test_the_notebooks_solutions_are_accepted(root, number, name, capsys):
    check.exercise(number, take_solution(root, name))
    assert f"✔ {number}" in capsys.readouterr().out


# 8.4


def butterfly(*, add_early=False, double=2, partner=lambda rank, d: rank ^ d, first=1, adds=True, half=False):
    """A butterfly with one thing done differently."""

    def butterfly_all_reduce(x):
        rank, n, distance = dist.get_rank(), dist.get_world_size(), first
        received = torch.empty_like(x)
        while distance < n:
            other = partner(rank, distance) % n
            work, arrives = dist.isend(x, other), dist.irecv(received, other)
            if add_early:
                x += received
            work.wait()
            arrives.wait()
            if not add_early:
                x.add_(received) if adds else x.copy_(received)
            distance *= double
        return x / 2 if half else None

    return butterfly_all_reduce


def to_all(x):
    """The sum, with a message to every rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    buffers = {other: torch.empty_like(x) for other in range(n) if other != rank}
    works = [dist.isend(x, other) for other in buffers] + [dist.irecv(b, other) for other, b in buffers.items()]
    [work.wait() for work in works]
    x += sum(buffers.values())


def for_four_ranks(x):
    for distance in (1, 2):
        received, other = torch.empty_like(x), dist.get_rank() ^ distance
        for work in (dist.isend(x, other), dist.irecv(received, other)):
            work.wait()
        x += received


def by_element(x):
    """A butterfly with messages of one number each."""
    rank, distance = dist.get_rank(), 1
    while distance < dist.get_world_size():
        received = torch.empty_like(x)
        for one, other in zip(received.split(1), x.split(1), strict=True):
            work = dist.isend(other, rank ^ distance)
            dist.recv(one, rank ^ distance)
            work.wait()
        x += received
        distance *= 2


WRONG_BUTTERFLIES = {
    "by element": (by_element, "each message costs its latency"),
    "for four ranks": (for_four_ranks, "dist.get_world_size()"),
    "adds before the wait": (butterfly(add_early=True), "changed while it was being sent"),
    "one step": (butterfly(double=1000), "which rank sends which part"),
    "copies": (butterfly(adds=False), "which rank sends which part"),
    "starts at two": (butterfly(first=2), "which"),
    "a ring": (ring(), "asked for are 2"),
    "to all": (to_all, "asked for are 2"),
    "torch's": (lambda x: dist.all_reduce(x), "without a collective of torch's"),
    "nothing": (lambda x: x + 0, "x is as it was"),
    "forgets the wait": (
        lambda x: (dist.isend(x, dist.get_rank() ^ 1), dist.recv(torch.empty_like(x), dist.get_rank() ^ 1)),
        "wait() for every isend",
    ),
}
STUCK_BUTTERFLIES = {
    "does not double": (butterfly(double=1, partner=lambda rank, d: rank ^ 1), "does the loop end?"),
    "to the right": (lambda x: send_first(x), "If all send first"),
    "the partner is rank + d": (
        lambda x: dist.recv(x, (dist.get_rank() + 1) % dist.get_world_size()),
        "a message that nobody sends",
    ),
}


@pytest.mark.parametrize("name", WRONG_BUTTERFLIES)
def test_wrong_butterflies_are_refused(name):
    refuse("8.4", *WRONG_BUTTERFLIES[name])


@pytest.mark.parametrize("name", STUCK_BUTTERFLIES)
def test_butterflies_that_do_not_end_are_ended(name, soon):
    with pytest.raises(NotYetError) as refused:
        check.exercise("8.4", STUCK_BUTTERFLIES[name][0])
    assert "did not return" in refused.value.yours


def by_bits(x):
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


@pytest.mark.parametrize("answer", [butterfly(), by_bits])
def test_right_butterflies_are_accepted(answer, capsys):
    check.exercise("8.4", answer)
    assert "✔ 8.4" in capsys.readouterr().out
