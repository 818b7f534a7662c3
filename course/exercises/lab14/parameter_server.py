"""Exercises 14.3 and 14.4: a parameter server over send and recv, synchronous and asynchronous.

The answer runs on rank 0. The workers are the check's own: each holds its gradient back until it is certain which one
comes next. So a server that waits for the wrong worker always gets stuck, and a correct one never does, however busy
the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import RawArray
from typing import Any

import torch
import torch.distributed as dist

from course.check.judge import AnyOf, judge
from course.check.verdicts import NotYetError, expect
from course.exercises.messages import expect_no_error, watch_messages
from course.exercises.ranks import show_printed
from course.exercises.witness import MisuseError
from course.ranks import Outcome, fork_ranks
from lab_common.text import clean

SIZE = 16  # numbers of the weights
LIMIT = 6.0  # seconds for what takes milliseconds
PAUSE = 0.001  # seconds between two looks of a worker that holds its gradient back
CLOSE = 1e-4
OPEN = (
    "a send or a receive is still open at the end: wait() for each that you start, and start no receive after the last "
    "gradient that you take"
)
WORKERS = "send to, and receive from, the ranks in `workers`, and no other: rank 0 serves"
WHOLE = "each message is all weights, or one gradient: a float32 tensor as long as weights, torch.empty_like(weights)"
EARLY = "these are not numbers: wait() for an irecv before you use its tensor"
SIGN = "the step has the wrong sign: subtract it from the weights"
RATE = "lr is not in the step: multiply by it"
IN_PLACE = "weights = … names a new tensor, and the caller keeps the old one: change it in place, weights -= …"
MISTAKES = {"same as the rank of the current process": WORKERS}


@dataclass(frozen=True)
class _Case:
    """One test case.

    Attributes:
        workers: The ranks of the workers.
        steps: Number of rounds, or of updates.
        lr: The learning rate.
        order: The worker of each update, if the server is asynchronous.
        idle: Number of other ranks: in the lab, `workers` need not be all ranks but 0.
    """

    workers: Sequence[int]
    steps: int
    lr: float
    order: tuple[int, ...] = ()
    idle: int = 0

    def __str__(self) -> str:
        return f"{len(self.workers)} workers, {self.steps} {'updates' if self.order else 'rounds'}"

    def is_next(self, worker: int, received: Sequence[int]) -> bool:
        """Returns True if a worker may send its gradient now, given how often each one has received weights."""
        number = received[worker]
        if not self.order:
            return min(received[other] for other in self.workers) >= number
        places = [place for place, other in enumerate(self.order) if other == worker]
        place = places[number - 1] if number <= len(places) else self.steps
        return all(received[other] > self.order[:place].count(other) for other in self.workers)


# Two workers alone would hide a division by two.
IN_TURN = _Case(range(1, 3), 3, 0.1), _Case([3, 1, 2], 2, 0.25, idle=1)
AT_ONCE = _Case(range(1, 3), 6, 0.1, (1, 1, 1, 2, 1, 2)), _Case([3, 1, 2], 7, 0.2, (2, 3, 2, 2, 1, 3, 1), idle=1)


def make_weights() -> torch.Tensor:
    """Returns the weights before the first step."""
    return torch.linspace(0.5, 2, SIZE)


def find_gradient(worker: int, weights: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a worker, which differs from every other worker's."""
    slope, shift = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(worker))
    return slope * weights + shift


@dataclass(frozen=True)
class _Run:
    """The result of an answer.

    Attributes:
        received: The weights that each worker got.
        final: The caller's weights when the answer returned.
        on_way: The workers whose last gradient was not received.
        ages: The answer's return value as numbers, or as text if it is something else.
    """

    received: dict[int, list[torch.Tensor]]
    final: torch.Tensor
    on_way: tuple[int, ...]
    ages: list[float] | str

    def count_taken(self) -> int:
        """Returns how many gradients the answer received: one for each time that a worker got weights."""
        return sum(map(len, self.received.values())) - len(self.on_way)


def _run(answer: Callable, case: _Case) -> _Run:
    ranks = 1 + len(case.workers) + case.idle
    # How often each rank has got weights; rank 0 gets none, and has a 1 once the answer has returned.
    received = RawArray("i", ranks)

    def take_part(rank: int) -> Any:
        if not rank:
            return _serve(answer, case, received)
        return _work(rank, case, received) if rank in case.workers else []

    outcomes = fork_ranks(take_part, answer, ranks, limit=LIMIT)
    show_printed({0: outcomes[0]})
    expected = "it returns, and every worker was served"
    expect_no_error(outcomes[:1], str(case), expected, MISTAKES)
    _expect_return(outcomes, case, received, expected)
    return _Run({worker: outcomes[worker].value for worker in case.workers}, *outcomes[0].value)


def _work(rank: int, case: _Case, received: Any) -> list[torch.Tensor]:
    """Does a worker's job; returns the weights that it got."""
    got: list[torch.Tensor] = []
    while True:
        weights = torch.empty(SIZE)
        dist.recv(weights, src=0)
        if _is_end(weights):
            dist.send(weights, dst=0)
            return got
        got.append(weights)
        received[rank] += 1
        while not (case.is_next(rank, received) or received[0]):
            time.sleep(PAUSE)
        dist.send(find_gradient(rank, weights), dst=0)


def _is_end(message: torch.Tensor) -> bool:
    """Returns True for the message that ends a worker. Zeros, which end the lab's workers, could be real weights."""
    return bool(message.isposinf().all())


def _serve(answer: Callable, case: _Case, received: Any) -> tuple[torch.Tensor, tuple[int, ...], list[float] | str]:
    """Runs the answer on rank 0; returns rank 0's part of a :class:`_Run`."""

    def inspect(tensor: torch.Tensor, peer: int | None) -> None:
        if peer is not None and peer not in case.workers:
            raise MisuseError(WORKERS)
        if tensor.numel() != SIZE or tensor.dtype != torch.float32:
            raise MisuseError(WHOLE)

    witness, weights = watch_messages(inspect), make_weights()
    returned = answer(weights, case.workers[:], case.steps, case.lr)
    if witness.count_open():
        raise MisuseError(OPEN)
    final = weights.detach().clone()
    received[0] = 1
    on_way = tuple(worker for worker in case.workers if _dismiss(worker))
    try:
        ages: list[float] | str = [float(age) for age in returned]
    except (TypeError, ValueError, RuntimeError):
        ages = clean(repr(returned), 60)
    return final, on_way, ages


def _dismiss(worker: int) -> bool:
    """Ends a worker; returns whether it had sent a gradient that the answer did not receive."""
    message = torch.full((SIZE,), torch.inf)
    # Both at once: it may wait for either.
    farewell, got = dist.isend(message, worker), torch.empty(SIZE)
    dist.recv(got, src=worker)
    if on_way := not _is_end(got):
        dist.recv(got, src=worker)
    farewell.wait()
    return on_way


def _expect_return(outcomes: Sequence[Outcome], case: _Case, received: Sequence[int], expected: str) -> None:
    """Expects the answer to return; otherwise the weights that each worker has got give the hint."""
    if not any(one.stuck or one.number or one.error for one in outcomes):
        return
    without = [worker for worker in case.workers if not received[worker]]
    if max(received) > case.steps + 1:
        hint = "the loop does not end: `rounds`, or `updates`, says how many there are"
    elif without:
        hint = f"worker {without[0]} has no weights: first send them to all of `workers`, then wait for a gradient"
    elif case.order:
        hint = (
            "take whichever gradient comes first, by a recv without src, and answer it, by a step and new weights to "
            "its worker alone, before the next recv"
        )
    else:
        hint = "each round sends the weights anew to every worker, and then receives one gradient from every worker"
    yours = f"it stands in {outcomes[0].line}" if outcomes[0].line else "it did not return"
    raise NotYetError(f"{case}: the server did not end", yours=yours, expected=expected, hint=hint)


def verify_serve_in_turn(answer: Callable) -> str:
    """Serves two and three workers, and compares each one's weights with the steps in one process."""
    for case in IN_TURN:
        run, points, gradients = _run(answer, case), [make_weights()], []
        for _ in range(case.steps):
            gradients.append([find_gradient(worker, points[-1]) for worker in case.workers])
            points.append(points[-1] - case.lr * sum(gradients[-1]) / len(case.workers))
        for number, point in enumerate(points[: case.steps]):
            for worker in case.workers:
                found = run.received[worker][number : number + 1]
                words = f"{case}: what worker {worker} got in round {number + 1}"
                _judge_weights(found, point, words, _list_mean_mistakes(points[:number], gradients[:number], case.lr))
        taken, wanted = run.count_taken(), case.steps * len(case.workers)
        hint = "each of the `rounds` sends to every worker, and receives a gradient from every worker, the last one too"
        counts = {worker: len(some) for worker, some in run.received.items()}
        words = f"{case}: how many gradients were received, and how often each worker got weights"
        right = taken == wanted and set(counts.values()) == {case.steps}
        expected = f"{wanted}, {dict.fromkeys(counts, case.steps)}"
        expect(right, words, yours=f"{taken}, {counts}", expected=expected, hint=hint)
        wrong = {IN_PLACE: points[0], **_list_mean_mistakes(points[:-1], gradients, case.lr)}
        _judge_weights([run.final], points[-1], f"{case}: the caller's weights at the end", wrong)
    return "2 and 3 workers, each with all weights at once, and in every round one step with their mean"


def _list_mean_mistakes(
    points: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]], lr: float
) -> dict[str, object]:
    """Returns what mistakes make of the last of the ``points`` with all rounds' ``gradients``; nothing at the start."""
    if not points:
        return {}
    last, total, count = points[-1], sum(gradients[-1]), len(gradients[-1])
    steps = {
        "a step with the sum, or one with each gradient: the mean is the sum divided by len(workers)": [total],
        "rank 0 has no gradient: divide by the number of workers, len(workers), and not by that of ranks": [
            total / (count + 1)
        ],
        "no step was taken between the rounds: step in place, after all gradients have come": [0 * total],
        SIGN: [-total / count],
        RATE: [total / count / lr, total / lr],
        "one gradient counts for all: a receive overwrites its tensor, so add it up first, or give each irecv a tensor "
        "of its own": [*gradients[-1], *(one / count for one in gradients[-1])],
        "gradients of an earlier round are in the step again: set the total to zero in each round": [
            sum(sum(some) for some in gradients) / count
        ],
    }
    return {hint: AnyOf(tuple(last - lr * step for step in some)) for hint, some in steps.items()}


def verify_serve_at_once(answer: Callable) -> str:
    """Serves two and three workers of unequal speed, whose gradients arrive in a known order."""
    for case in AT_ONCE:
        _verify_at_once(_run(answer, case), case)
    return "2 and 3 workers of unequal speed: a step for each gradient as it came, none waited, and all ages"


def _verify_at_once(run: _Run, case: _Case) -> None:
    points, ages, seen, tables = [make_weights()], [], dict.fromkeys(case.workers, 0), []
    for number, worker in enumerate(case.order):
        gradient, last = find_gradient(worker, points[seen[worker]]), points[-1]
        points.append(last - case.lr * gradient)
        tables.append(
            {
                "first the step, in place, and then the new weights go to the worker": AnyOf(tuple(points[:-1])),
                "each gradient is a whole step here: do not divide it": last - case.lr * gradient / len(case.workers),
                RATE: last - gradient,
                SIGN: last + case.lr * gradient,
            }
        )
        ages.append(number - seen[worker])
        seen[worker] = number + 1
    for worker in case.workers:
        _judge_weights(run.received[worker][:1], points[0], f"{case}: what worker {worker} got first", {})
    taken, words = run.count_taken(), f"{case}: gradients taken"
    hint = "one gradient for each of `updates`, counted over all workers"
    expect(taken == case.steps, words, yours=taken, expected=case.steps, hint=hint)
    got = {worker: iter(some[1:]) for worker, some in run.received.items()}
    for number, worker in enumerate(case.order):
        found = [next(got[worker], None)]
        words = f"{case}: what worker {worker} got after update {number + 1}"
        _judge_weights(found, points[number + 1], words, tables[number])
    _judge_weights([run.final], points[-1], f"{case}: the caller's weights at the end", {IN_PLACE: points[0]})
    judge(
        run.ages,
        right=ages,
        case=f"{case}: the ages, with gradients of workers {', '.join(map(str, case.order))}",
        hint="return a list in the order of the updates: the number of each, from 0, less how many updates were "
        "in the weights that its worker got",
        wrong={
            "all are one too old: a gradient of the newest weights has age 0": [age + 1 for age in ages],
            "the weights that are sent after update 0 have 1 update in them": [
                age + (worker in case.order[:number])
                for number, (age, worker) in enumerate(zip(ages, case.order, strict=True))
            ],
            "these count from the start: note, when a worker gets new weights, how many updates are in them": list(
                range(case.steps)
            ),
            "these count each worker's own updates: those of all other workers make its weights older": [
                case.order[:number].count(worker) for number, worker in enumerate(case.order)
            ],
        },
    )


def _judge_weights(
    found: Sequence[torch.Tensor | None], right: torch.Tensor, case: str, wrong: Mapping[str, object]
) -> None:
    """Compares one message, or the weights at the end; ``found`` is empty if the message was not sent."""
    hint = "these are not the previous weights − lr * the mean, or here the one gradient that came last, and no more"
    if not wrong:
        hint = "the first weights that every worker gets are those that you were given, unchanged"
    yours = found[0].float() if found and found[0] is not None else None
    nothing = {"it got none: send to all of `workers` in each round, or after each update, the last one included": None}
    unread = {EARLY: torch.full((SIZE,), torch.nan)}
    judge(yours, right=right, case=case, hint=hint, wrong={**nothing, **unread, **wrong}, within=CLOSE)
