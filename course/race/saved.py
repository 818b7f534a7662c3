"""Watches a file on a node and sends each version of it, until its standard input ends. Standard library only.

A version is a line with its number of bytes, then these. The line is sent as soon as the version is seen.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

EVERY = 0.02  # seconds between two looks
LARGEST = 512 * 2**20


def look(path: Path) -> tuple[int, ...] | None:
    """What changes with the file's content, or None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def main() -> None:
    """Sends versions of the file that the first argument names, and makes its folder."""
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    sent = seen = look(path)
    over, out = False, sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    while True:
        over = over or bool(select.select([sys.stdin], [], [], EVERY)[0])
        before, seen = seen, look(path)
        # Unchanged since the last look: nobody writes into it just now.
        if seen and seen != sent and (seen == before or over):
            sent = seen
            content = path.read_bytes() if seen[2] <= LARGEST else b""
            out.write(b"%d\n" % len(content) + content)
            out.flush()
        if over:
            return


if __name__ == "__main__":
    main()
