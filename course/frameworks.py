"""Frameworks that the labs' lock does not have: where the Python of each one's own environment is.

``make engines ENGINE=lightning`` builds one in ``.engines/lightning/`` (``setup_engine.py``). It sees all packages of
``.venv/`` and adds those of ``engines/lightning.lock``. A lab starts its Python as a separate program. The frameworks
are in ``engines/frameworks.json``. (``lab_utils.engines`` is something else: ranks that live through a notebook.)
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from lab_common import LabError, checkout


def read_table() -> dict[str, dict]:
    """Returns the facts of each framework by its name: ``title``, and ``size`` and ``time`` of its build."""
    return json.loads((checkout() / "engines" / "frameworks.json").read_text(encoding="utf-8"))


def find_folder(name: str) -> Path:
    """Returns the folder of a framework's environment, whether it is there or not."""
    return checkout() / ".engines" / name


def find_lock(name: str) -> Path:
    """Returns the file with the exact versions that a framework's environment adds, and their hashes."""
    return checkout() / "engines" / f"{name}.lock"


def name_version(name: str) -> str:
    """Returns what a framework is called, and its version: ``"JAX 0.10.2"``."""
    (version,) = re.findall(rf"^{name}==(\S+)", find_lock(name).read_text(encoding="utf-8"), re.MULTILINE)
    return f"{read_table()[name]['title']} {version}"


def find_fault(name: str) -> str:
    """Returns why a framework's environment cannot be used, as the end of a sentence; "" if it can."""
    folder = find_folder(name)
    if not folder.exists():
        return "is not here"
    if not (folder / "ready").exists():  # written last, so that a build that was cut off has none
        return "is incomplete"
    made = json.loads((folder / "ready").read_text(encoding="utf-8"))
    if made["folder"] != str(checkout()):
        return "was built for another folder"
    if made["lock"] != hashlib.sha256(find_lock(name).read_bytes()).hexdigest():
        return "has other versions than its lock"
    return "" if (folder / "bin" / "python").exists() else "has lost its Python"


def find_python(name: str) -> Path:
    """Returns the Python that has a framework, and all packages of the labs beside it.

    Args:
        name: One of ``engines/frameworks.json``, such as ``"lightning"``.

    Raises:
        LabError: Its environment is missing, incomplete or out of date.
    """
    folder, row = find_folder(name), read_table()[name]
    if fault := find_fault(name):
        title = row["title"]
        cause = f"{title} is not among the labs' own packages: its environment is built once, on demand"
        fix = f"make engines ENGINE={name} (in {checkout()}: {row['size']}, {row['time']})"
        if not (checkout() / "Makefile").exists():
            fix = f"ask your instructor for an image with {title}"  # in a team's container
        raise LabError(f"{title}'s environment {fault}.", where=folder, cause=cause, fix=fix)
    # Not resolved: the link's own place tells Python which environment it belongs to.
    return folder / "bin" / "python"
