"""Builds or repairs the environment of one framework, in .engines/; `make engines ENGINE=lightning` calls it.

The environment lies on top of ``.venv/``: it sees all packages there, and has only those of ``engines/NAME.lock``
itself. Each file is checked against a SHA-256. ``ready`` is written last and says what the environment was made for
(``course/frameworks.py``): where it is missing or says something else, the environment is made anew.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import setup_venv
from course.frameworks import FRAMEWORKS, describe_build, find_fault, find_folder, find_lock


def make_environment(folder: Path, hides: Sequence[str]) -> None:
    """Makes an environment without packages that sees those of .venv, but for some modules."""
    setup_venv.clear(folder)
    subprocess.run([setup_venv.PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (seen,) = setup_venv.VENV.glob(f"lib/{own.parent.name}/site-packages")
    # Not the path alone: that would leave out the .pth files of .venv, by which our own packages are found. In ASCII,
    # since Python 3.11 reads this file in the encoding of the system.
    lines = [f"import site; site.addsitedir({str(seen)!a})"]
    lines += [f"import sys; sys.modules[{name!a}] = None" for name in hides]
    (own / "labs.pth").write_text("\n".join(lines) + "\n", encoding="ascii")


def build(name: str) -> None:
    """Makes a framework's environment and installs the locked versions in it."""
    folder, lock = find_folder(name), find_lock(name)
    wanted = describe_build(name)  # before pip reads the lock: it may be edited meanwhile
    make_environment(folder, FRAMEWORKS[name].hides)
    count = len(re.findall(r"^[\w.-]+==", lock.read_text(encoding="utf-8"), re.MULTILINE))
    setup_venv.install("--require-hashes", "-r", lock, count=count, python=folder / "bin" / "python")
    draft = folder / "ready.tmp"
    draft.write_text(json.dumps(wanted), encoding="utf-8")
    draft.replace(folder / "ready")  # whole or not at all


def main(arguments: Sequence[str]) -> None:
    """Brings the environment of the framework that is named up to date, and says so."""
    if len(arguments) != 1 or arguments[0] not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        sys.exit(f"ENGINE has to be one of these: {known}. For example: make engines ENGINE={next(iter(FRAMEWORKS))}")
    (name,) = arguments
    framework, folder = FRAMEWORKS[name], f".engines/{name}"
    fault = find_fault(name)
    if not fault:
        return print(f"{framework.title}'s environment is ready: {folder}")
    print(f"{framework.title}'s environment {fault}.", flush=True)
    print(f"Building it in {folder} (about {framework.size} and {framework.time}) ...", flush=True)
    try:
        build(name)
    except (subprocess.CalledProcessError, OSError, KeyboardInterrupt) as error:
        shutil.rmtree(find_folder(name), ignore_errors=True)
        why = "the packages could not be installed (pip says why above)"
        if isinstance(error, KeyboardInterrupt):
            why = "the build was interrupted"
        elif isinstance(error, OSError):
            why = str(error)
        sys.exit(f"{framework.title}'s environment was not built: {why}.\nRun make engines ENGINE={name} to try again.")
    print(f"{framework.title}'s environment is ready: {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
