"""The output of a job within bounds of memory, disk and time: lines, an allowance per rank, a log that fills up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# The bytes that one rank may print at once, and per second after that, and that are kept of the rest.
BURST, RATE, TAIL = 4 * 2**20, 128 * 2**10, 64 * 2**10
# The most bytes of a line, of a log, and of a node's own line about itself.
LINE_BYTES, LOG_BYTES, EVENT_BYTES = 2**20, 64 * 2**20, 32 * 2**20
CHUNK = 64 * 2**10


class Lines:
    """Splits pieces of output into lines of at most ``longest`` bytes, in bounded memory.

    A longer line is cut. A progress bar writes its line again and again; its last text is kept.
    """

    def __init__(self, longest: int = LINE_BYTES) -> None:
        self._longest, self._rest, self._cut = longest, b"", 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the lines that this piece completes, each with its end."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        lines = [self._close(line) for line in whole]
        if len(self._rest) > self._longest:
            self._rest = self._rest[self._rest.rfind(b"\r") + 1 :]
            self._cut += max(0, len(self._rest) - self._longest)
            self._rest = self._rest[: self._longest]
        return lines

    def end(self) -> list[bytes]:
        """Returns the rest when nothing more will come."""
        rest, self._rest = self._rest, b""
        return [self._close(rest)] if rest else []

    def _close(self, line: bytes) -> bytes:
        cut, self._cut = self._cut + max(0, len(line) - self._longest), 0
        note = f" ({cut:,} bytes of this line are left out)".encode() if cut else b""
        return line[: self._longest] + note + b"\n"


def read_lines(stream: BinaryIO, longest: int = EVENT_BYTES) -> Iterator[bytes]:
    """Yields the lines of a buffered stream as they come, each with its end; a longer line is cut."""
    lines = Lines(longest)
    while piece := stream.read1(CHUNK):
        yield from lines.feed(piece)
    yield from lines.end()


class Output:
    """Output that ``pass_on`` gets line by line, behind a prefix: ``burst`` bytes at once, and ``rate`` per second.

    What is beyond that is dropped, except for the last lines. They follow a line with the number of dropped bytes when
    the allowance has grown again, when nothing is printed, and at the end.
    """

    def __init__(
        self, pass_on: Callable[[bytes], object], prefix: bytes = b"", burst: int = BURST, rate: int = RATE
    ) -> None:
        self._pass_on, self._prefix, self._burst, self._rate = pass_on, prefix, burst, rate
        self._lines, self._left, self._when = Lines(), float(burst), time.monotonic()
        self._tail, self._dropped = b"", 0

    def feed(self, piece: bytes) -> None:
        """Takes a piece of output; b"" if there was none."""
        now = time.monotonic()
        self._left, self._when = min(self._burst, self._left + (now - self._when) * self._rate), now
        if self._tail and self._left > (self._burst // 4 if piece else TAIL):
            self._resume()
        if self._tail or len(piece) > self._left:
            self._send(self._lines.end())
            self._tail += piece
            self._dropped += max(0, len(self._tail) - TAIL)
            self._tail = self._tail[-TAIL:]
        else:
            self._left -= len(piece)
            self._send(self._lines.feed(piece))

    def end(self) -> None:
        """Passes on what is left when nothing more will come."""
        self._resume()
        self._send(self._lines.end())

    def _resume(self) -> None:
        tail, dropped, self._tail, self._dropped = self._tail, self._dropped, b"", 0
        if dropped:
            begun, _, rest = tail.partition(b"\n")  # the end of a line, unless there is nothing else
            tail, dropped = (rest, dropped + len(begun) + 1) if rest else (tail, dropped)
            self._send([f"({dropped / 2**20:,.1f} MiB are left out here: too much was printed)\n".encode()])
        self._left -= len(tail)
        self._send(self._lines.feed(tail))

    def _send(self, lines: list[bytes]) -> None:
        for line in lines:
            self._pass_on(self._prefix + line)


class Log(Output):
    """A file of lines, to which ``room`` bytes are added at most; after that, only the last lines at the end."""

    def __init__(self, path: Path, room: int = LOG_BYTES) -> None:
        # Unbuffered: a log that is read while the job runs, or after its writer was killed, has to be whole.
        self._file = path.open("ab", buffering=0)
        super().__init__(self._file.write, burst=room, rate=0)
        self._lines = Lines(EVENT_BYTES)

    def close(self) -> None:
        """Adds the last lines, if the file is full.

        Raises:
            OSError: The disk is full.
        """
        with self._file:
            self.end()
