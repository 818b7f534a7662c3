"""Files that are there whole or not at all, also after a crash; locks; reading what may not be the file it seems."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lab_common import LabError


@contextlib.contextmanager
def write_atomically(path: Path, *, prefix: str | None = None, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the place of ``path``, safely on disk, when the block ends without error.

    Args:
        path: The file; its folder has to be there.
        prefix: How the temporary file's name begins, for a caller that clears up after killed processes.
        mode: The file's permissions; a temporary file is its owner's alone.

    Raises:
        OSError: The disk is full, or the folder cannot be written, or a device lies there; ``path`` is as it was.
    """
    if path.is_char_device() or path.is_block_device():  # a file in the place of /dev/null harms everybody
        raise OSError(errno.EINVAL, "it is a device", str(path))
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


def sync_folder(folder: Path) -> None:
    """Sends a folder to the disk: a renamed file survives a power cut only when its folder, too, has arrived there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # it cannot, as some network shares and WSL's disks
            raise
    finally:
        os.close(descriptor)


def hold_lock(descriptor: int) -> bool:
    """Locks an open file or folder for this process alone, and returns False where the file system has no locks.

    Raises:
        BlockingIOError: Another process holds it.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # ENOLCK, EBADF, ENOTSUP: as some network file systems answer
        if isinstance(error, BlockingIOError):
            raise
        return False
    return True


@contextlib.contextmanager
def hold_folder(folder: Path, taken: str) -> Iterator[None]:
    """Keeps a folder for one process at a time, if its file system has locks; a lock ends with its process.

    Raises:
        LabError: Another process has it; ``taken`` is its first line.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            hold_lock(descriptor)
        except BlockingIOError as error:
            raise LabError(f"{taken}.", where=folder, cause="it has not ended yet", fix="wait for it to end") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_regular(path: Path, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Opens a regular file for reading; what else may lie there is neither opened nor waited for.

    Raises:
        OSError: It is not there, no regular file (or behind a link, without ``follow``), or cannot be read.
    """
    _refuse_other(path.stat(follow_symlinks=follow))  # opening a device may do something, if only to a tape
    # Asked again once it is open, since it may be replaced in between; a pipe would wait for somebody to write.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        _refuse_other(os.fstat(file.fileno()))
        yield file


def _refuse_other(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device or a socket")
        raise OSError(errno.EINVAL, f"it is {kind} and no regular file")


def read_bounded(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Returns the content of a regular file of at most ``most`` bytes; a link is followed unless told otherwise.

    Raises:
        OSError: It is not there, no regular file, too large, or cannot be read; ``strerror`` says which.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(most + 1) or b""  # None: a file of the kernel's has nothing now
        size = max(os.fstat(file.fileno()).st_size, len(content))
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size / 2**20:,.1f} MB, and {most / 2**20:,.0f} is the most")
    return content
