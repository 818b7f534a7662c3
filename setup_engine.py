"""Makes or repairs the environment of one framework, in .engines/; `make engines ENGINE=lightning` calls it.

The environment sees all packages of ``.venv/`` and has only those of ``engines/NAME.lock`` itself. ``ready`` is written
last and holds what the environment was made for (``course/frameworks.py``). JupyterLab lists its Python as a kernel.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import setup_venv
from course.frameworks import FRAMEWORKS, describe_build, find_fault, find_folder, find_lock
from engines.compiled import compile_sources


def make_environment(folder: Path, hides: tuple[str, ...]) -> None:
    """Makes an environment without packages that sees those of .venv, except for some modules."""
    setup_venv.clear(folder)
    setup_venv.run(setup_venv.PYTHON, "-m", "venv", "--without-pip", folder)
    (own,) = folder.glob("lib/python*/site-packages")
    (seen,) = setup_venv.VENV.glob(f"lib/{own.parent.name}/site-packages")
    # addsitedir reads .venv's .pth files too, which lead to our own packages. ASCII: Python 3.11 goes by the locale.
    lines = [f"import site; site.addsitedir({str(seen)!a})", *(f"import sys; sys.modules[{n!a}] = None" for n in hides)]
    (own / "labs.pth").write_text("\n".join(lines) + "\n", encoding="ascii")


def build(name: str, folder: Path) -> None:
    """Makes a framework's environment and installs the locked versions in it."""
    python, wanted = folder / "bin" / "python", describe_build(name)
    make_environment(folder, FRAMEWORKS[name].hides)
    if FRAMEWORKS[name].options:
        compile_sources(name, python)
    else:
        setup_venv.install("--no-deps", "--require-hashes", "-r", find_lock(name), python=python)
    (folder / "ready").write_text(json.dumps(wanted), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Brings the environment of the named framework, and its kernel, up to date."""
    if len(arguments) != 1 or arguments[0] not in FRAMEWORKS:
        sys.exit(f"ENGINE must be one of {', '.join(FRAMEWORKS)}. For example: make engines ENGINE=lightning")
    name, framework, folder = arguments[0], FRAMEWORKS[arguments[0]], find_folder(arguments[0])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no half environment is left behind
    kernel = setup_venv.VENV / "share" / "jupyter" / "kernels" / f"labs-{name}"
    words = ("--prefix", setup_venv.VENV, "--name", kernel.name, "--display-name", f"Labs with {framework.title}")
    try:
        if fault := find_fault(name):
            print(f"{framework.warning}\n{framework.title}'s environment {fault}.".strip())
            print(f"Building it in .engines/{name} (about {framework.size} and {framework.time}) ...", flush=True)
            build(name, folder)
        if not (kernel / "kernel.json").exists():
            setup_venv.run(folder / "bin" / "python", "-m", "ipykernel", "install", *words)
    except (subprocess.CalledProcessError, OSError, KeyboardInterrupt) as error:
        if find_fault(name):  # a whole one whose kernel could not be installed stays
            shutil.rmtree(folder, ignore_errors=True)
        why = error if str(error) else "the build was interrupted"
        sys.exit(f"{framework.title}'s environment is not ready: {why}\nTo try again: make engines ENGINE={name}")
    print(f"{framework.title}'s environment is ready: .engines/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
