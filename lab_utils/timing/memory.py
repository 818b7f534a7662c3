"""Memory: what a forward pass keeps for the backward pass, counted without a GPU; what is free, given back."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch
from torch import nn


def count_saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Counts the bytes of all tensors that autograd saves while ``forward`` runs.

    Each storage counts once, however many operations save a view of it; the model's own parameters and buffers do not
    count. Works on fake tensors as well (``torch._subclasses.fake_tensor.FakeTensorMode``), which have no data.

    Args:
        forward: Runs the model, with whatever autocast it should run under; called without arguments.
        model: The model whose own tensors are left out.

    Returns:
        Bytes, the input batch included where an operation saves it.
    """
    return_memory()
    saved = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # held, so that its address is not given to another
        return tensor.detach()  # an output that kept itself would keep its whole graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)


def return_memory() -> None:
    """Makes glibc return free memory to the system; ResNets of different sizes can leave several GB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
