"""Images per second that a GPU's data sheet allows, from the operations and bytes of each kernel of a training step.

Each kernel takes the longer of two times, ``flops / peak`` and ``bytes / bandwidth`` (Williams, Waterman and Patterson,
"Roofline", https://doi.org/10.1145/1498765.1498785); a step takes their sum. Convolutions and the linear layer run
forward and backward (gradient of the input, gradient of the weights). Activations and the weights that kernels read
have 2 bytes (bf16); parameters, their gradients and the momentum have 4. Caches, launches and the loss cost nothing.

BatchNorm is fused with the ReLU and the addition behind it, as a compiler can do it around a library's convolutions.
Forward it reads its input for the statistics, reads it again and writes; backward it reads input and gradient for two
sums, reads both again and writes. The ReLU costs nothing, and the residual addition reads one more activation forward,
and backward reads two gradients and writes one.

ResNet-152 with the ImageNet stem at batch 1,024 on an H200 comes to 243,000 images/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import conv_flop_count

from lab_utils import models

# Dense bf16 FLOP/s (half of the 1,979 TFLOP/s with sparsity) and bytes/s of the SXM boards, from NVIDIA's data sheets:
# https://www.nvidia.com/en-us/data-center/h100/ and https://www.nvidia.com/en-us/data-center/h200/.
SHEETS = {"H100 80GB HBM3": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
# Reads and writes of one activation, forward and backward.
BATCH_NORM, ADDITION = 3 + 5, 1 + 3
SHORT, LONG, INDEX = 2, 4, 8  # bytes of bf16, of float32, and of the positions that max pooling remembers (int64)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step: floating-point operations, and bytes that it reads and writes."""

    flops: float
    bytes: float


def find_sheet(gpu: str) -> tuple[float, float] | None:
    """Returns peak FLOP/s (dense bf16) and bytes/s of a GPU by the name that CUDA gives it; None of an unknown one."""
    return next((sheet for name, sheet in SHEETS.items() if gpu.endswith(name)), None)


def list_kernels(net: str, stem: str, batch: int) -> list[Kernel]:
    """Returns the kernels of one training step on (batch, 3, 32, 32) images; network and stem as for ``models.build``.

    The layers and their shapes come from a forward pass on tensors without data, so that any batch takes a second.
    """
    layers: list[tuple[nn.Module, torch.Size, torch.Size]] = []
    with FakeTensorMode():
        model = models.build(net, stem=stem)
        for module in model.modules():
            # A leaf, or a residual block, whose output is a sum.
            if not list(module.children()) or hasattr(module, "downsample"):
                module.register_forward_hook(lambda one, read, wrote: layers.append((one, read[0].shape, wrote.shape)))
        model(torch.empty(batch, 3, 32, 32))
        size = sum(parameter.numel() for parameter in model.parameters())
    kernels = [kernel for index, layer in enumerate(layers) for kernel in count_layer(*layer, first=not index)]
    # The 16-bit copy is made (4 + 2); the gradient comes back in 32 bits (2 + 4); SGD reads weight, gradient and
    # momentum and writes weight and momentum.
    return [*kernels, Kernel(0.0, size * (2 * (SHORT + LONG) + 5 * LONG))]


def count_layer(module: nn.Module, read: torch.Size, wrote: torch.Size, *, first: bool = False) -> Iterator[Kernel]:
    """Yields the kernels, forward and backward, of a leaf of the network, or of a residual block's addition.

    ``first`` is the network's first layer, whose input needs no gradient.
    """
    inputs, outputs = math.prod(read), math.prod(wrote)
    if isinstance(module, nn.Conv2d | nn.Linear):
        if isinstance(module, nn.Conv2d):
            flops = conv_flop_count(list(read), list(module.weight.shape), list(wrote))
        else:
            flops = 2 * inputs * module.out_features
        for _ in range(2 if first else 3):
            yield Kernel(flops, SHORT * (inputs + outputs + module.weight.numel()))
    elif isinstance(module, nn.BatchNorm2d):
        yield Kernel(0.0, SHORT * BATCH_NORM * inputs)
    elif hasattr(module, "downsample"):
        yield Kernel(0.0, SHORT * ADDITION * outputs)
    elif isinstance(module, nn.MaxPool2d):
        yield Kernel(0.0, 2 * (SHORT * (inputs + outputs) + INDEX * outputs))
    elif isinstance(module, nn.AdaptiveAvgPool2d):
        yield Kernel(0.0, 2 * SHORT * (inputs + outputs))


def predict(net: str, stem: str, batch: int, sheet: tuple[float, float]) -> float:
    """Returns the images per second of a GPU with these FLOP/s and bytes/s (``find_sheet``)."""
    peak, bandwidth = sheet
    return batch / sum(max(one.flops / peak, one.bytes / bandwidth) for one in list_kernels(net, stem, batch))
