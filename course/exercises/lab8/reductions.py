"""Exercises 8.3 and 8.4: the learner's all-reduce, around a ring and with a butterfly, on forked ranks."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course.check.verdicts import NotYetError, OpenError, expect
from course.exercises.lab8.witness import MisuseError, Witness
from course.ranks import Outcome, fork_ranks

# Numbers of a chunk, and their type: of float64, so that a buffer of another type is found.
CASES = ((3, torch.float64), (2, torch.float32))
LIMIT = 6.0  # seconds for what takes milliseconds


@dataclass(frozen=True)
class _Kind:
    """An algorithm's requirements: numbers of ranks, messages and bytes that each sends, and its peers."""

    number: str
    worlds: tuple[int, ...]
    messages: Callable[[int], int]
    factor: Callable[[int], float]
    peers: Callable[[int, int], list[set[int]]]
    peer_hint: str
    bytes_hint: str


RING = _Kind(
    number="8.3",
    worlds=(4, 3, 2),
    messages=lambda n: 2 * (n - 1),
    factor=lambda n: 2 * (n - 1) / n,
    peers=lambda rank, n: [{(rank + 1) % n}, {(rank - 1) % n}],
    peer_hint="in a ring each rank sends to one neighbour only, (rank + 1) % n, and receives from the other one",
    bytes_hint="2(n − 1) messages of one chunk each: n − 1 for the reduce-scatter, n − 1 for the all-gather",
)
BUTTERFLY = _Kind(
    number="8.4",
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
            returned = answer(x)
            if witness.count_open():
                raise MisuseError("wait() for every isend and irecv before you return: else it may not have ended")
            returned = returned.tolist() if isinstance(returned, torch.Tensor) else None
            found.append((x.tolist(), returned, witness.sent[before:]))
        return found

    outcomes = fork_ranks(run, answer, n, limit=LIMIT)
    _look_at_ends(kind, outcomes, f"{n} ranks, {len(cases[0][0])} numbers each")
    for index, inputs in enumerate(cases):
        dtype = str(inputs[0].dtype).removeprefix("torch.")
        case = f"{n} ranks, {len(inputs[0])} numbers of {dtype} each"
        found = [outcome.value[index] for outcome in outcomes]
        _compare_sums(case, inputs, [(x, returned) for x, returned, _ in found])
        for rank, (_, _, sent) in enumerate(found):
            _count_messages(kind, case, rank, n, sent, inputs[0].nbytes)


def _look_at_ends(kind: _Kind, outcomes: list[Outcome], case: str) -> None:
    """Raises the error of an answer that did not return on every rank: a rank's own error takes precedence."""
    errors = [(rank, one) for rank, one in enumerate(outcomes) if one.error]
    # Not what a rank says that only lost its neighbour: one that had to be ended says more.
    lost = [pair for pair in errors if any(word in str(pair[1].error) for word in ("Connection", "closed by peer"))]
    stuck = [(rank, one) for rank, one in enumerate(outcomes) if one.stuck or one.number]
    errors = [pair for pair in errors if pair not in lost] + ([] if stuck else lost)
    for rank, one in errors:
        if isinstance(one.error, NotImplementedError):
            raise one.error
        if isinstance(one.error, MisuseError):
            yours = f"rank {rank}: {one.line or 'at its end'}"
            expected = "isend and irecv, each with its wait()"
            raise NotYetError(f"{case}: the messages", yours=yours, expected=expected, hint=str(one.error))
    aborted = [rank for rank, one in enumerate(outcomes) if one.number == signal.SIGABRT]
    if aborted:
        hint = "Gloo aborts a rank that gets a longer message than its tensor can hold: compare lengths and types"
        raise NotYetError(case, yours=f"rank {aborted[0]} was aborted", expected="the sum on every rank", hint=hint)
    ended = [rank for rank, one in enumerate(outcomes) if one.number]
    if ended and not errors:
        hint = "does it send to a rank that is not there? The number of ranks is dist.get_world_size()"
        yours = f"rank {ended[0]} ended by itself, by signal {outcomes[ended[0]].number}"
        raise NotYetError(case, yours=yours, expected="the sum on every rank", hint=hint)
    for rank, one in errors:
        what = f"✘ {kind.number} stopped with an error in your code; this counts as no try."
        cause = f"{type(one.error).__name__}: {str(one.error).splitlines()[0] if str(one.error) else ''}"
        everywhere = {outcome.line for outcome in outcomes} == {one.line}
        raise OpenError(what, where=one.line if everywhere else f"rank {rank}, {one.line}", cause=cause)
    if stuck:
        rank, one = next((pair for pair in stuck if pair[1].line), stuck[0])
        yours = f"rank {rank} did not return; it stands in {one.line or 'a line outside of the function'}"
        raise NotYetError(
            case, yours=yours, expected="all ranks return", hint=_explain_wait([o.line for _, o in stuck])
        )


def _explain_wait(lines: list[str]) -> str:
    if any("isend" not in line and "send(" in line for line in lines):
        hint = "send() returns when the other rank receives. If all send first, none receives"
        return f"{hint}: start with irecv, then isend, and wait for both"
    if any(word in line for line in lines for word in ("recv", "wait")):
        hint = (
            "a rank waits for a message that nobody sends: whoever receives from left must be sent to by left, as often"
        )
        return f"{hint}; there are dist.get_world_size() ranks"
    return "no rank waits for a message there: does the loop end?"


def _compare_sums(case: str, inputs: list[torch.Tensor], found: list[tuple[list, list | None]]) -> None:
    total = sum(inputs).tolist()
    for rank, (x, returned) in enumerate(found):
        if x == total:
            continue
        raise NotYetError(
            f"{case}: rank {rank}",
            yours=_shorten(x),
            expected=_shorten(total),
            hint=_explain_sum(x, returned, inputs, rank),
        )


def _shorten(numbers: list[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers[:12])}{', …' * (len(numbers) > 12)}]"


def _explain_sum(x: list, returned: list | None, inputs: list[torch.Tensor], rank: int) -> str:
    """Returns the hint for a wrong sum."""
    n, total = len(inputs), sum(inputs).tolist()
    if any(math.isnan(number) for number in x):
        return "NaN: a tensor was used before its receive had ended. What irecv fills is valid after wait()"
    if returned == total:
        return "the returned tensor is right; change x itself, in place, as dist.all_reduce does"
    if x == inputs[rank].tolist():
        return "x is as it was: change it in place (x += …, chunks[i].copy_(…)); x = … only gives the name to another"
    if x == (sum(inputs) / n).tolist():
        return "this is the mean; an all-reduce sums"
    size = len(x) // n
    right = [x[i * size : (i + 1) * size] == total[i * size : (i + 1) * size] for i in range(n)]
    if sum(right) == 1 and n > 2:
        return (
            "one chunk is right: the reduce-scatter did that; the all-gather then sends complete chunks on, n − 1 times"
        )
    if any(right):
        return (
            f"chunks {[i for i, one in enumerate(right) if one]} are right: which chunk does a rank send in each step?"
        )
    return "write down for each step which rank sends which part to whom, and what the receiver does with it"


def _count_messages(kind: _Kind, case: str, rank: int, n: int, sent: list[tuple[int, int]], size: int) -> None:
    total, wanted = sum(count for _, count in sent), kind.factor(n) * size
    many = f"{total:,} bytes are {total / size:.3g} times the tensor's; asked for are {kind.factor(n):.3g}"
    expect(
        total == wanted,
        f"{case}: bytes that rank {rank} sent",
        yours=f"{total:,}",
        expected=f"{wanted:,.0f}",
        hint=f"{many}. {kind.bytes_hint}",
    )
    hint = f"each message costs its latency, however short it is: {kind.bytes_hint}"
    wanted = kind.messages(n)
    expect(len(sent) == wanted, f"{case}: messages of rank {rank}", yours=len(sent), expected=wanted, hint=hint)
    peers, right = {peer for peer, _ in sent}, kind.peers(rank, n)
    expect(
        peers in right,
        f"{case}: whom rank {rank} sent to",
        yours=sorted(peers),
        expected=" or ".join(str(sorted(one)) for one in right),
        hint=kind.peer_hint,
    )
