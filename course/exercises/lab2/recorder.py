"""Stands in for a SummaryWriter, so that a check sees what an answer logs without a file."""

from __future__ import annotations

from typing import NoReturn

import torch

Record = tuple[str, float, int]


class Recorder:
    """Stands in for a SummaryWriter: keeps what it is given instead of writing it.

    Attributes:
        records: Tag, value and step of each scalar, in order; step -1 if none was given.
        closed: Whether ``close`` was called, or the ``with`` block left.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def add_scalar(
        self,
        tag: str,
        scalar_value: object,
        global_step: object = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Takes the arguments of ``SummaryWriter.add_scalar``."""
        value = scalar_value.detach() if isinstance(scalar_value, torch.Tensor) else scalar_value
        self.records.append((tag, float(value), -1 if global_step is None else int(global_step)))

    def add_scalars(self, *_: object, **__: object) -> NoReturn:
        """Refuses: a SummaryWriter would open a run of its own for each number."""
        raise TypeError("add_scalars makes a new run of each number; add_scalar logs one number to this run")

    def flush(self) -> None:
        """Does nothing, as there is no file."""

    def close(self) -> None:
        """Notes that it was called."""
        self.closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, tag: str) -> list[tuple[float, int]]:
        """Value and step of each record with this tag."""
        return [(value, step) for name, value, step in self.records if name == tag]
