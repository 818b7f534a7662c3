"""Our arms of the benchmark: one training step of ResNet-152, eager, compiled, and as a CUDA graph of the whole step.

A step takes uint8 images and labels on the device, normalises them there, and trains. What distinguishes an arm,
besides ``channels_last``, autocast to bfloat16 and the fused SGD, is in ``make_training``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from lab_utils import models

# ImageNet's, which the peers' scripts normalise by.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SGD = {"momentum": 0.9, "weight_decay": 1e-4}
LR = 0.1
WARMUP = 3  # steps on a side stream before a capture, as in PyTorch's notes

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """Settings that all arms have in common.

    Attributes:
        net: As for ``models.build``; timm uses the same name.
        stem: As for ``models.build``.
        device: The device that trains.
        backend: Backend of ``torch.compile``.
        amp: True if our arms use autocast; False for tests of their arithmetic.
    """

    net: str
    stem: str
    device: torch.device
    backend: str = "inductor"
    amp: bool = True

    def build(self) -> nn.Module:
        """Builds the network, in float32 on the CPU, with the same random weights for every arm."""
        torch.manual_seed(0)
        return models.build(self.net, stem=self.stem)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Returns uint8 images (N, 3, H, W) as float32 with ImageNet's mean and deviation."""
        mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
        return images.float().div_(255).sub_(mean).div_(std)


class Training:
    """A running arm: the network, its optimizer, and the step, which returns its loss.

    Args:
        model: The network, on the device.
        optimizer: The optimizer of all its parameters.
        step: Trains on one batch.
        prepare: A loader's work, which is not timed: makes the input of ``step`` from uint8 images.
    """

    peak: int | None = None  # bytes at the capture; a replay allocates nothing

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Step,
        prepare: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
    ) -> None:
        self.model, self.optimizer, self.step, self.prepare = model, optimizer, step, prepare
        self._first = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> Sequence[torch.Tensor]:
        return [*chain(self.model.parameters(), self.model.buffers())]

    @torch.no_grad()
    def reset(self) -> None:
        """Restores the first weights and clears the momentum, in place, since a graph has their addresses.

        SGD starts from zero momentum: in the first step it is the gradient itself.
        """
        for tensor, first in zip(self._tensors(), self._first, strict=True):
            tensor.copy_(first)
        for state in self.optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, in place if it is a tensor."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def run(
        self,
        batches: Sequence[Batch],
        count: int,
        mark: Callable[[int], None] = lambda index: None,
        losses: list[float] | None = None,
    ) -> None:
        """Trains ``count`` steps on the batches in turn.

        Args:
            batches: Batches from ``prepare``.
            count: Number of steps.
            mark: Called with each step's number before it, and with ``count`` at the end.
            losses: Receives the loss of each step, for which the program waits.
        """
        for index in range(count):
            mark(index)
            loss = self.step(*batches[index % len(batches)])
            if losses is not None:
                losses.append(float(loss))
        mark(count)

    def capture(self, batch: Batch) -> None:
        """Turns a step into a CUDA graph. This changes weights and momentum: call ``reset`` afterwards."""
        self.step = capture_step(self.step, batch, partial(self.optimizer.zero_grad, set_to_none=True))
        self.peak = torch.cuda.max_memory_allocated()


def capture_step(step: Step, batch: Batch, drop_gradients: Callable[[], None]) -> Step:
    """Captures forward, loss, backward and optimizer in one CUDA graph; returns a step that replays it.

    As in PyTorch's notes, "CUDA Graphs, Whole-network capture" (https://docs.pytorch.org/docs/stable/notes/cuda.html):
    it warms up on a side stream, so that no algorithm is searched for and no momentum made during the capture, and has
    no gradients when the capture begins, so that they are in the graph's memory and each replay overwrites them.
    One graph per process: no two graphs share memory.

    Args:
        step: Reads nothing back from the device, and uses autocast without its cache.
        batch: The step is captured for the shapes of this batch.
        drop_gradients: Sets them to None.
    """
    images, labels = (tensor.clone() for tensor in batch)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step(images, labels)
    torch.cuda.current_stream().wait_stream(side)
    drop_gradients()
    torch.cuda.reset_peak_memory_stats()  # of what searching for algorithms took
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = step(images, labels)

    def replay(new_images: torch.Tensor, new_labels: torch.Tensor) -> torch.Tensor:
        images.copy_(new_images)
        labels.copy_(new_labels)
        graph.replay()
        return loss

    return replay


def make_training(
    setup: Setup, *, compiled: str = "", mode: str | None = None, weights: torch.dtype = torch.float32
) -> Training:
    """Builds one of our arms.

    Args:
        setup: Settings that all arms have in common.
        compiled: ``net`` compiles normalisation, network and loss as one; ``blocks`` each residual block, of which
            those of one shape share their code, as in PyTorch's recipe "regional compilation"
            (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html); "" compiles nothing.
        mode: Mode of ``torch.compile``.
        weights: Type of the weights of convolutions and linear layers; BatchNorm stays in float32.
    """
    model = setup.build().to(setup.device, memory_format=torch.channels_last)
    for module in model.modules() if weights != torch.float32 else ():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(weights)
    # On the device: a captured graph reads it there at each replay, so that a schedule may change it.
    lr = torch.tensor(LR, device=setup.device)
    optimizer = torch.optim.SGD(model.parameters(), lr, fused=True, **SGD)
    # (value / 255 - mean) / std as one multiplication and one addition.
    scale = torch.tensor([1 / (255 * std) for std in STD], device=setup.device).view(3, 1, 1)
    offset = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=setup.device).view(3, 1, 1)

    def compute_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return F.cross_entropy(model(images * scale + offset), labels)

    if compiled:
        # One code for each shape of block; PyTorch gives up after eight.
        torch._dynamo.config.recompile_limit = 64
        options = {"backend": setup.backend, "dynamic": False} | ({"mode": mode} if mode else {})
        if compiled == "net":
            compute_loss = torch.compile(compute_loss, **options)
        for block in find_blocks(model) if compiled == "blocks" else ():
            block.compile(**options)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        # Each weight is used once, so the cache of casts gains nothing, and a capture must not meet it.
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.amp, cache_enabled=False):
            loss = compute_loss(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the residual blocks of a ResNet; the network itself if it has none."""
    return [module for module in model.modules() if hasattr(module, "downsample")] or [model]


def make_reference(setup: Setup) -> Training:
    """Builds the reference for every curve: float32 and PyTorch's plain SGD, in the standard layout."""
    model = setup.build().to(setup.device)
    optimizer = torch.optim.SGD(model.parameters(), LR, foreach=False, **SGD)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, setup.normalize)


@dataclass(frozen=True)
class Arm:
    """One way to train: how to build it, and the settings of its process.

    Attributes:
        make: Builds its ``Training``.
        ours: True if it is ours, False for a peer.
        compiled: True if it uses ``torch.compile``.
        graph: True if its step becomes a CUDA graph.
        amp: True if it uses autocast or 16-bit weights.
        benchmark: ``torch.backends.cudnn.benchmark``; PyTorch's default is False.
        tf32_matmul: True if float32 means TF32 in matrix products; PyTorch's default is False.
        tf32_conv: The same for convolutions; PyTorch's default is True.
        package: A package that must be installed.
        source: The script that it follows.
    """

    make: Callable[[Setup], Training]
    ours: bool = True
    compiled: bool = False
    graph: bool = False
    amp: bool = True
    benchmark: bool = True
    tf32_matmul: bool = False
    tf32_conv: bool = True
    package: str = ""
    source: str = ""


TUNED = "max-autotune-no-cudagraphs"
OURS = {
    "eager": Arm(make_training),
    "graph": Arm(make_training, graph=True),
    "compiled": Arm(partial(make_training, compiled="net"), compiled=True),
    "regional": Arm(partial(make_training, compiled="blocks"), compiled=True),
    "compiled graph": Arm(partial(make_training, compiled="net"), compiled=True, graph=True),
    "regional graph": Arm(partial(make_training, compiled="blocks"), compiled=True, graph=True),
    "tuned graph": Arm(partial(make_training, compiled="net", mode=TUNED), compiled=True, graph=True),
    "bf16 weights graph": Arm(partial(make_training, weights=torch.bfloat16), graph=True),
}
REFERENCE = Arm(make_reference, amp=False, benchmark=False, tf32_conv=False)
