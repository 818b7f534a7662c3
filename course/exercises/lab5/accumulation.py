"""Exercise 5.4: one step over several micro-batches that sends the gradients once, on a DDP of a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.check import expect
from course.exercises.probe import Probe
from lab_common import LabError

# Micro-batches of each step. Two steps, because what the first leaves behind shows in the second.
STEPS, SIZE, CLOSE = (3, 2), 4, 1e-10


class _Witness:
    """Notes what happens to a DDP model: forward and backward passes, whether they were to send, and what was sent."""

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.clear()
        model.register_comm_hook(None, self._note_sending)
        model.module.register_forward_hook(self._note_forward)
        optimizer.register_step_post_hook(self._note_step)

    def clear(self) -> None:
        """Forgets what was noted."""
        self.events: list[str] = []
        self.forward_syncs: list[bool] = []
        self.backward_syncs: list[bool] = []
        self.sent_in: list[int] = []  # the number of the backward pass of each sending
        self.steps = 0

    def _note_sending(self, state, bucket):  # without types: DDP refuses those that are kept as text, as all are here
        self.sent_in.append(self.events.count("backward"))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())  # the mean over one rank
        return done

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


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone for a block; one that is there already is used, and left.

    Raises:
        LabError: The one that is there has other processes, which do not take part.
    """
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            fix = "dist.destroy_process_group(), then run the cell again"
            raise LabError("A process group with other processes is open here.", where="this kernel", fix=fix)
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def verify_accumulation(accumulate: Callable) -> str:
    """Makes two steps over three and two micro-batches and compares them with steps on the global batches."""
    with group_of_one():
        reference = Probe().double()
        model = DistributedDataParallel(copy.deepcopy(reference))
        optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
        witness = _Witness(model, optimizer)
        generator = torch.Generator().manual_seed(2)
        for step, count in enumerate(STEPS, start=1):
            batches = [_draw(generator) for _ in range(count)]
            before, last = _flatten(reference), _find_gradient(reference, *batches[-1])
            witness.clear()
            accumulate(model, batches, optimizer)
            _step(reference, plain, batches)
            case = f"step {step}, {count} micro-batches"
            _expect_passes(case, witness, count)
            _expect_sent_once(case, witness, count)
            _expect_update(case, _flatten(model) - before, _flatten(reference) - before, count=count, last=last)
    return "each of two steps equals a step on its global batch, and sent the gradients once"


def _draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(SIZE, 3, 2, 2, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 10, (SIZE,), generator=generator)


def _flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _find_gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> None:
    """The expected step: one pass over all images at once."""
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def _expect_passes(case: str, witness: _Witness, count: int) -> None:
    """One forward and one backward pass per micro-batch, in turns, and one step."""
    passes = ["forward", "backward"] * count
    hint = f"{count} micro-batches are {count} forward passes through model, each followed by its backward()"
    if witness.events == ["forward"] * count + ["backward"] * count:
        hint = "backward() after each forward: it frees that pass's activations"
    expect(
        witness.events == passes,
        f"{case}: the passes",
        yours=" ".join(witness.events) or "none",
        expected=" ".join(passes),
        hint=hint,
    )
    hint = "optimizer.step() once, after the last micro-batch: until then the gradients are only being added up"
    expect(witness.steps == 1, f"{case}: steps of the optimizer", yours=witness.steps, expected=1, hint=hint)


def _expect_sent_once(case: str, witness: _Witness, count: int) -> None:
    """The gradients were sent once, in the last backward pass, when all micro-batches had been added up."""
    hint = "all micro-batches but the last run under model.no_sync()"
    if not witness.sent_in:
        hint = "the last micro-batch runs through model, outside model.no_sync(), or the ranks never exchange gradients"
    elif all(witness.forward_syncs) and not all(witness.backward_syncs):
        hint = "forward belongs under model.no_sync() too: DDP decides in the forward pass whether backward will send"
    expect(
        len(witness.sent_in) == 1,
        f"{case}: how often the gradients were sent",
        yours=len(witness.sent_in),
        expected=1,
        hint=hint,
    )
    expect(
        witness.sent_in == [count],
        f"{case}: in which of the backward passes the gradients were sent",
        yours=witness.sent_in[0],
        expected=count,
        hint="send in the last pass, when all gradients have been added up; what comes later stays on its own rank",
    )


def _expect_update(case: str, yours: torch.Tensor, right: torch.Tensor, *, count: int, last: torch.Tensor) -> None:
    """The weights moved as they do for the mean loss over the global batch."""
    ratio = float(yours.norm() / right.norm())
    # Both in the first step, when the momentum is the gradient: the direction tells which gradients went into it.
    of_last, of_all = (float(F.cosine_similarity(yours, other, dim=0)) for other in (-last, right))
    hint = "the loss of each micro-batch is the mean over its images, divided by the number of micro-batches"
    if of_all > 1 - CLOSE and abs(ratio - count) < CLOSE:
        hint = "backward() adds up: divide each loss by the number of micro-batches, or the step is too long"
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
