"""Exercise 9.2: a communication hook of torch's DDP that notes the bytes of each bucket and averages as DDP does."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from course.check.verdicts import expect
from course.exercises.lab9.nets import Stack, are_close, draw, expecting_works, find_gradients, find_loss, format_norm
from course.exercises.ranks import run_on_ranks

# The first step sends one bucket, and the later ones several, where a bucket is as small as this.
STEPS, MEBIBYTES, LATE = 3, 0.0007, 3.0
RANKS = 3  # what divides by two is no mean


def verify_note_and_average(note_and_average: Callable) -> str:
    """Trains three steps by DDP with the hook on three ranks; one of them is late for the first bucket."""
    names = list(inspect.signature(note_and_average).parameters)
    hint = "DDP looks for a parameter that is called bucket: def note_and_average(notes, bucket)"
    yours = ", ".join(names)
    expect("bucket" in names, "the parameters of the hook", yours=yours, expected="notes, bucket", hint=hint)
    through = multiprocessing.get_context("fork").Event()

    def work(rank: int) -> dict:
        net, truth, kinds, blocked = Stack(), [], [], []
        notes: list[Any] = []

        # Without types: DDP refuses those that are kept as text, as all are here.
        def watch(state, bucket):
            truth.append(bucket.buffer().nbytes)
            if rank == 1 and len(truth) == 1:
                blocked.append(not through.wait(LATE))
            promise = note_and_average(state, bucket)
            through.set()
            if isinstance(promise, torch._C.Future):
                return promise.then(lambda future: _open(future, bucket.buffer(), kinds))
            kinds.append(type(promise).__name__)
            done: torch.futures.Future = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model, gradients = DistributedDataParallel(net, bucket_cap_mb=MEBIBYTES), []
        model.register_comm_hook(notes, watch)
        for step in range(STEPS):
            model.zero_grad()
            find_loss(model(draw(rank, step))).backward()
            gradients.append([parameter.grad.clone() for parameter in net.parameters()])
        return {"notes": notes, "truth": truth, "kinds": kinds, "blocked": any(blocked), "gradients": gradients}

    case = "three steps of DDP with your hook"
    with expecting_works(case):
        first, second, _ = run_on_ranks(work, note_and_average, case=case, count=RANKS)
    _expect_promise(first["kinds"], second["blocked"])
    for step in range(STEPS):
        _expect_mean(first["gradients"][step], step)
    _expect_notes(first["notes"], first["truth"])
    return f"three steps of DDP average as without it, and it noted all {len(first['truth'])} buckets"


def _open(future: torch.futures.Future, buffer: torch.Tensor, kinds: list[str]) -> torch.Tensor:
    """The future's tensor; notes what DDP would refuse with its own assertion, or inside a callback."""
    try:
        value = future.value()
    except RuntimeError as error:
        if "'list'" not in str(error):
            raise
        value = []
    if isinstance(value, torch.Tensor):
        return value
    kinds.append(f"a future of a {type(value).__name__}")
    return buffer


def _expect_promise(kinds: list[str], blocked: bool) -> None:
    hint = "return work.get_future().then(…): DDP asks the future for the bucket when backward ends"
    if "NoneType" in kinds:
        hint = "the hook has to return a future, or DDP never learns when the bucket is ready: return … .then(…)"
    elif "Work" in kinds:
        hint = "a Work is not a future: work.get_future() is"
    elif any(kind.startswith("a future") for kind in kinds):
        hint = "get_future() promises a list of one tensor: .then(…) has to give the mean of future.value()[0]"
    yours = kinds[0] if kinds else ""
    expect(not kinds, "what the hook returned", yours=yours, expected="a future of one tensor", hint=hint)
    expect(
        not blocked,
        "rank 0's hook, while rank 1 is late",
        yours="waits for rank 1",
        expected="returns at once",
        hint="all_reduce(…, async_op=True), and no wait() in the hook: backward stands still as long as the hook runs",
    )


def _expect_mean(yours: list[torch.Tensor], step: int) -> None:
    own = [find_gradients(Stack(), draw(rank, step)) for rank in range(RANKS)]
    total = [sum(gradients) for gradients in zip(*own, strict=True)]
    mean = [one / RANKS for one in total]

    def are(divisor: int, of: list[torch.Tensor]) -> bool:
        return are_close(yours, [one / divisor for one in of])

    hint = "the future's value has to be one tensor, the mean of the ranks' buckets: future.value()[0]"
    if are(1, total):
        hint = "this is the sum. With a hook DDP does not divide: the hook has to, by dist.get_world_size()"
    elif are(RANKS**2, total):
        hint = "divided twice: before the all-reduce or after it, not both"
    elif are(2, total):
        hint = "divided by two, whatever the number of ranks: it is dist.get_world_size()"
    elif are(1, own[0]) or are(RANKS, own[0]):
        hint = "these are rank 0's own gradients: all-reduce bucket.buffer(), and return the future of that"
    expect(
        are_close(yours, mean),
        f"step {step + 1}: the length of rank 0's gradients",
        yours=format_norm(yours),
        expected=format_norm(mean),
        hint=hint,
    )


def _expect_notes(notes: list[Any], truth: list[int]) -> None:
    hint = "append the bytes of the bucket in each call: notes.append(bucket.buffer().nbytes)"
    counts = [size // 8 for size in truth]
    if notes == counts:
        hint = "these are numbers, not bytes; a float64 has 8 bytes, a float32 has 4: bucket.buffer().nbytes"
    elif notes == [4 * count for count in counts]:
        hint = "not every number has 4 bytes, these have 8: bucket.buffer().nbytes asks the tensor"
    elif notes == list(range(len(truth))) or (notes and len(notes) == len(truth) and max(notes) < len(truth)):
        hint = "these are the buckets' indices; their bytes are bucket.buffer().nbytes"
    elif notes and notes == [sum(truth[: place + 1]) for place in range(len(truth))]:
        hint = "one note per bucket, of this bucket alone: do not add up"
    elif len(notes) < len(truth):
        hint = "a note in every call: the hook runs once for each bucket of each step"
    expect(notes == truth, "bytes of the buckets of three steps", yours=notes, expected=truth, hint=hint)
