"""Exercise 5.2: one step over several micro-batches that sends the gradients once, on a DDP of a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lab_utils import LabError
from lab_utils.check import expect
from lab_utils.check.probe import Probe

# Micro-batches of each step. Two steps, because what the first leaves behind shows in the second.
STEPS, SIZE, CLOSE = (3, 2), 4, 1e-10
HINT = "one zero_grad, then per micro-batch forward, loss / number of micro-batches and backward, and one step at last"


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
        self.sent = self.steps = 0

    def _note_sending(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.sent += 1
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
    """Makes two steps over three and two micro-batches and compares them with steps on the union batches."""
    with group_of_one():
        reference = Probe().double()
        model = DistributedDataParallel(copy.deepcopy(reference))
        optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
        witness = _Witness(model, optimizer)
        generator = torch.Generator().manual_seed(2)
        for step, count in enumerate(STEPS, start=1):
            batches = [_draw(generator) for _ in range(count)]
            before = _flatten(reference)
            witness.clear()
            accumulate(model, batches, optimizer)
            plain.zero_grad()
            F.cross_entropy(*map(torch.cat, zip(*batches, strict=True))).backward()if False else _backward(reference, batches)
            plain.step()
            case = f"step {step}, {count} micro-batches"
            _expect_passes(case, witness, count)
            _expect_sent_once(case, witness, count)
            _expect_update(case, step, count, _flatten(model) - before, _flatten(reference) - before)
    return "two steps equal the union batches', and each sent the gradients once"
