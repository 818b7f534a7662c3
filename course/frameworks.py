"""Frameworks that the labs' lock does not have: where the Python of each one's own environment is.

``make engines ENGINE=lightning`` builds one in ``.engines/lightning/`` (``setup_engine.py``). It sees all packages of
``.venv/`` and adds those of ``engines/lightning.lock``. A lab starts its Python as a separate program.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lab_common import LabError, checkout


@dataclass(frozen=True)
class Framework:
    """A framework with its own environment.

    Attributes:
        title: Its name in a sentence.
        size: What its environment takes of the disk, as measured.
        time: What it takes to build it, as measured.
        hides: Modules of the labs that its Python does not find.
        options: Environment variables, with which it is compiled for the labs' torch; empty where PyPI has it compiled.
        warning: What one has to know of it before it is built.
    """

    title: str
    size: str
    time: str
    hides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    warning: str = ""


# Another one: a row here, and engines/NAME.in, from which `make lock` makes engines/NAME.lock. One with options has
# engines/NAME.build.in besides: the programs that compile it.
FRAMEWORKS = {
    "lightning": Framework("Lightning", size="60 MB", time="half a minute"),
    # jsonschema imports that one for a check that Ray does not make: a second in each of its ten processes.
    "ray": Framework("Ray", size="250 MB", time="half a minute", hides=("rfc3987_syntax",)),
    "horovod": Framework(
        "Horovod",
        size="6 MB",
        time="two minutes on two cores",
        options=(
            *("HOROVOD_WITH_PYTORCH=1", "HOROVOD_WITHOUT_TENSORFLOW=1", "HOROVOD_WITHOUT_MXNET=1"),
            *("HOROVOD_WITH_GLOO=1", "HOROVOD_WITHOUT_MPI=1"),
            # For newer compilers: g++ 13 wants headers that it does not include, g++ 14 refuses its own span.
            "CXXFLAGS=-include string -include cstdint -DFLATBUFFERS_USE_STD_SPAN",
        ),
        warning="Horovod has had no release since June 2023. Do not choose it for a new project.",
    ),
    "tensorflow": Framework("TensorFlow", size="1.4 GB", time="a minute"),
    "jax": Framework("JAX", size="530 MB", time="half a minute"),
    "sphinx": Framework("Sphinx", size="70 MB", time="half a minute"),  # for `make site`, and for no lab
}
# What an environment is made for, and what is wrong with it where that has changed.
CHANGES = {
    "folder": "was built for another folder",
    "python": "was built for another Python",
    "lock": "has other versions than its lock",
    "torch": "was compiled for another torch",
}


def find_folder(name: str) -> Path:
    """Returns the folder of a framework's environment, whether it is there or not."""
    return checkout() / ".engines" / name


def find_lock(name: str) -> Path:
    """Returns the file with the exact versions that a framework's environment adds, and their hashes."""
    return checkout() / "engines" / f"{name}.lock"


def name_version(name: str) -> str:
    """Returns what a framework is called, and its version: ``"JAX 0.10.2"``."""
    (version,) = re.findall(rf"^{name}==(\S+)", find_lock(name).read_text(encoding="utf-8"), re.MULTILINE)
    return f"{FRAMEWORKS[name].title} {version}"


def describe_build(name: str) -> dict[str, str]:
    """Returns what a framework's environment is made for: the folder, the Python of ``.venv/``, the lock.

    For one that is compiled also the torch of ``.venv/``.
    """
    venv = checkout() / ".venv"
    files = {"python": venv / "pyvenv.cfg", "lock": find_lock(name)}
    hashes = {key: hashlib.sha256(file.read_bytes()).hexdigest() for key, file in files.items() if file.is_file()}
    # By the name of a folder, +cpu and all: importing torch to ask it would take seconds.
    torch = "".join(path.name for path in venv.glob("lib/python*/site-packages/torch-*.dist-info"))
    compiled = {"torch": torch} if FRAMEWORKS[name].options else {}
    return {"folder": str(checkout()), "python": "none", "lock": "none"} | hashes | compiled


def find_fault(name: str) -> str:
    """Returns what is wrong with a framework's environment, as the end of a sentence; "" if it is whole."""
    folder, wanted = find_folder(name), describe_build(name)
    if not folder.exists():
        return "is not here"
    try:
        # Written last, so that a build that was cut off has none.
        made = dict(json.loads((folder / "ready").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return "is incomplete"
    for key, words in CHANGES.items():
        if made.get(key) != wanted.get(key):
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
