"""Reads the headers of a tar file that somebody else has made, and judges each before tarfile acts on it."""

from __future__ import annotations

import bz2
import lzma
import re
import tarfile
import zlib
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from lab_utils.data.images import IMAGE_BYTES


@dataclass(frozen=True)
class Caps:
    """The most that an archive of this data set can have.

    Attributes:
        files: 3 × 90,000 images and a few files that describe them.
        folders: A top folder, 3 splits, 30 classes, and some room.
        archive_bytes: Of the file itself; the real one has a third of it.
        total_bytes: After decompression, headers included; the real one has about half of it.
        image_bytes: Per image.
        other_bytes: Per file that is not an image, such as the list of ImageNet's contributors.
    """

    files: int = 270_100
    folders: int = 100
    archive_bytes: int = 2 * 1024**3
    total_bytes: int = 2 * 1024**3
    image_bytes: int = IMAGE_BYTES
    other_bytes: int = 64 * 1024**2


# A long name, a long link and a pax header may stand before a file's own, and a few headers speak for all files.
MOST_HEADERS = 8
MOST_LETTERS = 512  # of a member's path; CINIC-10's have fewer than 60
# A gzip file may be several, one behind the other: bgzip makes one of each 64 KiB, which are 32,768 in 2 GiB.
MOST_PARTS = 100_000


HARM = "it is not CINIC-10's archive, or was made to do harm"
OTHER = "it is not CINIC-10's archive, or was packed from other files as well"


class RefusedError(Exception):
    """Why the archive is refused, in words that follow 'The archive is refused: it has', and what that likely means."""

    def __init__(self, reason: str, member: str = "", cause: str = HARM) -> None:
        super().__init__(reason)
        self.reason, self.member, self.cause = reason, member, cause


_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_RECORD = re.compile(rb"(\d{1,5}) [^=\n]+=")
ODD = "a link, a device or another thing that is neither file nor folder"


class _Member(tarfile.TarInfo):
    """A header that is judged before tarfile reads what it announces.

    tarfile takes long names and pax headers to memory, calls itself for the header after each of them, and (before
    Python 3.11.10 and 3.12.6: CVE-2024-6232) searches a pax header in a time that grows with the square of its length.
    """

    def _proc_member(self, tar: Tar) -> tarfile.TarInfo:
        regular = self.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if self.size < 0 or (not regular and self.size > 65536):
            raise RefusedError(f"a header that announces {self.size:,} bytes", self.name)
        if self.type == tarfile.GNUTYPE_SPARSE:  # its list of holes may go on for gigabytes
            raise RefusedError(ODD, self.name)
        tar.in_a_row += 1
        if tar.in_a_row > MOST_HEADERS:
            raise RefusedError(f"more than {MOST_HEADERS} headers for one file", self.name)
        if self.type not in _PAX:
            return super()._proc_member(tar)
        tar.of_all += self.type == tarfile.XGLTYPE
        if tar.of_all > MOST_HEADERS:
            raise RefusedError(f"more than {MOST_HEADERS} headers for all files", self.name)
        stream, content = tar.fileobj, tar.fileobj.read(self._block(self.size))
        _check_pax(content)
        tar.fileobj = _Again(content, stream)
        try:
            return super()._proc_member(tar)
        finally:
            tar.fileobj = stream


class Tar(tarfile.TarFile):
    """Counts the headers that come in a row, and those that speak for all files that follow."""

    tarinfo = _Member
    in_a_row = of_all = 0

    def next(self) -> tarfile.TarInfo | None:
        """Returns the next member, or None after the last."""
        self.in_a_row = 0
        return super().next()


class _Again:
    """Gives what was read from a stream once more, in one piece, and then what follows."""

    def __init__(self, content: bytes, stream: BinaryIO) -> None:
        self._content, self._stream, self.tell = content, stream, stream.tell

    def read(self, size: int) -> bytes:
        content, self._content = self._content or self._stream.read(size), b""
        return content


def _check_pax(content: bytes) -> None:
    """Refuses a pax header that is not a list of records "length keyword=value", as programs write it.

    The format: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html, "pax Extended Header".
    """
    at, records = 0, 0
    while at < len(content) and content[at]:  # filled up with zeros
        found = _RECORD.match(content, at, at + 300)
        end = at + int(found[1]) if found else -1
        if not found or end <= found.end() or content[end - 1 : end] != b"\n" or found[0].find(b" GNU.sparse.") > 0:
            raise RefusedError("a pax header that no archive of images has")
        at, records = end, records + 1
    if records > 100 or max(map(len, re.findall(rb"\d+", content)), default=0) > 64:
        raise RefusedError("a pax header that no archive of images has")


class _Gzip:
    """Decompresses one part of a gzip file, with the methods of ``bz2.BZ2Decompressor`` and ``lzma.LZMADecompressor``.

    With zlib itself, because Python's gzip goes one by one through the zeros that may stand behind the content: where
    they are a hole in a small file, for days.
    """

    needs_input, eof, unused_data = True, False, b""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16)  # of a gzip file, whose checksums it compares

    def decompress(self, data: bytes, size: int) -> bytes:
        block = self._stream.decompress(self._stream.unconsumed_tail + data, size)
        self.needs_input = not self._stream.unconsumed_tail
        self.eof, self.unused_data = self._stream.eof, self._stream.unused_data
        return block


# By a file's first bytes: what decompresses it. The dictionary of an .xz file takes at most 256 MiB here.
DECOMPRESSORS = {
    b"\x1f\x8b": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": partial(lzma.LZMADecompressor, memlimit=2**28),
}


class CappedReader:
    """Reads a file, decompressed where it is compressed, and refuses to go on past a number of bytes."""

    def __init__(self, file: BinaryIO, size: int, cap: int) -> None:
        """Takes a file of ``size`` bytes, of which no more are read, and the ``cap`` on what they become."""
        self._file, self._unread, self._cap, self._left = file, size, cap, cap
        self._part, self._parts, self._rest = None, 0, b""
        file.seek(0)
        first = file.read(min(size, 6))
        self._make = next((make for mark, make in DECOMPRESSORS.items() if first.startswith(mark)), None)
        self.compressed = bool(self._make)
        file.seek(0)

    def read(self, size: int) -> bytes:
        """Returns at most ``size`` bytes; empty at the end.

        Raises:
            RefusedError: It is more than it may be.
            EOFError, zlib.error, OSError, lzma.LZMAError: The file is cut short or damaged.
        """
        block = self._decompress(size) if self._make else self._take(size)
        self._left -= len(block)
        if self._left < 0:
            raise RefusedError(f"more than {self._cap:,} bytes when decompressed", cause=OTHER)
        return block

    def _take(self, size: int) -> bytes:
        block = self._file.read(min(size, self._unread))
        self._unread = self._unread - len(block) if block else 0
        return block

    def _decompress(self, size: int) -> bytes:
        while self._part or self._fill():
            if self._part is None:
                self._begin_part()
            data = b""
            if asked := self._part.needs_input:
                self._fill()
                data, self._rest = self._rest, b""
            block = self._part.decompress(data, size)
            if self._part.eof:
                self._rest, self._part = self._part.unused_data, None
            elif asked and not (block or data):
                raise EOFError("it ends before its content does")
            if block:
                return block
        return b""

    def _fill(self) -> bool:
        """Sees to it that there is something to decompress; False at the file's end."""
        while True:
            if self._part is None and self._parts:
                self._rest = self._rest.lstrip(b"\0")  # a part may be filled up with zeros
            if self._rest or not self._unread:
                return bool(self._rest)
            # Short, because what follows a part in it is copied for each part.
            self._rest = self._take(16384)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise RefusedError(f"more than {MOST_PARTS:,} parts that are compressed on their own")
        self._part = self._make()
