"""Builds or repairs the environment of one framework, in .engines/; `make engines ENGINE=lightning` calls it.

The environment lies on top of ``.venv/``: it sees all packages there, and has only those of ``engines/NAME.lock``
itself. Each file is checked against a SHA-256. ``ready`` is written last and says what the environment was made for
(``course/frameworks.py``): where it is missing or says something else, the environment is made anew.

One that PyPI has as sources alone is compiled here with g++, for the torch of ``.venv/``. The programs that this needs
besides are those of ``engines/NAME.build.lock``, which are gone afterwards.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import setup_venv
from course.frameworks import FRAMEWORKS, describe_build, find_fault, find_folder, find_lock

# What the headers of the labs' torch ask for, at the least.
STANDARD = "c++20"
# What a compiler has to get through before anything is built.
PROBE = "#include <Python.h>\n#include <concepts>\n"
# Stands for the compiler in a build that asks for an older standard than torch's headers do, and for debug information,
# which takes memory and time.
COMPILER = """#!/bin/sh
for word do
    shift
    case $word in -std=*) word=-std=STANDARD ;; -g) continue ;; esac
    set -- "$@" "$word"
done
exec CXX "$@"
"""
# Read by each Python of a build. With what torch says of CUDA, Horovod wants the CUDA toolkit even for a build without
# GPUs; it asks in `python -c`.
SITE = """import sys
if "-c" in sys.orig_argv:
    import torch
    torch.version.cuda = None
"""
# Compilers say "error" in the language of the system; we look for that word.
ENGLISH = {"LC_ALL": "C.UTF-8"}
# What is shown of a failed build's log: lines from a little before its first error on, and how much of each.
BEFORE, AFTER, WIDTH = 3, 20, 300


def find_compiler() -> str:
    """Returns the command of the C++ compiler."""
    return os.environ.get("CXX") or "g++"


def find_obstacle() -> str:
    """Returns why C++ cannot be compiled here for Python and torch, and what mends that; "" where it can."""
    if sys.platform != "linux":
        return "it is compiled on Linux alone."
    compiler, python = find_compiler(), f"python{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"Debian, Ubuntu: sudo apt-get install g++ make {python}-dev"
    missing = [program for program in (compiler, "make") if not shutil.which(program)]
    if missing:
        return f"it has to be compiled, and there is no {' and no '.join(missing)} here.\n{fix}"
    probe = [compiler, f"-std={STANDARD}", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-x", "c++", "-"]
    run = subprocess.run(probe, input=PROBE, env=os.environ | ENGLISH, capture_output=True, text=True)
    if run.returncode:
        said = next((line for line in run.stderr.splitlines() if "error" in line), "nothing")
        what = f"it has to be compiled, and {compiler} cannot compile {STANDARD.upper()} for {python} here. It says:"
        return f"{what}\n  {said}\n{fix}\nAnother compiler can be named: CXX=g++-12 make engines ENGINE=..."
    return ""


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


def run_build(command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a command that compiles, says how far it is, and shows its first error where it fails.

    Whatever ends this process's wait ends all processes of the build, too: none writes to a folder that is removed.
    """
    terminal, log = sys.stdout.isatty(), []
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(
        list(map(str, command)), env=environment, text=True, errors="replace", start_new_session=True, **pipes
    ) as process:
        try:
            for line in process.stdout:
                log.append(line)
                if terminal and (found := re.match(r"\s*\[ *(\d+)%\]", line)):
                    print(f"\r\033[K  compiling: {found[1]} %", end="", flush=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()  # at its end when the last of them is gone
            raise
    if terminal:
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        errors = (at for at, line in enumerate(log) if re.search(r"error:|CMake Error", line, re.IGNORECASE))
        first = max(0, next(errors, len(log) - AFTER) - BEFORE)
        print("\n".join(line.rstrip()[:WIDTH] for line in log[first : first + BEFORE + AFTER]), flush=True)
        raise subprocess.CalledProcessError(process.returncode, command)


def install_compiled(name: str, python: Path) -> None:
    """Compiles what the lock has as sources, for the torch of .venv, and installs it."""
    # Not beside the environment: Horovod's linker script is not found in a folder whose name has a space.
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        place = Path(folder)
        setup_venv.install("--require-hashes", "--target", place, "-r", find_lock(f"{name}.build"), python=python)
        (place / "sitecustomize.py").write_text(SITE, encoding="ascii")
        compiler = place / "compiler"
        compiler.write_text(COMPILER.replace("STANDARD", STANDARD).replace("CXX", find_compiler()), encoding="utf-8")
        compiler.chmod(0o755)
        environment = {
            **os.environ,
            **ENGLISH,
            **dict(option.split("=", 1) for option in FRAMEWORKS[name].options),
            "CXX": str(compiler),
            "MAKEFLAGS": f"-j{min(os.cpu_count() or 1, 4)}",  # two files take 2 GB of memory each
            "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": folder,
            "TMPDIR": folder,  # so that all that a build leaves is removed with it
        }
        # Not from pip's cache, which does not know for which torch it was compiled. Without isolation, since that would
        # fetch a torch of its own, and without a hash.
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--verbose", "install"]
        pip += ["--no-deps", "--require-hashes", "--use-pep517", "--no-build-isolation", "-r", find_lock(name)]
        run_build(pip, environment)


def build(name: str) -> None:
    """Makes a framework's environment and installs the locked versions in it."""
    folder, lock = find_folder(name), find_lock(name)
    python = folder / "bin" / "python"
    wanted = describe_build(name)  # before pip reads the lock: it may be edited meanwhile
    make_environment(folder, FRAMEWORKS[name].hides)
    if FRAMEWORKS[name].options:
        install_compiled(name, python)
    else:
        count = len(re.findall(r"^[\w.-]+==", lock.read_text(encoding="utf-8"), re.MULTILINE))
        setup_venv.install("--require-hashes", "-r", lock, count=count, python=python)
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
    if framework.warning:
        print(framework.warning)
    print(f"{framework.title}'s environment {fault}.", flush=True)
    if framework.options and (obstacle := find_obstacle()):
        sys.exit(f"{framework.title}'s environment cannot be built: {obstacle}")
    print(f"Building it in {folder} (about {framework.size} and {framework.time}) ...", flush=True)
    # As an interrupt does: what ends this process must not leave a build behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
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
