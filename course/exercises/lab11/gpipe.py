"""Exercise 11.1: a step of GPipe, in which each rank has one stage of the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from course.check.verdicts import NotYetError, expect
from course.exercises.lab8.witness import MisuseError
from course.exercises.lab10.mistakes import refusing_mistakes
from course.exercises.lab11.pipeline import EARLIER, NEIGHBOURS, WIDTH, Case, Counters, Report, find_right, take_step
from course.exercises.ranks import NETWORK, PRINTED
from course.ranks import Outcome, fork_ranks
from lab_common.text import clean

# What was received in place of the inputs shows by its values in the first, and by its shape in the second.
CASES = (Case(ranks=2, micro=4, width=WIDTH), Case(ranks=3, micro=2, width=6))
LIMIT = 15.0  # seconds for what takes milliseconds, also beside other programs
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


def verify_gpipe_step(gpipe_step: Callable) -> str:
    """Takes a step on two and on three ranks, and compares with the whole network in one process."""
    # backward(gradient) imports hundreds of modules: once here, and not in each rank of each check.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    for case in CASES:
        _verify(gpipe_step, case)
    return "the gradients of the whole network on 2 and on 3 ranks, and neighbours work at the same time"


def _verify(gpipe_step: Callable, case: Case) -> None:
    counters = Counters(case.ranks)
    outcomes = fork_ranks(partial(take_step, gpipe_step, case, counters), gpipe_step, case.ranks, limit=LIMIT)
    for rank, outcome in enumerate(outcomes):
        for line in outcome.printed.splitlines()[:PRINTED]:
            print(f"[rank {rank}] {clean(line, 200)}")
    _expect_ends(outcomes, counters, case)
    reports = [outcome.value for outcome in outcomes]
    for rank, report in enumerate(reports):
        _expect_passes(report.passes, case.micro, f"{case}, rank {rank}")
    right = find_right(case)
    for rank in reversed(range(case.ranks)):
        yours, wanted = reports[rank].gradients, right[rank].gradients
        expect(
            _are_close(yours, wanted),
            f"{case}: the gradients of rank {rank}, their length",
            yours=_format_length(yours),
            expected=_format_length(wanted),
            hint=_explain(reports, right, rank, case),
        )
    for rank, report in enumerate(reports):
        _expect_overlap(report.late, rank, str(case))


def _expect_ends(outcomes: Sequence[Outcome], counters: Counters, case: Case) -> None:
    """Raises what an answer gets that did not return on every rank."""
    expected = f"{case.micro} forward and {case.micro} backward passes on each rank"
    for rank, one in enumerate(outcomes):
        # Not what a rank says that only lost its neighbour.
        if not one.error or any(word in str(one.error) for word in (*NETWORK, "closed by peer", "Wait timeout")):
            continue
        if isinstance(one.error, MisuseError):
            where = f"rank {rank}: {one.line or 'at its end'}"
            raise NotYetError(f"{case}: the messages", yours=where, expected=expected, hint=str(one.error))
        one.error.line_of_answer = one.line
        with refusing_mistakes(f"{case}: rank {rank}", expected, MISTAKES):
            raise one.error
    silent = [rank for rank, one in enumerate(outcomes) if one.error or one.stuck or one.number]
    if silent:
        lines = [f"rank {rank} stands in {outcomes[rank].line}" for rank in silent if outcomes[rank].line]
        forward, backward = counters.read("F"), counters.read("B")
        ended = f"rank {', '.join(map(str, silent))} did not return"
        raise NotYetError(
            f"{case}: the step did not end",
            yours=f"forward passes by rank: {forward}, backward: {backward}; {(lines or [ended])[0]}",
            expected=expected,
            hint=_explain_wait(forward, backward, case.micro),
        )


def _explain_wait(forward: list[int], backward: list[int], micro: int) -> str:
    """The hint that fits passes at which the ranks have stopped."""
    for rank in range(1, len(forward)):
        if forward[rank] > forward[rank - 1]:
            return f"rank {rank} ran forward without rank {rank - 1}'s output: above rank 0, dist.recv comes first"
    for rank in range(1, len(forward)):
        if forward[rank - 1] > 0 and not forward[rank]:
            return f"rank {rank} got no output: each rank but the last, world_size − 1, sends its own to rank + 1"
    if backward[-1] and forward[-1] < micro:
        return "all forward passes come first, also on the last rank: run backward in a second loop"
    if 0 < backward[-1] < micro:
        return "each rank runs a backward pass for each micro-batch, also the last one"
    for rank in range(1, len(backward)):
        if backward[rank] > 0 and not backward[rank - 1]:
            return f"rank {rank - 1} got no gradient: each rank above 0 sends x.grad to rank − 1 after each backward"
    return f"a rank waits for a message that nobody sends, or a loop does not end: {NEIGHBOURS}"


def _expect_passes(passes: str, micro: int, case: str) -> None:
    forward, backward = passes.count("F"), passes.count("B")
    hint = "call stage(x) once for each micro-batch, and keep its output for backward"
    expect(forward == micro, f"{case}: forward passes", yours=forward, expected=micro, hint=hint)
    hint = "a second loop runs one backward for each micro-batch, on every rank"
    expect(backward == micro, f"{case}: backward passes", yours=backward, expected=micro, hint=hint)
    right = "F" * micro + "B" * micro
    hint = "GPipe runs all forward passes first: keep the outputs in a list, and run backward in a second loop"
    expect(passes == right, f"{case}: the order of its passes", yours=passes, expected=right, hint=hint)


def _expect_overlap(late: str, rank: int, case: str) -> None:
    hint = "the next rank could work meanwhile: receive, compute and send one micro-batch before the next one"
    yours = f"rank {rank + 1} begins only after rank {rank}'s last one"
    expected = f"rank {rank + 1} begins when rank {rank} has sent the first output"
    expect("F" not in late, f"{case}: the forward passes", yours=yours, expected=expected, hint=hint)
    hint = (
        "the rank before could work meanwhile: one backward for each micro-batch, and send x.grad before the next one"
    )
    yours = f"rank {rank - 1} begins only after rank {rank}'s last one"
    expected = f"rank {rank - 1} begins when rank {rank} has sent the first gradient"
    expect("B" not in late, f"{case}: the backward passes", yours=yours, expected=expected, hint=hint)


def _explain(reports: list[Report], right: list[Report], rank: int, case: Case) -> str:
    """The hint that fits wrong gradients: where what a stage got is not what it should have got."""
    for place, (report, wanted) in enumerate(zip(reports, right, strict=True)):
        if not _are_close(report.given, wanted.given):
            if place and _are_close(report.given, case.draw()[0]):
                return f"rank {place} used its own inputs: above rank 0, call stage(x) with the x of dist.recv"
            return (
                f"rank {place}'s stage got something else than rank {place - 1} found: send output, and use it as it is"
            )
    if _are_close(reports[rank].gradients, [one - EARLIER + EARLIER / case.micro for one in right[rank].gradients]):
        return "dividing .grad at the end also divides what was there before the step: divide each micro-batch's loss"
    last = case.ranks - 1
    for place in reversed(range(rank, case.ranks)):
        yours, wanted = (list(map(one[place].found.get, range(case.micro))) for one in (reports, right))
        if not _are_close(yours, wanted):
            return _explain_loss(yours, wanted, case) if place == last else _explain_gradients(yours, wanted, place)
    if any(one is None for one in reports[rank].gradients):
        return "backward leaves the gradients in the parameters' .grad: let them stay there"
    if _are_close(reports[rank].gradients, [one - EARLIER for one in right[rank].gradients]):
        return "the step adds to the gradients that are there: zero_grad() is the caller's"
    for factor in (case.micro, case.ranks):
        if _are_close(reports[rank].gradients, [one / factor for one in right[rank].gradients]):
            return "divided twice: the loss divided by len(inputs) is enough"
    return (
        "the gradients of all micro-batches add up in .grad: do not set them to zero between, and change nothing else"
    )


def _explain_loss(yours: list[torch.Tensor], wanted: list[torch.Tensor], case: Case) -> str:
    """The hint for gradients that the loss gave to the last stage's outputs."""
    ratios = {
        case.micro: "the losses are added up, and no mean is taken: divide each micro-batch's loss by len(inputs)",
        case.micro
        / case.ranks: "divide the loss by the number of micro-batches, len(inputs), and not by that of ranks",
        1 / case.micro: "divided twice: divide each micro-batch's loss by len(inputs) once",
    }
    for ratio, hint in ratios.items():
        if _are_close(yours, [ratio * one for one in wanted]):
            return hint
    return "on the last rank: find_loss(output, target) of the same micro-batch, divided by len(inputs)"


def _explain_gradients(yours: list[torch.Tensor], wanted: list[torch.Tensor], place: int) -> str:
    """The hint for gradients with which a stage that has no loss ran backward."""
    if all(any(_are_close([one], [other]) for other in wanted) for one in yours):
        return "a gradient met another micro-batch's output: all ranks run backward in the same order of micro-batches"
    totals = [sum(wanted[: number + 1]) for number in range(len(wanted))]
    if _are_close(yours, totals):
        return OWN
    return f"rank {place}'s backward needs what rank {place + 1} found in x.grad, as it is: output.backward(gradient)"


def _are_close(some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one is not None and one.shape == other.shape and torch.allclose(one.float(), other, rtol=1e-4, atol=1e-6)
        for one, other in zip(some, others, strict=True)
    )


def _format_length(gradients: Sequence[torch.Tensor | None]) -> str:
    """The length of all as one vector."""
    if any(one is None for one in gradients):
        return "None"
    return f"{float(torch.cat([one.flatten() for one in gradients]).norm()):.6f}"
