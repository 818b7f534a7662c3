"""Ranks that send to each other, for the checks of a pipeline's step and of a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from course.check.verdicts import NotYetError, refusing
from course.exercises.ranks import NETWORK
from course.exercises.witness import MisuseError, Witness
from course.ranks import Outcome

# What a rank says that only lost its neighbour.
LOST = (*NETWORK, "closed by peer", "Wait timeout")


def watch_messages(inspect: Callable[[torch.Tensor, int | None], None]) -> Witness:
    """Watches the messages of this process; see :class:`Witness`.

    Args:
        inspect: Is called with each tensor and the other rank, None if that can be any, before the message is begun;
            it refuses one by :class:`MisuseError`.
    """
    witness, group = Witness(), dist.ProcessGroup

    def inspecting(start: Callable, to_any: bool = False) -> Callable:
        def begin(group: dist.ProcessGroup, tensors: list[torch.Tensor], *where: int, **options: int) -> Any:
            inspect(tensors[0], None if to_any else options["peer"] if "peer" in options else where[0])
            # The witness fills a tensor, which autograd forbids where the tensor already asks for a gradient.
            return start(group, [tensors[0].detach()], *where, **options)

        return begin

    group.send, group.recv = inspecting(group.send), inspecting(group.recv)
    group.recv_anysource = inspecting(group.recv_anysource, to_any=True)
    return witness


def expect_no_error(outcomes: Iterable[Outcome], case: str, expected: str, hints: Mapping[str, str]) -> None:
    """Raises the first error of the answer's own; not those of ranks that lost another one.

    Args:
        outcomes: Of the ranks that ran the answer.
        case: What was tried.
        expected: The expected behaviour.
        hints: For words of torch's message a hint; an error without one passes on as it is.
    """
    for rank, one in enumerate(outcomes):
        if not one.error or any(word in str(one.error) for word in LOST):
            continue
        if isinstance(one.error, MisuseError):
            where = f"rank {rank}: {one.line or 'at its end'}"
            raise NotYetError(f"{case}: the messages", yours=where, expected=expected, hint=str(one.error))
        one.error.line_of_answer = one.line
        with refusing(case=f"{case}: rank {rank}", expected=expected, hints=hints):
            raise one.error
