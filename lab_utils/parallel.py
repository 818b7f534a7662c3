"""``torch.nn.DataParallel`` over copies in CPU memory, so that what it does can be seen, and checked, without a GPU.

Beside it stand the same step with one thing changed at a time, which tells what each thing costs, and hooks that note
when each copy of a network computes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from lab_common import LabError


class CpuDataParallel(nn.DataParallel):
    """DataParallel whose devices are threads of this process.

    ``forward`` and ``replicate`` are torch's own, and so is what becomes of attributes, buffers and gradients. Only
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
            raise LabError(f"{replicas} replicas are none.", where="CpuDataParallel", cause=cause, fix=fix)
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


class InThreads(CpuDataParallel):
    """The emulation without copies: the threads run forward on the one module itself."""

    def replicate(self, module: nn.Module, device_ids: Sequence[int]) -> list[nn.Module]:
        """Makes no copies."""
        return [module for _ in device_ids]


def step_in_threads(
    model: CpuDataParallel, images: torch.Tensor, labels: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Trains one step on the emulation's copies, of which each thread runs forward and its own backward.

    The emulation itself has one backward for all, which one thread runs. All else is the same, gradients included.
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
        The list that grows: the number of a module, and a row as ``plots.timeline`` takes it, with its ``thread``.
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


def _copy_tensors(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Any]]:
    """For each device all tensors: the first has the very memory of the module, as a GPU's broadcast leaves it.

    The gradients of a tensor's copies add up in it, which is what torch's Broadcast does in its backward pass.
    """
    first = [tensor.detach() if detach else tensor.view_as(tensor) for tensor in tensors]
    copies = [[tensor.detach().clone() if detach else tensor.clone() for tensor in tensors] for _ in devices[1:]]
    return [first, *copies]
