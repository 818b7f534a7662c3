"""Programs for a node that lacks our code: a zip of lab_common and nodelaunch.node, started by a few lines of Python.

It may have to run on Python 3.9 with nothing installed. The zip is an argument, which has to be below 128 KiB.
"""

from __future__ import annotations

import base64
import functools
import io
import zipfile
import zlib
from pathlib import Path
from types import ModuleType

import nodelaunch

# The current folder goes first: a random.py in the home folder must not be imported in place of Python's own.
STUB = """\
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import base64, os, runpy, tempfile, zlib
try:
    archive = open(os.memfd_create("nodelaunch"), "wb")
    place = "/proc/self/fd/%d" % archive.fileno()
except (AttributeError, OSError):  # no Linux
    archive = tempfile.NamedTemporaryFile(suffix=".pyz")
    place = archive.name
archive.write(zlib.decompress(base64.b64decode(sys.argv.pop(1))))
archive.flush()
sys.path.insert(0, place)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def make_command(python: str, module: ModuleType, *arguments: str) -> list[str]:
    """Returns the command that runs a module on a node, whatever is installed there.

    The module is one of ``nodelaunch.node``, or another that imports only the standard library and ``lab_common``.
    """
    inside = module.__name__.startswith("nodelaunch.node.")
    name = module.__name__ if inside else module.__name__.rpartition(".")[2]
    return [python, "-c", STUB, _pack(None if inside else module.__file__), name, *arguments]


@functools.lru_cache(maxsize=8)
def _pack(extra: str | None) -> str:
    files, stream = list_files(), io.BytesIO()
    if extra:
        files[Path(extra).name] = Path(extra)
    with zipfile.ZipFile(stream, "w") as archive:
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
    return base64.b64encode(zlib.compress(stream.getvalue(), 9)).decode()


def list_files() -> dict[str, Path]:
    """The files that run around a script on a node, lab_common and nodelaunch.node, by their path in the archive."""
    root = Path(nodelaunch.__file__).parents[1]
    patterns = ("lab_common/[!.]*.py", "nodelaunch/__init__.py", "nodelaunch/node/[!.]*.py")
    return {path.relative_to(root).as_posix(): path for pattern in patterns for path in root.glob(pattern)}
