"""When each phase of each training step began and ended on this rank."""

from __future__ import annotations

import time

import torch

from lab_utils.timing.measure import synchronize


class Timeline:
    """Records the phases of training steps, one after the other, on the time line that all ranks of a machine share.

    On CUDA the device is synchronised when a phase ends, so that a phase's seconds are its own. This has a cost: the
    program no longer runs ahead of the device, and the next batch is no longer fetched while the device computes. So a
    run whose speed counts is made with ``enabled=False``, which costs nothing. On a CPU a phase costs microseconds.

    Clocks of two machines differ, often by milliseconds: compare moments between ranks on one machine only, lengths
    between any.

    Attributes:
        step: The step that the next phases belong to; set by the loop.

    Args:
        device: The device that is synchronised.
        enabled: False records nothing.
    """

    def __init__(self, device: torch.device | str = "cpu", *, enabled: bool = True) -> None:
        self.step = 0
        self._device, self._enabled = torch.device(device), enabled
        self._rows: list[dict[str, object]] = []
        self._start = 0.0
        # The offset is taken once: the wall clock may be set while we run, and would make a phase end before it began.
        self._offset = time.time() - time.perf_counter()

    def begin(self) -> None:
        """Begins a phase."""
        self._start = time.perf_counter()

    def end(self, name: str) -> None:
        """Ends the phase that began last, of the current step; the next one begins here."""
        if self._enabled:
            synchronize(self._device)
            start, self._start = self._start, time.perf_counter()
            times = {"start": self._offset + start, "end": self._offset + self._start}
            self._rows.append({"phase": name, "step": self.step, **times})

    def as_rows(self) -> list[dict[str, object]]:
        """Returns a row for each phase, in the order in which they ended.

        Each has ``phase``, its name; ``step``; ``start`` and ``end``, in seconds since 1970 by this machine's clock.
        """
        return [dict(row) for row in self._rows]
