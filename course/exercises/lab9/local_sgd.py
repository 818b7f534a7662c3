"""Exercise 9.4: local SGD, in which the ranks step alone and average their weights from time to time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.check.verdicts import NotYetError, expect
from course.exercises.lab9.nets import draw, find_loss, is_close
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

STEPS, RATE, MOMENTUM = 6, 0.1, 0.9


def _build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds a net with batch norm, whose statistics are buffers; float64, equal on all ranks except for a count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)
        net = nn.Sequential(*layers).double()
    # Unequal counts of batches: a mean of them shows.
    net[1].num_batches_tracked += 10 * rank
    return net, torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def _run_backward(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    find_loss(net(draw(rank, number))).backward()


def verify_local_step(local_step: Callable) -> str:
    """Takes six steps, of which every third or second one averages, and compares with all ranks in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several threads take seconds for what is so small
    try:
        # Three ranks: what divides by two is no mean.
        for count, every in ((2, 3), (3, 2)):
            _verify(local_step, count, every)
    finally:
        torch.set_num_threads(threads)
    return (
        "2 ranks averaged weights and statistics every 3rd step, and 3 ranks every 2nd, in one all-reduce; "
        "momentum stayed local"
    )


def _verify(local_step: Callable, count: int, every: int) -> None:
    def work(rank: int) -> list[dict]:
        net, optimizer = _build(rank)
        found = []
        for number in range(1, STEPS + 1):
            _run_backward(net, optimizer, rank, number)
            before = count_collectives()
            local_step(net, optimizer, number, every)
            found.append(_note(net, optimizer) | {"calls": count_collectives() - before})
        return found

    case = f"{STEPS} steps, an average every {every}"
    try:
        ranks = run_on_ranks(work, local_step, case=case, count=count)
    except RuntimeError as error:
        if "a leaf Variable" not in str(error):
            raise
        hint = "autograd follows what is done with weights, unless it stands in `with torch.no_grad():`"
        raise NotYetError(case, yours=str(error), expected="the mean in the weights", hint=hint) from error
    right = _simulate(count, every)
    for number in range(1, STEPS + 1):
        yours, wanted = ([rank[number - 1] for rank in some] for some in (ranks, right))
        _expect_calls(yours[0]["calls"], number, every)
        for rank in range(count):
            case = f"step {number}, every {every}: rank {rank} of {count}"
            hint = _explain_weights(yours, wanted, rank, averages=number % every == 0)
            _expect_state(yours[rank], wanted[rank], case, count, hint)


def _note(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns copies of the state after a step."""
    momentum = [optimizer.state[p].get("momentum_buffer") for p in net.parameters()]
    return {
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]),
        "statistics": torch.cat([net[1].running_mean, net[1].running_var]).clone(),
        "batches": str(net[1].num_batches_tracked.item()),
        "momentum": torch.cat([torch.zeros(1) if one is None else one.flatten() for one in momentum]),
    }


def _simulate(count: int, every: int) -> list[list[dict]]:
    """Simulates all ranks in this process; returns each rank's state after each step."""
    ranks = [_build(rank) for rank in range(count)]
    found: list[list[dict]] = [[] for _ in ranks]
    for number in range(1, STEPS + 1):
        for rank, (net, optimizer) in enumerate(ranks):
            _run_backward(net, optimizer, rank, number)
            optimizer.step()
        # Before the average: a rank's own.
        alone = [copy.deepcopy(_note(*rank)) for rank in ranks]
        if number % every == 0:
            states = [net.state_dict() for net, _ in ranks]
            for name, value in states[0].items():
                if value.is_floating_point():
                    mean = sum(state[name] for state in states) / count
                    for state in states:
                        state[name].copy_(mean)
        for rank, (net, optimizer) in enumerate(ranks):
            found[rank].append(_note(net, optimizer) | {"alone": alone[rank]})
    return found


def _expect_calls(calls: int, number: int, every: int) -> None:
    averages = number % every == 0
    hint = "between two averages the ranks do not talk: send nothing unless number % every == 0"
    if averages and not calls:
        hint = "steps count from 1: average when number % every == 0, after optimizer.step()"
    elif averages:
        hint = "join weights and statistics in one tensor, pack(…), and all-reduce that once"
    expect(
        calls == averages,
        f"step {number}, every {every}: all-reduces",
        yours=calls,
        expected=int(averages),
        hint=hint,
    )


def _expect_state(yours: dict, wanted: dict, case: str, count: int, hint: str) -> None:
    alone = wanted["alone"]
    expect(
        is_close(yours["weights"], wanted["weights"]),
        f"{case}: weights, their length",
        yours=f"{float(yours['weights'].norm()):.9f}",
        expected=f"{float(wanted['weights'].norm()):.9f}",
        hint=hint,
    )
    hint = "the statistics of batch norm are buffers: average these, too; net.state_dict() has both"
    if is_close(yours["statistics"], count * wanted["statistics"]):
        hint = "the statistics are summed and not averaged: divide all by dist.get_world_size()"
    elif not is_close(yours["statistics"], alone["statistics"]):
        hint = "pack the running means and variances with the weights, divide by dist.get_world_size(), unpack"
    expect(
        is_close(yours["statistics"], wanted["statistics"]),
        f"{case}: running statistics",
        yours=_format(yours["statistics"]),
        expected=_format(wanted["statistics"]),
        hint=hint,
    )
    hint = "num_batches_tracked counts batches, an integer: leave it out; tensor.is_floating_point()"
    expect(
        yours["batches"] == wanted["batches"],
        f"{case}: num_batches_tracked",
        yours=yours["batches"],
        expected=wanted["batches"],
        hint=hint,
    )
    hint = "momentum belongs to the optimizer of each rank, and is not averaged here: only weights and statistics are"
    if not yours["momentum"].norm():
        hint = "the optimizer's momentum is gone: average in place, tensor.copy_(…), and keep the optimizer as it is"
    expect(
        is_close(yours["momentum"], wanted["momentum"]),
        f"{case}: momentum, its length",
        yours=f"{float(yours['momentum'].norm()):.6f}",
        expected=f"{float(wanted['momentum'].norm()):.6f}",
        hint=hint,
    )


def _explain_weights(ranks: list[dict], wanted: list[dict], rank: int, *, averages: bool) -> str:
    """Returns the hint for wrong weights."""
    yours, total = ranks[rank]["weights"], len(ranks) * wanted[rank]["weights"]
    if torch.allclose(yours, wanted[rank]["weights"], rtol=1e-5, atol=1e-5):
        return "these are rounded on the way: send them in their own dtype, without .float()"
    if not averages:
        return "optimizer.step() in every step, once, with the rank's own gradients"
    if is_close(yours, total):
        return "this is the sum of the ranks' weights: divide by dist.get_world_size()"
    if is_close(yours, total / 2):
        return "divided by two, whatever the number of ranks: it is dist.get_world_size()"
    if is_close(yours, wanted[rank]["alone"]["weights"]):
        return "the mean did not come back: unpack it into the tensors themselves, in place"
    if not is_close(yours, ranks[rank - 1]["weights"]):
        return "after an average all ranks have the same weights: first optimizer.step(), then the average of weights"
    return "average the weights after optimizer.step(), not the gradients before it"


def _format(tensor: torch.Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in tensor[:3].tolist())}, …]"
