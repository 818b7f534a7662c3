"""The networks of the labs: torchvision's ResNets with the stem as a choice, and a small net for a CPU."""

from __future__ import annotations

from torch import nn

from lab_common import LabError
from lab_utils import load_torchvision

RESNETS = ("resnet18", "resnet50", "resnet152")
NAMES = (*RESNETS, "tiny")


def build(name: str, *, num_classes: int = 10, stem: str = "imagenet") -> nn.Module:
    """Builds a network with random weights that maps (N, 3, 32, 32) float images to (N, num_classes) logits.

    The stem decides how much there is to compute. The ``imagenet`` stem (7×7 convolution of stride 2, then a pooling of
    stride 2) leaves a 32×32 image 8×8 before the first block and 1×1 in the last. The ``cifar`` stem (3×3 convolution
    of stride 1, no pooling) keeps it 32×32, as in section 4.2 of He et al., "Deep Residual Learning"
    (arXiv:1512.03385): the same number of weights within 0.02 %, about sixteen times the multiplications.

    Args:
        name: One of ``resnet152``, ``resnet50``, ``resnet18`` (the layers are torchvision's) or ``tiny``.
        num_classes: Number of logits.
        stem: ``imagenet`` or ``cifar``; ``tiny`` has one stem only and takes either word.

    Returns:
        The network, in training mode, float32, on the CPU.

    Raises:
        LabError: Unknown name or stem, or torchvision does not go with torch.
    """
    if name not in NAMES:
        raise LabError(f"There is no network {name!r}.", fix=f"choose one of {', '.join(NAMES)}")
    if stem not in ("imagenet", "cifar"):
        raise LabError(f"There is no stem {stem!r}.", fix="choose stem='imagenet' or stem='cifar'")
    if name == "tiny":
        return _build_tiny(num_classes)
    model = getattr(load_torchvision().models, name)(weights=None, num_classes=num_classes)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
        model.maxpool = nn.Identity()
    return model


def _build_tiny(num_classes: int) -> nn.Module:
    """Three convolutions, 24 thousand weights: an epoch takes seconds on one CPU core."""
    layers: list[nn.Module] = []
    for channels_in, channels in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if channels < 64 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, num_classes))
