"""Facts about this machine: processor, memory and GPUs, read from the system and from torch, never guessed."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lab_common import cores

# The processor flags that decide how fast low precision is, spelled as Linux spells them: x86's, then Arm's.
CPU_FEATURES = {
    "avx2": "256-bit vectors",
    "avx512f": "512-bit vectors",
    "avx512_bf16": "bf16 dot products in the vector units",
    "avx512_fp16": "fp16 arithmetic in the vector units",
    "amx_bf16": "bf16 matrix units",
    "amx_fp16": "fp16 matrix units",
    "asimd": "128-bit vectors (NEON)",
    "asimdhp": "fp16 arithmetic in the vector units",
    "bf16": "bf16 dot and matrix products in the vector units",
    "sve": "vectors of 128 to 2,048 bits",
    "smeb16f32": "bf16 matrix units",
    "smef16f32": "fp16 matrix units",
}
# Those with which bf16, or fp16, can be faster than fp32, and not only smaller.
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16", "smeb16f32"})
FP16_FEATURES = frozenset({"avx512_fp16", "amx_fp16", "asimdhp", "smef16f32"})
# Apple's names of the same.
SYSCTLS = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.arm.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.SME_B16F32": "smeb16f32",
    "hw.optional.arm.SME_F16F32": "smef16f32",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use: its name, its memory in bytes, its compute capability such as (9, 0)."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def has_bf16_tensor_cores(self) -> bool:
        """True if the GPU has matrix units for bf16: from compute capability 8.0 (Ampere) on."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Machine:
    """The facts on which a measurement depends.

    Attributes:
        cpu: The processor's name, tidied.
        cores: Logical processors that this process may use (affinity and container limits counted).
        threads: Threads that torch uses within one operation.
        memory_bytes: Main memory, or the container's share of it.
        cpu_features: Those of ``CPU_FEATURES`` that the processor has; empty if the system does not tell.
        gpus: The GPUs that torch sees.
        python, torch, torchvision: Versions.
        cuda: The CUDA version that torch was built with; None for a CPU build.
        system: Operating system and architecture.
    """

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    cpu_features: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    python: str
    torch: str
    torchvision: str
    cuda: str | None
    system: str

    @property
    def label(self) -> str:
        """A short name for tables and figures: the GPU's if there is one, otherwise the processor's."""
        if not self.gpus:
            return f"{self.cpu} ({self.cores} core{'s' if self.cores != 1 else ''})"
        count = len(self.gpus)
        return self.gpus[0].name if count == 1 else f"{count} × {self.gpus[0].name}"


def describe() -> Machine:
    """Describes this machine. Imports torch, and on a GPU machine starts CUDA in this process."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(properties.name, properties.total_memory, (properties.major, properties.minor)))
    cpu, features = read_cpu()
    return Machine(
        cpu=cpu,
        cores=count_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=measure_memory(),
        cpu_features=features,
        gpus=tuple(gpus),
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=_read_version("torchvision"),
        cuda=torch.version.cuda,
        system=f"{platform.system()} {platform.machine()}",
    )


def has_fast_bf16(machine: Machine) -> bool:
    """Returns True if the labs' device here has units for bf16; otherwise bf16 cannot be faster."""
    if machine.gpus:
        return machine.gpus[0].has_bf16_tensor_cores
    return bool(BF16_FEATURES & set(machine.cpu_features))


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """Reads the processor's name and the features that matter here; () if the system does not tell.

    Linux lists an Arm processor's features as https://docs.kernel.org/arch/arm64/elf_hwcaps.html names them, in lower
    case; its name is known to ``lscpu``. macOS reports both by ``sysctl``, as Apple's page "Determining instruction set
    characteristics" says: https://developer.apple.com/documentation/kernel/1387446-sysctlbyname.
    """
    if platform.system() == "Darwin":
        known = _ask("sysctl", "machdep.cpu.brand_string", "hw.optional")
        name = known.get("machdep.cpu.brand_string")
        flags = {feature for key, feature in SYSCTLS.items() if known.get(key) == "1"}
    else:
        known = _read_fields(cpuinfo.read_text(errors="replace")) if cpuinfo.exists() else {}
        name = known.get("model name") or _ask("lscpu").get("Model name")  # on Arm the file has no name
        flags = set(known.get("flags", known.get("Features", "")).split())
    name = name or platform.processor() or platform.machine() or "CPU"
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*$", " ", name, flags=re.IGNORECASE)
    return " ".join(name.split()) or "CPU", tuple(feature for feature in CPU_FEATURES if feature in flags)


def _read_fields(text: str) -> dict[str, str]:
    """Reads lines such as ``model name : AMD EPYC``; the first of a name counts, as one of several processors."""
    pairs = [line.partition(":")[::2] for line in reversed(text.splitlines())]
    return {key.strip(): value.strip() for key, value in pairs}


def _ask(*command: str) -> dict[str, str]:
    try:
        text = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return _read_fields(text)


def count_cores() -> int:
    """Counts the logical processors that this process may use, at least 1; a container often has fewer."""
    return max(1, round(cores.count_cores()))


def measure_memory() -> int:
    """Returns main memory in bytes, or the container's limit if that is lower."""
    import psutil

    total, limit = psutil.virtual_memory().total, read_memory_limit()
    return total if limit is None else min(total, limit)


def read_memory_limit(root: Path = cores.ROOT, own: Path = cores.OWN) -> int | None:
    """Returns the lowest memory limit of this process's control groups in bytes (v2 and v1); None without one."""
    found = [
        *cores.read_cgroup_files(root, own, "", "memory.max"),
        *cores.read_cgroup_files(root, own, "memory", "memory.limit_in_bytes"),
    ]
    # v1 says "no limit" with a number near 2**63.
    return min((int(text) for text in found if text.isdigit() and int(text) < 2**60), default=None)


def _read_version(package: str) -> str:
    # From the metadata: importing a torchvision that does not go with this torch raises.
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
