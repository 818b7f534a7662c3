"""Modules for the notebooks, which then hold only the lines that teach: data, models, training, timing, plots.

Each module is imported by its name (``from lab_utils import data, timing``); this file imports none of them, so that
``import lab_utils`` costs nothing and works even if torch and torchvision do not fit together.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType

from lab_common import LabError, checkout, env_folder

__all__ = ["LabError", "checkout", "choose_repair", "describe_pair", "env_folder", "load_torchvision"]


def choose_repair() -> str:
    """Returns the command that reinstalls everything in the current environment."""
    root = checkout()
    if Path(sys.prefix).resolve() == (root / ".venv").resolve():
        return "rm -rf .venv && make setup"
    # On a JupyterHub, say, the torch that is there has to stay.
    script = root / "setup_anywhere.py"
    if script.exists() and not Path(__file__).resolve().is_relative_to(root):
        return shlex.join([sys.executable, str(script)])
    # Under conda, say, a fresh .venv would leave the Python that is running as it is.
    return "pip install --force-reinstall -r requirements.lock"


def describe_pair() -> str:
    """Returns the installed torch and torchvision in words, importing neither."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "torchvision"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return " and ".join(found)


def load_torchvision() -> ModuleType:
    """Imports torchvision, which is built for exactly one version of torch.

    Raises:
        LabError: It is missing or does not go with the installed torch (``operator torchvision::nms does not exist``).
    """
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError) as error:
        raise LabError(
            f"{describe_pair()} do not go together.",
            where="import torchvision",
            cause=f"each torchvision is built for one torch; importing it said: {str(error).splitlines()[0]}",
            fix=choose_repair(),
        ) from error
    return torchvision
