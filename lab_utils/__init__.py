"""What the notebooks import, so that they hold only the lines that teach: data, models, training, timing, plots.

Each module is imported by its name (``from lab_utils import data, timing``); this file imports none of them, so that
``import lab_utils`` costs nothing and works even where torch and torchvision do not fit together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from lab_common import LabError, checkout, env_folder

# What was here until the launcher and the course became packages of their own.
MOVED = {
    "check": "course.check",
    "course": "course.nbgrader",
    "launch": "nodelaunch",
    "report": "course.report",
    "workspace": "course.workspace",
}

__all__ = ["LabError", "checkout", "choose_repair", "describe_pair", "env_folder", "load_torchvision"]


def __getattr__(name: str) -> object:
    """Says where a module is that an older copy of a lab imports from here."""
    if name in MOVED:
        raise ImportError(f"lab_utils.{name} is {MOVED[name]} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_repair() -> str:
    """Returns the command that installs everything anew in the environment that is running."""
    # Under conda, say, a fresh .venv would leave the Python that is running as it is.
    own = Path(sys.prefix).resolve() == (checkout() / ".venv").resolve()
    return "rm -rf .venv && make setup" if own else "pip install --force-reinstall -r requirements.lock"


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
