"""Facts about this machine, and the device and scale that the labs use on it."""

from __future__ import annotations

from lab_utils.machine.facts import BF16_FEATURES, CPU_FEATURES, FP16_FEATURES, Gpu, Machine, describe, has_fast_bf16
from lab_utils.machine.settings import device, scale, scale_reason

__all__ = [
    "CPU_FEATURES",
    "Gpu",
    "Machine",
    "card",
    "describe",
    "device",
    "has_fast_bf16",
    "scale",
    "scale_reason",
]


def card() -> None:
    """Prints the machine card: what a reader must know about this machine to judge measurements made on it."""
    machine = describe()
    rows = [
        ("Machine", machine.label),
        ("Processor", f"{machine.cpu}; cores we may use: {machine.cores}; threads that torch uses: {machine.threads}"),
        ("Memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        *_describe_units(machine),
        *_describe_gpus(machine),
        ("Versions", f"torch {machine.torch}, torchvision {machine.torchvision}, Python {machine.python}"),
        (
            "System",
            f"{machine.system}, {f'torch built with CUDA {machine.cuda}' if machine.cuda else 'torch without CUDA'}",
        ),
        ("Scale", f"{scale()} ({scale_reason()})"),
    ]
    print("\n".join(f"{name:<11}{text}" for name, text in rows))


def _describe_units(machine: Machine) -> list[tuple[str, str]]:
    features = set(machine.cpu_features)
    if not features:
        told = machine.system.startswith(("Linux", "Darwin"))
        return [("CPU units", "none of those we look for" if told else "not known (only Linux and macOS tell)")]
    lines = [f"{feature:<13}{CPU_FEATURES[feature]}" for feature in machine.cpu_features]
    if not BF16_FEATURES & features:
        what = "bf16: it saves" if FP16_FEATURES & features else "bf16 or fp16: low precision saves"
        lines.append(f"no unit for {what} memory on this processor, and may cost time")
    return [("CPU units" if line is lines[0] else "", line) for line in lines]


def _describe_gpus(machine: Machine) -> list[tuple[str, str]]:
    if not machine.gpus:
        return [("GPU", "none: the labs run on the processor, and say what only a GPU can show")]
    rows = []
    for index, gpu in enumerate(machine.gpus):
        bf16 = "with" if gpu.has_bf16_tensor_cores else "without"
        major, minor = gpu.capability
        facts = f"{gpu.memory_bytes / 2**30:.1f} GiB, capability {major}.{minor}, {bf16} bf16 tensor cores"
        rows.append((f"GPU {index}", f"{gpu.name}, {facts}"))
    return rows
