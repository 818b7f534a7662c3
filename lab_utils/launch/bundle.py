"""What a node has to have before a job can start there: this package and the training script, named by their hash."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lab_utils
from lab_utils import LabError
from lab_utils.launch.facts import hash_files
from lab_utils.launch.nodes import Node

RECEIVER = Path(__file__).with_name("receive.py")

# What stands beside a script is found before all that is installed, also by torchrun.
TAKEN = sys.stdlib_module_names | {"lab_utils", "numpy", "torch", "torchvision"}


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the code folder, and the SHA-256 over their names and contents."""

    files: Mapping[str, bytes]
    hash: str


def collect_files(script: Path, extra: tuple[Path, ...] = ()) -> Bundle:
    """Reads the package, the training script and other files that it imports.

    Raises:
        LabError: A file is not there, or two have the same name.
    """
    package = Path(lab_utils.__file__).parent
    files = {f"lab_utils/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    for path in (script, *extra):
        if not path.is_file():
            fix = "give its path, relative to the notebook's folder or absolute"
            raise LabError(f"There is no file {path.name!r} to run.", where=path, cause="a slip in the path", fix=fix)
        if path.stem in TAKEN:
            cause = f"torchrun itself would import it in place of the module {path.stem!r}"
            raise LabError(f"A file of a job cannot be called {path.name!r}.", where=path, cause=cause, fix="rename it")
        if f"script/{path.name}" in files:
            fix = "rename one of them"
            raise LabError(f"Two files of the job are called {path.name!r}.", where=path, fix=fix)
        files[f"script/{path.name}"] = path
    contents = {name: path.read_bytes() for name, path in files.items()}
    return Bundle(contents, hash_files(contents))


def send(
    node: Node,
    root: str,
    folders: Mapping[str, Mapping[str, bytes] | Path],
    *,
    started: list[subprocess.Popen],
    timeout: float | None = 60.0,
) -> None:
    """Puts folders into a folder of the node, each whole or not at all; one that is there already stays.

    Args:
        node: Where to.
        root: The folder there.
        folders: By their path within it, either files by name, or a folder of this machine.
        started: Takes in the process that sends, so that the caller can end it.
        timeout: Seconds after which the node is given up; None for data, which take as long as they take.

    Raises:
        LabError: The node was not reached, or its disk is full.
    """
    process = node.popen([node.python, "-c", RECEIVER.read_text(), root, *folders])
    started.append(process)
    # A node that does not take what is sent must not hold the launcher for ever; ending ssh breaks the pipe.
    alarm = threading.Timer(timeout, process.kill) if timeout else None
    if alarm:
        alarm.start()
    try:
        # The pipe breaks when the receiver ends early; its own words then say why.
        with contextlib.suppress(OSError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for target, content in folders.items():
                _add(archive, target, content)
        _, errors = process.communicate()
    finally:
        if alarm:
            alarm.cancel()
    if process.returncode:
        said = "timed out" if process.returncode < 0 else errors.decode(errors="replace")
        raise node.explain(255 if process.returncode < 0 else process.returncode, said)


def _add(archive: tarfile.TarFile, target: str, content: Mapping[str, bytes] | Path) -> None:
    if isinstance(content, Path):
        archive.add(content, arcname=target)
        return
    for name, text in content.items():
        entry = tarfile.TarInfo(f"{target}/{name}")
        entry.size, entry.mode = len(text), 0o600
        archive.addfile(entry, io.BytesIO(text))
