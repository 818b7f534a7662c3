"""Makes, updates or repairs .venv/ with the exact versions of requirements.lock; every target of the Makefile calls it.

uv installs the packages: the one on PATH, or the one that the lock pins. ``.venv/ready`` is written last and holds the
folder that the environment was made for: if it is missing or names another folder, the environment is made again.
Every file is checked against the SHA-256 in the lock. TORCH=cpu takes torch and torchvision from PyTorch's own index
instead: the lock has no hashes of those files, so they are trusted as far as the TLS connection is.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV, LOCK = ROOT / ".venv", ROOT / "requirements.lock"
READY, PYTHON = VENV / "ready", VENV / "bin" / "python"
CUDA_PARTS = r"(torch|torchvision|triton|nvidia-[\w-]+|cuda-[\w-]+)=="  # in the lock, and not for TORCH=cpu


def clear(folder: Path) -> None:
    """Makes an empty folder in place of an unusable environment; one that the labs did not make is left alone."""
    mine = folder / "made-by-the-labs"
    if folder.is_symlink() or (folder.exists() and not mine.exists()):
        sys.exit(f"{folder} was not made by these labs. Move it away, then run make again.")
    (folder / "ready").unlink(missing_ok=True)  # first: a half-removed environment must not pass for a whole one
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mine.touch()


def run(*command: object, **settings: str) -> None:
    """Runs a command with more environment variables; if we are interrupted, all its processes end with us."""
    words, settings = list(map(str, command)), {"UV_SYSTEM_CERTS": "true"} | os.environ | settings  # as pip trusts
    with subprocess.Popen(words, cwd=ROOT, env=settings, start_new_session=True) as process:
        try:
            process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words[:3])


def find_uv() -> str:
    """Returns the path of uv: of the one on PATH, or of the locked one, which pip installs by its hash."""
    if found := shutil.which("uv"):
        version = re.findall(r"\d+", subprocess.run([found, "--version"], capture_output=True, text=True).stdout)
        if tuple(map(int, version[:2])) >= (0, 9):  # as in pyproject.toml
            return found
    (entry,) = re.findall(r"^uv==.*(?:\n +.*)*", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    (lock := VENV / "uv.lock").write_text(entry, encoding="utf-8")
    run(PYTHON, "-m", "pip", "--quiet", "install", "--no-deps", "--require-hashes", "-r", lock)
    return str(VENV / "bin" / "uv")


def install(*words: object, python: Path = PYTHON, command: str = "install", **settings: str) -> None:
    """Installs packages with uv in the environment of a Python; ``command`` is one of `uv pip`."""
    run(find_uv(), "pip", command, "--python", python, *words, **settings)


def install_all() -> None:
    """Installs the locked versions, removes all others, and installs our own packages as editable ones."""
    entries, lock = re.split(r"^(?=[A-Za-z])", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE), LOCK
    if os.environ.get("TORCH") == "cpu":
        lock = VENV / "without-cuda.lock"
        lock.write_text("".join(entry for entry in entries if not re.match(CUDA_PARTS, entry)), encoding="utf-8")
    install("--require-hashes", lock, command="sync")
    if lock != LOCK:
        pins = (entry.split()[0] for entry in entries if re.match(r"torch(vision)?==", entry))
        install("--no-deps", "--torch-backend", "cpu", *pins)
    install("--no-deps", "--no-build-isolation", "--editable", ROOT)
    (settings := VENV / "share" / "jupyter" / "lab" / "settings").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "course" / "jupyterlab.json", settings / "overrides.json")


def is_usable() -> bool:
    """Checks that the environment is whole, was made for this folder, and that its Python still runs."""
    ours = READY.exists() and READY.read_text(encoding="utf-8").strip() == str(ROOT) and shutil.which(PYTHON)
    return bool(ours) and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def main() -> None:
    """Brings the environment up to date, or makes a new one if there is none that can be used."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that uv ends with us
    try:
        if is_usable():
            # `ready` keeps its time until the end, by which make sees that there is still something to do.
            print("Updating .venv ...", flush=True)
        else:
            print("Setting up .venv (about a minute; 7 GB, or 2 GB with TORCH=cpu) ...", flush=True)
            clear(VENV)
            run(sys.executable, "-m", "venv", VENV)
        install_all()
        READY.write_text(f"{ROOT}\n", encoding="utf-8")
    except (subprocess.CalledProcessError, OSError, KeyboardInterrupt) as error:
        again = "make setup TORCH=cpu" if os.environ.get("TORCH") == "cpu" else "make setup"
        sys.exit(f"\nThe set-up ended early: {str(error) or 'interrupted'}\nTo try again: {again}")


if __name__ == "__main__":
    main()
