"""Each check of lab 10 refuses typical wrong answers with the hint that fits, accepts right ones, ends its ranks."""

import os
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course import check
from course.check import NotYetError
from course.exercises import ranks
from course.exercises.lab10 import split_mlp, zero
from lab_common import LabError

pytestmark = pytest.mark.usefixtures("runs")
MB = 10**6


@pytest.fixture
def quick(request, monkeypatch):
    """Shortens the time that ranks wait in vain; makes no rank late unless that is the point."""
    if request.node.callspec.id in ("one rank gathers", "two parts"):
        monkeypatch.setattr(ranks, "COLLECTIVE", 2.0)
    late = 0.5 if request.node.callspec.id.startswith("no wait") else 0.0
    monkeypatch.setattr(zero, "LATE", late)
    monkeypatch.setattr(split_mlp, "LATE", late)


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


# 10.1


def bytes_by(
    *,
    each=lambda mixed: (2, 2, 12) if mixed else (4, 4, 8),
    begin=(3, 2, 1),
    divides=lambda stage, begin: stage >= begin,
    by=lambda ranks: ranks,
    give=tuple,
):
    """The lab's answer, in which any part can be another."""

    def state_bytes(parameters, ranks, stage, mixed):
        rows = zip(each(mixed), begin, strict=True)
        return give(parameters * size / (by(ranks) if divides(stage, first) else 1) for size, first in rows)

    return state_bytes


def each_of(float32=(4, 4, 8), mixed=(2, 2, 12)):
    return lambda is_mixed: mixed if is_mixed else float32


def count_by_hand(parameters, ranks, stage, mixed):
    """Right: whole bytes, as a list, part by part."""
    weights = gradients = 2 * parameters if mixed else 4 * parameters
    optimizer = 12 * parameters if mixed else 8 * parameters
    if stage > 0:
        optimizer //= ranks
    if stage > 1:
        gradients //= ranks
    if stage > 2:
        weights //= ranks
    return [weights, gradients, optimizer]


def count_by_shards(parameters, ranks, stage, mixed):
    """Right: the parameters of a rank come first, then the bytes of each."""
    here = [parameters if stage < first else -(-parameters // ranks) for first in (3, 2, 1)]
    copy = 4 if mixed else 0
    low = torch.float16.itemsize if mixed else torch.float32.itemsize
    return here[0] * low, here[1] * low, here[2] * (copy + 2 * torch.float32.itemsize)


def on_four_ranks(parameters, ranks, stage, mixed):
    return bytes_by()(parameters, 4, stage, mixed)


WRONG_BYTES = {
    "numbers": (bytes_by(each=each_of((1, 1, 2), (1, 1, 3))), "float32 number has 4 bytes"),
    "always float32": (bytes_by(each=each_of(mixed=(4, 4, 8))), "one of 16 bits has 2"),
    "copy with the weights": (bytes_by(each=each_of(mixed=(6, 2, 8))), "copy belongs to the optimizer"),
    "no copy": (bytes_by(each=each_of(mixed=(2, 2, 8))), "also holds a float32 copy"),
    "moments of 16 bits": (bytes_by(each=each_of(mixed=(2, 2, 4))), "two moments"),
    "moments of 16 bits and copy": (bytes_by(each=each_of(mixed=(2, 2, 10))), "4 + 4 bytes"),
    "copy in float32": (bytes_by(each=each_of((4, 4, 12))), "no other copy"),
    "never divides": (bytes_by(divides=lambda *_: False), "from ZeRO-1 on, each rank holds only"),
    "DDP divides": (bytes_by(divides=lambda *_: True), "the weights are divided from ZeRO-3 on, and not before"),
    "one stage alone": (bytes_by(divides=lambda stage, first: stage == first), "from ZeRO-1 on"),
    "gradients first": (bytes_by(begin=(3, 1, 2)), "gradients are divided from ZeRO-2 on, and not before"),
    "weights second": (bytes_by(begin=(2, 3, 1)), "weights are divided from ZeRO-3 on"),
    "rank 0 alone": (bytes_by(divides=lambda stage, first: stage >= first, by=lambda ranks: float("inf")), "never 0"),
    "all ranks": (lambda *given: [one * given[1] for one in bytes_by()(*given)], "return the bytes of one rank"),
    "MB": (lambda *given: [one / MB for one in bytes_by()(*given)], "return bytes"),
    "order": (bytes_by(give=lambda some: sorted(some, reverse=True)), "in this order"),
    "sum": (bytes_by(give=sum), "return the three numbers"),
    "of one": (lambda *given: [one / given[0] for one in bytes_by()(*given)], "multiply by parameters"),
    "four ranks": (on_four_ranks, "divide by ranks where sharded"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_BYTES.values(), ids=WRONG_BYTES)
def test_wrong_bytes_of_states_are_refused(answer, hint):
    assert hint in refuse("10.1", answer)


def count_in_tensors(*given):
    return tuple(map(torch.tensor, bytes_by()(*given)))


def count_in_an_array(*given):
    return np.array(bytes_by()(*given))


@pytest.mark.parametrize("answer", [bytes_by(), count_by_hand, count_by_shards, count_in_tensors, count_in_an_array])
def test_right_bytes_of_states_are_accepted(answer, capsys):
    check.exercise("10.1", answer)
    proven = "✔ 10.1 Bytes of the states: 24 cases of precision, stage and number of ranks, to the byte\n"
    assert capsys.readouterr().out == proven


# 10.2


def activations_by(*, block=16, widths=2, logits=256, size=lambda mixed: 2 if mixed else 4, total=round):
    """The lab's answer, in which any part can be another."""

    def activation_bytes(tokens, width, layers, mixed):
        return total(tokens * size(mixed) * (layers * block * width + widths * width + logits))

    return activation_bytes


def add_up_rows(tokens, width, layers, mixed):
    """Right: row by row."""
    numbers = 0
    for _ in range(layers):
        numbers += 2 * width  # norms
        numbers += width + 4 * width  # the linear of q, k, v; attention
        numbers += width + 2 * 4 * width  # the MLP
    for last in (width, width, 256):
        numbers += last
    return numbers * tokens * (4 - 2 * mixed)


def add_up_shapes(tokens, width, layers, mixed):
    """Right: the elements of tensors that hold no memory."""
    shapes = [(tokens, width)] * 4 + [(3, tokens, width), (tokens, width)] + [(tokens, 4 * width)] * 2
    kept = [torch.empty(shape, device="meta") for shape in shapes * layers + [(tokens, width)] * 2 + [(tokens, 256)]]
    return sum(one.numel() for one in kept) * (torch.bfloat16 if mixed else torch.float32).itemsize


def end_in_each_block(tokens, width, layers, mixed):
    return activations_by()(tokens, width, 1, mixed) * layers


def one_block(tokens, width, layers, mixed):
    return activations_by()(tokens, width, 1, mixed)


def one_token(tokens, width, layers, mixed):
    return activations_by()(1, width, layers, mixed)


def with_statistics(tokens, width, layers, mixed):
    return activations_by(logits=256 + (2 * layers + 1) * 2)(tokens, width, layers, mixed)


def loss_in_float32(tokens, width, layers, mixed):
    return activations_by(logits=512 if mixed else 256)(tokens, width, layers, mixed)


WRONG_ACTIVATIONS = {
    "numbers": (activations_by(size=lambda mixed: 1), "these are numbers"),
    "always 4 bytes": (activations_by(size=lambda mixed: 4), "with mixed precision each number has 2"),
    "statistics of norms": (with_statistics, "leave the statistics of the norms out"),
    "loss in float32": (loss_in_float32, "log-probabilities have 2 bytes each"),
    "one token": (one_token, "multiply by tokens"),
    "one block": (one_block, "multiply 16 · width by layers"),
    "end in each block": (end_in_each_block, "come once"),
    "no end": (activations_by(widths=0, logits=0), "after all blocks come 2 · width + 256"),
    "no final norm": (activations_by(widths=1), "the final norm and the head keep their inputs"),
    "no loss": (activations_by(logits=0), "the loss keeps 256"),
    "one norm": (activations_by(block=15), "two norms"),
    "no inputs of linears": (activations_by(block=14), "the linear of q, k, v and the MLP's first"),
    "attention's result alone": (activations_by(block=13), "attention keeps q, k, v and its result"),
    "no GELU": (activations_by(block=12), "GELU and the linear after it"),
    "attention's result twice": (activations_by(block=17), "share one tensor"),
    "GELU twice": (activations_by(block=20), "is one tensor, count it once"),
    "MB": (activations_by(total=lambda found: found / MB), "return bytes"),
    "three numbers": (activations_by(total=lambda found: (found, 0, 0)), "return one number"),
    "infinite": (activations_by(total=lambda found: float("inf")), "add the table's rows"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_ACTIVATIONS.values(), ids=WRONG_ACTIVATIONS)
def test_wrong_bytes_of_activations_are_refused(answer, hint):
    assert hint in refuse("10.2", answer)


@pytest.mark.parametrize(
    "answer",
    [
        activations_by(),
        *map(lambda kind: activations_by(total=kind), (float, torch.tensor)),
        add_up_rows,
        add_up_shapes,
    ],
)
def test_right_bytes_of_activations_are_accepted(answer, capsys):
    check.exercise("10.2", answer)
    assert capsys.readouterr().out == "✔ 10.2 Bytes of the activations: 16 models, to the byte\n"


# 10.3


def mine(flat):
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def reduce_scatter(gradient, shard, parts=list):
    found = torch.empty_like(shard)
    dist.reduce_scatter(found, parts(gradient.chunk(dist.get_world_size())))
    return found


def all_gather(weights, shard):
    dist.all_gather(list(weights.chunk(dist.get_world_size())), shard.data)


def zero_by(
    *,
    scatter=reduce_scatter,
    divide=lambda summed: summed / dist.get_world_size(),
    put=lambda shard, mean: setattr(shard, "grad", mean),
    step=lambda weights, shard, optimizer: optimizer.step(),
    gather=all_gather,
):
    """The lab's answer, in which any part can be another."""

    def zero_step(weights, gradient, shard, optimizer):
        put(shard, divide(scatter(gradient, shard)))
        step(weights, shard, optimizer)
        gather(weights, shard)

    return zero_step


def zero_of_the_lab(weights, gradient, shard, optimizer):
    """Right: as the lab has it."""
    n = dist.get_world_size()
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter(shard.grad, list(gradient.chunk(n)))
    shard.grad /= n
    optimizer.step()
    dist.all_gather(list(weights.chunk(n)), shard.data)


def zero_by_single(weights, gradient, shard, optimizer):
    """Right: the collectives of one tensor; the mean is taken before, and no gradient is left behind."""
    optimizer.zero_grad()
    shard.grad = torch.zeros_like(shard)
    dist.reduce_scatter_single(shard.grad, gradient / dist.get_world_size())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_gather_single(weights, shard.detach())


def zero_by_tensor(weights, gradient, shard, optimizer):
    """Right: the names of before torch 2.14, into its own tensor that is copied."""
    part, whole = shard.new_empty(shard.numel()), torch.empty_like(weights)
    dist.reduce_scatter_tensor(part, gradient)
    shard.grad = part.div_(dist.get_world_size())
    optimizer.step()
    dist.all_gather_into_tensor(whole, shard.data)
    weights.copy_(whole)


def scatter_by_all_to_all(gradient, shard):
    found = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_to_all(found, list(gradient.chunk(dist.get_world_size())))
    return sum(found)


def scatter_by_all_reduce(gradient, shard):
    dist.all_reduce(gradient)
    return mine(gradient)


def scatter_by_rank_0(gradient, shard):
    dist.reduce(gradient, dst=0)
    part = torch.empty_like(shard)
    dist.scatter(part, list(gradient.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None)
    return part


def sum_of_own_parts(gradient, shard):
    own = mine(gradient).clone()
    dist.all_reduce(own)
    return own


def gather_by_all_reduce(weights, shard):
    own = shard.detach().clone()
    weights.zero_()
    mine(weights).copy_(own)
    dist.all_reduce(weights)


def scatter_by_reduce(gradient, shard):
    for rank, part in enumerate(gradient.chunk(dist.get_world_size())):
        dist.reduce(part, dst=rank)
    return mine(gradient)


def gather_by_broadcast(weights, shard):
    for rank, part in enumerate(weights.chunk(dist.get_world_size())):
        dist.broadcast(part, src=rank)


def gather_and_wait(weights, shard):
    dist.all_gather(list(weights.chunk(dist.get_world_size())), shard.data, async_op=True).wait()


def scatter_without_wait(gradient, shard):
    found = torch.empty_like(shard)
    dist.reduce_scatter(found, list(gradient.chunk(dist.get_world_size())), async_op=True)
    return do_other_things(found)


def do_other_things(tensor):
    """So long that a collective of ranks that come together ends meanwhile."""
    time.sleep(0.1)
    return tensor


def scatter_without_room(gradient, shard):
    dist.reduce_scatter(shard.grad, list(gradient.chunk(dist.get_world_size())))
    return shard.grad


def add_gradient(shard, mean):
    shard.grad = mean if shard.grad is None else shard.grad + mean


def step_anew(weights, shard, optimizer):
    torch.optim.Adam([shard], lr=0.1).step()


def step_on_rank_0(weights, shard, optimizer):
    if dist.get_rank() == 0:
        optimizer.step()


def step_twice(weights, shard, optimizer):
    optimizer.step()
    optimizer.step()


def gather_rounded(weights, shard):
    found = torch.empty(len(weights))
    dist.all_gather_single(found, shard.data.float())
    weights.copy_(found)


def gather_backwards(weights, shard):
    dist.all_gather(list(weights.chunk(dist.get_world_size()))[::-1], shard.data.clone())


def gather_other_dtype(weights, shard):
    dist.all_gather([torch.empty(len(shard)) for _ in range(dist.get_world_size())], shard.data)


def average_weights(weights, shard):
    dist.all_reduce(weights)
    weights /= dist.get_world_size()


def gather_on_rank_0(weights, shard):
    if dist.get_rank() == 0:
        all_gather(weights, shard)


def zero_like_ddp(weights, gradient, shard, optimizer):
    """Right numbers, but each rank keeps the optimizer of all weights."""
    dist.all_reduce(gradient)
    shard.data = weights
    shard.grad = gradient / dist.get_world_size()
    optimizer.step()


WRONG_STEPS = {
    "sum": (zero_by(divide=lambda summed: summed), "this is the sum"),
    "divided by two": (zero_by(divide=lambda summed: summed / 2), "whatever the number of ranks"),
    "divided twice": (zero_by(divide=lambda summed: summed / dist.get_world_size() ** 2), "divided twice"),
    "multiplied": (zero_by(divide=lambda summed: summed * dist.get_world_size()), "divide by the number of ranks"),
    "own gradient": (zero_by(scatter=lambda gradient, shard: mine(gradient)), "this rank's own gradients"),
    "other part": (
        zero_by(scatter=partial(reduce_scatter, parts=lambda parts: list(parts)[::-1])),
        "the part of another rank",
    ),
    "no wait": (zero_by(scatter=scatter_without_wait), "wait for it"),
    "added": (zero_by(put=add_gradient), "of the step before"),
    "no gradient": (zero_by(put=lambda shard, mean: None), "set that before optimizer.step()"),
    "whole gradient": (zero_by(scatter=lambda gradient, shard: gradient), "the size and the dtype of shard"),
    "no room": (zero_by(scatter=scatter_without_room), "make room"),
    "two parts": (
        zero_by(scatter=partial(reduce_scatter, parts=lambda parts: list(torch.cat(parts).chunk(2)))),
        "as many parts as ranks",
    ),
    "tuple": (zero_by(scatter=partial(reduce_scatter, parts=tuple)), "a list is list("),
    "parts of other size": (
        zero_by(gather=lambda weights, shard: all_gather(weights, weights)),
        "each as large",
    ),
    "other dtype": (zero_by(gather=gather_other_dtype), "the dtype of weights"),
    "in place": (zero_by(step=lambda weights, shard, _: shard.sub_(shard.grad)), "let optimizer.step() change it"),
    "whole optimizer": (zero_like_ddp, "the optimizer of its own part alone"),
    "new optimizer": (zero_by(step=step_anew), "the optimizer that it was given"),
    "rank 0 steps": (zero_by(step=step_on_rank_0), "each rank steps its own part"),
    "two steps": (zero_by(step=step_twice), "once: optimizer.step()"),
    "no gather": (zero_by(gather=lambda *_: None), "all-gather the parts after optimizer.step()"),
    "gather into a copy": (
        zero_by(gather=lambda weights, shard: all_gather(weights + 0, shard)),
        "into weights itself",
    ),
    "other order": (zero_by(gather=gather_backwards), "part r has to come from rank r"),
    "rounded": (zero_by(gather=gather_rounded), "in their own dtype"),
    "mean of weights": (zero_by(gather=average_weights), "copy it from there"),
    "one rank gathers": (zero_by(gather=gather_on_rank_0), "only one rank calls"),
    "all-reduce": (zero_by(scatter=scatter_by_all_reduce), "the sum of part r alone"),
    "a name of %%px": (zero_by(divide=lambda summed: summed / world_size), "world_size is dist.get_world_size()"),  # noqa: F821
    "by rank 0": (zero_by(scatter=scatter_by_rank_0), "goes through no single rank"),
    "all-reduce of own parts": (zero_by(scatter=sum_of_own_parts), "do not belong together"),
    "all-reduce of weights": (zero_by(gather=gather_by_all_reduce), "dist.all_gather copies the parts"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("answer", "hint"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_zero_steps_are_refused(answer, hint):
    assert hint in refuse("10.3", answer)


RIGHT_STEPS = {
    "lab": zero_of_the_lab,
    "single": zero_by_single,
    "tensor": zero_by_tensor,
    "all-to-all": zero_by(scatter=scatter_by_all_to_all, gather=gather_and_wait),
    "broadcast": zero_by(gather=gather_by_broadcast),
    "reduce": zero_by(scatter=scatter_by_reduce),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("answer", RIGHT_STEPS.values(), ids=RIGHT_STEPS)
def test_right_zero_steps_are_accepted(answer, capsys):
    check.exercise("10.3", answer)
    assert capsys.readouterr().out == (
        "✔ 10.3 A step of ZeRO-1: 3 steps of Adam on 2 and on 3 ranks: all weights equal, each rank stepped its own "
        "part alone\n"
    )


# 10.4


def all_reduce(part):
    dist.all_reduce(part)
    return part


def start(part):
    dist.all_reduce(part, async_op=True)
    return part


def chunk(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


def half(tensor, dim=0):
    return tensor.chunk(2, dim=dim)[dist.get_rank()]


def mlp_by(
    *,
    rows=chunk,
    first_bias=chunk,
    columns=lambda down: chunk(down, 1),
    between=F.gelu,
    part=lambda part, bias: part,
    total=all_reduce,
    add=lambda total, bias: total + bias,
):
    """The lab's answer, in which any part can be another."""

    def split_mlp(x, up, up_bias, down, down_bias):
        hidden = between(F.linear(x, rows(up), first_bias(up_bias)))
        return add(total(part(F.linear(hidden, columns(down)), down_bias)), down_bias)

    return split_mlp


def mlp_by_index(x, up, up_bias, down, down_bias):
    """Right: slices and @, everything in place."""
    size = len(up) // dist.get_world_size()
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    y = F.gelu(x @ up[own].T + up_bias[own]) @ down[:, own].T
    dist.all_reduce(y, async_op=True).wait()
    y += down_bias
    return y


def mlp_with_the_bias_on_rank_0(x, up, up_bias, down, down_bias):
    """Right: one rank alone adds the bias, before the all-reduce."""
    first = dist.get_rank() == 0
    part = F.linear(nn.GELU()(F.linear(x, chunk(up), chunk(up_bias))), chunk(down, 1), down_bias if first else None)
    dist.all_reduce(part)
    return part


def mlp_of_modules(x, up, up_bias, down, down_bias):
    """Right: modules, whose parameters ask for gradients."""
    up, up_bias, down = chunk(up), chunk(up_bias), chunk(down, 1)
    layers = nn.Linear(*up.T.shape).double(), nn.GELU(), nn.Linear(*down.T.shape, bias=False).double()
    net = nn.Sequential(*layers)
    net.load_state_dict({"0.weight": up, "0.bias": up_bias, "2.weight": down})
    return all_reduce(net(x).detach()) + nn.Parameter(down_bias)


def total_by_all_gather(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return sum(parts)


def total_on_rank_0(part):
    dist.reduce(part, dst=0)
    return part


def total_in_float32(part):
    return torch.zeros(part.shape).add_(all_reduce(part))


def total_by_rows(part):
    for row in part:
        dist.all_reduce(row)
    return part


def mlp_of_its_rows(x, *weights):
    return mlp_by()(chunk(x), *weights)


def mlp_that_sums_hidden_units(x, up, up_bias, down, down_bias, end=lambda part: part):
    hidden = all_reduce(F.linear(x, chunk(up), chunk(up_bias)))
    return end(F.linear(F.gelu(hidden), chunk(down, 1))) + down_bias


def bias_on_rank_0_afterwards(total, bias):
    return total + bias if dist.get_rank() == 0 else total


WRONG_MLPS = {
    "whole": (
        mlp_by(rows=lambda up: up, first_bias=lambda bias: bias, columns=lambda down: down),
        "NaN marks what this rank does not hold",
    ),
    "two parts": (mlp_by(rows=half, first_bias=half, columns=partial(half, dim=1)), "as many parts"),
    "rows of down": (mlp_by(columns=chunk), "columns of down"),
    "columns of up": (mlp_by(rows=lambda up: chunk(up, 1)), "rows of up"),
    "whole first bias": (mlp_by(first_bias=lambda bias: bias), "up_bias.chunk(n)[rank]"),
    "alone": (mlp_by(total=lambda part: part), "all-reduce it"),
    "no wait": (mlp_by(total=lambda part: do_other_things(start(part))), "wait for it"),
    "reduce": (mlp_by(total=total_on_rank_0), "gives it to every rank"),
    "bias of each rank": (mlp_by(part=torch.add, add=lambda total, bias: total), "the second bias came 2 times"),
    "bias before and after": (mlp_by(part=torch.add), "came 3 times"),
    "half the bias": (
        mlp_by(part=lambda part, bias: part + bias / 2, add=lambda total, bias: total),
        "the second bias came 1.5 times",
    ),
    "no second bias": (mlp_by(add=lambda total, bias: total), "the second bias is missing"),
    "bias of rank 0 after": (mlp_by(add=bias_on_rank_0_afterwards), "add it on every rank"),
    "no first bias": (mlp_by(first_bias=lambda bias: None), "the first bias is missing"),
    "mean": (mlp_by(add=lambda total, bias: total / dist.get_world_size() + bias), "do not divide"),
    "no GELU": (mlp_by(between=torch.clone), "stands F.gelu"),
    "GELU by tanh": (mlp_by(between=partial(F.gelu, approximate="tanh")), "without an approximation"),
    "GELU at the end": (mlp_by(between=torch.clone, add=lambda total, bias: F.gelu(total + bias)), "not after them"),
    "float32": (mlp_by(total=total_in_float32), "keep the dtype of x"),
    "sum of hidden units": (mlp_that_sums_hidden_units, "not the same ones"),
    "rows of x": (mlp_of_its_rows, "all ranks compute all rows"),
    "nothing": (mlp_by(total=dist.all_reduce, add=lambda total, bias: total), "returns no tensor"),
    "by rows": (mlp_by(total=total_by_rows), "one all-reduce is enough"),
    "all-gather": (mlp_by(total=total_by_all_gather), "adds them on the way"),
    "nothing to add to": (mlp_by(total=dist.all_reduce), "go on with the tensor that you gave it"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("answer", "hint"), WRONG_MLPS.values(), ids=WRONG_MLPS)
def test_wrong_mlps_are_refused(answer, hint):
    assert hint in refuse("10.4", answer)


RIGHT_MLPS = {
    "lab": mlp_by(),
    "index": mlp_by_index,
    "bias on rank 0": mlp_with_the_bias_on_rank_0,
    "bias in parts": mlp_by(part=lambda part, bias: part + bias / dist.get_world_size(), add=lambda total, bias: total),
    "modules": mlp_of_modules,
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("answer", RIGHT_MLPS.values(), ids=RIGHT_MLPS)
def test_right_mlps_are_accepted(answer, capsys):
    check.exercise("10.4", answer)
    assert capsys.readouterr().out == (
        "✔ 10.4 An MLP on two ranks: equal to the whole MLP on 2 and on 3 ranks, each from its own weights alone, with "
        "one all-reduce\n"
    )


# The ranks of a check


@pytest.mark.parametrize(("number", "answer"), [("10.3", zero_of_the_lab), ("10.4", mlp_by(total=lambda part: part))])
def test_no_rank_is_left(number, answer, tmp_path):
    def noted(*arguments):
        (tmp_path / str(os.getpid())).touch()
        return answer(*arguments)

    with nullcontext() if number == "10.3" else pytest.raises(NotYetError):
        check.exercise(number, noted)
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == (5 if number == "10.3" else 2) and not any(map(psutil.pid_exists, pids))
    assert not dist.is_initialized()


@pytest.fixture
def late(monkeypatch):
    """Each rank comes to the group so much later than the one before; a collective waits half a second."""
    start, seconds = dist.init_process_group, []

    def start_late(*args, rank, **kwargs):
        time.sleep(rank * sum(seconds))
        return start(*args, rank=rank, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", start_late)
    monkeypatch.setattr(ranks, "COLLECTIVE", 0.5)
    return seconds


def test_ranks_that_are_slow_to_start_are_waited_for(late, capsys):
    late.append(1)
    check.exercise("10.3", zero_of_the_lab)
    assert "all weights equal" in capsys.readouterr().out


def test_ranks_that_do_not_find_each_other_are_no_fault_of_the_answer(late, monkeypatch):
    late.append(10)
    monkeypatch.setattr("course.ranks.START", 0.5)
    with pytest.raises(LabError, match="did not find each other"):
        check.exercise("10.3", zero_of_the_lab)
