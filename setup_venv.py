"""Makes, updates or repairs .venv/ with the exact versions of requirements.lock; every target of the Makefile calls it.

Needs nothing but the standard library. ``.venv/ready`` is written last and holds the folder for which the environment
was made: where it is missing, a set-up was cut off, and where it says something else, the folder was moved. Both ask
for a new environment, for pip takes a half-copied package for a whole one. An update that fails on its own, without a
network, say, leaves the environment as it was.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MINE, READY, UPDATING = VENV / "made-by-the-labs", VENV / "ready", VENV / "updating"
PYTHON = VENV / "bin" / "python"
# Where TORCH=cpu finds builds of the same versions without CUDA, and what only the builds with CUDA want.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PARTS = ("torch==", "torchvision==", "triton==", "nvidia-", "cuda-")


def is_usable() -> bool:
    """Whether the environment is whole, was made for this folder, and its Python still runs."""
    try:
        whole = READY.read_text(encoding="utf-8").strip() == str(ROOT)
        return whole and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def make_environment() -> None:
    """Makes an empty environment in the place of an unusable one of ours."""
    if VENV.exists() and not MINE.exists():
        sys.exit(f"{VENV} was not made by these labs. Move it away, then run make again.")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MINE.touch()  # before all else, so that a set-up that is cut off here can be told from somebody's own folder
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)


def without_cuda(lock: str) -> str:
    """The lock without the packages that come from CPU_INDEX, or that only CUDA wants."""
    entries = re.split(r"^(?=[A-Za-z])", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not entry.startswith(CUDA_PARTS))


def install(*arguments: object) -> None:
    """Runs pip in the environment; versions and their needs are the lock's business, hence no dependencies."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *map(str, arguments)], check=True, cwd=ROOT)


def install_all() -> None:
    """Installs the locked versions and then lab_utils itself, as an editable package."""
    lock = ROOT / "requirements.lock"
    if os.environ.get("TORCH") == "cpu":
        text = lock.read_text(encoding="utf-8")
        index = os.environ.get("TORCH_CPU_INDEX", CPU_INDEX)
        install("--index-url", index, *re.findall(r"^(?:torch|torchvision)==[\d.]+", text, flags=re.MULTILINE))
        lock = VENV / "without-cuda.lock"
        lock.write_text(without_cuda(text), encoding="utf-8")
    install("--require-hashes", "-r", lock)
    install("--no-build-isolation", "--editable", ROOT)


def main() -> None:
    """Brings the environment up to date, and says so."""
    updating = is_usable()
    if not updating:
        make_environment()
        print("Setting up .venv (about three minutes and 6 GB the first time) ...", flush=True)
    else:
        READY.rename(UPDATING)  # a rename keeps the file's time, by which make sees that there is something to do
        print("Updating .venv ...", flush=True)
    try:
        install_all()
    except subprocess.CalledProcessError:
        if updating:
            UPDATING.rename(READY)
        state = "as it was" if updating else "incomplete"
        sys.exit(
            f"The packages could not be installed (pip says why above); .venv is {state}. Run make again to repeat it."
        )
    UPDATING.unlink(missing_ok=True)
    READY.write_text(f"{ROOT}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
