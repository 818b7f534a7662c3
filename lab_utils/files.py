"""Files that are there whole or not at all, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def write_atomically(path: Path, *, prefix: str | None = None, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the place of ``path``, safely on disk, when the block ends without error.

    Args:
        path: The file; its folder has to be there.
        prefix: How the temporary file's name begins, for a caller that clears up after killed processes.
        mode: The file's permissions; a temporary file is its owner's alone.

    Raises:
        OSError: The disk is full, or the folder cannot be written; ``path`` is as it was.
    """
    prefix = prefix or f".{path.name}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=".tmp", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(mode)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading; a pipe or a device of this name is not waited for, and not read.

    Raises:
        OSError: It is not there, may not be read, or is no regular file (a link to one is).
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        yield file


def sync_folder(folder: Path) -> None:
    """Sends a folder to the disk: a renamed file survives a power cut only when its folder, too, has arrived there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
