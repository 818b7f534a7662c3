"""Compiles a framework that PyPI has as sources only, for the torch of .venv/. Horovod is the one such framework."""

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import setup_venv

# Stands in for the compiler: Horovod asks for C++14, and torch's headers need C++20. Debug information takes memory.
COMPILER = """#!/bin/sh
for word do
    shift
    case $word in -std=*) word=-std=c++20 ;; -g) continue ;; esac
    set -- "$@" "$word"
done
exec "${REAL_CXX:-g++}" "$@"
"""
# Read by each Python of a build: with a torch that has CUDA, Horovod wants the CUDA toolkit even for a build without.
SITE = 'import sys\nif "-c" in sys.orig_argv:\n    import torch\n    torch.version.cuda = None\n'


def compile_sources(sources: Path, tools: Path, options: dict[str, str], python: Path) -> None:
    """Compiles and installs a framework in the environment of a Python; what the build needs is gone afterwards.

    Raises:
        OSError: The compiler, make, or Python's headers are missing.
        subprocess.CalledProcessError: The build failed; uv has shown why.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [word for word in (os.environ.get("CXX") or "g++", "make") if not shutil.which(word)]
    missing += [] if header.exists() else [str(header)]
    if missing:
        fix = f"Debian, Ubuntu: sudo apt-get install g++ make python3.{sys.version_info.minor}-dev"
        raise OSError(f"it has to be compiled, and these are missing: {', '.join(missing)}.\n{fix}")
    # Not beside the environment: Horovod's linker script is not found in a folder whose name has a space.
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        setup_venv.install("--no-deps", "--target", place, "--require-hashes", "-r", tools, python=python)
        (place / "sitecustomize.py").write_text(SITE, encoding="ascii")
        (compiler := place / "compiler").write_text(COMPILER, encoding="ascii")
        compiler.chmod(0o755)
        settings = options | {"CXX": str(compiler), "REAL_CXX": os.environ.get("CXX", "")}
        settings |= {"TMPDIR": folder, "PYTHONPATH": folder}
        settings["PATH"] = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        settings["MAKEFLAGS"] = f"-j{min(os.cpu_count() or 1, 4)}"  # two files take 2 GB of memory each
        # Not from uv's cache, which does not know for which torch something was compiled.
        words = ("--no-deps", "--no-cache", "--no-build-isolation", "--require-hashes", "-r", sources)
        setup_venv.install(*words, python=python, **settings)
