"""Each check of lab 11 refuses typical wrong answers with the hint that fits, accepts right ones, ends its ranks."""

import os
import time
from contextlib import nullcontext
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, combinations, pairwise

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from course import check
from course import ranks as forks
from course.check import NotYetError
from course.exercises.lab11 import gpipe, pipeline

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def quick(request, monkeypatch):
    """Ranks that wait for each other in vain do not wait long in a test."""
    monkeypatch.setattr(forks, "GRACE", 0.1)
    kind = request.node.callspec.id
    if kind.startswith("stuck"):
        monkeypatch.setattr(gpipe, "LIMIT", 0.6)
        monkeypatch.setattr(pipeline, "PATIENCE", 0.1)
    elif kind.startswith("late"):
        monkeypatch.setattr(pipeline, "PATIENCE", 0.3)


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


# 11.1


def receive(shape, source):
    x = torch.empty(shape)
    dist.recv(x, source)
    return x


def find_rank():
    return dist.get_rank(), dist.get_world_size() - 1


def gpipe_by(
    *,
    rank=find_rank,
    take=lambda shape, own, rank: receive(shape, rank - 1).requires_grad_(),
    first=lambda rank: rank == 0,
    run=lambda stage, x: stage(x),
    give=lambda output, rank: dist.send(output.detach(), rank + 1),
    keep=lambda output: output,
    divide=lambda loss, micro: loss / micro,
    order=lambda pairs, rank, last: pairs,
    fetch=lambda shape, rank: receive(shape, rank + 1),
    backward=lambda output, gradient, rank: output.backward(gradient),
    back=lambda x, rank: dist.send(x.grad, rank - 1),
    end=lambda stage: None,
):
    """The lab's answer, in which any part can be another."""

    def gpipe_step(stage, inputs, targets, find_loss, shape):
        own, last = rank()
        pairs = []
        for x, y in zip(inputs, targets, strict=True):
            if not first(own):
                x = take(shape, x, own)
            output = run(stage, x)
            if own < last:
                give(output, own)
                output = keep(output)
            else:
                output = divide(find_loss(output, y), len(inputs))
            pairs.append((x, output))
        for x, output in order(pairs, own, last):
            gradient = fetch(shape, own) if own < last else None
            backward(output, gradient, own)
            if own > 0:
                back(x, own)
        end(stage)

    return gpipe_step


def gpipe_of_the_lab(stage, inputs, targets, find_loss, shape):
    """Right: as the lab has it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received, outputs = [], []
    for x, y in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        output = stage(x)
        if rank < last:
            dist.send(output.detach(), rank + 1)
        else:
            output = find_loss(output, y) / len(inputs)
        received.append(x)
        outputs.append(output)
    for x, output in zip(received, outputs, strict=True):
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        output.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)


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


def gpipe_of_the_paper(stage, inputs, targets, find_loss, shape):
    """Right: backward in reverse order on all ranks."""
    gpipe_by(order=lambda pairs, *_: pairs[::-1])(stage, inputs, targets, find_loss, shape)


def gpipe_by_batches(stage, inputs, targets, find_loss, shape):
    """Right: P2POps; the gradients of inputs by `torch.autograd.grad`, into parameters by hand."""
    rank, last = find_rank()

    def exchange(operation, tensor, peer):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
            work.wait()
        return tensor

    kept = []
    for number in range(len(targets)):
        x = inputs[number]
        if rank:
            x = exchange(dist.irecv, torch.empty(*shape), rank - 1)
        x = x.clone().requires_grad_()
        output = stage(x)
        if rank < last:
            exchange(dist.isend, output.detach(), rank + 1)
        kept.append((x, output))
    for (x, output), target in zip(kept, targets, strict=True):
        leaves = [x, *stage.parameters()]
        if rank == last:
            found = torch.autograd.grad(find_loss(output, target) / len(targets), leaves)
        else:
            found = torch.autograd.grad(output, leaves, exchange(dist.irecv, torch.empty_like(output), rank + 1))
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        if rank:
            exchange(dist.isend, x.grad, rank - 1)


def whole_batch(stage, inputs, targets, find_loss, shape):
    shape = (len(inputs) * shape[0], *shape[1:])
    gpipe_by()(stage, [torch.cat(inputs)], [torch.cat(targets)], find_loss, shape)


def whole_batch_in_parts(stage, inputs, targets, find_loss, shape):
    """One call of the stage, whose output is sent in parts."""
    rank, last = find_rank()
    x = torch.cat([receive(shape, rank - 1) for _ in inputs] if rank else inputs).requires_grad_()
    output = stage(x)
    if rank < last:
        for part in output.detach().chunk(len(inputs)):
            dist.send(part, rank + 1)
        output.backward(torch.cat([receive(shape, rank + 1) for _ in inputs]))
    else:
        find_loss(output, torch.cat(targets)).backward()
    if rank:
        for part in x.grad.chunk(len(inputs)):
            dist.send(part, rank - 1)


def one_micro_batch_after_the_other(stage, inputs, targets, find_loss, shape):
    step = gpipe_by(divide=lambda loss, _: loss / len(inputs))
    for x, y in zip(inputs, targets, strict=True):
        step(stage, [x], [y], find_loss, shape)


def in_turns_on_the_last(stage, inputs, targets, find_loss, shape):
    rank, last = find_rank()
    step = one_micro_batch_after_the_other if rank == last else gpipe_by()
    step(stage, inputs, targets, find_loss, shape)


def sum_of_losses(stage, inputs, targets, find_loss, shape):
    """The last rank runs backward once, through all micro-batches, before it sends any gradient."""
    rank, last = find_rank()
    if rank < last:
        gpipe_by()(stage, inputs, targets, find_loss, shape)
        return
    received, losses = [], []
    for y in targets:
        received.append(receive(shape, rank - 1).requires_grad_())
        losses.append(find_loss(stage(received[-1]), y))
    torch.stack(losses).mean().backward()
    for x in received:
        dist.send(x.grad, rank - 1)


def outputs_at_the_end(stage, inputs, targets, find_loss, shape):
    """All forward passes of a rank, and only then the messages."""
    rank, last = find_rank()
    received = [receive(shape, rank - 1).requires_grad_() for _ in inputs] if rank else inputs
    outputs = [stage(x) for x in received]
    for number, output in enumerate(outputs):
        if rank < last:
            dist.send(output.detach(), rank + 1)
        else:
            outputs[number] = find_loss(output, targets[number]) / len(inputs)
    for x, output in zip(received, outputs, strict=True):
        output.backward(receive(shape, rank + 1) if rank < last else None)
        if rank:
            dist.send(x.grad, rank - 1)


def receive_own_shape(shape, own, rank):
    return receive(own.shape, rank - 1).requires_grad_()


def receive_and_forget(shape, own, rank):
    receive(shape, rank - 1)
    return own.clone().requires_grad_()


def receive_without_wait(shape, own, rank):
    dist.irecv(x := torch.empty(shape), rank - 1)
    return x.requires_grad_()


def one_buffer(*, fresh):
    """Receives into the same tensor again and again; with `fresh` it requires gradients again each time."""
    buffers = {}

    def take(shape, own, rank):
        x = buffers.setdefault("x", torch.empty(shape))
        dist.recv(x.detach(), rank - 1)
        return x.detach().requires_grad_() if fresh else x.requires_grad_()

    return take


def for_two_ranks(stage, inputs, targets, find_loss, shape):
    """Rank 0 is the first one, any other the last one."""
    first = dist.get_rank() == 0
    kept = []
    for x, y in zip(inputs, targets, strict=True):
        if first:
            output = stage(x)
            dist.send(output.detach(), 1)
        else:
            x = receive(shape, dist.get_rank() - 1).requires_grad_()
            output = find_loss(stage(x), y) / len(inputs)
        kept.append((x, output))
    for x, output in kept:
        output.backward(receive(shape, 1) if first else None)
        if not first:
            dist.send(x.grad, dist.get_rank() - 1)


def from_rank_0(shape, own, rank):
    return receive(shape, 0).requires_grad_()


def zero_before(stages):
    def run(stage, x):
        stages.append(stage)
        return stage(x)

    def backward(output, gradient, rank):
        stages[-1].zero_grad()
        output.backward(gradient)

    return {"run": run, "backward": backward}


def take_grad(stage):
    for parameter in stage.parameters():
        parameter.grad = None


def scale_grad(factor, stage):
    for parameter in stage.parameters():
        parameter.grad *= factor


def target_first(stage, inputs, targets, find_loss, shape):
    gpipe_by()(stage, inputs, targets, lambda output, target: find_loss(target, output), shape)


def zero_first(stage, *arguments):
    stage.zero_grad()
    gpipe_by()(stage, *arguments)


def reverse_on_the_last(pairs, rank, last):
    return pairs[::-1] if rank == last else pairs


def other_target(stage, inputs, targets, find_loss, shape):
    gpipe_by()(stage, inputs, targets[::-1], find_loss, shape)


def without_graph(stage, x):
    with torch.no_grad():
        return stage(x)


WRONG_STEPS = {
    "not divided": (
        gpipe_by(divide=lambda loss, micro: loss),
        "no mean is taken: divide each micro-batch's loss by len(inputs)",
    ),
    "divided by ranks": (gpipe_by(divide=lambda loss, micro: loss / dist.get_world_size()), "not by that of ranks"),
    "divided twice": (gpipe_by(divide=lambda loss, micro: loss / micro**2), "divided twice"),
    "no gradient of inputs": (
        gpipe_by(take=lambda shape, own, rank: receive(shape, rank - 1)),
        "after dist.recv call x.requires_grad_()",
    ),
    "rank 0 sends back": (gpipe_by(back=lambda x, rank: dist.send(None, rank - 1)), "ranks above 0"),
    "last alone": (gpipe_by(order=lambda pairs, rank, last: pairs[-1:]), "one backward for each micro-batch"),
    "whole batch": (whole_batch, "one message of the given shape for each micro-batch"),
    "whole batch in parts": (whole_batch_in_parts, "call stage(x) once for each micro-batch"),
    "forward twice": (gpipe_by(run=lambda stage, x: stage(x) * 0 + stage(x)), "call stage(x) once"),
    "own inputs": (gpipe_by(take=receive_and_forget), "used its own inputs"),
    "own shape": (gpipe_by(take=receive_own_shape), "receive it into torch.empty(shape)"),
    "in turns": (one_micro_batch_after_the_other, "GPipe runs all forward passes first"),
    "another order": (gpipe_by(order=reverse_on_the_last), "in the same order of micro-batches"),
    "another target": (other_target, "of the same micro-batch"),
    "inputs in float64": (
        gpipe_by(give=lambda output, rank: dist.send(output.detach().double(), rank + 1)),
        "float32",
    ),
    "changed output": (gpipe_by(give=lambda output, rank: dist.send(output.detach() / 2, rank + 1)), "as it is"),
    "changed gradient": (gpipe_by(back=lambda x, rank: dist.send(x.grad / 2, rank - 1)), "what rank 1 found in x.grad"),
    "no gradient": (
        gpipe_by(backward=lambda output, gradient, rank: output.backward()),
        "output.backward(gradient), with what came from rank + 1",
    ),
    "gradient for the loss": (
        gpipe_by(
            backward=lambda output, gradient, rank: output.backward(torch.ones(2, 4) if gradient is None else gradient)
        ),
        "the loss on the last rank is one number",
    ),
    "detached": (gpipe_by(keep=torch.Tensor.detach), "call backward of output itself"),
    "no graph": (gpipe_by(run=without_graph), "which has the graph"),
    "one buffer": (gpipe_by(take=one_buffer(fresh=False)), "tensors of its own"),
    "set to zero": (gpipe_by(**zero_before([])), "do not set them to zero between"),
    "divided with what was there": (
        gpipe_by(divide=lambda loss, micro: loss, end=partial(scale_grad, 1 / 4)),
        "also divides what was there before the step",
    ),
    "inputs ask for gradients": (
        gpipe_by(run=lambda stage, x: stage(x.requires_grad_())),
        "only on what was received",
    ),
    "target first": (target_first, "takes the output first"),
    "two ranks by name": (
        gpipe_by(rank=lambda: (dist.get_rank(), 1), first=lambda rank: rank != 1),
        "there can be more than two",
    ),
    "set to zero first": (zero_first, "zero_grad() is the caller's"),
    "none left": (gpipe_by(end=take_grad), "let them stay there"),
    "no wait for a receive": (gpipe_by(take=receive_without_wait), "wait() for every isend and irecv"),
    "to itself": (gpipe_by(give=lambda output, rank: dist.send(output.detach(), rank)), "sends to r + 1"),
    "round a ring": (gpipe_by(first=lambda rank: False), "rank 0 has no rank before it"),
    "beyond the last": (
        gpipe_by(rank=lambda: (dist.get_rank(), dist.get_world_size())),
        "the last rank, world_size − 1, none after it",
    ),
    "all from rank 0": (gpipe_by(take=from_rank_0), "rank r receives from r − 1"),
    "late: all forward passes, then messages": (outputs_at_the_end, "receive, compute and send one micro-batch"),
    "late: one backward for all": (sum_of_losses, "send x.grad before the next one"),
    "stuck: no output sent": (gpipe_by(give=lambda output, rank: None), "rank 1 got no output"),
    "stuck: no gradient sent": (gpipe_by(back=lambda x, rank: None), "rank 0 got no gradient"),
    "stuck: not received": (
        gpipe_by(take=lambda shape, own, rank: own.requires_grad_()),
        "rank 1 ran forward without rank 0's output",
    ),
    "stuck: two ranks": (for_two_ranks, "rank 2 got no output: each rank but the last, world_size − 1"),
    "stuck: last backward alone": (
        gpipe_by(order=lambda pairs, rank, last: pairs[-1:] if rank == last else pairs),
        "also the last one",
    ),
    "stuck: last rank in turns": (in_turns_on_the_last, "also on the last rank: run backward in a second loop"),
    "stuck: endless": (gpipe_by(rank=lambda: [None for _ in iter(int, 1)]), "a loop does not end"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("answer", "hint"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_steps_are_refused(answer, hint):
    began = time.monotonic()
    assert hint in refuse("11.1", answer)
    assert time.monotonic() - began < 15


RIGHT_STEPS = {
    "lab": gpipe_of_the_lab,
    "parts": gpipe_by(),
    "without waiting": gpipe_without_waiting,
    "of the paper": gpipe_of_the_paper,
    "batches": gpipe_by_batches,
    "not detached": gpipe_by(give=lambda output, rank: dist.send(output, rank + 1)),
}


@pytest.mark.parametrize("answer", RIGHT_STEPS.values(), ids=RIGHT_STEPS)
def test_right_steps_are_accepted(answer, capsys):
    check.exercise("11.1", answer)
    assert capsys.readouterr().out == (
        "✔ 11.1 A step of GPipe: the gradients of the whole network on 2 and on 3 ranks, and neighbours work at the "
        "same time\n"
    )


# 11.2


def order_by(
    *,
    warm_up=lambda rank, ranks, micro: min(ranks - 1 - rank, micro),
    turn=("F", "B"),
    begin=0,
    rest=True,
    write=lambda letter, number: f"{letter}{number}",
    give=list,
):
    """The lab's answer, in which any part can be another."""

    def one_f_one_b(rank, ranks, micro):
        first = warm_up(rank, ranks, micro)
        order = [("F", number) for number in range(first)]
        for number in range(micro - first):
            order += [(letter, number + first * (letter == "F")) for letter in turn]
        if rest:
            order += [("B", number) for number in range(max(micro - first, 0), micro)]
        return give(write(letter, begin + number) for letter, number in order)

    return one_f_one_b


def order_by_counting(rank, ranks, micro):
    """Right: backward as soon as the rank holds as many as it may."""
    order, forward, backward = [], 0, 0
    while backward < micro:
        if forward < micro and forward - backward < ranks - rank:
            order.append(f"F{forward}")
            forward += 1
        else:
            order.append(f"B{backward}")
            backward += 1
    return tuple(order)


def order_by_slices(rank, ranks, micro):
    """Right: two lists, of which one is shifted."""
    first = min(ranks - rank, micro)
    forward, backward = [f"F{i}" for i in range(micro)], [f"B{i}" for i in range(micro)]
    middle = [work for pair in zip(backward, forward[first:]) for work in pair]  # noqa: B905
    return forward[:first] + middle + backward[micro - first :]


def order_for_one_rank_more(rank, ranks, micro):
    """Right: forward first where a rank has nothing to run backward yet, in any order that is as fast."""
    return order_by(warm_up=lambda rank, ranks, micro: min(max(ranks - 1 - rank, 0), micro - 1))(rank, ranks, micro)


def backward_in_reverse(rank, ranks, micro):
    return [f"F{i}" for i in range(micro)] + [f"B{i}" for i in reversed(range(micro))]


def one_warm_up_less(rank, ranks, micro):
    return min(max(ranks - 2 - rank, 0), micro)


def two_at_a_time(rank, ranks, micro):
    """As many as it may hold, all their backward passes, and again."""
    most = ranks - rank
    blocks = [range(begin, min(begin + most, micro)) for begin in range(0, micro, most)]
    return [f"{letter}{number}" for block in blocks for letter in "FB" for number in block]


WRONG_ORDERS = {
    "GPipe": (order_by(warm_up=lambda rank, ranks, micro: micro), "too many forward passes before a backward"),
    "one more": (order_by(warm_up=lambda rank, ranks, micro: min(ranks - rank, micro)), "too many forward passes"),
    "one less": (order_by(warm_up=one_warm_up_less), "rank 0 waits for its first backward"),
    "other way round": (
        order_by(warm_up=lambda rank, ranks, micro: min(rank, micro)),
        "a rank begins with min(ranks − 1 − rank, micro)",
    ),
    "middle ranks alternate": (
        order_by(warm_up=lambda rank, ranks, micro: min(ranks - 1, micro) if rank == 0 else 0),
        "rank 1 waits for its first backward",
    ),
    "ranks wait for each other": (
        order_by(warm_up=lambda rank, ranks, micro: min(ranks - 1 - rank, micro) if rank or ranks == 2 else 0),
        "the ranks wait for each other",
    ),
    "two at a time": (two_at_a_time, "a rank waits where it could work"),
    "no min": (order_by(warm_up=lambda rank, ranks, micro: ranks - 1 - rank), "min(…, micro)"),
    "backward first": (order_by(turn=("B", "F")), "comes after its forward"),
    "rest left out": (order_by(rest=False), "the backward passes that are left"),
    "one more at the end": (
        lambda *given: [*order_by()(*given), "B0"],
        "a backward pass comes twice",
    ),
    "forward left out": (lambda *given: order_by()(*given)[1:], "forward passes are missing"),
    "from 1": (order_by(begin=1), "count from 0"),
    "backward in reverse": (backward_in_reverse, "in the order of the micro-batches"),
    "small letters": (order_by(write=lambda letter, number: f"{letter.lower()}{number}"), "without a space"),
    "pairs": (order_by(write=lambda letter, number: (letter, number)), "the order of this rank alone"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_wrong_orders_are_refused(answer, hint):
    assert hint in refuse("11.2", answer)


RIGHT_ORDERS = [order_by(), order_by_counting, order_by_slices, order_for_one_rank_more]


@pytest.mark.parametrize("answer", RIGHT_ORDERS)
def test_right_orders_are_accepted(answer, capsys):
    check.exercise("11.2", answer)
    assert capsys.readouterr().out == (
        "✔ 11.2 The order of 1F1B: 30 pipelines of 1 to 6 ranks take (micro + ranks − 1) · 3, and rank r never holds "
        "more than ranks − r micro-batches\n"
    )


# 11.3


def list_cuts(layers, stages):
    for places in combinations(range(1, layers), stages - 1):
        yield [end - begin for begin, end in pairwise((0, *places, layers))]


def find_stages(times, counts):
    ends = list(accumulate(counts))
    return [sum(times[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def cut_by(*, judge=max, times_as=list, give=list, better=min):
    """The lab's answer, in which any part can be another."""

    def cut(times, stages):
        used = times_as(times)
        return give(better(list_cuts(len(used), stages), key=lambda counts: judge(find_stages(used, counts))))

    return cut


def cut_from_0(times, stages):
    cuts = ([0, *places, len(times)] for places in combinations(range(len(times)), stages - 1))
    best = min(cuts, key=lambda cut: max(sum(times[begin:end]) for begin, end in pairwise(cut)))
    return [end - begin for begin, end in pairwise(best)]


def cut_by_recursion(times, stages):
    """Right: the best first stage, and the best rest after it."""

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


def cut_by_limit(times, stages):
    """Right: the smallest limit under which stages that are filled from the left are enough; NumPy's integers."""

    def fill(limit):
        counts, seconds = [0], 0.0
        for index, one in enumerate(times):
            # As many layers are kept back as there are stages to come.
            forced = len(times) - index <= stages - len(counts)
            if counts[-1] and (seconds + one > limit + 1e-12 or forced):
                counts.append(0)
                seconds = 0.0
            counts[-1] += 1
            seconds += one
        return counts

    limits = sorted(sum(times[begin:end]) for begin, end in combinations(range(len(times) + 1), 2))
    return np.array(next(counts for limit in limits if len(counts := fill(limit)) <= stages))


def cut_equally(times, stages):
    return [len(part) for part in np.array_split(times, stages)]


def cut_greedily(share):
    """A stage ends where the mean is reached, with a share of the next layer."""

    def cut(times, stages):
        mean, counts, seconds = sum(times) / stages, [0], 0.0
        for index, one in enumerate(times):
            left = stages - len(counts)
            full = seconds + share * one > mean - 1e-9 or len(times) - index <= left
            if counts[-1] and left and full:
                counts.append(0)
                seconds = 0.0
            counts[-1] += 1
            seconds += one
        return counts

    return cut


def cut_in_halves(times, stages):
    if stages == 1:
        return [len(times)]
    left = stages // 2
    places = range(left, len(times) - (stages - left) + 1)
    place = min(places, key=lambda place: abs(sum(times[:place]) / left - sum(times[place:]) / (stages - left)))
    return cut_in_halves(times[:place], left) + cut_in_halves(times[place:], stages - left)


def cut_too_seldom(times, stages):
    return cut_by()(times, stages - 1)


WRONG_CUTS = {
    "equal counts": (cut_equally, "equal counts of layers do not take equal seconds"),
    "equal counts by division": (
        lambda times, stages: (
            [len(times) // stages] * (stages - 1) + [len(times) - len(times) // stages * (stages - 1)]
        ),
        "equal counts of layers",
    ),
    "until the mean is reached": (cut_greedily(0), "ends near the mean"),
    "halves": (cut_in_halves, "try all places of the cuts"),
    "from 0": (cut_from_0, "each stage needs at least one layer"),
    "slowest is slowest": (cut_by(better=max), "only the slowest stage counts"),
    "sorted": (cut_by(times_as=sorted), "do not sort the times"),
    "in reverse": (cut_by(give=lambda counts: counts[::-1]), "in reverse order"),
    "one too few": (cut_by(give=lambda counts: [*counts[:-1], counts[-1] - 1]), "each layer belongs to exactly one"),
    "all in one stage": (lambda times, stages: [len(times)] + [0] * (stages - 1), "at least one layer"),
    "a stage too few": (cut_too_seldom, "one number for each stage"),
    "seconds": (lambda times, stages: find_stages(times, cut_by()(times, stages)), "whole numbers, and no seconds"),
    "slowest stage": (lambda times, stages: max(find_stages(times, cut_by()(times, stages))), "that is one number"),
    "places": (cut_by(give=lambda counts: list(accumulate(counts))[:-1]), "the places of the cuts"),
    "layers": (lambda times, stages: [times[:1], times[1:]], "len() of each part"),
    "floats": (cut_by(give=lambda counts: [float(count) for count in counts]), "whole numbers"),
    "string": (cut_by(give=str), "as a list"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_CUTS.values(), ids=WRONG_CUTS)
def test_wrong_cuts_are_refused(answer, hint):
    assert hint in refuse("11.3", answer)


def last_of_the_best(times, stages):
    """Right: of several that are best, the last one."""
    best = cut_by()(times, stages)
    slowest = max(find_stages(times, best))
    return [one for one in list_cuts(len(times), stages) if max(find_stages(times, one)) <= slowest + 1e-9][-1]


@pytest.mark.parametrize("answer", [cut_by(), cut_by(give=tuple), last_of_the_best, cut_by_recursion, cut_by_limit])
def test_right_cuts_are_accepted(answer, capsys):
    check.exercise("11.3", answer)
    assert capsys.readouterr().out == (
        "✔ 11.3 Where to cut: no other cuts have a faster slowest stage, for 8 networks and 1 to 4 stages\n"
    )


# 11.4


def sent_by(
    *,
    ring=lambda n: 2 * (n - 1) / n,
    data=lambda weights, tokens, width, layers, n: weights,
    tensor=lambda weights, tokens, width, layers, n: 4 * layers * tokens * width,
    pipeline=lambda weights, tokens, width, layers, n: 2 * tokens * width,
    size=2,
    give=float,
):
    """The lab's answer, in which any part can be another."""

    def bytes_sent(way, ranks, weights, tokens, width, layers):
        numbers = {"data": data, "tensor": tensor, "pipeline": pipeline}[way](weights, tokens, width, layers, ranks)
        return give(size * numbers * (1 if way == "pipeline" else ring(ranks)))

    return bytes_sent


def sent_by_parts(way, ranks, weights, tokens, width, layers):
    """Right: whole bytes, in messages of a ring."""
    match way:
        case "data":
            size, times = 2 * weights, 1
        case "tensor":
            size, times = 2 * tokens * width, 4 * layers
        case _:
            return 4 * width * tokens
    return times * 2 * (ranks - 1) * size // ranks


def sent_by_tensors(way, ranks, weights, tokens, width, layers):
    """Right: the bytes of tensors that hold no memory."""

    def find_bytes(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").nbytes

    if way == "pipeline":
        return find_bytes(tokens, width) + find_bytes(tokens, width)
    whole = find_bytes(weights) if way == "data" else sum(find_bytes(tokens, width) for _ in range(4 * layers))
    return whole * 2 - whole * 2 / ranks


def pipeline_as_ring(way, ranks, *sizes):
    return sent_by()(way, ranks, *sizes) * (2 * (ranks - 1) / ranks if way == "pipeline" else 1)


def by_tokens(weights, tokens, width, layers, n):
    return tokens * width


def by_weights(weights, tokens, width, layers, n):
    return weights


WRONG_BYTES = {
    "numbers": (sent_by(size=1), "these are numbers"),
    "float32": (sent_by(size=4), "and not 4"),
    "bits": (sent_by(size=16), "these are bits"),
    "all ranks": (lambda way, ranks, *model: ranks * sent_by()(way, ranks, *model), "what all ranks send together"),
    "MB": (sent_by(size=2 / 10**6), "return bytes"),
    "no factor 2": (sent_by(ring=lambda n: (n - 1) / n), "in the reduce-scatter, and as much in the all-gather"),
    "no ring": (sent_by(ring=lambda n: 1), "the factor is 2 · (n − 1)/n"),
    "whole messages": (sent_by(ring=lambda n: 2 * (n - 1)), "each message of a ring has 1/n"),
    "one rank sends": (sent_by(ring=lambda n: 2 * (n - 1) / n if n > 1 else 2), "one rank has nobody to send to"),
    "data by layers": (sent_by(data=lambda weights, t, w, layers, n: weights * layers), "do not multiply by layers"),
    "data of tokens": (sent_by(data=by_tokens), "data parallelism sends gradients"),
    "data by tokens": (sent_by(data=lambda weights, tokens, *_: weights * tokens), "are summed before they are sent"),
    "data by ranks": (sent_by(data=lambda weights, t, w, layers, n: weights / n), "do not divide the weights by ranks"),
    "data half": (sent_by(data=lambda weights, *_: weights / 2), "one all-reduce of the gradients"),
    "data none": (sent_by(data=lambda *_: 0), "one all-reduce of weights numbers"),
    "two all-reduces": (
        sent_by(tensor=lambda w, t, width, layers, n: 2 * layers * t * width),
        "four all-reduces in each",
    ),
    "no layers": (sent_by(tensor=lambda w, tokens, width, layers, n: 4 * tokens * width), "multiply by layers"),
    "tensor of weights": (sent_by(tensor=by_weights), "and no gradients of weights"),
    "tensor by weights": (
        sent_by(tensor=lambda weights, t, w, layers, n: 4 * layers * weights),
        "no gradients of weights",
    ),
    "tensor without width": (sent_by(tensor=lambda w, tokens, wi, layers, n: 4 * layers * tokens), "each place of"),
    "tensor by ranks": (sent_by(tensor=lambda w, t, width, layers, n: 4 * layers * t * width / n), "whole width"),
    "tensor eight": (sent_by(tensor=lambda w, t, width, layers, n: 8 * layers * t * width), "4 · layers all-reduces"),
    "pipeline forward alone": (sent_by(pipeline=by_tokens), "the gradients of its inputs back"),
    "pipeline by ranks": (
        sent_by(pipeline=lambda w, t, width, layers, n: 2 * t * width * n),
        "whatever the number of ranks",
    ),
    "pipeline as ring": (pipeline_as_ring, "that is no ring"),
    "pipeline by layers": (
        sent_by(pipeline=lambda w, t, width, layers, n: 2 * t * width * layers),
        "only where the network is cut",
    ),
    "pipeline of weights": (sent_by(pipeline=lambda weights, t, w, layers, n: weights / n), "and no weights"),
    "pipeline without width": (sent_by(pipeline=lambda w, tokens, *_: 2 * tokens), "each place of the width"),
    "pipeline none": (sent_by(pipeline=lambda *_: 0), "a pipeline sends, too"),
    "pipeline seven": (sent_by(pipeline=lambda w, t, width, *_: 7 * t * width), "2 · tokens · width · 2 bytes"),
    "nothing": (sent_by(give=lambda found: None), "return one number"),
    "pipeline forgotten": (lambda way, *sizes: None if way == "pipeline" else sent_by()(way, *sizes), "three ways"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_BYTES.values(), ids=WRONG_BYTES)
def test_wrong_bytes_are_refused(answer, hint):
    assert hint in refuse("11.4", answer)


@pytest.mark.parametrize(
    "answer",
    [
        *(sent_by(give=kind) for kind in (float, round, Fraction, torch.tensor)),
        sent_by(ring=lambda n: Fraction(2 * (n - 1), n)),
        sent_by_parts,
        sent_by_tensors,
    ],
)
def test_right_bytes_are_accepted(answer, capsys):
    check.exercise("11.4", answer)
    assert capsys.readouterr().out == (
        "✔ 11.4 Bytes that a rank sends: 16 cases of data, tensor and pipeline parallelism, to the byte\n"
    )


# The ranks of a check


def die(*arguments):
    os._exit(3)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("answer", "count"),
    [(gpipe_of_the_lab, 5), (gpipe_by(back=lambda x, rank: None), 2), (die, 2)],
    ids=["right", "stuck", "death"],
)
def test_no_rank_is_left(answer, count, tmp_path):
    def noted(*arguments):
        (tmp_path / str(os.getpid())).touch()
        return answer(*arguments)

    with nullcontext() if answer is gpipe_of_the_lab else pytest.raises(NotYetError):
        check.exercise("11.1", noted)
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == count and not any(map(psutil.pid_exists, pids))
    assert not dist.is_initialized()


def test_what_the_ranks_print_is_shown(capsys):
    def chatty(*arguments):
        print("micro-batches:", len(arguments[1]))
        gpipe_by()(*arguments)

    check.exercise("11.1", chatty)
    assert "[rank 2] micro-batches: 2\n✔ 11.1" in capsys.readouterr().out
