"""Exercise 11.1: a step of GPipe, on forked ranks that have one stage each, and whose messages are watched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import RawArray

import torch
from torch import nn
from torch.nn import functional as F

from course.check.judge import AnyOf, judge
from course.check.verdicts import NotYetError
from course.exercises.messages import expect_no_error, watch_messages
from course.exercises.ranks import show_printed
from course.exercises.witness import MisuseError
from course.ranks import Outcome, fork_ranks

BATCH, WIDTH = 2, 4  # rows of a micro-batch, and numbers in each row that a stage sends
SHAPE = (BATCH, WIDTH)
EARLIER = 0.5  # the gradient that each parameter has before the step
LIMIT = 15.0  # seconds for what takes milliseconds, also beside other programs
# Seconds that a stage's last pass waits for its neighbour's first one, which in a pipeline has begun long ago.
PATIENCE = 5.0
CLOSE = 1e-4
ONE_EACH = "one message of the given shape for each micro-batch, float32: receive it into torch.empty(shape)"
ENDS = "rank 0 has no rank before it, and the last rank, world_size − 1, none after it"
NEIGHBOURS = "rank r receives from r − 1 and sends to r + 1, and the gradients go the other way"
OWN = "each micro-batch needs tensors of its own: make x = torch.empty(shape) inside of the loop"
MISTAKES = {
    "shapes cannot be multiplied": "a stage got what is not its own: each rank above 0, and there can be more than "
    "two, calls stage(x) with what it received from rank − 1",
    "got <class 'NoneType'>": "x.grad is None: after dist.recv call x.requires_grad_(), and send x.grad on ranks above "
    "0, after backward",
    "implicitly created only for scalar": "only the last rank has a loss: on the others output.backward(gradient), "
    "with what came from rank + 1",
    "Mismatch in shape: grad_output": "the loss on the last rank is one number: its backward takes no gradient",
    "does not require grad": "send output.detach(), and call backward of output itself, which has the graph",
    "by an inplace operation": OWN,
    "through the graph a second time": "one backward for each micro-batch, of that micro-batch's output",
    "same as the rank of the current process": NEIGHBOURS,
}


@dataclass(frozen=True)
class _Case:
    """One test case; ``width`` is the width of the inputs."""

    ranks: int
    micro: int
    width: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.micro} micro-batches"

    def draw(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns inputs and targets of all micro-batches, float32, the same on every rank."""
        generator = torch.Generator().manual_seed(self.ranks)
        inputs = torch.randn(self.micro, BATCH, self.width, generator=generator)
        return list(inputs), list(torch.randn(self.micro, *SHAPE, generator=generator))

    def build(self, rank: int) -> nn.Linear:
        """Returns the layer of a rank's stage."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            return nn.Linear(WIDTH if rank else self.width, WIDTH)


# What was received in place of the inputs shows by its values in the first, and by its shape in the second.
CASES = (_Case(ranks=2, micro=4, width=WIDTH), _Case(ranks=3, micro=2, width=6))


@dataclass
class _Report:
    """The work that a rank did, or should have done.

    Attributes:
        gradients: The gradients of its parameters; None for a missing one.
        given: The stage's input in each forward pass.
        found: The gradient of each output, by forward pass.
        passes: ``F`` and ``B`` in the order in which the passes began.
        late: Kinds of passes, ``F`` or ``B``, that the neighbour began only after this rank's last one.
    """

    gradients: list[torch.Tensor | None] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    passes: str = ""
    late: str = ""


class _Stage(nn.Module):
    """A layer and tanh; notes its passes, and counts them in ``begun``, by kind and rank, which all forks share."""

    def __init__(self, case: _Case, rank: int, begun: dict) -> None:
        super().__init__()
        self.layer = case.build(rank)
        self._micro, self._rank, self._begun = case.micro, rank, begun
        self.report = _Report()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (2, width) to (2, 4)."""
        number = len(self.report.given)
        self.report.given.append(x.detach().clone())
        self._note("F", self._rank + 1)
        output = torch.tanh(self.layer(x))
        if output.requires_grad:
            output.register_hook(partial(self._note_gradient, number))
        return output

    def _note_gradient(self, number: int, gradient: torch.Tensor) -> None:
        self.report.found[number] = gradient.detach().clone()
        self._note("B", self._rank - 1)

    def _note(self, kind: str, neighbour: int) -> None:
        """Notes a pass; the last one of its kind waits until the neighbour, if there is one, has begun its first."""
        begun = self._begun[kind]
        self.report.passes += kind
        begun[self._rank] += 1
        if begun[self._rank] != self._micro or not 0 <= neighbour < len(begun):
            return
        end = time.monotonic() + PATIENCE
        while not begun[neighbour]:
            if time.monotonic() > end:
                self.report.late += kind
                return
            time.sleep(0.001)


def verify_gpipe_step(gpipe_step: Callable) -> str:
    """Takes a step on two and on three ranks, and compares with the whole network in one process."""
    # backward(gradient) imports hundreds of modules: once here, and not in each rank of each check.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    for case in CASES:
        begun = {kind: RawArray("i", case.ranks) for kind in "FB"}
        outcomes = fork_ranks(partial(_take_step, gpipe_step, case, begun), gpipe_step, case.ranks, limit=LIMIT)
        show_printed(dict(enumerate(outcomes)))
        expected = f"{case.micro} forward and {case.micro} backward passes on each rank"
        expect_no_error(outcomes, str(case), expected, MISTAKES)
        _expect_return(outcomes, begun, case, expected)
        _judge_reports([outcome.value for outcome in outcomes], case)
    return "the gradients of the whole network on 2 and on 3 ranks, and neighbours work at the same time"


def _take_step(gpipe_step: Callable, case: _Case, begun: dict, rank: int) -> _Report:
    """Takes one step on a rank; returns its report."""

    def inspect(tensor: torch.Tensor, peer: int | None) -> None:
        if peer is not None and not 0 <= peer < case.ranks:
            raise MisuseError(ENDS)
        if peer is not None and abs(peer - rank) != 1:
            raise MisuseError(NEIGHBOURS)
        if tensor.nbytes != 4 * math.prod(SHAPE):
            raise MisuseError(ONE_EACH)

    witness, stage = watch_messages(inspect), _Stage(case, rank, begun)
    for one in stage.parameters():  # of an earlier step, to which this one adds
        one.grad = torch.full_like(one, EARLIER)
    inputs, targets = case.draw()
    gpipe_step(stage, inputs, targets, _find_loss, SHAPE)
    if any(one.requires_grad for one in inputs):
        raise MisuseError(
            "requires_grad_() only on what was received: inputs can be whole numbers, such as the GPT's bytes, with no "
            "gradient"
        )
    if witness.count_open():
        raise MisuseError("wait() for every isend and irecv before you return: else it may not have ended")
    stage.report.gradients = [one.grad for one in stage.parameters()]
    return stage.report


def _find_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a micro-batch, from its output and its target in this order."""
    if target.requires_grad:
        raise MisuseError("find_loss takes the output first, and then the target")
    return F.mse_loss(output, target)


def _find_right(case: _Case) -> list[_Report]:
    """Returns the right report of each rank, from the whole network in one process."""
    layers = [case.build(rank) for rank in range(case.ranks)]
    reports = [_Report() for _ in layers]
    for number, (x, y) in enumerate(zip(*case.draw(), strict=True)):
        for layer, report in zip(layers, reports, strict=True):
            report.given.append(x.detach())
            x = torch.tanh(layer(x))
            x.register_hook(partial(report.found.__setitem__, number))
        (_find_loss(x, y) / case.micro).backward()
    for layer, report in zip(layers, reports, strict=True):
        report.gradients = [one.grad + EARLIER for one in layer.parameters()]
    return reports


def _expect_return(outcomes: Sequence[Outcome], begun: dict, case: _Case, expected: str) -> None:
    """Expects every rank to return; otherwise the passes at which they have stopped give the hint."""
    silent = [rank for rank, one in enumerate(outcomes) if one.error or one.stuck or one.number]
    if not silent:
        return
    forward, backward = list(begun["F"]), list(begun["B"])
    hint = f"a rank waits for a message that nobody sends, or a loop does not end: {NEIGHBOURS}"
    for rank in reversed(range(1, case.ranks)):
        if backward[rank] and forward[rank - 1] == case.micro and not backward[rank - 1]:
            hint = f"rank {rank - 1} got no gradient: each rank above 0 sends x.grad to rank − 1 after each backward"
        if forward[rank - 1] and not forward[rank]:
            hint = f"rank {rank} got no output: each rank but the last, world_size − 1, sends its own to rank + 1"
    if backward[-1] and forward[-1] < case.micro:
        hint = "all forward passes come first, also on the last rank: run backward in a second loop"
    lines = [f"rank {rank} stands in {outcomes[rank].line}" for rank in silent if outcomes[rank].line]
    lines += [f"rank {', '.join(map(str, silent))} did not return"]
    raise NotYetError(
        f"{case}: the step did not end",
        yours=f"forward passes by rank: {forward}, backward: {backward}; {lines[0]}",
        expected=expected,
        hint=hint,
    )


def _judge_reports(reports: Sequence[_Report], case: _Case) -> None:
    right, inputs = _find_right(case), case.draw()[0]
    for rank, report in enumerate(reports):
        judge(
            report.passes,
            right="F" * case.micro + "B" * case.micro,
            case=f"{case}, rank {rank}: forward (F) and backward passes (B), in their order",
            hint="call stage(x) once for each micro-batch; a second loop runs one backward for each, on every rank",
            wrong={
                "GPipe runs all forward passes first: keep the outputs in a list, and run backward in a second loop": (
                    "FB" * case.micro
                )
            },
        )
        judge(
            report.given,
            right=right[rank].given,
            case=f"{case}, rank {rank}: what its stage got",
            hint="rank 0 calls stage(x) with its inputs, all others with what the rank before found, as it is",
            wrong={"above rank 0, call stage(x) with the x of dist.recv, and not with your own inputs": inputs},
            within=CLOSE,
        )
    for rank in reversed(range(case.ranks)):
        _judge_gradients(reports[rank], right[rank], rank, case)
    for rank, report in enumerate(reports):
        judge(
            report.late,
            right="",
            case=f"{case}, rank {rank}: passes (F, B) that its neighbour begins only after the last one here",
            hint="the ranks have to work at the same time",
            wrong={
                "the next rank could work meanwhile: receive, compute and send one micro-batch before the next one": (
                    AnyOf(("F", "FB"))
                ),
                "the rank before could work meanwhile: one backward for each micro-batch, and send x.grad before the "
                "next one": "B",
            },
            show=lambda late: late or "none",
        )


def _judge_gradients(report: _Report, right: _Report, rank: int, case: _Case) -> None:
    """Compares the gradients of a rank's outputs, which come from the next rank or the loss, then its parameters'."""
    found, wanted = ([one.found.get(number) for number in range(case.micro)] for one in (report, right))
    wrong = {
        "a gradient met another micro-batch's output: all ranks run backward in the same order of micro-batches": (
            wanted[::-1]
        )
    }
    hint = f"rank {rank}'s backward needs what rank {rank + 1} found in x.grad, as it is: output.backward(gradient)"
    if rank == case.ranks - 1:
        hint = "on the last rank: find_loss(output, target) of the same micro-batch, divided by len(inputs)"
        wrong = {
            "the losses are added up, and no mean is taken: divide each micro-batch's loss by len(inputs)": [
                case.micro * one for one in wanted
            ],
            "divide the loss by the number of micro-batches, len(inputs), and not by that of ranks": [
                case.micro / case.ranks * one for one in wanted
            ],
        }
    words = f"{case}, rank {rank}: the gradients"
    judge(found, right=wanted, case=f"{words} of its outputs", hint=hint, wrong=wrong, within=CLOSE)
    judge(
        report.gradients,
        right=right.gradients,
        case=f"{words} of its parameters",
        hint="all micro-batches add up in .grad: do not set it to zero between, and leave the sum there",
        wrong={
            "the step adds to the gradients that are there: zero_grad() is the caller's": [
                one - EARLIER for one in right.gradients
            ]
        },
        within=CLOSE,
    )
