"""A pretended CUDA device, for rehearsals on a CPU: which calls are made, in which order, and on which tensors.

The numbers are computed in main memory. A tensor is "on the GPU" if its storage is in a list, and torch's own modes
keep that list: a :class:`TorchFunctionMode` sees calls that name a device, a :class:`TorchDispatchMode` sees each
operation, including the backward pass. As on a GPU, launched work is done later, waiting for it takes time, and these
are errors: mixing tensors of the two devices, reading an event before its work is done, waiting while a graph is
captured, and using more memory than there is. Unlike on a GPU, a captured step is computed as well.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# What torch has to wait for the device for, since the program, or the shape of the result, depends on the numbers.
READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
SIZED = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
CAPTURING = "operation not permitted when stream is capturing"


class Stream:
    """A queue of launched work, which is done at a certain time of ``time.perf_counter``."""

    def __init__(self, cuda: Pretence) -> None:
        self.cuda, self.done = cuda, 0.0
        cuda.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.note("wait_stream")
        self.done = max(self.done, other.done)

    def synchronize(self) -> None:
        self.cuda.wait("Stream.synchronize", self.done)


class Event:
    """A mark in a queue: the time when its stream reaches it."""

    def __init__(self, cuda: Pretence, enable_timing: bool) -> None:
        self.cuda, self.timed, self.at = cuda, enable_timing, None
        cuda.note("Event")

    def record(self, stream: Stream | None = None) -> None:
        self.cuda.note("record")
        self.at = max(time.perf_counter(), (stream or self.cuda.stream).done)

    def synchronize(self) -> None:
        self.cuda.wait("Event.synchronize", self.at)

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds until another event."""
        if not (self.timed and end.timed):
            raise RuntimeError("both events must have enable_timing=True")
        if time.perf_counter() < max(self.at, end.at):
            raise RuntimeError("device not ready: the work before the event is not done")
        return 1e3 * (end.at - self.at)


class Graph:
    """The captured work and its number of operations."""

    def __init__(self, cuda: Pretence) -> None:
        self.cuda, self.launched, self.operations = cuda, [], 0

    def replay(self) -> None:
        self.cuda.note("replay")
        for seconds in self.launched:
            self.cuda.launch(seconds)


class Pretence:
    """The pretended device.

    Attributes:
        real: False; True for the device that replaces it on a machine with a GPU.
        device: The device, as the labs name it.
        calls: The calls so far, each a tuple of a name and details.
        total: Bytes of its memory.
        capability: Its compute capability.
    """

    real, device, name = False, CUDA, "Pretended GPU"
    # Storages, of all pretences: the code may keep a tensor for the next one.
    _there, _pinned = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()

    def __init__(self, *, total: int = 2**30, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: list[tuple] = []
        self.total, self.capability = total, capability
        self.now = self.peak = 0
        self.streams: list[Stream] = []
        self.stream = Stream(self)
        self.capture: Graph | None = None
        self._forbidden = False
        # Where the results of operations go; None: where their inputs are.
        self._aim: bool | None = None

    @contextlib.contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[Pretence]:
        """Replaces the functions of ``torch.cuda`` by pretended ones."""
        for name, value in self.list_functions().items():
            patch.setattr(torch.cuda, name, value)
        begin = torch.autocast.__init__

        def note_autocast(one, device_type, dtype=None, enabled=True, cache_enabled=None):
            self.note("autocast", device_type, dtype, enabled)
            if device_type == "cuda":  # cast on the CPU, whose own default is another
                device_type, dtype = "cpu", dtype or torch.float16
            begin(one, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

        patch.setattr(torch.autocast, "__init__", note_autocast)
        with _Operations(self), _Calls(self):
            yield self

    def list_functions(self) -> dict[str, Callable]:
        """Returns the functions that replace those of ``torch.cuda``, by name."""
        quiet = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.stream,
            "is_current_stream_capturing": lambda: self.capture is not None,
            "is_bf16_supported": lambda including_emulation=True: self.capability >= (8, 0),
            "memory_allocated": lambda device=None: self.now,
            "mem_get_info": lambda device=None: (self.total - self.now, self.total),
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: self.name,
            "get_device_properties": lambda device=None: SimpleNamespace(
                name=self.name, total_memory=self.total, major=self.capability[0], minor=self.capability[1]
            ),
            "Stream": lambda *args, **options: Stream(self),
            "Event": lambda enable_timing=False, **options: Event(self, enable_timing),
            "CUDAGraph": lambda *args, **options: Graph(self),
            "stream": self.enter_stream,
            "graph": self.capture_graph,
        }
        told = {name: self._tell(name) for name in ("init", "set_device", "empty_cache")}
        told["synchronize"] = lambda device=None: self.wait("synchronize", max(one.done for one in self.streams))
        told["reset_peak_memory_stats"] = self._tell("reset_peak_memory_stats", self._reset_peak)
        told["max_memory_allocated"] = self._tell("max_memory_allocated", lambda: self.peak)
        return quiet | told

    def _tell(self, name: str, function: Callable = lambda: None) -> Callable:
        def run(device: object = None) -> Any:
            self.note(name)
            return function()

        return run

    def _reset_peak(self) -> None:
        self.peak = self.now

    def note(self, name: str, *details: object) -> None:
        """Notes a call."""
        self.calls.append((name, *details))

    def launch(self, seconds: float) -> None:
        """Queues work of this length."""
        if self.capture is not None:
            self.capture.launched.append(seconds)
        else:
            self.stream.done = max(time.perf_counter(), self.stream.done) + seconds

    def least(self, seconds: float) -> float:
        """Returns the least time for work of this length."""
        return seconds

    def wait(self, name: str, until: float | None = None, *, hidden: bool = False) -> None:
        """Waits until a given time, or for the current stream; ``hidden``: in an operation that was not told to wait.

        Raises:
            RuntimeError: A graph is being captured, or hidden waits are forbidden, as in torch's debug mode.
        """
        if self.capture is not None:
            raise RuntimeError(f"{CAPTURING}: {name}")
        if hidden and self._forbidden:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        self.note(name)
        time.sleep(max(0.0, (self.stream.done if until is None else until) - time.perf_counter()))

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Makes operations that wait for the device raise in this block."""
        self._forbidden = True
        try:
            yield
        finally:
            self._forbidden = False

    @contextlib.contextmanager
    def enter_stream(self, stream: Stream) -> Iterator[None]:
        self.note("stream")
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def capture_graph(self, graph: Graph, pool: object = None, stream: object = None, **options: object) -> Iterator:
        self.wait("synchronize", max(one.done for one in self.streams))  # as torch.cuda.graph does
        self.note("graph begins")
        self.capture = graph
        try:
            yield
        finally:
            self.capture = None
            self.note("graph ends", graph.operations)

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is on the GPU."""
        return tensor.untyped_storage()._cdata in self._there

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor's memory as the GPU's.

        Raises:
            torch.OutOfMemoryError: There is not that much memory.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._there:
            self._find_room(storage.nbytes())
            self._there[storage._cdata] = storage
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())
        return tensor

    def _find_room(self, size: int) -> None:
        if self.now + size > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size:,} bytes.")

    def _free(self, size: int) -> None:
        self.now -= size

    @contextlib.contextmanager
    def _aimed(self, there: bool) -> Iterator[None]:
        before, self._aim = self._aim, there
        try:
            yield
        finally:
            self._aim = before

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is in page-locked memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor that is only marked as page-locked."""
        if self.has(tensor):
            raise RuntimeError("only dense CPU tensors can be pinned")
        copy = tensor.clone()
        self._pinned[copy.untyped_storage()._cdata] = copy.untyped_storage()
        return copy

    def move(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Does the work of ``Tensor.to``."""
        copy = options.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (CUDA if self.has(args[0]) else CPU, args[0].dtype, *args[1:])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **options)
        if device is not None and device.type not in ("cuda", "cpu"):
            return tensor.to(device, dtype)
        there = self.has(tensor) if device is None else device.type == "cuda"
        how = {"dtype": dtype or tensor.dtype, "memory_format": layout or torch.preserve_format}
        if there == self.has(tensor):
            return tensor.to(copy=copy, **how)
        self._note_copy(there, tensor, non_blocking)
        with self._aimed(there):
            moved = tensor.to(copy=True, **how)
        return self.place(moved) if there else moved

    def _note_copy(self, there: bool, source: torch.Tensor, non_blocking: bool) -> None:
        self.note("copy", "cuda" if there else "cpu", self.is_pinned(source), non_blocking)
        if not non_blocking:
            self.wait("copying waits", hidden=True)

    def call(self, function: Callable, args: tuple, options: dict[str, Any]) -> Any:
        """Runs a call of torch: removes its mention of a device, and keeps that in the list instead."""
        if function in SPECIAL:
            return SPECIAL[function](self, *args, **options)
        name, device, pinned = getattr(function, "__name__", ""), options.get("device"), options.get("pin_memory")
        if pinned:
            del options["pin_memory"]
        if device is None and name.startswith("new_"):
            device = CUDA if self.has(args[0]) else None
        if device is None or torch.device(device).type not in ("cuda", "cpu"):
            result = function(*args, **options)
            return self.pin(result) if pinned else result
        there = torch.device(device).type == "cuda"
        if there and name in SIZED:
            self._find_room(function(*args, **{**options, "device": "meta"}).nbytes)
        with self._aimed(there):
            result = function(*args, **{**options, "device": CPU})
        return self.place(result) if there and isinstance(result, torch.Tensor) else result

    def run(self, operation: Any, args: tuple, options: dict[str, Any]) -> Any:
        """Runs an operation: its result is on the GPU if its inputs are.

        Raises:
            RuntimeError: Some inputs are on the GPU and others are not, or it would wait when waiting is forbidden.
        """
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        inputs, name = [one for one in tensors if self.has(one)], operation._schema.name.removeprefix("aten::")
        if inputs and self._aim is None:
            self._check(name, args, tensors)
        result = operation(*args, **options)
        if self.capture is not None and inputs:
            self.capture.operations += 1
        if name != "copy_" and (bool(inputs) if self._aim is None else self._aim):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                    self.place(leaf)
        return result

    def _check(self, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
        elsewhere = [one for one in tensors if not self.has(one) and one.dim()]
        if name == "copy_":
            target, source, *more = args
            if self.has(target) != self.has(source):
                self._note_copy(self.has(target), source, bool(more and more[0]))
        elif name in READS or (name in INDEXED and (elsewhere or _has_mask(args[1]))):
            self.wait(name, hidden=True)
        elif elsewhere:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found cuda:0 and cpu")


def _has_mask(indices: list) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _read(function: Callable) -> Callable:
    """Returns a call that reads the numbers directly from the tensor's memory."""

    def run(cuda: Pretence, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if cuda.has(tensor):
            if function is torch.Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            cuda.wait(function.__name__, hidden=True)
        return function(tensor, *args, **options)

    return run


SPECIAL: dict[Callable, Callable] = {
    torch.Tensor.device.__get__: lambda cuda, one, *_: CUDA if cuda.has(one) else torch.Tensor.device.__get__(one),
    torch.Tensor.is_cuda.__get__: lambda cuda, one, *_: cuda.has(one),
    torch.Tensor.is_cpu.__get__: lambda cuda, one, *_: not cuda.has(one),
    torch.Tensor.to: Pretence.move,
    torch.Tensor.cuda: lambda cuda, one, device=None, **options: cuda.move(one, CUDA, **options),
    torch.Tensor.cpu: lambda cuda, one, **options: cuda.move(one, CPU, **options),
    torch.Tensor.pin_memory: lambda cuda, one, *_: cuda.pin(one),
    torch.Tensor.is_pinned: lambda cuda, one, *_: cuda.is_pinned(one),
    torch.Tensor.tolist: _read(torch.Tensor.tolist),
    torch.Tensor.numpy: _read(torch.Tensor.numpy),
}


class _Calls(TorchFunctionMode):
    def __init__(self, cuda: Pretence) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._cuda.call(func, args, dict(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, cuda: Pretence) -> None:
        super().__init__()
        self._cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds, at the first operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._cuda.run(func, args, kwargs or {})
