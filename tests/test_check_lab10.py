"""Lab 10: edits of the notebook's solutions are refused with the hint that fits, and other right answers accepted."""

import pytest
import torch
import torch.distributed as dist
from harness.answers import refuse_edited
from torch.nn import functional as F

from course import check
from course.exercises.lab10 import zero

pytestmark = pytest.mark.usefixtures("runs")
SCATTER, GATHER = "dist.reduce_scatter(shard.grad, list(gradient.chunk(n)))", "dist.all_gather(list(weights.chunk(n)), "
STEP_ALL = "shard.data = weights\n    dist.all_reduce(gradient)\n    shard.grad = gradient\n    return optimizer.step()"
FETCH = "parts = [torch.empty_like(y) for _ in range(n)]\n    dist.all_gather(parts, y)\n    y = sum(parts)"
# For each: the exercise, what is replaced in its solution, by what, and words of the hint.
EDITS = [
    ("10.3", "    shard.grad = torch.empty_like(shard)\n", "", "make room"),
    ("10.3", SCATTER, "shard.grad = gradient", "the size and the dtype of shard"),
    (
        "10.3",
        SCATTER,
        "dist.all_reduce(gradient)\n    shard.grad = gradient.chunk(n)[dist.get_rank()]",
        "of part r alone",
    ),
    ("10.3", "list(gradient.chunk(n))", "gradient.chunk(n)", "a list is list("),
    ("10.3", "list(gradient.chunk(n))", "list(gradient.chunk(n)), async_op=True", "wait for it"),
    ("10.3", "optimizer.step()", "shard.sub_(shard.grad)", "let optimizer.step() change it"),
    ("10.3", "optimizer.step()", "torch.optim.Adam([shard], lr=0.1).step()", "the optimizer that it was given"),
    ("10.3", "shard.grad = torch.empty_like(shard)", STEP_ALL, "the optimizer of its own part alone"),
    ("10.3", GATHER, "dist.all_gather(list((weights + 0).chunk(n)), ", "into weights itself"),
    ("10.4", "up.chunk(n)[rank]", "up", "up.chunk(n)[rank]"),
    ("10.4", "dist.get_world_size()", "2", "as many parts as ranks"),
    ("10.4", "dist.all_reduce(y)", "y = dist.all_reduce(y)", "go on with the tensor"),
    ("10.4", "dist.all_reduce(y)", FETCH, "adds them on the way"),
    ("10.4", "F.gelu(F.linear(x, up, up_bias))", "F.linear(x, up, up_bias)", "between the two layers stands F.gelu"),
    ("10.4", "y + down_bias", "y[:1] + down_bias", "rows of up, and columns of down"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), EDITS)
def test_edited_solutions_are_refused(number, old, new, hint, monkeypatch):
    monkeypatch.setattr(zero, "LATE", 0.5 if "async_op" in new else 0.0)
    assert hint in refuse_edited(number, (old, new))


def count_by_hand(parameters, ranks, stage, mixed):
    """Whole bytes, as a list, part by part."""
    weights = gradients = 2 * parameters if mixed else 4 * parameters
    optimizer = 12 * parameters if mixed else 8 * parameters
    if stage > 0:
        optimizer //= ranks
    if stage > 1:
        gradients //= ranks
    if stage > 2:
        weights //= ranks
    return [weights, gradients, optimizer]


def add_up_rows(tokens, width, layers, mixed):
    numbers = 0
    for _ in range(layers):
        numbers += 2 * width  # norms
        numbers += width + 4 * width  # the linear of q, k, v; attention
        numbers += width + 2 * 4 * width  # the MLP
    for last in (width, width, 256):
        numbers += last
    return torch.tensor(numbers * tokens * (4 - 2 * mixed))


def zero_by_single(weights, gradient, shard, optimizer):
    """The collectives of one tensor; the mean is taken before, and no gradient is left behind."""
    optimizer.zero_grad()
    shard.grad = torch.zeros_like(shard)
    dist.reduce_scatter_single(shard.grad, gradient / dist.get_world_size())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_gather_single(weights, shard.detach())


def mlp_with_the_bias_on_rank_0(x, up, up_bias, down, down_bias):
    """One rank alone adds the bias, before the all-reduce."""
    rank, n = dist.get_rank(), dist.get_world_size()
    hidden = torch.nn.GELU()(F.linear(x, up.chunk(n)[rank], up_bias.chunk(n)[rank]))
    part = F.linear(hidden, down.chunk(n, dim=1)[rank], None if rank else down_bias)
    dist.all_reduce(part)
    return part


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("10.1", count_by_hand),
        ("10.2", add_up_rows),
        ("10.3", zero_by_single),
        ("10.4", mlp_with_the_bias_on_rank_0),
    ],
)
def test_other_right_answers_are_accepted(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number}")
