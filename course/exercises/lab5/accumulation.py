"""Exercise 5.4: one step over several micro-batches that sends the gradients once, with DDP on two forked ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.check.judge import AnyOf, judge
from course.exercises.probe import Probe
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

# Micro-batches of each step. Two steps, because what the first leaves behind shows in the second.
STEPS, SIZE, RANKS, LR = (3, 2), 4, 2, 0.1


def _note_events(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list[str]:
    """Notes each pass of the model, forward and backward, each sending of gradients, and each step, in order."""
    events: list[str] = []

    def note_sending(state, bucket):  # without types: DDP refuses those that are kept as text, as all are here
        events.append("send")
        return allreduce_hook(state, bucket)

    def note_forward(module: nn.Module, arguments: tuple, logits: torch.Tensor) -> None:
        events.append("forward")
        if logits.requires_grad:
            logits.register_hook(lambda _: events.append("backward"))

    model.register_comm_hook(None, note_sending)
    model.module.register_forward_hook(note_forward)
    optimizer.register_step_post_hook(lambda *_: events.append("step"))
    return events


def verify_accumulation(accumulate: Callable) -> str:
    """Makes two steps over three and two micro-batches and compares them with steps on the global batches."""

    def work(rank: int) -> list[dict]:
        model, reference = (DistributedDataParallel(Probe().double()) for _ in range(2))
        optimizer, plain = (torch.optim.SGD(one.parameters(), lr=LR, momentum=0.9) for one in (model, reference))
        events = _note_events(model, optimizer)
        generator, found = torch.Generator().manual_seed(2), []
        for count in STEPS:
            of_ranks = [[_draw(generator) for _ in range(count)] for _ in range(RANKS)]
            before, begin = _flatten(reference), count_collectives()
            last = _find_gradient(reference.module, *_join([batches[-1] for batches in of_ranks]))
            events.clear()
            accumulate(model, of_ranks[rank], optimizer)
            middle, noted = count_collectives(), [*events]
            # The expected step: one pass over all images of this rank at once; DDP averages over the ranks.
            images, labels = _join(of_ranks[rank])
            plain.zero_grad()
            F.cross_entropy(reference(images), labels).backward()
            plain.step()
            # DDP alone starts as many for both: its first steps have some that are not for gradients.
            own_calls = (middle - begin) - (count_collectives() - middle)
            updates = {"yours": _flatten(model) - before, "right": _flatten(reference) - before}
            found.append({"events": noted, "own calls": own_calls, "last": last, **updates})
        return found

    first = run_on_ranks(work, accumulate, case="two steps on two ranks", count=RANKS)[0]
    for step, (count, found) in enumerate(zip(STEPS, first, strict=True), start=1):
        case = f"step {step}, {count} micro-batches"
        _judge_events(f"{case}: what is done, in order", found["events"], count)
        _judge_update(f"{case}: the weights' update", found["yours"], found["right"], found["last"], count)
        hint = "no collective of your own: DDP has averaged the gradients when the last backward() returns"
        judge(found["own calls"], right=0, case=f"{case}: collectives beside DDP's own", hint=hint)
    return "each of two steps equals a step on its global batch, and sent the gradients once"


def _draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(SIZE, 3, 2, 2, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 10, (SIZE,), generator=generator)


def _flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _find_gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def _join(batches: list) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(part) for part in zip(*batches, strict=True))


def _judge_events(case: str, yours: list[str], count: int) -> None:
    """Compares with one forward and one backward pass for each micro-batch; the last one sends, then comes the step."""
    each, end = ["forward", "backward"], ["send", "step"]
    wrong = {
        "all micro-batches but the last run under model.no_sync(), forward, too: in it DDP decides who sends": [
            *([*each, "send"] * count),
            "step",
        ],
        "the last micro-batch runs through model, outside model.no_sync(), where DDP sends": [*each * count, "step"],
        "send in the last pass, when all gradients have been added up": [*each, "send", *each * (count - 1), "step"],
        "optimizer.step() once, after the last micro-batch": [*[*each, "step"] * (count - 1), *each, *end],
        "backward() after each forward: it frees that pass's activations": [*sorted(each * count)[::-1], *end],
    }
    hint = f"{count} micro-batches are {count} forward passes through model, each followed by its backward()"
    judge(yours, right=[*each * count, *end], case=case, wrong=wrong, hint=hint)


def _judge_update(case: str, yours: torch.Tensor, right: torch.Tensor, last: torch.Tensor, count: int) -> None:
    """Compares with the update for the mean loss over the global batch."""
    wrong = {
        "the weights did not move: were the gradients zeroed between the last backward() and the step?": 0 * right,
        "backward() adds up: divide each loss by the number of micro-batches, or the step is too long": right * count,
        "DDP has divided by the number of ranks already: divide by that of the micro-batches alone": right / RANKS,
        "only the last micro-batch counts: optimizer.zero_grad() once, before the first, not for each": AnyOf(
            (-LR * last, -LR * last / count)
        ),
    }
    hint = "the gradients of this step alone, optimizer.zero_grad() before its first micro-batch, of losses that are "
    hint += "divided by the number of micro-batches; DDP averages them over the ranks"
    judge(yours, right=right, case=case, wrong=wrong, hint=hint)
