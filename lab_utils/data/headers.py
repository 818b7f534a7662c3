"""Reads the headers of a tar file that somebody else has made, and judges each before tarfile acts on it."""

from __future__ import annotations

import re
import tarfile
import zlib
from dataclasses import dataclass
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


class RefusedError(Exception):
    """Why the archive is refused, in words that follow 'The archive is refused: it has'."""

    def __init__(self, reason: str, member: str = "") -> None:
        super().__init__(reason)
        self.reason, self.member = reason, member


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


class CappedReader:
    """Decompresses a gzip file, and refuses to go on past a number of bytes, however little they take compressed.

    With zlib itself, because Python's gzip goes one by one through the zeros that may stand behind the content: where
    they are a hole in a small file, for days.
    """

    def __init__(self, file: BinaryIO, size: int, cap: int) -> None:
        """Takes a file of ``size`` bytes, of which no more are read, and the ``cap`` on what they become."""
        self._file, self._unread, self._cap, self._left = file, size, cap, cap
        self._part, self._parts, self._rest = None, 0, b""

    def read(self, size: int) -> bytes:
        """Returns at most ``size`` bytes; empty at the end.

        Raises:
            RefusedError: It is more than it may be.
            EOFError, zlib.error: The file is cut short, damaged, or no gzip file.
        """
        while self._fill() or self._part:
            if self._part is None:
                self._begin_part()
            block = self._part.decompress(self._rest, size)
            ended = self._part.eof
            if not (block or ended or self._rest):
                raise EOFError("it ends before its content does")
            self._rest = self._part.unused_data if ended else self._part.unconsumed_tail
            self._part = None if ended else self._part
            if block:
                self._left -= len(block)
                if self._left < 0:
                    raise RefusedError(f"more than {self._cap:,} bytes when decompressed")
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
            self._rest = self._file.read(min(16384, self._unread))
            self._unread = self._unread - len(self._rest) if self._rest else 0

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise RefusedError(f"more than {MOST_PARTS:,} parts that are compressed on their own")
        self._part = zlib.decompressobj(zlib.MAX_WBITS | 16)  # of a gzip file, whose checksums it compares
