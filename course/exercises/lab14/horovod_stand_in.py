"""A stand-in for Horovod: the part of ``horovod.torch`` that a training script needs, built on torch's Gloo.

For a script it looks like Horovod 0.28.1: names, arguments, defaults, results, and the errors that typical mistakes
raise. Like Horovod's coordinator, the ranks compare before each operation what they are about to do, so that a mismatch
is an error and not a wrong number. It needs no build, and no processes besides the ranks.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

Average, Sum, Adasum, Min, Max, Product = range(6)
OPERATIONS = {
    Average: dist.ReduceOp.SUM,  # and then divided
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
KINDS = ("end", "allreduce", "allgather", "broadcast", "barrier")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
NOT_YET = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)
NAMES = (
    *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "barrier"),
    *("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "allgather_object"),
    *("broadcast", "broadcast_", "broadcast_object", "broadcast_parameters", "broadcast_optimizer_state"),
    "DistributedOptimizer",
)


class NoCompression:
    """Gradients are sent as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Returns what is sent, and what :meth:`decompress` needs."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns what was sent in its own dtype."""
        return tensor.to(dtype)


class HalfCompression(NoCompression):
    """Gradients are sent as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Returns what is sent, and what :meth:`decompress` needs."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype


Compression = SimpleNamespace(none=NoCompression, fp16=HalfCompression)


class Horovod:
    """The functions of ``horovod.torch`` on one rank.

    Attributes:
        optimizers: The DistributedOptimizers that were made.
        started: Whether ``init()`` has been called.
    """

    def __init__(self, group: Any, *, local_rank: int, local_size: int) -> None:
        """Takes the rank's process group, which need not be torch's default one."""
        self._group, self._local = group, (local_rank, local_size)
        self.optimizers: list[_Averaging] = []
        self.started = False

    def make_modules(self) -> dict[str, ModuleType]:
        """Returns the modules that ``import horovod.torch`` should find, by name, for ``sys.modules``."""
        package, module = ModuleType("horovod"), ModuleType("horovod.torch")
        package.__path__, package.torch = [], module
        operations = {"Average": Average, "Sum": Sum, "Adasum": Adasum, "Min": Min, "Max": Max, "Product": Product}
        vars(module).update({name: getattr(self, name) for name in NAMES}, **operations, Compression=Compression)
        return {"horovod": package, "horovod.torch": module}

    def init(self, *_: Any, **__: Any) -> None:
        """Makes the rank join the group, whatever the arguments."""
        self.started = True

    def shutdown(self) -> None:
        """Makes the rank leave the group."""
        self.started = False

    def is_initialized(self) -> bool:
        """Returns True if :meth:`init` was called."""
        return self.started

    def rank(self) -> int:
        """Returns the number of this rank in the whole job."""
        return self._find_group().rank()

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._find_group().size()

    def local_rank(self) -> int:
        """Returns the number of this rank on its node."""
        return self._find_group() and self._local[0]

    def local_size(self) -> int:
        """Returns the number of ranks on its node."""
        return self._find_group() and self._local[1]

    def _find_group(self) -> Any:
        if not self.started:
            raise ValueError(NOT_YET)
        return self._group

    def end(self) -> None:
        """Waits until the script has ended on all ranks; a rank that still calls an operation gets an error."""
        self.started = True
        self._agree("end")

    def _agree(self, kind: str, tensor: torch.Tensor | None = None, chosen: int = 0) -> Any:
        """Compares the next operation with all ranks; returns their group."""
        group = self._find_group()
        what = [DTYPES.index(tensor.dtype), tensor.numel()] if tensor is not None else [0, 0]
        own = torch.tensor([KINDS.index(kind), chosen, *what])
        all_ranks = [torch.empty_like(own) for _ in range(group.size())]
        group.allgather([all_ranks], [own]).wait()
        kinds, choices, *others = (set(column) for column in torch.stack(all_ranks).T.tolist())
        if len(kinds) > 1 and KINDS.index("end") in kinds:
            raise RuntimeError(SHUT_DOWN)
        if len(kinds) > 1:
            words = " and ".join(sorted(KINDS[number] for number in kinds))
            raise RuntimeError(f"Mismatched operations: {words}.")
        if len(choices) > 1:
            name = {"broadcast": "root rank", "allreduce": "reduction"}[kind]
            words = ", but another rank specified ".join(f"{name} {number}" for number in sorted(choices))
            raise RuntimeError(f"Mismatched {kind.upper()} {name}s: One rank specified {words}.")
        for name, found in zip(("data types", "tensor shapes"), others, strict=True):
            if len(found) > 1:
                raise RuntimeError(f"Mismatched {name} in {kind}.")
        return group

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits for all ranks."""
        self._agree("barrier")

    def allreduce(
        self,
        tensor: torch.Tensor,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = NoCompression,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        **_: Any,
    ) -> torch.Tensor:
        """Returns the tensor reduced over all ranks: the mean, unless ``op`` says otherwise."""
        sent, context = compression.compress(tensor.detach())
        found = self.allreduce_(sent.clone(), average, name, op, prescale_factor, postscale_factor)
        return compression.decompress(found, context)

    @torch.no_grad()
    def allreduce_(
        self,
        tensor: torch.Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        **_: Any,
    ) -> torch.Tensor:
        """Reduces the tensor in place, and returns it."""
        op = _choose_op(op, average)
        group = self._agree("allreduce", tensor, op)
        if op not in OPERATIONS:
            raise NotImplementedError("Adasum is not in this stand-in for Horovod.")
        whole = tensor.detach() * prescale_factor if prescale_factor != 1 else tensor.detach().clone()
        options = dist.AllreduceOptions()
        options.reduceOp = OPERATIONS[op]
        group.allreduce([whole], options).wait()
        factor = postscale_factor / (group.size() if op == Average else 1)
        return tensor.copy_(whole * factor if factor != 1 else whole)

    def grouped_allreduce(self, tensors: Iterable[torch.Tensor], *args: Any, **options: Any) -> list[torch.Tensor]:
        """Returns each of the tensors reduced."""
        return [self.allreduce(tensor, *args, **options) for tensor in tensors]

    def grouped_allreduce_(self, tensors: Iterable[torch.Tensor], *args: Any, **options: Any) -> list[torch.Tensor]:
        """Reduces each of the tensors in place."""
        return [self.allreduce_(tensor, *args, **options) for tensor in tensors]

    def allgather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns the tensors of all ranks, one after another along their first dimension."""
        return torch.cat(self.allgather_object(tensor.detach()))

    def allgather_object(self, obj: Any, *_: Any, **__: Any) -> list[Any]:
        """Returns the objects of all ranks, in the order of the ranks."""
        size = self._agree("allgather").size()
        return [self._send_object(obj, root) for root in range(size)]

    def broadcast(self, tensor: torch.Tensor, root_rank: int, *_: Any, **__: Any) -> torch.Tensor:
        """Returns the root's tensor."""
        return self.broadcast_(tensor.detach().clone(), root_rank)

    @torch.no_grad()
    def broadcast_(self, tensor: torch.Tensor, root_rank: int, *_: Any, **__: Any) -> torch.Tensor:
        """Overwrites the tensor with the root's, and returns it."""
        group = self._agree("broadcast", tensor, root_rank)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, 0
        sent = tensor.detach().contiguous().clone()
        group.broadcast([sent], options).wait()
        return tensor.copy_(sent)

    def broadcast_object(self, obj: Any, root_rank: int = 0, *_: Any, **__: Any) -> Any:
        """Returns the root's object."""
        return self._send_object(obj, root_rank)

    def _send_object(self, obj: Any, root: int) -> Any:
        text = pickle.dumps(obj) if self.rank() == root else b""
        length = self.broadcast_(torch.tensor(len(text)), root)
        # A tensor that shares a bytearray's memory keeps it.
        text = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        sent = self.broadcast_(text, root).numpy().tobytes()
        return obj if self.rank() == root else pickle.loads(sent)

    def broadcast_parameters(self, params: Any, root_rank: int) -> None:
        """Overwrites tensors, in a dictionary or a list, with the root's."""
        if isinstance(params, dict):
            params = sorted(params.items())
        elif not isinstance(params, list):
            raise ValueError(f"invalid params of type: {type(params)}")
        for one in params:
            self.broadcast_(one[1] if isinstance(one, tuple) else one, root_rank)

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
        """Overwrites an optimizer's state and options with the root's."""
        if not optimizer.state_dict()["state"]:
            # One step with gradients of 0 makes the state, such as momentum, of an optimizer that has made none.
            for parameter in _list_parameters(optimizer):
                parameter.grad = torch.zeros_like(parameter)
            step_alone = super(_Averaging, optimizer).step if isinstance(optimizer, _Averaging) else optimizer.step
            step_alone()
        packed = optimizer.state_dict()
        if not packed["state"]:
            return
        options = [{key: value for key, value in group.items() if key != "params"} for group in packed["param_groups"]]
        others = {}
        for index, state in sorted(packed["state"].items()):
            for name, value in state.items():
                if torch.is_tensor(value):
                    self.broadcast_(value, root_rank)
                else:
                    others[index, name] = value
        options, others = self.broadcast_object((options, others), root_rank)
        for group, option in zip(optimizer.param_groups, options, strict=True):
            group.update(option)
        for (index, name), value in others.items():
            packed["state"][index][name] = value

    def DistributedOptimizer(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = NoCompression,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        **_: Any,
    ) -> torch.optim.Optimizer:
        """Returns a new optimizer of the same kind that reduces the gradients before it takes a step."""
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        kind = type(optimizer)
        made = type(kind.__name__, (_Averaging, kind), {})(optimizer.param_groups)  # with no state of the old one
        _check_named(made, named_parameters)
        made._begin(self, compression, backward_passes_per_step, op)
        self.optimizers.append(made)
        return made


class _Averaging:
    """Mix-in that ``DistributedOptimizer`` puts before an optimizer's class: reduces gradients before a step.

    Attributes:
        op: The operation that reduces the gradients of all ranks.
        compression: The compression with which they are sent.
    """

    def _begin(self, horovod: Horovod, compression: Any, passes: int, op: int) -> None:
        self._horovod, self.compression, self.op = horovod, compression, op
        self.backward_passes_per_step = passes
        self._passes: Counter = Counter()
        self._synchronized, self._should_synchronize = False, True
        for parameter in _list_parameters(self):
            parameter.register_post_accumulate_grad_hook(self._note_pass)

    def _note_pass(self, parameter: torch.Tensor) -> None:
        self._passes[parameter] += 1
        if self._passes[parameter] > self.backward_passes_per_step:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )

    def synchronize(self) -> None:
        """Reduces the gradients; Horovod starts with each as soon as backward() has computed it."""
        for parameter in _list_parameters(self):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found = self._horovod.allreduce(parameter.grad, compression=self.compression, op=self.op)
            parameter.grad.copy_(found)
        self._passes.clear()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block in which :meth:`step` reduces no gradients."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Reduces the gradients, and takes a step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn("optimizer.step() called without optimizer.skip_synchronize() context.", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self) -> None:
        """Clears the gradients, which must have been used."""
        if self._passes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state."""
        self._passes.clear()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)


def _list_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Returns the parameters that an optimizer trains, in its order."""
    return [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]


def _choose_op(op: int | None, average: bool | None) -> int:
    """Returns the operation to reduce with: ``average`` is the older form of ``op``."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def _check_named(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]] | None) -> None:
    """Refuses names that are malformed, appear twice, or do not cover all parameters."""
    if named is None:
        return
    named = list(named)
    if not all(isinstance(one, tuple) for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(twice))}"
        )
    if {id(one) for group in optimizer.param_groups for one in group["params"]} - {id(one) for _, one in named}:
        raise ValueError("named_parameters was specified, but one or more model parameters were not named.")
