"""Trains a small network in a pipeline of two stages, beside the same network in one piece: which waves are fast?"""

import copy
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

import nodelaunch as launch

# One number of micro-batches for each epoch.
WAVES, BATCH_SIZE, MICRO_BATCHES = 96, 16, (1, 2, 4)
CHANNELS, LENGTH = 8, 32
Chunks = Sequence[tuple[torch.Tensor, torch.Tensor]]


def build_stages() -> torch.nn.Sequential:
    """The network: a stage for each rank."""
    return torch.nn.Sequential(
        torch.nn.Sequential(
            torch.nn.Conv1d(1, CHANNELS, 5, padding=2), torch.nn.GroupNorm(2, CHANNELS), torch.nn.ReLU()
        ),
        torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(CHANNELS, 2)),
    )


def make_waves() -> tuple[torch.Tensor, torch.Tensor]:
    """Slow and fast waves with noise, shape (WAVES, 1, LENGTH), and which of them are fast."""
    fast = torch.arange(WAVES) % 2
    angles = (2 + 4 * fast)[:, None] * torch.linspace(0, 6.28, LENGTH) + 6.28 * torch.rand(WAVES, 1)
    return (angles.sin() + 0.1 * torch.randn(WAVES, LENGTH))[:, None], fast


def run_first(stage: torch.nn.Module, chunks: Chunks) -> list[torch.Tensor]:
    """All micro-batches forward through rank 0's stage, then all backward; returns what it sent."""
    outputs = []
    for inputs, _ in chunks:
        outputs.append(stage(inputs))
        dist.send(outputs[-1].detach(), 1)
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    return outputs


def run_last(stage: torch.nn.Module, chunks: Chunks) -> list[torch.Tensor]:
    """The same through rank 1's stage; returns what it received."""
    received, losses = [], []
    for _, targets in chunks:
        buffer = torch.empty(len(targets), CHANNELS, LENGTH)
        dist.recv(buffer, 0)
        received.append(buffer.requires_grad_())
        losses.append(F.cross_entropy(stage(buffer), targets) / len(chunks))
    for loss, buffer in zip(losses, received, strict=True):
        loss.backward()
        dist.send(buffer.grad, 0)
    return received


def step_alone(alone: torch.nn.Module, optimizer: torch.optim.Optimizer, chunks: Chunks) -> None:
    """A step of the whole network on the whole batch."""
    inputs, targets = map(torch.cat, zip(*chunks, strict=True))
    optimizer.zero_grad()
    F.cross_entropy(alone(inputs), targets).backward()
    optimizer.step()


def measure_gap(stage: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between the weights of two stages."""
    pairs = zip(stage.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def main() -> None:
    """Trains an epoch with each number of micro-batches, and reports how far the weights are from those of one rank."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    waves, fast = make_waves()
    alone = build_stages()
    stage, start = copy.deepcopy(alone[rank]), copy.deepcopy(alone[rank])
    optimizer, optimizer_alone = (torch.optim.SGD(net.parameters(), lr=0.5) for net in (stage, alone))

    gaps, messages = [], []
    for epoch, count in enumerate(MICRO_BATCHES):
        for inputs, targets in zip(waves.split(BATCH_SIZE), fast.split(BATCH_SIZE), strict=True):
            chunks = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
            optimizer.zero_grad()
            boundary = run_last(stage, chunks) if rank else run_first(stage, chunks)
            optimizer.step()
            step_alone(alone, optimizer_alone, chunks)
        gaps.append(measure_gap(stage, alone[rank]))
        messages.append(len(boundary))
        words = f"{'received' if rank else 'sent'} {messages[epoch]} x {tuple(boundary[0].shape)}"
        print(f"epoch {epoch}: {words}; weights differ from one piece's by up to {gaps[epoch]:.0e}", flush=True)
    launch.report({"gaps": gaps, "messages": messages, "moved": measure_gap(stage, start)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
