"""The shared package of the Distributed Training Labs: the boring lines, so that the notebooks hold the others.

Each room is imported by its name (``from lab_utils import data, timing``); this file imports none of them, so that
``import lab_utils`` costs nothing and works even where torch and torchvision do not fit together.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType


class LabError(Exception):
    """What a learner can cause and mend: what happened, where, the likely cause, one command that fixes it, the log.

    Args:
        what: One sentence, at most 120 characters, that stands on the first line.
        where: The file, cell, host or address concerned.
        cause: The likely cause.
        fix: One command or action that fixes it.
        log: Path of the log with the details.
    """

    def __init__(self, what: str, *, where: object = "", cause: str = "", fix: str = "", log: object = "") -> None:
        self.what, self.where, self.cause, self.fix, self.log = what, str(where), cause, fix, str(log)
        hints = [("where", self.where), ("likely", cause), ("fix", fix), ("log", self.log)]
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in hints if text)]))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the message alone, which is all that a learner needs."""
        return str(self).splitlines()


def checkout() -> Path:
    """Returns the repository's root, or the current folder where the package is installed away from it."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").exists() else Path.cwd()


def env_folder(variable: str, default: str) -> Path:
    """Returns the folder that an environment variable names, or ``default``.

    Relative ones count from the repository's root and not from the current folder, so that ``make`` there and a
    notebook in ``workspace/`` mean the same.

    Raises:
        LabError: The variable begins with a user's home that is not known, or leads in a circle.
    """
    try:
        return (checkout() / Path(os.environ.get(variable) or default).expanduser()).resolve()
    except RuntimeError as error:
        what, fix = f"{variable} leads nowhere.", f"export {variable}=/a/folder/of/yours, then start JupyterLab again"
        raise LabError(what, where=os.environ.get(variable, default)[:300], cause=str(error)[:300], fix=fix) from error


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
