"""Arms of the benchmark: training steps of ResNet-152, ours and those of four other projects.

Our step takes uint8 images on the device, normalises them there, and trains in channels-last, autocast to bfloat16,
with the fused SGD; it runs eagerly, compiled, or as a CUDA graph of the whole step. The peers are the loops of four
projects in our own lines, as their users would run them, with the reads of loss and accuracy that make the program
wait. Three of them normalise in the loader's workers, on the CPU: here they get float32 images for nothing; timm's
loader normalises on the GPU, and so does ``make_timm``. Weights at the start and SGD's settings are everywhere the
same; label smoothing and other extras are off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lab_utils import models

# ImageNet's, which the peers' scripts normalise by.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SGD, LR = {"momentum": 0.9, "weight_decay": 1e-4}, 0.1
WARMUP = 3  # steps on a side stream before a capture, as in PyTorch's notes

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """Settings that all arms have in common: the network and its stem, as for ``models.build``, and the device."""

    net: str
    stem: str
    device: torch.device

    def build(self) -> nn.Module:
        """Builds the network, in float32 on the CPU, with the same random weights for every arm."""
        torch.manual_seed(0)
        return models.build(self.net, stem=self.stem)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Returns uint8 images (N, 3, H, W) as float32 with ImageNet's mean and deviation."""
        mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
        return images.float().div_(255).sub_(mean).div_(std)


@dataclass
class Training:
    """A running arm.

    Attributes:
        model: The network, on the device.
        optimizer: The optimizer of all its parameters.
        step: Trains on one batch and returns the loss, on the device.
        prepare: A loader's work, which is not timed: makes the input of ``step`` from uint8 images.
        peak: Bytes at the capture of a graph, since a replay allocates nothing; None without a graph.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda images: images
    peak: int | None = None

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Restores weights and clears the momentum, in place, since a graph has their addresses."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        for state in self.optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, in place if it is a tensor, which a graph reads at each replay."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def capture(self, batch: Batch) -> None:
        """Turns the step into a CUDA graph of forward, backward and optimizer; weights and momentum change.

        As in PyTorch's notes, "CUDA Graphs, Whole-network capture" (https://docs.pytorch.org/docs/stable/notes/cuda.html):
        it warms up on a side stream, so that no algorithm is searched for and no momentum made during the capture, and
        has no gradients when the capture begins, so that each replay overwrites them in the graph's own memory.
        """
        images, labels = (tensor.clone() for tensor in batch)
        step, side = self.step, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                step(images, labels)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()  # of what searching for algorithms took
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss = step(images, labels)

        def replay(new_images: torch.Tensor, new_labels: torch.Tensor) -> torch.Tensor:
            images.copy_(new_images)
            labels.copy_(new_labels)
            graph.replay()
            return loss

        self.step, self.peak = replay, torch.cuda.max_memory_allocated()


def make_ours(setup: Setup, *, compiled: bool = False, amp: bool = True) -> Training:
    """Builds our step; ``compiled`` compiles normalisation, network and loss as one."""
    model = setup.build().to(setup.device, memory_format=torch.channels_last)
    # On the device: a captured graph reads it there at each replay, so that a schedule may change it.
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(LR, device=setup.device), fused=True, **SGD)
    # (value / 255 - mean) / std as one multiplication and one addition.
    scale = torch.tensor([1 / (255 * std) for std in STD], device=setup.device).view(3, 1, 1)
    offset = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=setup.device).view(3, 1, 1)

    def compute_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return F.cross_entropy(model(images * scale + offset), labels)

    if compiled:
        compute_loss = torch.compile(compute_loss, dynamic=False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        # Each weight is used once, so the cache of casts gains nothing, and a capture must not meet it.
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
            loss = compute_loss(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


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


def count_right(output: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Returns the percentages of images whose label is the first, and among the first five, of (N, classes) logits."""
    with torch.no_grad():
        right = output.topk(5, dim=1).indices.eq(target.view(-1, 1))
        return [right[:, :k].reshape(-1).float().sum(0, keepdim=True).mul(100 / len(target)) for k in (1, 5)]


def make_examples(setup: Setup) -> Training:
    """The loop of pytorch/examples' ImageNet script; its AMP is what PyTorch's recipe adds, since it has none."""
    model = setup.build().to(setup.device)
    criterion = nn.CrossEntropyLoss().to(setup.device)
    optimizer = torch.optim.SGD(model.parameters(), LR, **SGD)
    meters = {"loss": 0.0, "top1": 0.0, "top5": 0.0}

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setup.device.type, torch.bfloat16):
            output = model(images)
            loss = criterion(output, target)
        top1, top5 = count_right(output, target)
        meters["loss"] += loss.item() * len(images)
        meters["top1"] += top1[0] * len(images)
        meters["top5"] += top5[0] * len(images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, setup.normalize)


def make_torchvision(setup: Setup) -> Training:
    """The loop of torchvision's classification reference with ``--amp``: float16 with a loss scale."""
    model = setup.build().to(setup.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), LR, **SGD)
    scaler = torch.amp.GradScaler(setup.device.type)
    meters = {"loss": 0.0, "acc1": 0.0, "acc5": 0.0}

    def step(image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setup.device.type, torch.float16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        acc1, acc5 = count_right(output, target)
        meters["loss"] += loss.item()
        meters["acc1"] += acc1.item() * len(image)
        meters["acc5"] += acc5.item() * len(image)
        return loss.detach()

    return Training(model, optimizer, step, setup.normalize)


def make_timm(setup: Setup, *, compiled: bool = False) -> Training:
    """The loop of timm's training script with ``--amp --amp-dtype bfloat16 --channels-last``, without a loss scale.

    Its network is timm's own. A network that timm does not have, such as the rehearsal's, is ours.
    """
    import timm
    from timm.optim import create_optimizer_v2

    donor = setup.build()
    model = timm.create_model(setup.net, num_classes=10) if timm.is_model(setup.net) else donor
    if setup.stem == "cifar" and model is not donor:
        model.conv1, model.maxpool = donor.conv1, donor.maxpool
    model.load_state_dict(donor.state_dict())
    model.to(setup.device, memory_format=torch.channels_last)
    # "momentum" is SGD with classical momentum; timm's "sgd" is Nesterov's.
    optimizer = create_optimizer_v2(model, opt="momentum", lr=LR, **SGD)
    forward = torch.compile(model) if compiled else model
    criterion = nn.CrossEntropyLoss().to(setup.device)
    mean, std = (
        torch.tensor([255 * x for x in values], device=setup.device).view(1, 3, 1, 1) for values in (MEAN, STD)
    )
    optimizer.zero_grad()
    total = 0.0

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal total
        images = images.to(torch.float32).sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(setup.device.type, torch.bfloat16):
            loss = criterion(forward(images), target)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(images)
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


@dataclass(frozen=True)
class Arm:
    """One way to train: how to build it, its kind, and the settings of its process.

    Attributes:
        make: Builds its ``Training``.
        kind: One of ``KINDS``: arms are compared with those of their own kind.
        ours: True if it is ours, False for a peer.
        benchmark: ``torch.backends.cudnn.benchmark``; PyTorch's default is False.
        tf32_matmul: True if float32 means TF32 in matrix products; PyTorch's default is False.
        tf32_conv: The same for convolutions; PyTorch's default is True.
        package: A package that must be installed.
        source: The script that it follows.
    """

    make: Callable[[Setup], Training]
    kind: str = "eager"
    ours: bool = False
    benchmark: bool = True
    tf32_matmul: bool = False
    tf32_conv: bool = True
    package: str = ""
    source: str = ""

    def set_globals(self) -> None:
        """Sets PyTorch's global settings, by the older names, as timm's script does: they set the newer ones, too."""
        torch.backends.cudnn.benchmark = self.benchmark
        torch.backends.cuda.matmul.allow_tf32 = self.tf32_matmul
        torch.backends.cudnn.allow_tf32 = self.tf32_conv


# Read at these commits. The first has its forward pass outside autocast; ours is inside, as in the same project's
# detection script.
VISION = "pytorch/vision, references/classification/train.py, commit 017e9b9"
EXAMPLES = "pytorch/examples, imagenet/main.py, commit 77f55b9"
TIMM = "huggingface/pytorch-image-models, train.py, commit aa4b585"
_timm = partial(Arm, tf32_matmul=True, package="timm", source=TIMM)
ARMS = {
    "eager": Arm(make_ours, ours=True),
    "timm AMP channels_last": _timm(make_timm),
    "torchvision AMP fp16": Arm(make_torchvision, source=VISION),
    "examples AMP": Arm(make_examples, benchmark=False, source=EXAMPLES),
    "compiled": Arm(partial(make_ours, compiled=True), "compiled", ours=True),
    "timm compiled channels_last": _timm(partial(make_timm, compiled=True), "compiled"),
    "graph": Arm(make_ours, "graph", ours=True),
    "compiled graph": Arm(partial(make_ours, compiled=True), "compiled graph", ours=True),
}
REFERENCE = Arm(make_reference, benchmark=False, tf32_conv=False)
KINDS = ("eager", "graph", "compiled", "compiled graph")
