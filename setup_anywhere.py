"""Installs the labs into a Python that somebody else set up: Google Colab, Kaggle, Studio Lab, a JupyterHub.

``docs/start_anywhere.ipynb`` runs it. It needs pip and the standard library, and neither root nor a ``.venv``. The
torch, torchvision and numpy that are there stay: they were chosen for this machine's GPUs and drivers. Everything else
that the labs need is brought into the ranges of pyproject.toml.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
KEPT = ("torch", "torchvision", "numpy")
# Notebooks ask for this kernel: this Python, with torchrun and tensorboard among its commands.
KERNEL, TITLE = "training-labs", "Training Labs"


def find_installed() -> dict[str, str]:
    """Returns the versions of the packages to keep, by name; those that are not installed are left out."""
    found = {}
    for name in KEPT:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_oldest() -> dict[str, str]:
    """Returns the oldest versions that the labs accept of the packages to keep, by name."""
    pattern = rf'^    "({"|".join(KEPT)})>=([\d.]+)'
    return dict(re.findall(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))


def read_numbers(text: str) -> list[int]:
    """Returns the numbers of a version that are compared here: "2.11.0+cu128" is [2, 11, 0]."""
    return [int(number) for number in text.partition("+")[0].split(".") if number.isdecimal()]


def explain_old(installed: dict[str, str]) -> str:
    """Explains what to do about versions that are too old for the labs; "" if all are new enough."""
    oldest = read_oldest()
    old = [name for name in installed if read_numbers(installed[name]) < read_numbers(oldest[name])]
    if not old:
        return ""
    lines = [f"{name} {installed[name]} is too old: the labs need {oldest[name]} or newer." for name in old]
    # A build for another CUDA may want a newer driver than the machine has.
    cuda = re.search(r"\+(cu\d+|cpu)$", installed.get("torch", ""))
    index = f" --index-url https://download.pytorch.org/whl/{cuda[1]}" if cuda and old != ["numpy"] else ""
    pip = f"{sys.executable} -m pip install --upgrade"
    new = [name for name in KEPT if name in old or (name != "numpy" and old != ["numpy"])]  # those two go together
    lines += [
        "Nothing was changed. You can",
        "  - make an environment of your own, where you may: type `make lab` in a terminal, in the labs' folder;",
        f"  - or upgrade here, which may break what else uses them: {pip} {' '.join(new)}{index}",
        "    Then restart the kernel (Colab: Runtime, Restart session) and run this again.",
    ]
    return "\n".join(lines)


def explain_forbidden() -> str:
    """Explains what to do if this user may not install packages for this Python; "" if they may."""
    if os.access(sysconfig.get_path("purelib"), os.W_OK) or site.ENABLE_USER_SITE:
        return ""
    return (
        f"You may not install packages for {sys.executable}, not even for yourself alone.\n"
        "Choose another kernel, or make an environment of your own. In a terminal, in the labs' folder, type\n"
        f"make setup && .venv/bin/python -m ipykernel install --user --name {KERNEL} --display-name '{TITLE}'"
    )


def install(kept: dict[str, str]) -> None:
    """Installs the labs and what they need; pip chooses the user's own folder if it may not write into Python's."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # pip would also install what an older version left there
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={number}\n" for name, number in kept.items()))
        file.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", file.name, str(ROOT)], check=True)


def install_kernel() -> None:
    """Registers a Jupyter kernel that runs this Python and finds its commands."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if site.ENABLE_USER_SITE:
        folders.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    path = os.pathsep.join([*dict.fromkeys(folders), "${PATH}"])  # Jupyter fills it in
    name = ["--user", "--name", KERNEL, "--display-name", TITLE]
    command = [sys.executable, "-m", "ipykernel", "install", *name, "--env", "PATH", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Installs the labs, or says why not and what to do."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"The labs need Python 3.11 to 3.13, and this is {sys.version.split()[0]}. Choose another kernel.")
    kept = find_installed()
    if problem := explain_old(kept) or explain_forbidden():
        sys.exit(problem)
    print("Installing the labs. The first time takes a minute or two ...", flush=True)
    try:
        install(kept)
        install_kernel()
    except subprocess.CalledProcessError:
        sys.exit("The labs could not be installed: the lines above say why. Run this again to repeat it.")
    names = ", ".join(f"{name} {number}" for name, number in kept.items())
    print(f"Done. {f'{names}: as they were. ' if names else ''}The kernel for the labs is called {TITLE}.")


if __name__ == "__main__":
    main()
