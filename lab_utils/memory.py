"""Bytes that tensors hold, on each rank; for labs 10 and 11."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count_bytes(tensors: Iterable[object]) -> int:
    """Counts the bytes that this process holds for tensors: each storage once, of a DTensor the local part.

    Args:
        tensors: Tensors; what is none, such as a gradient that is None, does not count.
    """
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def join(tensors: Iterable[object]) -> torch.Tensor:
    """Joins all numbers into one flat tensor, without a graph; of a DTensor the whole.

    That gathers the DTensors, so every rank has to call it.

    Args:
        tensors: What is none, such as a learning rate among an optimizer's state, is left out.
    """
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


def flatten(net: nn.Module) -> torch.Tensor:
    """Moves all weights into one flat tensor, which it returns; each parameter becomes a view of its part."""
    flat = join(net.parameters())
    parts = flat.split([parameter.numel() for parameter in net.parameters()])
    for parameter, part in zip(net.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)
    return flat
