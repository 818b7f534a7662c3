"""Exercise 2.3: the learner's function on two ranks at once, which are threads with an all-reduce that waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from course.check.verdicts import NotYetError, expect, refusing
from course.exercises.lab2.recorder import Recorder

# Images, summed loss and top-1 hits of two ranks: shares of different size, so that a mean of means is not the mean.
SHARES = ((17.0, 34.0, 5.0), (16.0, 40.0, 12.0))
PATIENCE = 3.0  # seconds that a rank waits for the other before we call it a hang


@dataclass
class _Ranks:
    """Two ranks in threads, with an all-reduce that waits as the real one does."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(len(SHARES)))
    brought: dict[int, torch.Tensor] = field(default_factory=dict)
    writers: dict[int, list[Recorder]] = field(default_factory=lambda: {rank: [] for rank in range(len(SHARES))})
    errors: dict[int, Exception] = field(default_factory=dict)

    def run(self, answer: Callable, step: int) -> None:
        """Calls the answer once per rank, at the same time."""
        threads = [
            threading.Thread(target=self._call, args=(answer, rank, step), daemon=True) for rank in range(len(SHARES))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)

    def _call(self, answer: Callable, rank: int, step: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> None:
            self.brought[rank] = tensor.clone()
            self.barrier.wait(PATIENCE)
            total = sum(self.brought.values())
            self.barrier.wait(PATIENCE)  # none goes on to its next call before all have read
            tensor.copy_(total)

        def open_writer() -> Recorder:
            self.writers[rank].append(Recorder())
            return self.writers[rank][-1]

        sums = torch.tensor(SHARES[rank], dtype=torch.float64)
        try:
            answer(rank=rank, sums=sums, all_reduce=all_reduce, open_writer=open_writer, step=step)
        except Exception as error:
            self.errors[rank] = error


def verify_log_reduced(log_reduced: Callable) -> str:
    """Calls it as two ranks at once and looks at who opened a writer, and at what was logged."""
    ranks, step = _Ranks(), 7
    ranks.run(log_reduced, step)
    case = f"two ranks with {SHARES[0][0]:.0f} and {SHARES[1][0]:.0f} images"
    # One rank that fails leaves the other waiting: what it failed of comes first.
    own = [error for error in ranks.errors.values() if not isinstance(error, threading.BrokenBarrierError)]
    for error in own:
        hint = "all_reduce(sums) works in place, on the tensor of three numbers, and returns nothing"
        with refusing(TypeError, AttributeError, RuntimeError, ValueError, case=case, expected="scalars", hint=hint):
            raise error
    if ranks.errors:
        hint = "all ranks have to call all_reduce(sums), before any `if rank == 0`: those who call wait for the others"
        raise NotYetError(
            f"{case}: all_reduce", yours="one rank waits for ever", expected="all ranks call it", hint=hint
        )
    opened = [rank for rank, writers in ranks.writers.items() for _ in writers]
    hint = "only one rank may open a writer: two files in one directory become one run, mixed or with points lost"
    if 0 not in opened:
        hint = "rank 0 has to open the writer: open_writer()"
    expect(opened == [0], f"{case}: the ranks that opened a writer", yours=opened, expected=[0], hint=hint)
    writer = ranks.writers[0][0]
    images, losses, hits = (sum(parts) for parts in zip(*SHARES, strict=True))
    for index, (tag, total) in enumerate({"loss/valid": losses, "acc1/valid": hits}.items(), start=1):
        found = writer.of(tag)
        expect(
            len(found) == 1 and found[0][1] == step,
            f"{case}: the points of {tag!r}",
            yours=[at for _, at in found],
            expected=[step],
            hint=f"writer.add_scalar({tag!r}, value, step), once",
        )
        yours = found[0][0]
        hint = _explain_reduced(yours, index)
        right = math.isclose(yours, total / images, rel_tol=1e-6)
        expect(
            right, f"{case}: the value of {tag!r}", yours=f"{yours:.4f}", expected=f"{total / images:.4f}", hint=hint
        )
    hint = (
        "close the writer, best by `with open_writer() as writer:`: what its queue still holds at the end can be lost"
    )
    expect(writer.closed, f"{case}: the writer at the end", yours="open", expected="closed", hint=hint)
    return "one writer for two ranks; the means are those over all images"


def _explain_reduced(yours: float, index: int) -> str:
    """The hint that fits a wrong mean."""
    means = [share[index] / share[0] for share in SHARES]
    images, total = (sum(share[part] for share in SHARES) for part in (0, index))
    if math.isclose(yours, sum(means) / len(means), rel_tol=1e-6):
        return "an average of averages: the shares differ in size. Sum the counts over all ranks, then divide once"
    if math.isclose(yours, means[0], rel_tol=1e-6):
        return "this is the share of rank 0 alone: all_reduce(sums) first, then divide"
    if math.isclose(yours, sum(means), rel_tol=1e-6):
        return "means were summed: sum the counts over all ranks, then divide once by the sum of the images"
    if math.isclose(yours, total, rel_tol=1e-6):
        return "this is the sum: divide by the images of all ranks, sums[0]"
    if math.isclose(yours, total / images / len(SHARES), rel_tol=1e-6):
        return "the sum of the images already covers all ranks: do not divide by their number again"
    return "all_reduce(sums), then loss / images and hits / images"
