"""Exercises 8.3 and 8.4: the learner's all-reduce, around a ring and with a butterfly, on forked ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course.check.judge import judge
from course.check.verdicts import NotYetError
from course.exercises.ranks import run_on_ranks
from course.exercises.witness import MisuseError, Witness

# Numbers of a chunk, and their type: of float64, so that a buffer of another type is found.
CASES = ((3, torch.float64), (2, torch.float32))
LIMIT = 6.0  # seconds for what takes milliseconds


@dataclass(frozen=True)
class _Kind:
    """An algorithm's requirements: numbers of ranks, messages and bytes that each sends, and its peers."""

    worlds: tuple[int, ...]
    messages: Callable[[int], int]
    factor: Callable[[int], float]
    peers: Callable[[int, int], list[set[int]]]
    peer_hint: str
    bytes_hint: str


RING = _Kind(
    worlds=(4, 3, 2),
    messages=lambda n: 2 * (n - 1),
    factor=lambda n: 2 * (n - 1) / n,
    peers=lambda rank, n: [{(rank + 1) % n}, {(rank - 1) % n}],
    peer_hint="in a ring each rank sends to one neighbour only, (rank + 1) % n, and receives from the other one",
    bytes_hint="2(n − 1) messages of one chunk each: n − 1 for the reduce-scatter, n − 1 for the all-gather",
)
BUTTERFLY = _Kind(
    worlds=(4, 2, 8),
    messages=lambda n: n.bit_length() - 1,
    factor=lambda n: math.log2(n),
    peers=lambda rank, n: [{rank ^ 2**step for step in range(n.bit_length() - 1)}],
    peer_hint="the partners of a rank are rank ^ 1, rank ^ 2, rank ^ 4, …: one bit is flipped each time",
    bytes_hint="one message of the whole tensor in each step, and log2(n) steps",
)


def verify_ring(ring_all_reduce: Callable) -> str:
    """Compares with the sum, on 4, 3 and 2 ranks, and counts what each rank sends."""
    for n in RING.worlds:
        _verify(RING, ring_all_reduce, n)
    return (
        "the sum on 4, 3 and 2 ranks, and each rank sent exactly 2(n − 1)/n times the tensor's bytes to one neighbour"
    )


def verify_butterfly(butterfly_all_reduce: Callable) -> str:
    """Compares with the sum, on 4, 2 and 8 ranks, and counts what each rank sends."""
    for n in BUTTERFLY.worlds:
        _verify(BUTTERFLY, butterfly_all_reduce, n)
    return "the sum on 4, 2 and 8 ranks, in log2(n) steps, each of which sends the whole tensor once"


def _make_inputs(n: int, chunk: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randint(-99, 100, (n * chunk,), generator=generator).to(dtype) for _ in range(n)]


def _verify(kind: _Kind, answer: Callable, n: int) -> None:
    cases = [_make_inputs(n, *case) for case in CASES]

    def run(rank: int) -> list[tuple]:
        witness, found = Witness(), []
        for inputs in cases:
            x, before = inputs[rank].clone(), len(witness.sent)
            answer(x)
            if witness.count_open():
                raise MisuseError("wait() for every isend and irecv before you return: else it may not have ended")
            found.append((x, witness.sent[before:]))
        return found

    try:
        ranks = run_on_ranks(run, answer, case=f"{n} ranks", count=n, limit=LIMIT)
    except MisuseError as error:
        expected, hint = "isend and irecv, each with its wait()", str(error)
        yours = getattr(error, "line_of_answer", "") or "at its end"
        raise NotYetError(f"{n} ranks: the messages", yours=yours, expected=expected, hint=hint) from None
    for index, inputs in enumerate(cases):
        case = f"{n} ranks, {len(inputs[0])} numbers of {str(inputs[0].dtype).removeprefix('torch.')} each"
        _judge_sums([found[index][0] for found in ranks], inputs, case)
        for rank, found in enumerate(ranks):
            _judge_messages(kind, found[index][1], rank, n, inputs[0].nbytes, case)


def _judge_sums(yours: list[torch.Tensor], inputs: list[torch.Tensor], case: str) -> None:
    n, total = len(inputs), sum(inputs)
    # After a reduce-scatter, chunk c of rank r is the sum over the ranks from c to r, around the ring.
    chunks = [one.chunk(n) for one in inputs]
    scattered = [
        torch.cat([sum(chunks[(c + k) % n][c] for k in range((r - c) % n + 1)) for c in range(n)]) for r in range(n)
    ]
    hint = "write down for each step which rank sends which part to whom, and what the receiver does with it"
    if any(one.isnan().any() for one in yours):
        hint = "NaN: a tensor was used before its receive had ended. What irecv fills is valid after wait()"
    judge(
        yours,
        right=[total] * n,
        case=f"{case}: x on each rank",
        wrong={
            "x is as it was: change it in place (x += …, chunks[i].copy_(…)); x = … only gives the name to another": (
                inputs
            ),
            "this is the mean; an all-reduce sums": [total / n] * n,
            "one chunk is right: the all-gather then sends complete chunks on, n − 1 times": scattered,
        },
        hint=hint,
    )


def _judge_messages(kind: _Kind, sent: list[tuple[int, int]], rank: int, n: int, size: int, case: str) -> None:
    total = sum(count for _, count in sent)
    many = f"{total:,} bytes are {total / size:.3g} times the tensor's; asked for are {kind.factor(n):.3g}"
    hint = f"{many}. {kind.bytes_hint}"
    judge(total, right=kind.factor(n) * size, case=f"{case}: bytes that rank {rank} sent", hint=hint)
    hint = f"each message costs its latency, however short it is: {kind.bytes_hint}"
    judge(len(sent), right=kind.messages(n), case=f"{case}: messages of rank {rank}", hint=hint)
    peers, right = {peer for peer, _ in sent}, kind.peers(rank, n)
    judge(peers in right, right=True, case=f"{case}: rank {rank} sent to {sorted(peers)}", hint=kind.peer_hint)
