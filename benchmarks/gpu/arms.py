"""Arms of the benchmark: one training step of ResNet-152, run eagerly, compiled, as a CUDA graph, or as both.

The step takes uint8 images on the device, normalises them there, and trains in channels-last, with autocast to bfloat16
and the fused SGD. The reference is the same training in five plain lines of float32.

All arms start from weights with which their losses can be compared: the last BatchNorm of each residual block is scaled
by ``CALM``, and the learning rate is ``LR``. From the usual initial weights, two float32 runs that differed in nothing
but the order of their sums were 8 to 80 % apart within 30 steps (ResNet-152, batch 64, on a CPU). From these weights
they were 0.2 % apart, and bfloat16 was off by 0.9 %; a learning rate 1.1 times as high was off by 10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lab_utils import models

# ImageNet's.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SGD, LR, CALM = {"momentum": 0.9, "weight_decay": 1e-4}, 3e-4, 0.1
WARMUP = 3  # steps on a side stream before a capture, as in PyTorch's notes

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Training:
    """A running arm.

    Attributes:
        model: The network, on the device.
        optimizer: The optimizer of all its parameters.
        step: Trains on one batch of uint8 images (N, 3, H, W) and labels; returns the loss, on the device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step

    @torch.no_grad()
    def restart(self, weights: dict[str, torch.Tensor]) -> None:
        """Restores weights and clears the momentum, in place, because a graph has their addresses."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        for state in self.optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()

    def capture(self, batch: Batch) -> int:
        """Turns the step into a CUDA graph of forward, backward and optimizer; weights and momentum stay as they were.

        As in PyTorch's notes, "CUDA Graphs, Whole-network capture" (https://docs.pytorch.org/docs/stable/notes/cuda.html):
        it warms up on a side stream, so that no algorithm is searched for and no momentum made during the capture, and
        has no gradients when the capture begins, so that each replay overwrites them in the graph's own memory.

        Returns:
            The most bytes that tensors held during the capture: a replay allocates nothing.
        """
        first = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}  # not in the peak memory
        images, labels = (tensor.clone() for tensor in batch)
        step, side = self.step, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                step(images, labels)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()  # the search for algorithms took more memory than a step does
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss = step(images, labels)

        def replay(new_images: torch.Tensor, new_labels: torch.Tensor) -> torch.Tensor:
            images.copy_(new_images)
            labels.copy_(new_labels)
            graph.replay()
            return loss

        self.step, peak = replay, torch.cuda.max_memory_allocated()
        self.restart(first)
        return peak


def build_model(net: str, stem: str) -> nn.Module:
    """Builds a network, as ``models.build`` does, with the same weights for every arm."""
    torch.manual_seed(0)
    model = models.build(net, stem=stem)
    # A Bottleneck's last BatchNorm is bn3, a BasicBlock's bn2.
    last = "bn3" if any(name.endswith("bn3") for name, _ in model.named_modules()) else "bn2"
    for name, module in model.named_modules():
        if name.endswith(last):
            nn.init.constant_(module.weight, CALM)
    return model


def build_reference(net: str, stem: str, device: torch.device) -> Training:
    """Builds the reference: float32 and PyTorch's plain SGD, in the standard layout."""
    model = build_model(net, stem).to(device)
    optimizer = torch.optim.SGD(model.parameters(), LR, foreach=False, **SGD)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model((images.float() / 255 - mean) / std), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


@dataclass(frozen=True)
class Arm:
    """One way to run the step.

    Attributes:
        compiled: True to compile normalisation, network and loss as one function.
        graph: True to record the whole step as a CUDA graph.
    """

    compiled: bool = False
    graph: bool = False

    def build(self, net: str, stem: str, device: torch.device, *, amp: bool = True) -> Training:
        """Builds the training; with ``graph``, its step is still to be captured."""
        model = build_model(net, stem).to(device, memory_format=torch.channels_last)
        # On the device: a captured graph reads it there at each replay, so that a schedule may change it.
        optimizer = torch.optim.SGD(model.parameters(), torch.tensor(LR, device=device), fused=True, **SGD)
        # (value / 255 - mean) / std as one multiplication and one addition.
        scale = torch.tensor([1 / (255 * std) for std in STD], device=device).view(3, 1, 1)
        offset = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=device).view(3, 1, 1)

        def compute_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            images = images.to(torch.float32, memory_format=torch.channels_last)
            return F.cross_entropy(model(images * scale + offset), labels)

        if self.compiled:
            compute_loss = torch.compile(compute_loss, dynamic=False)

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            # Each weight is used once, so the cache of casts gains nothing, and a capture must not meet it.
            with torch.autocast(device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
                loss = compute_loss(images, labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Training(model, optimizer, step)


ARMS = {
    "eager": Arm(),
    "graph": Arm(graph=True),
    "compiled": Arm(compiled=True),
    "compiled graph": Arm(compiled=True, graph=True),
}
