"""The peers of the benchmark: the training loops of four projects, in our own lines, as their users would run them.

Each does in a step what its script does there, with the reads of loss and accuracy that make the program wait. Three of
the scripts normalise in the loader's workers, on the CPU: here they get float32 images for nothing. timm's loader
normalises on the GPU, and so does ``make_timm``. The optimizer is everywhere SGD with the same settings, and the
initial weights are the same; label smoothing and other extras are off.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu.arms import LR, MEAN, SGD, STD, Arm, Batch, Setup, Training


def count_right(output: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Returns the percentages of images whose label is the first, and among the first five, as tensors of one number.

    Args:
        output: (N, classes) logits.
        target: (N,) labels.
    """
    with torch.no_grad():
        right = output.topk(5, dim=1).indices.eq(target.view(-1, 1))
        return [right[:, :k].reshape(-1).float().sum(0, keepdim=True).mul(100 / len(target)) for k in (1, 5)]


def make_examples(setup: Setup, *, amp: bool) -> Training:
    """The loop of pytorch/examples' ImageNet script; its AMP is what PyTorch's recipe adds, since it has none."""
    model = setup.build().to(setup.device)
    criterion = nn.CrossEntropyLoss().to(setup.device)
    optimizer = torch.optim.SGD(model.parameters(), LR, **SGD)
    meters: dict[str, float | torch.Tensor] = defaultdict(float)

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        images = images.to(setup.device, non_blocking=True)
        target = target.to(setup.device, non_blocking=True)
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=amp):
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


def make_torchvision(setup: Setup, *, amp: bool) -> Training:
    """The loop of torchvision's classification reference; its ``--amp`` is float16 with a loss scale."""
    model = setup.build().to(setup.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), LR, **SGD)
    scaler = torch.amp.GradScaler(setup.device.type) if amp else None
    meters: dict[str, float] = defaultdict(float)

    def step(image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        image, target = image.to(setup.device), target.to(setup.device)
        with torch.autocast(setup.device.type, torch.float16, enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        acc1, acc5 = count_right(output, target)
        meters["loss"] += loss.item()
        meters["acc1"] += acc1.item() * len(image)
        meters["acc5"] += acc5.item() * len(image)
        return loss.detach()

    return Training(model, optimizer, step, setup.normalize)


def make_timm(setup: Setup, *, amp: bool, channels_last: bool = False, compiled: bool = False) -> Training:
    """The loop of timm's training script with ``--amp --amp-dtype bfloat16``, which takes no loss scale.

    Its network is timm's own. A network that timm does not have, such as the rehearsal's, is ours.
    """
    import timm
    from timm.optim import create_optimizer_v2

    donor = setup.build()
    model = timm.create_model(setup.net, num_classes=10) if timm.is_model(setup.net) else donor
    if setup.stem == "cifar" and model is not donor:
        model.conv1, model.maxpool = donor.conv1, donor.maxpool
    model.load_state_dict(donor.state_dict())
    model.to(setup.device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    # "momentum" is SGD with classical momentum; timm's "sgd" is Nesterov's.
    optimizer = create_optimizer_v2(model, opt="momentum", lr=LR, **SGD)
    forward = torch.compile(model, backend=setup.backend) if compiled else model
    autocast = partial(torch.autocast, setup.device.type, torch.bfloat16) if amp else contextlib.nullcontext
    criterion = nn.CrossEntropyLoss().to(setup.device)
    mean, std = (torch.tensor([255 * x for x in values], device=setup.device) for values in (MEAN, STD))
    mean, std = mean.view(1, 3, 1, 1), std.view(1, 3, 1, 1)
    optimizer.zero_grad()
    total = 0.0

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal total
        images = images.to(torch.float32).sub_(mean).div_(std)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast():
            loss = criterion(forward(images), target)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(images)
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


class LightningTraining(Training):
    """Training by Lightning's Trainer, which has the loop: it calls back before and after each step."""

    def __init__(self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: object):
        super().__init__(model, optimizer, lambda *batch: module.training_step(batch, 0))
        self.module, self.settings = module, settings

    def run(
        self,
        batches: Sequence[Batch],
        count: int,
        mark: Callable[[int], None] = lambda index: None,
        losses: list[float] | None = None,
    ) -> None:
        """Trains in a ``fit`` of its own; what that does before and after the steps is not between two marks."""
        import lightning

        class Marks(lightning.Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                mark(batch_idx)

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if losses is not None:
                    losses.append(float(outputs["loss"]))
                if batch_idx == count - 1:
                    mark(count)

        trainer = lightning.Trainer(callbacks=[Marks()], **self.settings)
        # A list would be taken for several loaders; without a batch size this one hands over what it is given.
        loader = DataLoader([batches[index % len(batches)] for index in range(count)], batch_size=None)
        trainer.fit(self.module, loader)


def make_lightning(setup: Setup, *, precision: str) -> Training:
    """A LightningModule of few lines, and the Trainer without logger, checkpoints, bar and summary."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = setup.build()

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            loss = F.cross_entropy(self.model(images), labels)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer  # the same in each fit, so that its momentum stays

    module = Classifier().to(setup.device)
    optimizer = torch.optim.SGD(module.parameters(), LR, **SGD)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    accelerator = "gpu" if setup.device.type == "cuda" else "cpu"
    settings = {"accelerator": accelerator, "devices": 1, "precision": precision, "max_epochs": 1}
    training = LightningTraining(module, module.model, optimizer, **settings, **dict.fromkeys(quiet, False))
    training.prepare = setup.normalize
    return training


# Read at these commits; Lightning in this release. The first has its forward pass outside autocast; ours is inside, as
# in the same project's detection script.
VISION = "pytorch/vision, references/classification/train.py, commit 017e9b9"
EXAMPLES = "pytorch/examples, imagenet/main.py, commit 77f55b9"
TIMM = "huggingface/pytorch-image-models, train.py, commit aa4b585"
LIGHTNING = "Lightning 2.6.6, Trainer"

_examples = partial(Arm, ours=False, benchmark=False, source=EXAMPLES)
_torchvision = partial(Arm, ours=False, source=VISION)
_timm = partial(Arm, ours=False, tf32_matmul=True, package="timm", source=TIMM)
_lightning = partial(Arm, ours=False, benchmark=False, package="lightning", source=LIGHTNING)
PEERS = {
    "timm AMP channels_last": _timm(partial(make_timm, amp=True, channels_last=True)),
    "timm AMP": _timm(partial(make_timm, amp=True)),
    "torchvision AMP fp16": _torchvision(partial(make_torchvision, amp=True)),
    "examples AMP": _examples(partial(make_examples, amp=True)),
    "Lightning AMP": _lightning(partial(make_lightning, precision="bf16-mixed")),
    "timm compiled channels_last": _timm(
        partial(make_timm, amp=True, channels_last=True, compiled=True), compiled=True
    ),
    "timm compiled": _timm(partial(make_timm, amp=True, compiled=True), compiled=True),
    "timm fp32": _timm(partial(make_timm, amp=False), amp=False),
    "torchvision fp32": _torchvision(partial(make_torchvision, amp=False), amp=False),
    "examples fp32": _examples(partial(make_examples, amp=False), amp=False),
    "Lightning fp32": _lightning(partial(make_lightning, precision="32-true"), amp=False),
}
