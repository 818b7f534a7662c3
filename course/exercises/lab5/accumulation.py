"""Exercise 5.4: one step over several micro-batches that sends the gradients once, with DDP on two forked ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.check.verdicts import expect
from course.exercises.probe import Probe
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

# Micro-batches of each step. Two steps, because what the first leaves behind shows in the second.
STEPS, SIZE, RANKS, CLOSE = (3, 2), 4, 2, 1e-10


class _Witness:
    """Notes the passes of a DDP model, forward and backward, whether each should send, and what was sent."""

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.clear()
        model.register_comm_hook(None, self._note_sending)
        model.module.register_forward_hook(self._note_forward)
        optimizer.register_step_post_hook(self._note_step)

    def clear(self) -> None:
        """Clears the notes."""
        self.events: list[str] = []
        self.forward_syncs: list[bool] = []
        self.backward_syncs: list[bool] = []
        self.sent_in: list[int] = []  # the number of the backward pass of each sending
        self.steps = 0

    def get_notes(self) -> dict[str, Any]:
        """Returns the notes, without the model."""
        return {name: value for name, value in vars(self).items() if name != "_model"}

    def _note_sending(self, state, bucket):  # without types: DDP refuses those that are kept as text, as all are here
        self.sent_in.append(self.events.count("backward"))
        return allreduce_hook(state, bucket)

    def _note_forward(self, module: nn.Module, arguments: tuple, logits: torch.Tensor) -> None:
        self.events.append("forward")
        self.forward_syncs.append(self._model.require_backward_grad_sync)
        if logits.requires_grad:
            logits.register_hook(self._note_backward)

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self.events.append("backward")
        self.backward_syncs.append(self._model.require_backward_grad_sync)

    def _note_step(self, *_: object) -> None:
        self.steps += 1


def verify_accumulation(accumulate: Callable) -> str:
    """Makes two steps over three and two micro-batches and compares them with steps on the global batches."""

    def work(rank: int) -> list[dict]:
        model, reference = (DistributedDataParallel(Probe().double()) for _ in range(2))
        optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
        witness = _Witness(model, optimizer)
        generator, found = torch.Generator().manual_seed(2), []
        for count in STEPS:
            of_ranks = [[_draw(generator) for _ in range(count)] for _ in range(RANKS)]
            before, begin = _flatten(reference), count_collectives()
            last = _find_gradient(reference.module, *_join([batches[-1] for batches in of_ranks]))
            witness.clear()
            accumulate(model, of_ranks[rank], optimizer)
            middle = count_collectives()
            _step(reference, plain, *_join(of_ranks[rank]))
            # DDP alone starts as many for both: its first steps have some that are not for gradients.
            own_calls = (middle - begin) - (count_collectives() - middle)
            updates = {"yours": _flatten(model) - before, "right": _flatten(reference) - before}
            found.append({"notes": witness.get_notes(), "own_calls": own_calls, "last": last, **updates})
        return found

    first = run_on_ranks(work, accumulate, case="two steps on two ranks", count=RANKS)[0]
    for step, (count, found) in enumerate(zip(STEPS, first, strict=True), start=1):
        case, notes = f"step {step}, {count} micro-batches", found["notes"]
        _expect_passes(case, notes, count)
        _expect_sent_once(case, notes, count)
        _expect_update(case, found["yours"], found["right"], count=count, last=found["last"])
        hint = "no collective of your own: DDP has averaged the gradients when the last backward() returns"
        yours = found["own_calls"]
        expect(yours == 0, f"{case}: collectives beside DDP's own", yours=yours, expected=0, hint=hint)
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


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Takes the expected step: one pass over all images of this rank at once; DDP averages over the ranks."""
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def _expect_passes(case: str, notes: dict, count: int) -> None:
    """Expects one forward and one backward pass per micro-batch, in turns, and one step."""
    passes = ["forward", "backward"] * count
    hint = f"{count} micro-batches are {count} forward passes through model, each followed by its backward()"
    if notes["events"] == ["forward"] * count + ["backward"] * count:
        hint = "backward() after each forward: it frees that pass's activations"
    expect(
        notes["events"] == passes,
        f"{case}: the passes",
        yours=" ".join(notes["events"]) or "none",
        expected=" ".join(passes),
        hint=hint,
    )
    hint = "optimizer.step() once, after the last micro-batch: until then the gradients are only being added up"
    expect(notes["steps"] == 1, f"{case}: steps of the optimizer", yours=notes["steps"], expected=1, hint=hint)


def _expect_sent_once(case: str, notes: dict, count: int) -> None:
    """Expects the gradients to be sent once, in the last backward pass, after all micro-batches were added up."""
    hint = "all micro-batches but the last run under model.no_sync()"
    if not notes["sent_in"]:
        hint = "the last micro-batch runs through model, outside model.no_sync(), where DDP sends"
    elif all(notes["forward_syncs"]) and not all(notes["backward_syncs"]):
        hint = "forward belongs under model.no_sync() too: DDP decides in the forward pass whether backward will send"
    expect(
        len(notes["sent_in"]) == 1,
        f"{case}: how often DDP sent the gradients",
        yours=len(notes["sent_in"]),
        expected=1,
        hint=hint,
    )
    expect(
        notes["sent_in"] == [count],
        f"{case}: in which of the backward passes the gradients were sent",
        yours=notes["sent_in"][0],
        expected=count,
        hint="send in the last pass, when all gradients have been added up; what comes later stays on its own rank",
    )


def _expect_update(case: str, yours: torch.Tensor, right: torch.Tensor, *, count: int, last: torch.Tensor) -> None:
    """Expects the update for the mean loss over the global batch."""
    ratio = float(yours.norm() / right.norm())
    # Both in the first step, when the momentum is the gradient: the direction tells which gradients went into it.
    of_last, of_all = (float(F.cosine_similarity(yours, other, dim=0)) for other in (-last, right))
    hint = "the loss of each micro-batch is the mean over its images, divided by the number of micro-batches"
    if not ratio:
        hint = "the weights did not move: were the gradients zeroed between the last backward() and the step?"
    elif of_all > 1 - CLOSE and abs(ratio - count) < CLOSE:
        hint = "backward() adds up: divide each loss by the number of micro-batches, or the step is too long"
    elif of_all > 1 - CLOSE and abs(ratio * RANKS - 1) < CLOSE:
        hint = "DDP has divided by the number of ranks already: divide by that of the micro-batches alone"
    elif of_all > 1 - CLOSE and abs(ratio - RANKS) < CLOSE:
        hint = "DDP has averaged when the last backward() returns: all-reduce nothing yourself"
    elif of_last > 1 - CLOSE:
        hint = "only the last micro-batch counts: optimizer.zero_grad() once, before the first, not for each"
    elif of_all < 1 - CLOSE:
        hint = "are gradients of the step before still there (optimizer.zero_grad() comes before the first micro-batch)"
        hint += ", or is the loss not divided by the number of this call's micro-batches?"
    expect(
        float((yours - right).abs().max()) <= CLOSE,
        f"{case}: the length of the weights' update",
        yours=f"{ratio * float(right.norm()):.6f}",
        expected=f"{float(right.norm()):.6f}",
        hint=hint,
    )
