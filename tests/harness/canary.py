"""Detects effects of hostile input: a hang, a started program, a touched file outside, a message with its codes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from lab_common import LabError


class HangsError(BaseException):
    """A case exceeded its time; not caught by a reader's ``except Exception``."""


@contextlib.contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Ends a block that takes longer, even one that waits in a system call."""

    def stop(*_: object) -> None:
        raise HangsError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_tree(folder: Path) -> dict[str, object]:
    """Describes everything under a folder: each file's SHA-256 and mtime, each link's target, each folder's mode."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        target = str(path.readlink()) if path.is_symlink() else ""
        found[os.fspath(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns, content, target)
    return found


def make_canary(folder: Path) -> Path:
    """Makes a folder that an attack would try to reach, with programs that leave a mark when they are started."""
    for name in ("home/.ssh/authorized_keys", "etc/passwd", "train/cat/x.png", "x.png", "work/x.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the content of {name}")
    (folder / "link").symlink_to("etc")
    programs = folder / "programs"
    programs.mkdir()
    for name in ("gs", "sh", "touch", "tar", "gzip", "convert", "xz", "python"):
        (programs / name).write_text(f"#!/bin/bash\n: > '{folder}/{name} was started'\n")
        (programs / name).chmod(0o755)
    return folder


def assert_is_message(error: LabError, note: object = "") -> None:
    """Asserts that an error says what, where and why, without control characters for a terminal."""
    assert error.what and error.where and error.cause and error.fix, (note, str(error))
    first = str(error).splitlines()[0]
    assert len(first) <= 120, (note, first)
    assert all(c.isprintable() or c == "\n" for c in str(error)), (note, ascii(str(error)))
