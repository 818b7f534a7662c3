"""Runs a rank's script, as ``python train.py`` does, or its module, as ``python -m package.train`` does."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path


def take_arguments() -> tuple[str, str]:
    """Returns the script and "", or "" and the module; leaves the arguments and the path as Python does for each."""
    module = sys.argv[2] if sys.argv[1] == "-m" else ""
    script, sys.argv = "" if module else sys.argv[1], sys.argv[2 if module else 1 :]
    sys.path.insert(0, str(Path.cwd() if module else Path(script).parent))
    os.environ.pop("PYTHONSAFEPATH", None)  # the programs that it starts look there, too
    return script, module


def find_files(module: str) -> Iterator[str]:
    """The files of the packages that a module is in, from the outermost on, and that of the module itself; none for "".

    Looking for one imports the package around it, as ``python -m`` does.
    """
    names = module.split(".") if module else []
    for count in range(1, len(names) + 1):
        spec = _find_spec(".".join(names[:count]))
        yield spec.origin or ""  # a folder without __init__.py has none
    if names and spec.submodule_search_locations is not None:
        yield _find_spec(f"{module}.__main__").origin


def run_target(script: str, module: str) -> None:
    """Runs a module if there is one, else the script."""
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def shorten_path(script: str) -> str:
    """The name of a script, or the path of a module from the folder on in which Python found it."""
    folders = [folder for folder in sys.path if folder and script.startswith(f"{folder}/")]
    return os.path.relpath(script, max(folders, key=len)) if folders else Path(script).name


def _find_spec(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is None:
        error = ModuleNotFoundError(f"No module named {name!r}")
        error.cause = "the job's module is neither in its project nor installed on this node"
        error.fix = "give the project's folder as root=, or install the module on the node"
        raise error
    return spec
