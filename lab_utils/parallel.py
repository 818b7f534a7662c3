"""``torch.nn.DataParallel`` over copies in CPU memory, so that what it does can be seen, and checked, without a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from lab_common import LabError


class CpuDataParallel(nn.DataParallel):
    """DataParallel whose devices are threads of this process.

    ``forward`` and ``replicate`` are torch's own, and so is the handling of attributes, buffers and gradients. Only
    what copies between GPUs is replaced by copies in memory: scatter, gather, the copying of weights, and the threads.
    As on GPUs, replica 0 shares the memory of the module that is wrapped. Unlike there, one thread runs the backward of
    all replicas, layer by layer in turn, since autograd has one thread for the CPU and one for each GPU.

    Args:
        module: The module to replicate; its ``forward`` takes one tensor and returns one.
        replicas: How many devices to stand in for.
        threads: Cores that each replica's forward pass may use; None leaves that to torch.

    Raises:
        LabError: ``replicas`` is less than 1.
    """

    def __init__(self, module: nn.Module, replicas: int = 2, *, threads: int | None = None) -> None:
        # Not DataParallel's own, which would take the GPUs where there are any, and do nothing where there are none.
        nn.Module.__init__(self)
        if replicas < 1:
            cause, fix = "each replica needs a chunk of the batch", "replicas=2"
            raise LabError("replicas must be at least 1.", where="CpuDataParallel", cause=cause, fix=fix)
        self.module, self.dim = module, 0
        self.device_ids, self.output_device = list(range(replicas)), 0
        self.src_device_obj = torch.device("cpu")
        self._threads = threads

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[int]) -> Any:
        """Splits the one input as torch does, by ``Tensor.chunk``: maybe into fewer chunks than devices."""
        chunks = inputs[0].chunk(len(device_ids), self.dim)
        return tuple((chunk,) for chunk in chunks), ({},) * len(chunks)

    def replicate(self, module: nn.Module, device_ids: Sequence[int]) -> list[nn.Module]:
        """Runs torch's own ``replicate`` with a copy in memory in the place of a copy to a GPU."""
        # By its full name: torch.nn.parallel.replicate is the function of that module.
        target = sys.modules["torch.nn.parallel.replicate"]
        with mock.patch.object(target, "_broadcast_coalesced_reshape", _copy_tensors):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Runs each replica in a thread, which takes over from the caller what torch's own threads take over."""
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        results: list[Any] = [None] * len(replicas)

        def work(index: int) -> None:
            try:
                if self._threads:
                    torch.set_num_threads(self._threads)
                with torch.set_grad_enabled(grad), torch.amp.autocast("cpu", enabled=autocast):
                    results[index] = replicas[index](*inputs[index])
            except BaseException as error:  # else it would end the thread, and the loss be a mystery
                results[index] = error

        before = torch.get_num_threads()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)  # of this thread; what new ones begin with had changed, too
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def gather(self, outputs: Sequence[torch.Tensor], output_device: int) -> torch.Tensor:
        """Joins the outputs; numbers become a vector, as torch makes of them."""
        # A copy keeps the dtype; under the caller's autocast `cat` would not.
        with torch.amp.autocast("cpu", enabled=False):
            return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in outputs], self.dim)


def _copy_tensors(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Any]]:
    """For each device all tensors: the first has the very memory of the module, as a GPU's broadcast leaves it.

    The gradients of a tensor's copies add up in it, which is what torch's Broadcast does in its backward pass.
    """
    first = [tensor.detach() if detach else tensor.view_as(tensor) for tensor in tensors]
    copies = [[tensor.detach().clone() if detach else tensor.clone() for tensor in tensors] for _ in devices[1:]]
    return [first, *copies]
