"""Makes or repairs the environment of one framework, in .engines/; `make engines ENGINE=lightning` calls it.

The environment sees all packages of ``.venv/`` and has only those of ``engines/NAME.lock`` itself. ``ready`` is written
last and holds what the environment was made for. JupyterLab lists its Python as a kernel. Another framework is a row in
``engines/frameworks.json``, and ``engines/NAME.in``, from which `make lock` makes ``engines/NAME.lock``. One with
``options`` is compiled with them for the labs' torch, and has ``engines/NAME.build.in`` besides: the programs for that.
Modules of the labs that it ``hides`` are not found: jsonschema imports one for a check that Ray does not make, which
takes a second in each of its ten processes.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import setup_venv
from engines.compiled import compile_sources

TABLE = Path(__file__).with_name("engines") / "frameworks.json"


def find_lock(name: str) -> Path:
    """Returns the file with the exact versions that a framework's environment adds, and their hashes."""
    return TABLE.with_name(f"{name}.lock")


def describe_build(name: str, framework: dict) -> dict[str, str]:
    """Returns what an environment is made for: the folder, the Python of ``.venv/``, the lock, torch if compiled."""
    files = {"python": setup_venv.VENV / "pyvenv.cfg", "lock": find_lock(name)}
    hashes = {key: hashlib.sha256(file.read_bytes()).hexdigest() for key, file in files.items()}
    # By the name of a folder, +cpu and all: importing torch to ask it would take seconds.
    torch = "".join(path.name for path in setup_venv.VENV.glob("lib/python*/site-packages/torch-*.dist-info"))
    return {"folder": str(setup_venv.ROOT), **hashes, **({"torch": torch} if "options" in framework else {})}


def is_whole(folder: Path, wanted: dict[str, str]) -> bool:
    """Checks that an environment was made for what is wanted, to its end, and that its Python is still there."""
    try:
        made = json.loads((folder / "ready").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return made == wanted and (folder / "bin" / "python").exists()


def make_environment(folder: Path, hides: list[str]) -> None:
    """Makes an environment without packages that sees those of .venv, except for some modules."""
    setup_venv.clear(folder)
    setup_venv.run(setup_venv.PYTHON, "-m", "venv", "--without-pip", folder)
    (own,) = folder.glob("lib/python*/site-packages")
    (seen,) = setup_venv.VENV.glob(f"lib/{own.parent.name}/site-packages")
    # addsitedir reads .venv's .pth files too, which lead to our own packages. ASCII: Python 3.11 goes by the locale.
    lines = [f"import site; site.addsitedir({str(seen)!a})", *(f"import sys; sys.modules[{n!a}] = None" for n in hides)]
    (own / "labs.pth").write_text("\n".join(lines) + "\n", encoding="ascii")


def build(name: str, framework: dict, folder: Path) -> None:
    """Makes a framework's environment and installs the locked versions in it."""
    python, wanted = folder / "bin" / "python", describe_build(name, framework)
    make_environment(folder, framework.get("hides", []))
    if "options" in framework:
        compile_sources(find_lock(name), find_lock(f"{name}.build"), framework["options"], python)
    else:
        setup_venv.install("--no-deps", "--require-hashes", "-r", find_lock(name), python=python)
    (folder / "ready").write_text(json.dumps(wanted), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Brings the environment of the named framework, and its kernel, up to date."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if len(arguments) != 1 or arguments[0] not in table:
        sys.exit(f"ENGINE must be one of {', '.join(table)}. For example: make engines ENGINE=lightning")
    name, framework = arguments[0], table[arguments[0]]
    title, folder = framework["title"], setup_venv.ROOT / ".engines" / name
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no half environment is left behind
    kernel = setup_venv.VENV / "share" / "jupyter" / "kernels" / f"labs-{name}"
    words = ("--prefix", setup_venv.VENV, "--name", kernel.name, "--display-name", f"Labs with {title}")
    wanted = describe_build(name, framework)
    try:
        if not is_whole(folder, wanted):
            size, time = framework["size"], framework["time"]
            if warning := framework.get("warning"):
                print(warning)
            print(f"Building {title}'s environment in .engines/{name} (about {size} and {time}) ...", flush=True)
            build(name, framework, folder)
        if not (kernel / "kernel.json").exists():
            setup_venv.run(folder / "bin" / "python", "-m", "ipykernel", "install", *words)
    except (subprocess.CalledProcessError, OSError, KeyboardInterrupt) as error:
        if not is_whole(folder, wanted):  # a whole one whose kernel could not be installed stays
            shutil.rmtree(folder, ignore_errors=True)
        why = error if str(error) else "the build was interrupted"
        sys.exit(f"{title}'s environment is not ready: {why}\nTo try again: make engines ENGINE={name}")
    print(f"{title}'s environment is ready: .engines/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
