"""Watches and delays a rank's messages from outside the learner's function, however it imports torch.

Every way to send in ``torch.distributed`` (``send``, ``isend``, ``batch_isend_irecv``, with ``tag=`` or ``group=``)
ends at ``ProcessGroup.send``, and likewise for receiving. Two mistakes pass most runs by luck. Here they never do: a
tensor that is being received holds NaN until ``wait()``, and one that is being sent must be unchanged at ``wait()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

KINDS = ("gather", "reduce", "broadcast", "scatter", "alltoall", "all_to_all")
# Methods of torch's ProcessGroup; their names differ between torch 2.11 and 2.14.
COLLECTIVES = [name for name in vars(dist.ProcessGroup) if any(kind in name for kind in KINDS)]


def note_collectives() -> list[str]:
    """Notes the collectives of this process from now on, by the names above. Only for a process that ends soon."""
    names: list[str] = []
    group = dist.ProcessGroup

    def noting(name: str, start: Callable) -> Callable:
        def note(*arguments: object, **options: object) -> object:
            names.append(name)
            return start(*arguments, **options)

        return note

    for name in COLLECTIVES:
        setattr(group, name, noting(name, getattr(group, name)))
    return names


class MisuseError(Exception):
    """A misuse of a message that most runs do not show; its text is the hint."""


class _Transfer:
    """The return value of ``isend`` and ``irecv`` here: the work, and what to do to the tensor at ``wait()``."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, content: torch.Tensor, *, receives: bool) -> None:
        self._work, self._tensor, self._content, self._receives = work, tensor, content, receives
        self.waited = False

    def wait(self, *arguments: object) -> bool:
        done = self._work.wait(*arguments)
        if not self.waited:
            self.waited = True
            self._finish()
        return done

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        return self.wait() if done else False

    def _finish(self) -> None:
        if self._receives:
            self._tensor.copy_(self._content)
        elif not torch.equal(self._tensor.contiguous().view(torch.uint8), self._content.view(torch.uint8)):
            raise MisuseError("a tensor was changed while it was being sent: wait for the send first")

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


class Witness:
    """Notes the messages of this process from now on. Only for a process that ends soon: nothing is restored."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # to whom, and how many bytes
        self._transfers: list[_Transfer] = []
        group = dist.ProcessGroup
        send, receive, receive_any = group.send, group.recv, group.recv_anysource

        def note_send(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> _Transfer:
            content = tensors[0].detach().clone(memory_format=torch.contiguous_format)
            self.sent.append((peer, content.nbytes))
            return self._keep(send(group, [content], peer, tag), tensors[0], content, receives=False)

        def note_receive(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *where: int) -> _Transfer:
            content = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
            work = (receive if len(where) == 2 else receive_any)(group, [content], *where)
            # Whoever uses it before wait() computes with this.
            tensors[0].fill_(torch.nan if tensors[0].is_floating_point() else torch.iinfo(tensors[0].dtype).min)
            return self._keep(work, tensors[0], content, receives=True)

        def refuse(*_: object, **__: object) -> None:
            raise MisuseError("write it with isend and irecv (or send and recv), without a collective of torch's")

        group.send, group.recv, group.recv_anysource = note_send, note_receive, note_receive
        for name in COLLECTIVES:
            setattr(group, name, refuse)

    def _keep(self, *arguments: object, **options: object) -> _Transfer:
        self._transfers.append(_Transfer(*arguments, **options))
        return self._transfers[-1]

    def count_open(self) -> int:
        """Returns the number of sends and receives that were started but not waited for."""
        return sum(not transfer.waited for transfer in self._transfers)
