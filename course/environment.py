"""``python -m course.environment`` checks what the set-up cannot provide, and names the command to fix it.

These are a torch and torchvision that fit together, a GPU that torch can use, memory and disk.
Nothing here imports torchvision, so that it can say when the pair does not fit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab_common import LabError, env_folder, read_folder
from lab_common.commandline import run_command
from lab_common.nvidia import run_smi
from lab_common.text import clean_name
from lab_utils import choose_repair, describe_pair
from lab_utils.machine.facts import measure_memory

GIB = 2**30
# CINIC-10's archive and its packed arrays together take about 1.5 GB.
DISK_NEEDED = 2 * GIB
# A lab takes up to 2.6 GiB (START.md has the peak of each), and JupyterLab and a browser need more.
MEMORY_NEEDED, FREE_NEEDED = 3.5 * GIB, 2.6 * GIB

# Tried in a process of its own: an import that breaks half-way leaves this one unable to try again.
PROBE = """
import json
found = {}
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    import torchvision
    kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.ones(2), 0.5)
    found["torchvision"] = torchvision.__version__ if len(kept) == 1 else None
except Exception as error:
    found["error"] = (str(error) or repr(error)).splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Verdict:
    """One checked fact: whether it suits the labs, what was found, and the command that fixes it."""

    ok: bool
    what: str
    fix: str = ""


def check_environment() -> list[Verdict]:
    """Checks the torch and torchvision pair, CUDA, memory and disk; takes seconds."""
    found = probe_torch()
    return [
        check_pair(found),
        check_gpu(found),
        check_memory(),
        check_disk(),
        check_shared_memory(found.get("gpus", 0)),
    ]


def probe_torch() -> dict:
    """Imports torch and torchvision in a fresh process and returns the facts found there; "error" if it failed."""
    try:
        child = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"error": "importing torch took more than two minutes"}
    lines = child.stdout.splitlines()
    if child.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"error": (child.stderr.strip().splitlines() or [f"Python ended with status {child.returncode}"])[-1]}


def check_pair(found: dict) -> Verdict:
    """Checks that torch and torchvision match: each is built for exactly one version of the other."""
    pair = describe_pair()
    if found.get("torchvision"):
        return Verdict(True, f"{pair} go together")
    return Verdict(
        False, f"{pair} do not go together: {found.get('error', 'its operators do not work')}", choose_repair()
    )


def check_gpu(found: dict) -> Verdict:
    """Checks that torch can use the GPU that the machine's driver reports."""
    if found.get("gpus"):
        return Verdict(
            True, f"{found['gpus']} GPU{'s' if found['gpus'] > 1 else ''} (torch built with CUDA {found['cuda']})"
        )
    try:
        listed = any("GPU" in line for line in run_smi("-L"))
    except OSError:
        listed = False
    if not listed:
        return Verdict(True, "no GPU: the labs run on the processor and say what only a GPU can show")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Verdict(True, "a GPU that CUDA_VISIBLE_DEVICES hides: the labs run on the processor")
    if found.get("torch") and not found.get("cuda"):
        return Verdict(False, f"There is a GPU, but torch {found['torch']} is a build without CUDA.", choose_repair())
    return Verdict(
        False,
        "There is a GPU, but torch cannot use it; most often the driver is older than torch's CUDA needs.",
        "update the NVIDIA driver, then compare: nvidia-smi; python -c 'import torch; torch.cuda.init()'",
    )


def check_memory() -> Verdict:
    """Checks that main memory, or the container's share, holds any lab, and that enough of it is free now."""
    total, free = measure_memory(), psutil.virtual_memory().available
    text = f"{total / GIB:.1f} GiB of memory (the labs want {MEMORY_NEEDED / GIB:.1f}); "
    text += f"of the machine's {free / GIB:.1f} GiB are free (a lab takes up to {FREE_NEEDED / GIB:.1f})"
    if total < MEMORY_NEEDED:
        return Verdict(False, text, "give the container or virtual machine at least 4 GiB of memory")
    return Verdict(free >= FREE_NEEDED, text, "end other programs, and shut down the kernels of other notebooks")


def check_disk() -> Verdict:
    """Checks that there is room for a data set where ``LAB_DATA`` points."""
    try:
        folder = read_folder(env_folder("LAB_DATA", "data"))
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    except LabError as error:
        return Verdict(False, f"{error.what[:-1]}: {error.cause}", error.fix)
    except OSError as error:
        what = f"LAB_DATA cannot be used: {clean_name(error.filename, 200)}: {error.strerror}"
        return Verdict(False, what, "export LAB_DATA=/a/folder/of/yours")
    text = f"{free / GIB:.1f} GiB free for data (CINIC-10 wants {DISK_NEEDED / GIB:.0f})"
    return Verdict(free >= DISK_NEEDED, text, "export LAB_DATA=<a folder on a larger disk>")


def check_shared_memory(gpus: int = 0, folder: Path = Path("/dev/shm")) -> Verdict:
    """Checks shared memory, through which DataLoader workers and the processes of several GPUs pass tensors."""
    if not folder.exists():
        return Verdict(True, "shared memory: no limit that this system shows")
    # Docker gives 64 MiB, which is enough for a few workers with 32×32 images, but not for NCCL between GPUs.
    needed = GIB if gpus > 1 else 64 * 2**20
    total = shutil.disk_usage(folder).total
    text = f"{total / GIB:.2f} GiB of shared memory (wanted here: {needed / GIB:.2f})"
    return Verdict(total >= needed, text, "start the container with --shm-size=2g")


def main() -> int:
    """Prints one line per check, with the fix under each that failed; returns the exit status, 1 if one failed."""
    verdicts = check_environment()
    for verdict in verdicts:
        print(f"[ok]   {verdict.what}" if verdict.ok else f"[fail] {verdict.what}\n       fix: {verdict.fix}")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
