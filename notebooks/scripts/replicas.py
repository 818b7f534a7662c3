"""Variants of lab 4's emulation of DataParallel: the same step with one thing changed at a time.

They show what each thing costs; hooks note when each copy of a network computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lab_utils.parallel import CpuDataParallel


class InThreads(CpuDataParallel):
    """The emulation without copies: all threads run forward on the same module."""

    def replicate(self, module: nn.Module, device_ids: Sequence[int]) -> list[nn.Module]:
        """Returns the module itself for each device, without copies."""
        return [module for _ in device_ids]


def step_in_threads(
    model: CpuDataParallel, images: torch.Tensor, labels: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Trains one step on the emulation's copies, where each thread runs forward and its own backward.

    The emulation itself has one backward for all, in one thread. Everything else is the same, including gradients.
    """

    def run(replica: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.set_num_threads(max(1, before // len(model.device_ids)))
        # Divided by the whole batch, so that the chunks' gradients add up to those of the mean.
        (F.cross_entropy(replica(images), labels, reduction="sum") / whole).backward()

    optimizer.zero_grad()
    before, whole, count = torch.get_num_threads(), len(images), len(model.device_ids)
    replicas = model.replicate(model.module, model.device_ids)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, replicas, images.chunk(count), labels.chunk(count)))
    torch.set_num_threads(before)
    optimizer.step()


def note_phases(model: nn.Module) -> list[tuple[int, dict[str, Any]]]:
    """Notes when forward and backward of a model, and of each copy made of it later, begin and end.

    Returns:
        A growing list: the number of a module, and a row for ``plots.timeline``, with its ``thread``.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    begun: dict[tuple[int, str], float] = {}

    def begin(phase: str, module: nn.Module, *_: object) -> None:
        begun[id(module), phase] = time.perf_counter()

    def end(phase: str, module: nn.Module, *_: object) -> None:
        row = {"phase": phase, "step": 0, "start": begun[id(module), phase], "end": time.perf_counter()}
        rows.append((id(module), row | {"thread": threading.get_ident()}))

    model.register_forward_pre_hook(partial(begin, "forward"))
    model.register_forward_hook(partial(end, "forward"))
    model.register_full_backward_pre_hook(partial(begin, "backward"))
    model.register_full_backward_hook(partial(end, "backward"))
    return rows
