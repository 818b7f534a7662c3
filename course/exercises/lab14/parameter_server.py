"""Exercises 14.3 and 14.4: a parameter server over send and recv, synchronous and asynchronous.

The answer runs on rank 0. The workers are the check's own: each holds its gradient back until it is certain which one
comes next. So a server that waits for the wrong worker always gets stuck, and a correct one never does, however busy
the machine is.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course.check.verdicts import NotYetError, expect
from course.exercises.lab8.witness import MisuseError, Witness
from course.exercises.lab10.mistakes import refusing_mistakes
from course.exercises.ranks import PRINTED
from course.ranks import Outcome, fork_ranks
from lab_common.text import clean

# Numbers of the weights: more than gradients come, so that it shows which of them are in a step.
SIZE = 16
LIMIT = 6.0  # seconds for what takes milliseconds
PAUSE = 0.001  # seconds between two looks of a worker that holds its gradient back
OPEN = (
    "a send or a receive is still open at the end: wait() for each that you start, and start no receive after the last "
    "gradient that you take"
)
WORKERS = "send to, and receive from, the ranks in `workers`, and no other: rank 0 serves"
WHOLE = "each message is all weights, or one gradient: a float32 tensor as long as weights, torch.empty_like(weights)"
EARLY = "these are not numbers: wait() for an irecv before you use its tensor"
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

    def is_next(self, worker: int, received: dict[int, int]) -> bool:
        """Returns True if a worker may send its gradient now, given how often each one has received weights."""
        number = received[worker]
        if not self.order:
            return min(received.values()) >= number
        places = [place for place, other in enumerate(self.order) if other == worker]
        place = places[number - 1] if number <= len(places) else self.steps
        return all(count > self.order[:place].count(other) for other, count in received.items())


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


class _Board:
    """Counters for each worker, in memory shared by the forks, so that they can be read even if nobody returns."""

    ROWS = ("sent", "received", "offered", "taken")

    def __init__(self, workers: Iterable[int]) -> None:
        self._workers, self._bytes = sorted(workers), mmap.mmap(-1, len(self.ROWS) * (1 + max(workers)))

    def add(self, row: str, worker: int) -> None:
        """Adds one to a row: weights sent or received, or gradients offered or taken."""
        place = self._place(row, worker)
        self._bytes[place] = min(self._bytes[place] + 1, 255)

    def read(self, row: str) -> dict[int, int]:
        """Returns the count of each worker."""
        return {worker: self._bytes[self._place(row, worker)] for worker in self._workers}

    def end(self) -> None:
        """Notes that the answer has returned: no worker needs to hold anything back any more."""
        self._bytes[0] = 1

    def has_ended(self) -> bool:
        """Returns True if the answer has returned."""
        return self._bytes[0] == 1

    def _place(self, row: str, worker: int) -> int:
        return worker * len(self.ROWS) + self.ROWS.index(row)  # those of rank 0, no worker, begin with the end


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

    def count_taken(self, worker: int) -> int:
        """Returns how many gradients of a worker the answer received: one for each time that the worker got weights."""
        return len(self.received[worker]) - (worker in self.on_way)


def _run(answer: Callable, case: _Case) -> _Run:
    board = _Board(case.workers)

    def take_part(rank: int) -> Any:
        if not rank:
            return _serve(answer, case, board)
        return _work(rank, case, board) if rank in case.workers else []

    outcomes = fork_ranks(take_part, answer, 1 + len(case.workers) + case.idle, limit=LIMIT)
    for line in outcomes[0].printed.splitlines()[:PRINTED]:
        print(f"[rank 0] {clean(line, 200)}")
    _expect_ends(outcomes, case, board)
    return _Run({worker: outcomes[worker].value for worker in case.workers}, *outcomes[0].value)


def _work(rank: int, case: _Case, board: _Board) -> list[torch.Tensor]:
    """Does a worker's job; returns the weights that it got."""
    received: list[torch.Tensor] = []
    while True:
        weights = torch.empty(SIZE)
        dist.recv(weights, src=0)
        if _is_end(weights):
            dist.send(weights, dst=0)
            return received
        received.append(weights)
        board.add("received", rank)
        while not (case.is_next(rank, board.read("received")) or board.has_ended()):
            time.sleep(PAUSE)
        board.add("offered", rank)
        dist.send(find_gradient(rank, weights), dst=0)
        board.add("taken", rank)


def _is_end(message: torch.Tensor) -> bool:
    """Returns True for the message that ends a worker. Zeros, which end the lab's workers, could be real weights."""
    return bool(message.isposinf().all())


def _serve(answer: Callable, case: _Case, board: _Board) -> tuple[torch.Tensor, tuple[int, ...], list[float] | str]:
    """Runs the answer on rank 0; returns rank 0's part of a :class:`_Run`."""
    witness, weights = _watch_messages(case, board), make_weights()
    returned = answer(weights, case.workers[:], case.steps, case.lr)
    if witness.count_open():
        raise MisuseError(OPEN)
    final = weights.detach().clone()
    board.end()
    on_way = tuple(worker for worker in case.workers if _dismiss(worker))
    return final, on_way, _read_ages(returned)


def _watch_messages(case: _Case, board: _Board) -> Witness:
    """Watches the messages of this process, and refuses those that no worker expects; see :class:`Witness`."""
    witness, group = Witness(), dist.ProcessGroup
    send, receive, receive_any = group.send, group.recv, group.recv_anysource

    def inspect(tensors: Sequence[torch.Tensor], peer: int) -> None:
        if peer not in case.workers:
            raise MisuseError(WORKERS)
        if tensors[0].numel() != SIZE or tensors[0].dtype != torch.float32:
            raise MisuseError(WHOLE)

    def send_inspected(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        inspect(tensors, peer)
        board.add("sent", peer)
        return send(group, tensors, peer, tag)

    def receive_inspected(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        inspect(tensors, peer)
        return receive(group, tensors, peer, tag)

    def receive_from_any(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        inspect(tensors, case.workers[0])
        return receive_any(group, tensors, tag)

    group.send, group.recv, group.recv_anysource = send_inspected, receive_inspected, receive_from_any
    return witness


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


def _read_ages(returned: Any) -> list[float] | str:
    try:
        return [float(age) for age in returned]
    except (TypeError, ValueError, RuntimeError):
        return clean(repr(returned), 60)


def _expect_ends(outcomes: Sequence[Outcome], case: _Case, board: _Board) -> None:
    """Raises the error for an answer that did not return, or had to be ended."""
    server, expected = outcomes[0], "it returns, and every worker was served"
    if isinstance(server.error, MisuseError):
        yours = server.line or "at its end"
        raise NotYetError(f"{case}: the messages", yours=yours, expected=expected, hint=str(server.error))
    if server.error:
        server.error.line_of_answer = server.line
        with refusing_mistakes(str(case), expected, MISTAKES):
            raise server.error
    if server.calls is None:
        hint = "leave the function with return, and let the process live"
        raise NotYetError(str(case), yours="the server's process ended", expected=expected, hint=hint)
    if any(one.stuck or one.number or one.error for one in outcomes):
        explain = _explain_wait_at_once if case.order else _explain_wait_in_turn
        yours = f"it stands in {server.line}" if server.line else "it did not return"
        raise NotYetError(f"{case}: the server did not end", yours=yours, expected=expected, hint=explain(case, board))


def _sort_workers(board: _Board) -> tuple[list[int], list[int], list[int]]:
    """Returns the workers that wait for weights, that hold a gradient back, and whose gradient nobody receives."""
    received, offered, taken = map(board.read, ("received", "offered", "taken"))
    waiting = [worker for worker in received if taken[worker] == received[worker]]
    holding = [worker for worker in received if offered[worker] < received[worker]]
    return waiting, holding, [worker for worker in received if worker not in waiting + holding]


def _explain_wait_in_turn(case: _Case, board: _Board) -> str:
    """Returns the hint for a synchronous server that got stuck."""
    received = board.read("received")
    _, holding, offering = _sort_workers(board)
    if max(received.values()) > case.steps + 1:
        return "the loop does not end: `rounds` says how many rounds there are"
    if offering:
        worker = min(offering, key=received.get)
        return (
            f"worker {worker} sends a gradient that nobody receives: each round receives one from every worker, before "
            "the next weights go out"
        )
    last = min(received, key=received.get)
    if holding:
        return f"worker {last} has no weights, and the server waits for a gradient: first send to all of `workers`"
    if not received[last]:
        return "a worker sends a gradient only after it got weights: each round sends first, and then receives"
    return "all workers wait for weights again: each round sends the weights anew"


def _explain_wait_at_once(case: _Case, board: _Board) -> str:
    """Returns the hint for an asynchronous server that got stuck."""
    sent, received = board.read("sent"), board.read("received")
    waiting, _, offering = _sort_workers(board)
    if max(received.values()) > case.steps + 1:
        return "the loop does not end: `updates` says how many gradients to take"
    for worker in received:
        if sent[worker] > received[worker]:
            return (
                f"worker {worker} gets weights while it still computes: send new weights only to the worker that the "
                "gradient came from"
            )
    for worker in received:
        if not received[worker]:
            return f"worker {worker} has no weights: at the start all workers get them, before the first gradient"
    if offering:
        return (
            f"worker {offering[0]} has a gradient ready, and the server waits for a slower one: a recv without src "
            "takes whichever comes first"
        )
    if waiting:
        return (
            f"worker {waiting[0]} waits for new weights, and the server for a slower worker: answer each gradient, by "
            "a step and new weights, before the next recv"
        )
    return "a loop does not end"


def verify_serve_in_turn(answer: Callable) -> str:
    """Serves two and three workers, and compares each one's weights with the steps in one process."""
    for case in IN_TURN:
        _verify_in_turn(answer, case)
    return "2 and 3 workers, each with all weights at once, and in every round one step with their mean"


def _verify_in_turn(answer: Callable, case: _Case) -> None:
    run, points, gradients = _run(answer, case), [make_weights()], []
    for _ in range(case.steps):
        gradients.append([find_gradient(worker, points[-1]) for worker in case.workers])
        points.append(points[-1] - case.lr * sum(gradients[-1]) / len(case.workers))
    for worker in case.workers:
        words = f"{case}: how often worker {worker} got weights"
        hint = "it is left out: go through all of `workers`"
        expect(bool(run.received[worker]), words, yours="never", expected=case.steps, hint=hint)
    for number, point in enumerate(points):
        for worker in case.workers:
            for found in run.received[worker][number : number + 1]:
                words = f"{case}: what worker {worker} got in round {number + 1}"
                _expect_mean(found, point, points[:number], gradients[:number], case, words)
    for worker in case.workers:
        count = len(run.received[worker])
        hint = "each round sends the weights: there are `rounds` of them"
        if count > case.steps:
            hint = "a round ends with its step: after the last one nothing is sent"
        words = f"{case}: how often worker {worker} got weights"
        expect(count == case.steps, words, yours=count, expected=case.steps, hint=hint)
        hint = "the last round, too, receives a gradient from every worker"
        words = f"{case}: gradients received from worker {worker}"
        expect(worker not in run.on_way, words, yours=run.count_taken(worker), expected=case.steps, hint=hint)
    _expect_in_place(run.final, points, case)
    _expect_mean(run.final, points[-1], points[:-1], gradients, case, f"{case}: the weights at the end")


def _expect_mean(
    found: torch.Tensor,
    right: torch.Tensor,
    earlier: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    case: _Case,
    words: str,
) -> None:
    """Expects ``found`` to be a step from the last ``earlier`` weights with the mean of the last ``gradients``."""
    if _are_close(found, right):
        return
    hint = "total begins every round at zero, and adds up the gradients of that round, as they are"
    if not earlier:
        hint = "the first weights that are sent are those that you were given, unchanged"
        raise NotYetError(words, yours=_format(found), expected=_format(right), hint=hint)
    names = [f"g{worker}" for worker in case.workers]
    expected = _format_step([1 / len(names)] * len(names), names)
    step = found - earlier[-1]
    shares = _find_shares(step, gradients[-1], case.lr)
    if found.isnan().any():
        hint = EARLY
    elif shares:
        hint = _explain_mean(shares, case)
    elif len(gradients) > 1 and _find_shares(step, [*gradients[-1], *gradients[-2]], case.lr):
        hint = "gradients of an earlier round are in the step again: set the total to zero in each round"
    yours = _format_step(shares, names) if shares else _format(found)
    expected = f"{expected}, where g{case.workers[0]} is worker {case.workers[0]}'s gradient"
    raise NotYetError(words, yours=yours, expected=expected, hint=hint)


def _explain_mean(shares: Sequence[float], case: _Case) -> str:
    """Returns the hint for a step in which the gradients' shares are not one over the number of workers."""
    count, absent = len(shares), [worker for worker, share in zip(case.workers, shares, strict=True) if share == 0]
    if len(absent) == count:
        return "no step was taken between the rounds: step in place, after all gradients have come"
    if absent:
        if max(shares) > 1 - 1e-3:
            return (
                "one gradient counts for all: a receive overwrites its tensor, so add it up first, or give each irecv "
                "a tensor of its own"
            )
        return f"worker {absent[0]}'s gradient is not in it: add up all of the round, and then take one step"
    if max(shares) - min(shares) > 1e-3:
        return "all gradients have the same share in a mean: add all up, divide once, and take one step"
    ratios = {
        1: "a step with the sum, or one with each gradient: the mean is the sum divided by the number of workers",
        1 / (count + 1): "divided by the number of ranks: rank 0 has no gradient, so divide by that of workers",
        1 / 2: "divided by two, whatever the number of workers: it is len(workers)",
        1 / count**2: "divided twice: divide once by len(workers)",
        1 / count / case.lr: "lr is not in the step: multiply the mean by it",
        1 / case.lr: "lr is not in the step, and it is the sum in place of the mean: divide by len(workers)",
        -1 / count: "the step has the wrong sign: subtract it from the weights",
        -1: "the step has the wrong sign, and it is the sum: subtract the mean from the weights",
    }
    return _pick(ratios, shares[0]) or "the mean is the sum divided by len(workers); the step is lr times the mean"


def verify_serve_at_once(answer: Callable) -> str:
    """Serves two and three workers of unequal speed, whose gradients arrive in a known order."""
    for case in AT_ONCE:
        _verify_at_once(answer, case)
    return "2 and 3 workers of unequal speed: a step for each gradient as it came, none waited, and all ages"


def _verify_at_once(answer: Callable, case: _Case) -> None:
    run, points, gradients, ages = _run(answer, case), [make_weights()], [], []
    seen = dict.fromkeys(case.workers, 0)
    for number, worker in enumerate(case.order):
        gradients.append(find_gradient(worker, points[seen[worker]]))
        points.append(points[-1] - case.lr * gradients[-1])
        ages.append(number - seen[worker])
        seen[worker] = number + 1
    for worker in case.workers:
        words, yours = f"{case}: what worker {worker} got first", run.received[worker][:1]
        hint = "at the start every worker gets the weights that you were given, unchanged"
        right = bool(yours) and _are_close(yours[0], points[0])
        shown = _format(yours[0]) if yours else "nothing"
        expect(right, words, yours=shown, expected=_format(points[0]), hint=hint)
    taken = sum(map(run.count_taken, case.workers))
    hint = "one gradient for each of `updates`, counted over all workers"
    expect(taken == case.steps, f"{case}: gradients taken", yours=taken, expected=case.steps, hint=hint)
    got = {worker: iter(some[1:]) for worker, some in run.received.items()}
    for number, worker in enumerate(case.order):
        words = f"{case}: what worker {worker} got after update {number + 1}"
        if (found := next(got[worker], None)) is None:
            hint = f"worker {worker} waits for weights: they go out after every update, the last one included"
            raise NotYetError(words, yours="nothing", expected="the new weights", hint=hint)
        past = points[: number + 2]
        _expect_step(found, past, gradients[: number + 1], case, words)
    _expect_in_place(run.final, points, case)
    _expect_step(run.final, points, gradients, case, f"{case}: the weights at the end")
    _expect_ages(run.ages, ages, case)


def _expect_step(
    found: torch.Tensor, points: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], case: _Case, words: str
) -> None:
    """Expects ``found`` to be the last of the ``points``, to which the last of the ``gradients`` led."""
    if _are_close(found, points[-1]):
        return
    expected = "the previous weights − lr * gradient"
    for number, point in enumerate(points[:-1]):
        if _are_close(found, point):
            hint = "first the step, in place, and then the new weights go to the worker"
            yours = f"the weights after update {number}" if number else "the weights of the start"
            raise NotYetError(words, yours=yours, expected=expected, hint=hint)
    step = found - points[-2]
    share = _find_shares(step, gradients[-1:], case.lr)
    ratios = {
        1 / len(case.workers): "each gradient is a whole step here: do not divide it",
        1 / case.lr: "lr is not in the step: multiply the gradient by it",
        -1: "the step has the wrong sign: subtract it from the weights",
    }
    hint = "a step takes the gradient that came last, as it is, and no other"
    if found.isnan().any():
        hint = EARLY
    elif share:
        hint = _pick(ratios, share[0]) or hint
    elif _find_shares(step, gradients, case.lr):
        hint = "earlier gradients are in the step again: take only the one that came last"
    yours = f"the previous weights − lr * {share[0]:.3g} * gradient" if share else _format(found)
    raise NotYetError(words, yours=yours, expected=expected, hint=hint)


def _expect_ages(yours: list[float] | str, ages: Sequence[int], case: _Case) -> None:
    words = f"{case}: the ages, with gradients of workers {', '.join(map(str, case.order))}"
    hint = f"return a list with one age for each update, {case.steps} here, in the order of the updates"
    is_list = isinstance(yours, list) and len(yours) == len(ages)
    shown = [int(age) if age.is_integer() else age for age in yours] if isinstance(yours, list) else yours
    expect(is_list, words, yours=shown, expected=list(ages), hint=hint)
    first = [case.order.index(worker) == number for number, worker in enumerate(case.order)]
    hint = "the age is the number of this update, from 0, less how many updates were in the weights its worker got"
    if all(one == age + 1 for one, age in zip(yours, ages, strict=True)):
        hint = "all are one too old: a gradient of the newest weights has age 0"
    elif all(one == age + (not new) for one, age, new in zip(yours, ages, first, strict=True)):
        hint = "one too old, except for first gradients: the weights sent after update 0 have 1 update in them"
    elif yours == list(range(len(ages))):
        hint = "these count from the start: note, when a worker gets new weights, how many updates are in them"
    elif not any(yours) or yours == [case.order[:number].count(worker) for number, worker in enumerate(case.order)]:
        hint = "these count each worker's own updates: those of all other workers make its weights older"
    expect(yours == list(ages), words, yours=shown, expected=list(ages), hint=hint)


def _expect_in_place(final: torch.Tensor, points: Sequence[torch.Tensor], case: _Case) -> None:
    """Expects the caller's weights to have changed, once the workers' weights were right."""
    hint = "weights = … names a new tensor, and the caller keeps the old one: change it in place, weights -= …"
    words = f"{case}: the caller's weights at the end"
    is_new = not _are_close(final, points[0])
    expect(is_new, words, yours="as at the start", expected="those of the last step", hint=hint)


def _find_shares(step: torch.Tensor, gradients: Sequence[torch.Tensor], lr: float) -> list[float] | None:
    """Returns how much of each gradient a step contains, in units of −lr; None if it contains anything else."""
    matrix, wanted = torch.stack(list(gradients)).double().T, -step.double() / lr
    if not wanted.isfinite().all():
        return None
    shares = torch.linalg.lstsq(matrix, wanted.unsqueeze(1)).solution.squeeze(1)
    if not torch.allclose(matrix @ shares, wanted, rtol=1e-4, atol=1e-4):
        return None
    return [round(share, 3) + 0.0 for share in shares.tolist()]  # no -0


def _pick(hints: dict[float, str], share: float) -> str:
    """Returns the hint for the first known number that a share equals; "" if there is none."""
    return next((hint for number, hint in hints.items() if abs(share - number) < 2e-3), "")


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other, rtol=1e-4, atol=1e-5)


def _format(tensor: torch.Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in tensor[:3].tolist())}, …]"


def _format_step(shares: Sequence[float], names: Sequence[str]) -> str:
    terms = " + ".join(f"{share:.3g} {name}" for share, name in zip(shares, names, strict=True))
    return f"the previous weights − lr * ({terms})"
