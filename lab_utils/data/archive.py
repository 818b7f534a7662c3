"""Imports CINIC-10.tar.gz: looks through all of it first, then decodes its members straight into the packed arrays.

Nothing is ever unpacked to files, so no member can be written anywhere. What CINIC-10 cannot contain is refused all the
same, before the pack is begun: such an archive is not what it says it is.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lab_utils import LabError, env_folder
from lab_utils.data.fetch import MD5
from lab_utils.data.folder import (
    CLASS_NAMES,
    IMAGE_BYTES,
    MEAN_STD,
    Listing,
    check_listing,
    decode,
    describe_bad,
    has_layout,
    is_image,
    refuse_bad,
)
from lab_utils.data.pack import SPLITS
from lab_utils.data.system import make_command, quote
from lab_utils.data.write import write_pack
from lab_utils.files import open_regular
from lab_utils.text import clean_name


@dataclass(frozen=True)
class Caps:
    """The most that an archive of this data set can have.

    Attributes:
        files: 3 × 90,000 images and a few files that describe them.
        folders: A top folder, 3 splits, 30 classes, and some room.
        total_bytes: After decompression, headers included; the real one has about half of it.
        image_bytes: Per image.
        other_bytes: Per file that is not an image, such as the list of ImageNet's contributors.
    """

    files: int = 270_100
    folders: int = 100
    total_bytes: int = 2 * 1024**3
    image_bytes: int = IMAGE_BYTES
    other_bytes: int = 64 * 1024**2


# A long name, a long link and a pax header may stand before a file's own, and a few headers speak for all files.
MOST_HEADERS = 8
MOST_LETTERS = 512  # of a member's path; CINIC-10's have fewer than 60


class _Refused(Exception):
    """Why the archive is refused, in words that follow 'The archive is refused: it has'."""

    def __init__(self, reason: str, member: str = "") -> None:
        super().__init__(reason)
        self.reason, self.member = reason, member


_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_RECORD = re.compile(rb"(\d{1,5}) [^=\n]+=")
_ODD = "a link, a device or another thing that is neither file nor folder"


class _Member(tarfile.TarInfo):
    """A header that is judged before tarfile reads what it announces.

    tarfile takes long names and pax headers to memory, calls itself for the header after each of them, and (before
    Python 3.11.10 and 3.12.6: CVE-2024-6232) searches a pax header in a time that grows with the square of its length.
    """

    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        regular = self.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if self.size < 0 or (not regular and self.size > 65536):
            raise _Refused(f"a header that announces {self.size:,} bytes", self.name)
        if self.type == tarfile.GNUTYPE_SPARSE:  # its list of holes may go on for gigabytes
            raise _Refused(_ODD, self.name)
        tar.in_a_row += 1
        if tar.in_a_row > MOST_HEADERS:
            raise _Refused(f"more than {MOST_HEADERS} headers for one file", self.name)
        if self.type not in _PAX:
            return super()._proc_member(tar)
        tar.of_all += self.type == tarfile.XGLTYPE
        if tar.of_all > MOST_HEADERS:
            raise _Refused(f"more than {MOST_HEADERS} headers for all files", self.name)
        stream, content = tar.fileobj, tar.fileobj.read(self._block(self.size))
        _check_pax(content)
        tar.fileobj = _Again(content, stream)
        try:
            return super()._proc_member(tar)
        finally:
            tar.fileobj = stream


class _Tar(tarfile.TarFile):
    """Counts the headers that come in a row, and those that speak for all files that follow."""

    tarinfo = _Member
    in_a_row = of_all = 0

    def next(self) -> tarfile.TarInfo | None:
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
            raise _Refused("a pax header that no archive of images has")
        at, records = end, records + 1
    if records > 100 or max(map(len, re.findall(rb"\d+", content)), default=0) > 64:
        raise _Refused("a pax header that no archive of images has")


class _CappedReader:
    """Decompresses a gzip file, and refuses to go on past a number of bytes, however little they take compressed."""

    def __init__(self, file: BinaryIO, cap: int) -> None:
        self._gzip, self._cap, self._left = gzip.GzipFile(fileobj=file), cap, cap

    def read(self, size: int) -> bytes:
        """Returns at most ``size`` bytes; empty at the end."""
        block = self._gzip.read(size)
        self._left -= len(block)
        if self._left < 0:
            raise _Refused(f"more than {self._cap:,} bytes when decompressed")
        return block


def import_archive(
    file: Path | str, root: Path | str | None = None, *, skip_bad: bool = False, caps: Caps | None = None
) -> Path:
    """Packs an archive in CINIC-10's layout, with or without a top folder, and returns the pack's folder.

    Args:
        file: A .tar.gz of any number of images.
        root: The folder that holds data sets; by default ``LAB_DATA``, else the repository's ``data/``.
        skip_bad: Go on without the images that cannot be read.
        caps: What to refuse.

    Raises:
        LabError: The file is not there or damaged, has what the data set cannot have, or images that cannot be read.
    """
    file = Path(file).expanduser()
    root = Path(root).expanduser().resolve() if root else env_folder("LAB_DATA", "data")
    refuse_data_set(root)
    try:
        with open_regular(file) as stream:
            md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            size = stream.tell()
            listing = _survey(stream, size, caps or Caps())
            check_listing(listing, file, CLASS_NAMES)
            verified = "CINIC-10.tar.gz, checksum verified" if md5 == MD5 else "an archive in CINIC-10's layout"
            source = {"kind": "archive", "words": f"imported from {verified}", "fingerprint": f"md5 {md5}"}
            source |= {"archive": file.name, "bytes": size, "md5": md5}
            return _pack(stream, file, root / "packed" / "cinic10", listing, source, caps or Caps(), skip_bad=skip_bad)
    except OSError as error:
        cause, fix = "a mistyped path, or the file was moved", make_command("fetch cinic10")
        what = f"Cannot open the archive: {error.strerror or error}."
        raise LabError(what, where=clean_name(file), cause=cause, fix=fix) from error
    except _Refused as refusal:
        raise LabError(
            f"The archive is refused: it has {refusal.reason}.",
            where=clean_name(file) + (f", member '{clean_name(refusal.member, 200)}'" if refusal.member else ""),
            cause="it is not CINIC-10's archive, or was made to do harm; nothing was written",
            fix=make_command("fetch cinic10"),
        ) from refusal


def refuse_data_set(root: Path) -> None:
    """Raises a LabError where a root is itself a data set: nothing is written into it."""
    if has_layout(root):
        raise LabError(
            "An archive cannot be imported into a folder that is itself a data set.",
            where=root,
            cause="LAB_DATA points right at a folder with train, valid and test in it",
            fix="unset LAB_DATA, or let it name another folder: export LAB_DATA=/another/folder",
        )


def _survey(stream: BinaryIO, size: int, caps: Caps) -> Listing:
    """Reads the whole archive once, judges every member, and lists the images."""
    found: set[tuple[str, str, str]] = set()
    for _, place in _read_members(stream, size, caps, "looking through"):
        if place in found:
            raise _Refused("the same file twice", "/".join(place))
        found.add(place)
    listing: Listing = {}
    for split, class_name, name in sorted(found):
        listing.setdefault(split, {}).setdefault(class_name, []).append(name)
    return listing


def _pack(
    stream: BinaryIO, file: Path, pack: Path, listing: Listing, source: dict, caps: Caps, *, skip_bad: bool
) -> Path:
    """Reads the archive again and decodes each image to its sorted position, the one that ImageFolder would give it."""
    counts = {split: sum(map(len, listing[split].values())) for split in SPLITS}
    positions: dict[tuple[str, str, str], int] = {}
    with write_pack(pack, counts, class_names=CLASS_NAMES, source=source, mean_std=MEAN_STD) as draft:
        for split in SPLITS:
            places = [(split, class_name, name) for class_name in CLASS_NAMES for name in listing[split][class_name]]
            positions |= {place: position for position, place in enumerate(places)}
            draft.labels[split][:] = [CLASS_NAMES.index(class_name) for _, class_name, _ in places]
        bad: list[str] = []
        for image, place in _read_members(stream, source["bytes"], caps, "packing"):
            if (position := positions.pop(place, None)) is None:
                raise _Refused("changed while it was read", "/".join(place))
            try:
                draft.images[place[0]][position] = decode(image)
            except ValueError as error:
                bad.append(describe_bad("/".join(place), error))
                draft.skipped[place[0]].append(position)
        if positions:
            raise _Refused("changed while it was read")
        if not skip_bad:
            refuse_bad(bad, sum(counts.values()), file, option=f"import {quote(file)} --skip-bad")
        draft.notes["bad"] = bad[:100]
    return pack


def _read_members(stream: BinaryIO, size: int, caps: Caps, verb: str) -> Iterator[tuple[bytes, tuple[str, str, str]]]:
    """Goes through the archive from its start, and yields each image with its split, class and file name.

    Raises:
        _Refused: A member is something that the data set cannot have.
        LabError: The archive is cut short or damaged.
    """
    from tqdm.auto import tqdm

    stream.seek(0)
    files = folders = 0
    top: set[str] = set()
    try:
        with (
            _Tar.open(fileobj=_CappedReader(stream, caps.total_bytes), mode="r|") as tar,
            tqdm(total=size, desc=f"{verb} the archive", unit="B", unit_scale=True, delay=3) as bar,
        ):
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all 270,000 headers in memory
                folders, files = folders + member.isdir(), files + (not member.isdir())
                if files > caps.files or folders > caps.folders:
                    raise _Refused(f"more than {caps.files:,} files or {caps.folders:,} folders")
                place = _judge(member, caps, top)
                bar.update(min(stream.tell(), size) - bar.n)
                if place:
                    yield tar.extractfile(member).read(), place
            # tarfile takes a damaged header for the end; then something other than zeros follows.
            while block := tar.fileobj.read(65536):
                if block.strip(b"\0"):
                    raise tarfile.ReadError("there is more after the end")
    # The last two come out of tarfile for headers that nobody's tar has written.
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise LabError(
            "The archive is cut short or damaged.",
            where=clean_name(getattr(stream, "name", "")),
            cause=f"the download or copy ended early, or it is no .tar.gz file ({clean_name(error, 200)})",
            fix=f"{make_command('fetch cinic10')}, or copy the file again",
        ) from error


def _judge(member: tarfile.TarInfo, caps: Caps, top: set[str]) -> tuple[str, str, str] | None:
    """Returns the place of an image: its split, class and file name; None for folders and files that only describe.

    ``top`` collects the top folder, of which there may be one or none.
    """
    name = member.name
    regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
    if not regular and not member.isdir():
        raise _Refused(_ODD, name)
    if len(name) > MOST_LETTERS:
        raise _Refused(f"a name of {len(name):,} letters", name)
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise _Refused("a path that leads out of the archive", name)
    parts = PurePosixPath(name).parts  # "./train" and "train//cat" lose what does not matter
    if member.size < 0 or member.size > (caps.image_bytes if is_image(name) else caps.other_bytes):
        raise _Refused(f"a file of {member.size:,} bytes", name)
    if not regular or not parts or not is_image(parts[-1]):
        return None
    place = parts if parts[0] in SPLITS else parts[1:]
    top.add("" if place == parts else parts[0])
    if len(place) != 3 or place[0] not in SPLITS or len(top) > 1:
        raise _Refused("an image outside train|valid|test/<class>/", name)
    return place
