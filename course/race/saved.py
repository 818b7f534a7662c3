"""Watches a file on a node and sends each version of it, until its standard input ends. Standard library only.

A version is a line with its number of bytes, then these bytes. The line is sent as soon as the version is seen.
Anything but a regular file in this folder, such as a link to earlier weights, is ignored.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from contextlib import suppress
from pathlib import Path

EVERY = 0.02  # seconds between two looks
LARGEST = 512 * 2**20


def look(folder: int, name: str) -> tuple[int, ...] | None:
    """Returns a key that changes with the file's content; None if there is no regular file."""
    with suppress(OSError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def read(folder: int, name: str) -> bytes:
    """Returns the file's content, at most ``LARGEST`` bytes; nothing if it has become something else meanwhile."""
    with suppress(OSError):
        # A pipe would keep us waiting.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(LARGEST)
    return b""


def main() -> None:
    """Sends versions of the file that the first argument names, and makes its folder."""
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    # The folder itself, whatever gets its name later.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    sent = seen = look(folder, path.name)
    over, out = False, sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    while True:
        over = over or bool(select.select([sys.stdin], [], [], EVERY)[0])
        before, seen = seen, look(folder, path.name)
        # Unchanged since the last look: nobody writes into it just now.
        if seen and seen != sent and (seen == before or over):
            sent = seen
            content = read(folder, path.name)
            out.write(b"%d\n" % len(content) + content)
            out.flush()
        if over:
            return


if __name__ == "__main__":
    main()
