"""A small training step to try an answer on: a network that notes what is done to it, and the step as it should be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Probe(nn.Module):
    """A small classifier that notes under which autocast its forward ran and whether its backward ran under one too."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # leaves the random numbers of the learner's notebook as they are
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 10)
        self.forward_dtype: torch.dtype | None = None
        self.backward_in_autocast = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (N, 3, 2, 2) float images to (N, 10) logits."""
        self.forward_dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        hidden = torch.relu(self.hidden(images.flatten(1)))
        if hidden.requires_grad:
            hidden.register_hook(self._note_backward)
        return self.head(hidden)

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self.backward_in_autocast |= torch.is_autocast_enabled("cpu")


def make_case(dtype: torch.dtype, lr: float = 0.1) -> dict:
    """A probe, a batch, an optimizer and a scaler for one trial; the same numbers each time."""
    generator = torch.Generator().manual_seed(1)
    model = Probe()
    return {
        "model": model,
        "images": torch.randn(6, 3, 2, 2, generator=generator),
        "labels": torch.randint(0, 10, (6,), generator=generator),
        "optimizer": torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=dtype == torch.float16),
        "dtype": dtype,
    }


def run_reference(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
    max_norm: float | None = None,
) -> torch.Tensor:
    """The expected step; returns the loss, or the gradient norm where ``max_norm`` is given."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    norm = None
    if max_norm is not None:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach() if norm is None else norm


def measure_update(before: nn.Module, after: nn.Module) -> float:
    """Length of the step that the weights took, over all parameters."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return sum((new.detach() - old.detach()).square().sum().item() for old, new in pairs) ** 0.5
