"""The exercises of lab 9: DDP by hand with overlap, a communication hook, SyncBatchNorm on Gloo, local SGD."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect, refusing
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

SIZES = (6, 8, 8, 8, 4)
LATE = 3.0  # seconds that a late rank waits for what the others do meanwhile
NO_WORK = "only dist.all_reduce(…, async_op=True) returns a Work; without async_op it waits, and returns None"
WITHOUT_WORK = {f"'NoneType' object has no attribute '{name}'": NO_WORK for name in ("wait", "get_future")}


class _Stack(nn.Module):
    """Four linear layers in float64, the same on every rank; with ``unused``, a fifth that forward leaves out.

    Forward runs the first ``depth`` layers.
    """

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.depth = len(SIZES) - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pairs = pairwise(SIZES)
            self.layers = nn.ModuleList(nn.Linear(width, height, dtype=torch.float64) for width, height in pairs)
            if unused:
                self.spare = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps (N, 6) to (N, 4); to (N, 8) where ``depth`` is less."""
        for layer in self.layers[: self.depth]:
            inputs = torch.tanh(layer(inputs))
        return inputs


def _draw(rank: int, step: int) -> torch.Tensor:
    """A rank's inputs of a step, float64 (5, 6); no two alike."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64) + rank


def _find_loss(outputs: torch.Tensor) -> torch.Tensor:
    """Any loss that has a gradient everywhere: the mean of squares around 1."""
    return F.mse_loss(outputs, torch.ones_like(outputs))


def _join_gradients(net: nn.Module) -> torch.Tensor:
    """All gradients in one tensor; zeros if a parameter has none."""
    parameters = list(net.parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]).detach()


def _find_own_gradients(net: nn.Module, ranks: int, step: int) -> torch.Tensor:
    """Each rank's own gradients in a row, (ranks, numbers), by autograd alone."""
    rows = []
    for rank in range(ranks):
        net.zero_grad()
        _find_loss(net(_draw(rank, step))).backward()
        rows.append(_join_gradients(net))
    return torch.stack(rows)


# 9.1: gradients sent in buckets while backward still runs, with one rank that is late.

STEPS = 2  # what the first leaves behind shows in the second


class _Watched:
    """A Work that notes whether it was used: its wait, its future, or its completion."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.asked = work, False

    def __getattr__(self, name: str) -> Any:
        self.asked = True
        return getattr(self.work, name)


def _watch_all_reduce() -> list[_Watched]:
    """Makes this process's ``dist.all_reduce`` return watched Works, and lists them."""
    started: list[_Watched] = []
    original = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        work = original(*arguments, **options)
        if work is None:
            return None
        started.append(_Watched(work))
        return started[-1]

    dist.all_reduce = all_reduce
    return started


def verify_overlap(overlap: Callable) -> str:
    """Takes two steps with and without an unused parameter, and compares with the mean of the ranks."""
    # A weight of 8×8 and its bias have 576 bytes, all gradients 1,888: with the first limit two buckets are full during
    # backward, with the second one is, and the last bucket is not.
    _verify_overlap(overlap, 2, 500, 7, "a net of four layers")
    # Three ranks: what divides by two is no mean.
    _verify_overlap(overlap, 3, 1000, 2, "a net with an unused layer, on three ranks")
    return "both steps' gradients equal the ranks' mean, in buckets that are sent while the other rank is still late"


def _take_steps(overlap: Callable, net: _Stack, limit: int, through: Event, rank: int) -> dict:
    """Does a rank's work; the first rank's ``through`` is set when its first backward has ended."""
    found, started = [], _watch_all_reduce()
    finish = overlap(net, limit)
    if not callable(finish):
        return {"kind": type(finish).__name__}
    for step in range(STEPS):
        net.zero_grad()
        before = count_collectives()
        # If rank 0 waits for rank 1 in its backward, this wait takes its whole time.
        blocked = rank == 1 and not step and not through.wait(LATE)
        _find_loss(net(_draw(rank, step))).backward()
        during = count_collectives() - before
        if rank == 0:
            through.set()
        finish()
        ignored = sum(not work.asked for work in started)
        numbers = {"during": during, "calls": count_collectives() - before, "ignored": ignored}
        found.append(numbers | {"blocked": blocked, "gradients": _join_gradients(net)})
    # The gradients of the last layer stay zero in a step without it, unless those of the step before come back.
    net.zero_grad(set_to_none=False)
    net.depth -= 1
    _find_loss(net(_draw(rank, STEPS))).backward()
    finish()
    return {"kind": "a function", "steps": found, "old": float(net.layers[-1].weight.grad.norm())}


def _verify_overlap(overlap: Callable, count: int, limit: int, most: int, case: str) -> None:
    net, through = _Stack(unused=count == 3), multiprocessing.get_context("fork").Event()
    work = partial(_take_steps, overlap, net, limit, through)
    hint = "a flat tensor goes back into the gradients of its own bucket: keep list(bucket), a copy that clear() leaves"
    mixed_up = refusing(RuntimeError, ValueError, case=case, expected="a mean for each gradient", hint=hint)
    with mixed_up, refusing(case=f"{case}: dist.all_reduce returned None", expected="a Work", hints=WITHOUT_WORK):
        ranks = run_on_ranks(work, overlap, case=case, count=count)
    hint = "return finish, the function itself, without calling it"
    judge(ranks[0]["kind"], right="a function", case=f"{case}: what overlap returned", hint=hint)
    for step in range(STEPS):
        found = [rank["steps"][step] for rank in ranks]
        _verify_step(found, _find_own_gradients(net, count, step), f"{case}, limit {limit}, step {step + 1}", most)
    first, second = ranks[0]["steps"]
    yours = {"all-reduces of step 2": second["calls"], "gradient of a layer that step 3 leaves out": ranks[0]["old"]}
    right = dict(zip(yours, (first["calls"], 0.0), strict=True))
    hint = "something of a step is left for the next one: at its end finish() has to forget what was sent: sent.clear()"
    judge(yours, right=right, case=f"{case}: what is left of a step", hint=hint)


def _verify_step(ranks: list[dict], own: torch.Tensor, case: str, most: int) -> None:
    hint = "all_reduce(…, async_op=True) returns at once; work.wait() belongs into finish(), and not into send()"
    judge(
        ranks[1]["blocked"], right=False, case=f"{case}: rank 0's backward waits for rank 1, which is late", hint=hint
    )
    hint = "call work.wait() for each Work, and not for the last alone: messages may arrive in another order"
    judge(ranks[0]["ignored"], right=0, case=f"{case}: rank 0's Works without a wait()", hint=hint)
    mean, places = own.mean(0).expand_as(own), torch.arange(own.shape[1])
    ends = list(accumulate(parameter.numel() for parameter in _Stack().parameters()))[:4]
    judge(
        torch.stack([rank["gradients"] for rank in ranks]),
        right=mean,
        case=f"{case}: the ranks' gradients",
        wrong={
            "this is the sum: divide by dist.get_world_size()": len(own) * mean,
            "the mean did not come back: unpack flat / dist.get_world_size() into the gradients": own,
            "the last bucket is not full when backward ends: finish() has to send it, too: flush()": AnyOf(
                tuple(torch.where(places < end, own, mean) for end in ends)
            ),
        },
        hint="for each bucket: work.wait(), then unpack flat / dist.get_world_size() into the same gradients, in order",
    )
    calls, during = ranks[0]["calls"], ranks[0]["during"]
    hint = "one all-reduce for each bucket of limit bytes, which is empty after that: fill_buckets(net, limit, send)"
    expect(calls <= most, f"{case}: all-reduces", yours=calls, expected=f"at most {most}", hint=hint)
    hint = "call send() as soon as the gradients in the bucket have limit bytes together; finish() sends only the rest"
    expect(during > 0, f"{case}: all-reduces during backward", yours=0, expected="one or more", hint=hint)


# 9.2: a communication hook of torch's DDP that notes the bytes of each bucket and averages as DDP does.

HOOK_RANKS = 3  # what divides by two is no mean
HOOK_STEPS, MEBIBYTES = 3, 0.0007  # the first step sends one bucket, and the later ones several that are this small
ONE_TENSOR = "a future of one tensor"


def verify_note_and_average(note_and_average: Callable) -> str:
    """Trains three steps by DDP with the hook on three ranks; one of them is late for the first bucket."""
    names = list(inspect.signature(note_and_average).parameters)
    hint = "DDP looks for a parameter that is called bucket: def note_and_average(notes, bucket)"
    expect("bucket" in names, "the parameters", yours=", ".join(names), expected="notes, bucket", hint=hint)
    case = "three steps of DDP with your hook"
    work = partial(_train_with_hook, note_and_average, multiprocessing.get_context("fork").Event())
    with refusing(case=f"{case}: dist.all_reduce returned None", expected="a Work", hints=WITHOUT_WORK):
        first, second, _ = run_on_ranks(work, note_and_average, case=case, count=HOOK_RANKS)
    judge(
        first["kind"],
        right=ONE_TENSOR,
        case="what the hook returned",
        wrong={
            "the hook has to return a future, or DDP never learns when it is ready: return … .then(…)": "NoneType",
            "a Work is not a future: work.get_future() is": "Work",
            "get_future() promises a list of one tensor: .then(…) has to give the mean of future.value()[0]": "a list",
        },
        hint="return work.get_future().then(…): DDP asks the future for the bucket when backward ends",
    )
    hint = "all_reduce(…, async_op=True), and no wait() in the hook: backward stands still as long as the hook runs"
    judge(second["blocked"], right=False, case="rank 0's hook waits for rank 1, which is late", hint=hint)
    for step in range(HOOK_STEPS):
        own = _find_own_gradients(_Stack(), HOOK_RANKS, step)
        mean = own.mean(0)
        judge(
            first["gradients"][step],
            right=mean,
            case=f"step {step + 1}: rank 0's gradients",
            wrong={
                "this is the sum. DDP does not divide if there is a hook: divide by dist.get_world_size()": own.sum(0),
            },
            hint="the future's value has to be one tensor, the mean of the ranks' buckets: future.value()[0]",
        )
    truth = first["truth"]
    judge(
        first["notes"],
        right=truth,
        case="bytes of the buckets of three steps",
        wrong={
            "these are numbers, not bytes; a float64 has 8 bytes: bucket.buffer().nbytes": [one // 8 for one in truth],
            "not every number has 4 bytes, these have 8: bucket.buffer().nbytes": [one // 2 for one in truth],
        },
        hint="append the bytes of the bucket in each call: notes.append(bucket.buffer().nbytes)",
    )
    return f"three steps of DDP average as without it, and it noted all {len(truth)} buckets"


def _train_with_hook(note_and_average: Callable, through: Event, rank: int) -> dict:
    net, truth, gradients = _Stack(), [], []
    notes: list[Any] = []
    found = {"notes": notes, "truth": truth, "gradients": gradients, "kind": ONE_TENSOR, "blocked": False}

    # Without types: DDP refuses those that are kept as text, as all are here.
    def watch(state, bucket):
        truth.append(bucket.buffer().nbytes)
        if rank == 1 and len(truth) == 1:
            found["blocked"] = not through.wait(LATE)
        promise = note_and_average(state, bucket)
        through.set()
        if isinstance(promise, torch._C.Future):
            return promise.then(lambda future: open_future(future, bucket.buffer()))
        found["kind"] = type(promise).__name__
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def open_future(future, buffer):
        """The future's tensor; notes what DDP would refuse with its own assertion, or inside a callback."""
        try:
            value = future.value()
        except RuntimeError as error:
            if "'list'" not in str(error):
                raise
            value = []
        if isinstance(value, torch.Tensor):
            return value
        found["kind"] = f"a {type(value).__name__}"
        return buffer

    model = DistributedDataParallel(net, bucket_cap_mb=MEBIBYTES)
    model.register_comm_hook(notes, watch)
    for step in range(HOOK_STEPS):
        model.zero_grad()
        _find_loss(model(_draw(rank, step))).backward()
        gradients.append(_join_gradients(net))
    return found


# 9.3: batch normalisation over the images of all ranks, with one all-reduce per pass.

# Images of each rank: of two with equal shares, and of three with unequal ones.
SHARES, EPS, DIMS = ((4, 4), (2, 5, 1)), 1e-3, (0, 2, 3)


def verify_sync_batch_norm(sync_batch_norm: Callable) -> str:
    """Compares outputs and gradients with those of one process on the global batch."""
    for shares in SHARES:
        _verify_norm(sync_batch_norm, shares, f"{len(shares)} ranks with {', '.join(map(str, shares))} images")
    equal = "2 and 3 ranks, also with unequal shares, equal one process on the global batch in outputs and gradients"
    return f"{equal}; one all-reduce per pass"


class _NormTrial:
    """The global batch of one case, float64, and what one process makes of it.

    Attributes:
        shares: How many images each rank has.
        images: The images of all ranks, (N, 3, 3, 2), no two ranks alike.
        gradients: The gradient of the loss with respect to the outputs, of the same shape.
        weight: The factor of each channel.
        bias: The summand of each channel.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(sum(shares))
        self.shares = shares
        self.images, self.gradients = torch.randn(2, sum(shares), 3, 3, 2, generator=generator, dtype=torch.float64)
        self.images += torch.arange(sum(shares)).view(-1, 1, 1, 1)
        self.weight, self.bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def run(self, sync_batch_norm: Callable, rank: int) -> dict:
        """Runs the learner's function on a rank's images, forward and backward."""
        own = self.images.split(self.shares)[rank], self.weight, self.bias
        leaves = [one.clone().requires_grad_() for one in own]
        # What is not a leaf may be changed in place, so that a change of the images shows.
        given, before = leaves[0] * 1, count_collectives()
        outputs = sync_batch_norm(given, *leaves[1:], EPS)
        if not isinstance(outputs, torch.Tensor) or outputs.shape != given.shape:
            return {"shape": tuple(getattr(outputs, "shape", (type(outputs).__name__,)))}
        middle = count_collectives()
        (outputs * self.gradients.split(self.shares)[rank]).sum().backward()
        found = {"shape": tuple(given.shape), "outputs": outputs.detach(), "images": given.detach()}
        found["grads"] = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return found | {"passes": [middle - before, count_collectives() - middle]}

    def normalize(self, statistics: Callable) -> list[torch.Tensor]:
        """Returns outputs and the gradients of images, weight and bias.

        Args:
            statistics: Returns mean and variance of each channel for a rank's images, and given those of all ranks.
        """
        images, weight, bias = leaves = [one.clone().requires_grad_() for one in (self.images, self.weight, self.bias)]
        parts, outputs = images.split(self.shares), []
        for part in parts:
            mean, var = (one.view(-1, 1, 1) for one in statistics(part, parts))
            outputs.append((part - mean) * weight.view(-1, 1, 1) * (var + EPS).rsqrt() + bias.view(-1, 1, 1))
        whole = torch.cat(outputs)
        (whole * self.gradients).sum().backward()
        return [whole.detach(), *(leaf.grad for leaf in leaves)]


def _verify_norm(sync_batch_norm: Callable, shares: tuple[int, ...], case: str) -> None:
    trial = _NormTrial(shares)
    shape_hint = "return the normalised images, in their shape: statistics need [:, None, None] beside them"
    hint = "every operation has to leave a graph: in forward of SumOverRanks clone, all-reduce the clone, return it"
    hints = {"size of tensor a": shape_hint, "": hint}
    with refusing(RuntimeError, case=case, expected="outputs with a gradient", hints=hints):
        work = partial(trial.run, sync_batch_norm)
        ranks = run_on_ranks(work, sync_batch_norm, case=case, count=len(shares))
    shape = (shares[0], *trial.images.shape[1:])
    judge(ranks[0]["shape"], right=shape, case=f"{case}: the outputs of rank 0", hint=shape_hint)
    hint = "all_reduce works in place: sum a clone, or a new tensor, and leave the images as they are"
    judge(torch.cat([rank["images"] for rank in ranks]), right=trial.images, case=f"{case}: the images", hint=hint)
    outputs, *grads = trial.normalize(lambda part, parts: _describe(parts))
    _judge_outputs(torch.cat([rank["outputs"] for rank in ranks]), outputs, trial, case)
    _judge_gradient_of_images(torch.cat([rank["grads"][0] for rank in ranks]), grads[0], trial, case)
    yours = [sum(rank["grads"][place] for rank in ranks) for place in (1, 2)]
    hint = "leave the gradients of weight and bias to autograd: DDP averages them over the ranks later"
    judge(yours, right=grads[1:], case=f"{case}: the summed gradients of weight and bias", hint=hint)
    hint = "join sums, squares and the count in one tensor, torch.cat([…]), and sum that over the ranks"
    judge(ranks[0]["passes"], right=[1, 1], case=f"{case}: all-reduces in forward, and in backward", hint=hint)


def _judge_outputs(yours: torch.Tensor, right: torch.Tensor, trial: _NormTrial, case: str) -> None:
    each = [_describe([part]) for part in trial.images.split(trial.shares)]
    means, variances = (torch.stack(ones) for ones in zip(*each, strict=True))
    squares = (variances + means**2).mean(0)
    wrong = {
        "these are statistics of a rank's own images: sum them over the ranks": lambda part, parts: _describe([part]),
        "a mean of variances leaves out how far the ranks' means are apart: sum the squares, then E[x²] − E[x]²": (
            lambda *_: (means.mean(0), variances.mean(0))
        ),
        "shares are unequal: a mean of the ranks' means counts each rank alike; sum values, squares and counts": (
            lambda *_: (means.mean(0), squares - means.mean(0) ** 2)
        ),
    }
    judge(
        yours,
        right=right,
        case=f"{case}: the outputs",
        wrong={hint: trial.normalize(statistics)[0] for hint, statistics in wrong.items()},
        hint="variance = squares / count − mean²; count: N · H · W, of all ranks; (variance + eps).rsqrt()",
    )


def _judge_gradient_of_images(yours: torch.Tensor, right: torch.Tensor, trial: _NormTrial, case: str) -> None:
    wrong = {
        "no gradient flows through the statistics: dist.all_reduce alone has none; use SumOverRanks.apply": (
            lambda _, parts: _describe([one.detach() for one in parts])
        ),
        "backward gave each rank only its own part: all-reduce the gradient (a clone of it) in backward, too": (
            lambda part, parts: _describe([one if one is part else one.detach() for one in parts])
        ),
    }
    judge(
        yours,
        right=right,
        case=f"{case}: the gradient of the images",
        wrong={hint: trial.normalize(statistics)[1] for hint, statistics in wrong.items()},
        hint="the sums depend on the images of all ranks: backward has to sum the gradient of the sums over the ranks",
    )


def _describe(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over all images of the parts."""
    images = torch.cat(list(parts))
    return images.mean(DIMS), images.var(DIMS, correction=0)


# 9.4: local SGD, in which the ranks step alone and average their weights from time to time.

LOCAL_STEPS, RATE, MOMENTUM = 6, 0.1, 0.9


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
    _find_loss(net(_draw(rank, number))).backward()


def verify_local_step(local_step: Callable) -> str:
    """Takes six steps, of which every third or second one averages, and compares with all ranks in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several threads take seconds for what is so small
    try:
        # Three ranks: what divides by two is no mean.
        for count, every in ((2, 3), (3, 2)):
            _verify_local_step(local_step, count, every)
    finally:
        torch.set_num_threads(threads)
    return (
        "2 ranks averaged weights and statistics every 3rd step, and 3 ranks every 2nd, in one all-reduce; "
        "momentum stayed local"
    )


def _verify_local_step(local_step: Callable, count: int, every: int) -> None:
    def work(rank: int) -> list[dict]:
        net, optimizer = _build(rank)
        found = []
        for number in range(1, LOCAL_STEPS + 1):
            _run_backward(net, optimizer, rank, number)
            before = count_collectives()
            local_step(net, optimizer, number, every)
            found.append(_note_state(net, optimizer) | {"calls": count_collectives() - before})
        return found

    case = f"{LOCAL_STEPS} steps, an average every {every}"
    hints = {"a leaf Variable": "autograd follows what is done with weights, unless it is in `with torch.no_grad():`"}
    with refusing(RuntimeError, case=case, expected="the mean in the weights", hints=hints):
        ranks = run_on_ranks(work, local_step, case=case, count=count)
    for number, (right, alone) in enumerate(_simulate(count, every), start=1):
        yours = _by_part([rank[number - 1] for rank in ranks])
        _judge_state(yours, right, alone, number % every == 0, f"step {number}, an average every {every}")


def _judge_state(yours: dict, right: dict, alone: dict, averages: bool, case: str) -> None:
    """Compares the ranks' states; those of ``alone`` are theirs before the average."""
    hint = "between two averages the ranks do not talk: send nothing unless number % every == 0"
    if averages:
        hint = "join weights and statistics in one tensor, pack(…), and all-reduce that once"
    never = {"no average in this step: steps count from 1, so average when number % every == 0": 0}
    judge(yours.pop("calls")[0], right=int(averages), case=f"{case}: all-reduces", wrong=never, hint=hint)
    if not averages:
        hint = "optimizer.step() in every step, once, with the rank's own gradients"
        return judge(yours, right=right, case=f"{case}: the ranks' states", hint=hint)
    count = len(right["weights"])
    summed = {part: [count * one for one in right[part]] for part in ("weights", "statistics")}
    weights_alone = right | {"weights": summed["weights"], "statistics": alone["statistics"]}
    batches = sum(alone["batches"]) // count
    return judge(
        yours,
        right=right,
        case=f"{case}: the ranks' states",
        wrong={
            "this is the sum of the ranks' weights: divide by dist.get_world_size()": AnyOf(
                (right | summed, weights_alone)
            ),
            "the mean did not come back: unpack it into the tensors themselves, in place": alone,
            "the statistics of batch norm are buffers: average these, too; net.state_dict() has both": (
                right | {"statistics": alone["statistics"]}
            ),
            "num_batches_tracked counts batches, an integer: leave it out; tensor.is_floating_point()": (
                right | {"batches": [batches] * count}
            ),
        },
        hint="first optimizer.step(), then the average of weights and statistics, in place, and not of the momentum",
    )


def _note_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns copies of the state after a step."""
    momentum = [optimizer.state[p].get("momentum_buffer") for p in net.parameters()]
    return {
        "weights": _join(p.detach() for p in net.parameters()),
        "statistics": _join([net[1].running_mean, net[1].running_var]),
        "batches": int(net[1].num_batches_tracked),
        "momentum": _join(torch.zeros(1) if one is None else one for one in momentum),
    }


def _join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _by_part(states: Sequence[dict]) -> dict[str, list]:
    """For each part of a state those of all ranks."""
    return {part: [state[part] for state in states] for part in states[0]}


def _simulate(count: int, every: int) -> list[tuple[dict, dict]]:
    """Simulates all ranks in this process; returns, for each step, their states after it, and before its average."""
    ranks, found = [_build(rank) for rank in range(count)], []
    for number in range(1, LOCAL_STEPS + 1):
        for rank, (net, optimizer) in enumerate(ranks):
            _run_backward(net, optimizer, rank, number)
            optimizer.step()
        alone = _by_part([_note_state(*rank) for rank in ranks])
        if number % every == 0:
            states = [net.state_dict() for net, _ in ranks]
            for name, value in states[0].items():
                if value.is_floating_point():
                    mean = sum(state[name] for state in states) / count
                    for state in states:
                        state[name].copy_(mean)
        found.append((_by_part([_note_state(*rank) for rank in ranks]), alone))
    return found


EXERCISES = {
    "9.1": Exercise("Send while backward runs", verify_overlap),
    "9.2": Exercise("A hook that counts", verify_note_and_average),
    "9.3": Exercise("SyncBatchNorm on Gloo", verify_sync_batch_norm),
    "9.4": Exercise("Local SGD", verify_local_step),
}
