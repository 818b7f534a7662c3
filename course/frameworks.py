"""Frameworks that the labs' lock does not have: where the Python of each one's own environment is.

``make engines ENGINE=lightning`` builds one in ``.engines/lightning/`` (``setup_engine.py``). It sees all packages of
``.venv/`` and adds those of ``engines/lightning.lock``. A lab starts its Python as a program of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError, checkout


@dataclass(frozen=True)
class Framework:
    """A framework with an environment of its own.

    Attributes:
        title: Its name in a sentence.
        size: What its environment takes of the disk, as measured.
        time: What it takes to build it, as measured.
        hides: Modules of the labs that its Python does not find.
    """

    title: str
    size: str
    time: str
    hides: tuple[str, ...] = ()


# Another one: a row here, and engines/NAME.in, from which `make lock` makes engines/NAME.lock.
FRAMEWORKS = {
    "lightning": Framework("Lightning", size="60 MB", time="half a minute"),
    # jsonschema imports that one for a check that Ray does not make: a second in each of its ten processes.
    "ray": Framework("Ray", size="250 MB", time="half a minute", hides=("rfc3987_syntax",)),
}
# What an environment is made for, and what is wrong with it where that has changed.
CHANGES = {
    "folder": "was built for another folder",
    "python": "was built for another Python",
    "lock": "has other versions than its lock",
}


def find_folder(name: str) -> Path:
    """Returns the folder of a framework's environment, whether it is there or not."""
    return checkout() / ".engines" / name


def find_lock(name: str) -> Path:
    """Returns the file with the exact versions that a framework's environment adds, and their hashes."""
    return checkout() / "engines" / f"{name}.lock"


def describe_build(name: str) -> dict[str, str]:
    """Returns what a framework's environment is made for: the folder, the Python of ``.venv/``, the lock."""
    files = {"python": checkout() / ".venv" / "pyvenv.cfg", "lock": find_lock(name)}
    hashes = {key: hashlib.sha256(file.read_bytes()).hexdigest() for key, file in files.items() if file.is_file()}
    return {"folder": str(checkout()), "python": "none", "lock": "none"} | hashes


def find_fault(name: str) -> str:
    """Returns what is wrong with a framework's environment, as the end of a sentence; "" where it is whole."""
    folder, wanted = find_folder(name), describe_build(name)
    if not folder.exists():
        return "is not here"
    try:
        # Written last, so that a build that was cut off has none.
        made = dict(json.loads((folder / "ready").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return "is incomplete"
    for key, words in CHANGES.items():
        if made.get(key) != wanted[key]:
            return words
    return "" if (folder / "bin" / "python").exists() else "has lost its Python"


def find_python(name: str) -> Path:
    """Returns the Python that has a framework, and all packages of the labs beside it.

    Args:
        name: One of ``FRAMEWORKS``, such as ``"lightning"``.

    Raises:
        LabError: There is no such framework, or its environment is missing, incomplete or out of date.
    """
    if name not in FRAMEWORKS:
        fix = f"use one of these names: {', '.join(FRAMEWORKS)}"
        raise LabError(f"No framework is called {name!r:.40}.", where="frameworks.find_python", fix=fix)
    folder, framework = find_folder(name), FRAMEWORKS[name]
    if fault := find_fault(name):
        cause = f"{framework.title} is not among the labs' own packages: its environment is built once, on demand"
        fix = f"make engines ENGINE={name} (in {checkout()}: {framework.size}, {framework.time})"
        if not (checkout() / "Makefile").exists():
            fix = f"ask your instructor for an image with {framework.title}"  # in a team's container
        raise LabError(f"{framework.title}'s environment {fault}.", where=folder, cause=cause, fix=fix)
    # Not resolved: the link's own place tells Python which environment it belongs to.
    return folder / "bin" / "python"
