"""Imports CINIC-10.tar.gz: looks through all of it first, then decodes its members straight into the packed arrays.

Nothing is ever unpacked to files, so no member can be written anywhere. What CINIC-10 cannot contain is refused all the
same, before the pack is begun: such an archive is not what it says it is.
"""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lab_common import LabError, read_path
from lab_common.files import open_regular
from lab_common.text import clean_name
from lab_utils.bars import open_bar
from lab_utils.data.fetch import MD5
from lab_utils.data.folder import MEAN_STD
from lab_utils.data.headers import MOST_LETTERS, ODD, OTHER, CappedReader, Caps, RefusedError, Tar
from lab_utils.data.images import is_image, refuse_bad
from lab_utils.data.layout import CLASS_NAMES, Folder, Listing, Members, find_data_sets, is_data_set, survey
from lab_utils.data.pack import SPLITS, digest
from lab_utils.data.system import choose_root, find_target, make_command, quote
from lab_utils.data.write import write_pack

# What tarfile and the decompressors raise for what is damaged; the last two for headers that nobody's tar has written.
READING = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, IndexError)
# What comes in place of a tar archive: how it begins, what it is, and the command that unpacks it into a folder.
KINDS = (
    (rb"PK[\3\5]", "a zip archive", "{python} -m zipfile -e {file} {folder}"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "mkdir -p {folder} && tar --zstd -xf {file} -C {folder}"),
    (rb"\x04\x22\x4d\x18", "compressed with lz4", "mkdir -p {folder} && lz4 -dc {file} | tar -xf - -C {folder}"),
    (rb"\x1f[\x9d\xa0]", "compressed with compress", "mkdir -p {folder} && tar -xf {file} -C {folder}"),
    (rb"7z\xbc\xaf", "a 7z archive", "7z x {file} -o{folder}"),
    (rb"Rar!", "a rar archive", "unrar x {file} {folder}/"),
    (rb"PAR1|ARROW1", "a table of parquet or Arrow", ""),
    (rb"\x89HDF|\x93NUMPY|SQLite|\x80[\2-\5]", "a file of arrays or of a program's objects", ""),
    (rb"\x89PNG|\xff\xd8\xff|RIFF|BM", "a picture", ""),
    (rb"version https://git-lfs", "a pointer of Git LFS and not the file itself", ""),
    (rb"\s*<(?i:!doctype|html|head|\?xml|body)", "a web page", ""),
    (rb"\s*[{\[]\s*[\"{}\[\]]", "an answer of a server, in JSON", ""),
)


def import_archive(
    file: Path | str, root: Path | str | None = None, *, skip_bad: bool = False, caps: Caps | None = None
) -> Path:
    """Packs an archive in CINIC-10's layout, with or without a top folder, and returns the pack's folder.

    Args:
        file: A .tar, or .tar.gz, .tar.bz2, .tar.xz, of any number of images.
        root: The folder that holds data sets; by default ``LAB_DATA``, else the repository's ``data/``.
        skip_bad: Go on without the images that cannot be read.
        caps: What to refuse.

    Raises:
        LabError: The file is not there or damaged, has what the data set cannot have, or images that cannot be read.
    """
    file, root, caps = read_path(file), choose_root(root), caps or Caps()
    refuse_data_set(root)
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > caps.archive_bytes:
                raise RefusedError(f"{size:,} bytes", cause=OTHER)
            _check_kind(stream, file, size=size, caps=caps)
            md5 = digest(stream, "md5")
            top, listing, left_out = _survey(stream, file, size=size, caps=caps)
            verified = "CINIC-10.tar.gz, checksum verified" if md5 == MD5 else "an archive in CINIC-10's layout"
            source = {"kind": "archive", "words": f"imported from {verified}", "fingerprint": f"md5 {md5}"}
            source |= {"archive": file.name, "bytes": size, "md5": md5}
            return _pack(
                stream, file, root / "packed" / "cinic10", (top, listing, left_out), source, caps, skip_bad=skip_bad
            )
    except OSError as error:
        cause, fix = "a mistyped path, or the file was moved", make_command("fetch cinic10")
        if target := find_target(file):
            cause = f"it is a link to {target}"
        if os.path.isdir(file):  # noqa: PTH112 (a Path's own raises where the folder above may not be entered)
            cause, fix = "a folder needs no import", f"export LAB_DATA={quote(file)}"
        what = f"Cannot open the archive: {error.strerror or error}."
        raise LabError(what, where=clean_name(file), cause=cause, fix=fix) from error
    except RefusedError as refusal:
        raise LabError(
            f"The archive is refused: it has {refusal.reason}.",
            where=clean_name(file) + (f", member '{clean_name(refusal.member, 200)}'" if refusal.member else ""),
            cause=f"{refusal.cause}; nothing was written",
            fix=make_command("fetch cinic10"),
        ) from refusal


def refuse_data_set(root: Path) -> None:
    """Raises a LabError where a root is itself a data set: nothing is written into it."""
    if root.is_dir() and is_data_set(Folder(root)):
        raise LabError(
            "An archive cannot be imported into a folder that is itself a data set.",
            where=root,
            cause="LAB_DATA points right at a folder with train, valid and test in it",
            fix="unset LAB_DATA, or let it name another folder: export LAB_DATA=/another/folder",
        )


def _check_kind(stream: BinaryIO, file: Path, *, size: int, caps: Caps) -> None:
    """Refuses what is no tar archive, compressed or not, and says what it is, by its first bytes."""
    wrapped, start = CappedReader(stream, size, caps.total_bytes), b""
    try:
        while len(start) < 512 and (block := wrapped.read(512 - len(start))):
            start += block
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError) as error:
        raise _explain_damage(file, "it holds nothing") from error
    except tarfile.HeaderError as error:
        words, unpack = next((kind[1:] for kind in KINDS if re.match(kind[0], start)), ("", ""))
        if not (words or wrapped.compressed):
            raise _explain_damage(file, "it begins as no archive does") from error
        what = f"The file is {words}, and no archive of pictures."
        cause = "the download was answered with another file, or the file has another's name"
        fix = f"{make_command('fetch cinic10')}, or ask for the archive itself"
        if wrapped.compressed:
            what = f"The file is compressed, and holds {words or 'something else'} in place of a tar archive."
        elif unpack:
            what = f"The file is {words}, which import does not read."
            cause = "import takes .tar.gz, .tar.bz2, .tar.xz and .tar; all else has to be unpacked first"
            folder = quote(file.with_name(re.sub(r"(\.tar)?\.\w+$", "", file.name) + "-unpacked"))
            python = make_command("").rpartition(" -m ")[0]
            fix = f"{unpack.format(python=python, file=quote(file), folder=folder)} && export LAB_DATA={folder}"
        raise LabError(what, where=clean_name(file), cause=cause, fix=fix) from error
    except READING as error:
        raise _explain_damage(file, error) from error


def _explain_damage(file: Path, error: object) -> LabError:
    return LabError(
        "The archive is cut short or damaged.",
        where=clean_name(file),
        cause=f"the download or copy ended early, or it is no archive ({clean_name(error, 200)})",
        fix=f"{make_command('fetch cinic10')}, or copy the file again",
    )


def _survey(stream: BinaryIO, file: Path, *, size: int, caps: Caps) -> tuple[str, Listing, str]:
    """Reads the whole archive once, judges every member, and lists the images.

    Returns:
        The folder above the splits, the images, and in words what is left out.
    """
    tree = Members(file)
    for path, folder, _ in _read_members(stream, file, size, caps, verb="looking through"):
        if path != "." and not tree.add(path, folder=folder):
            raise RefusedError("the same file twice", path, OTHER)
    tops = find_data_sets(tree, sure=True, deepest=caps.folders)
    if len(tops) != 1:
        some = ", ".join(tops) or ", ".join([name for names in tree.list("") for name in names][:5]) or "nothing"
        raise LabError(
            "The folders train, valid and test are " + ("in several folders." if tops else "not in the archive."),
            where=clean_name(file),
            cause=f"it has: {clean_name(some, 300)}; {OTHER}; nothing was written",
            fix=f"{make_command('fetch cinic10')}, or pack one folder train|valid|test/<class>/*.png",
        )
    return tops[0], *survey(tree, tops[0])


def _pack(
    stream: BinaryIO,
    file: Path,
    pack: Path,
    found: tuple[str, Listing, str],
    source: dict[str, object],
    caps: Caps,
    *,
    skip_bad: bool,
) -> Path:
    """Reads the archive again and decodes each image to its sorted position, the one that ImageFolder would give it."""
    top, listing, left_out = found
    counts = {split: sum(map(len, listing[split].values())) for split in SPLITS}
    positions: dict[str, tuple[str, int]] = {}
    with write_pack(
        pack, counts, class_names=CLASS_NAMES, source=source, mean_std=MEAN_STD, left_out=left_out
    ) as draft:
        for split in SPLITS:
            places = [(label, f"{n}/{file}") for label, n in enumerate(CLASS_NAMES) for file in listing[split][n]]
            positions |= {f"{split}/{name}": (split, position) for position, (_, name) in enumerate(places)}
            draft.labels[split][:] = [label for label, _ in places]
        wanted = {f"{top}/{name}" if top else name: name for name in positions}
        for path, _, content in _read_members(stream, file, source["bytes"], caps, verb="packing", wanted=wanted):
            if name := wanted.pop(path, ""):
                draft.put(name, *positions[name], partial(bytes, content))
        if wanted:
            raise RefusedError("changed while it was read", cause="another program writes into it")
        if not skip_bad:
            refuse_bad(draft.bad, sum(counts.values()), file, option=f"import {quote(file)} --skip-bad")
    return pack


def _read_members(
    stream: BinaryIO, file: Path, size: int, caps: Caps, *, verb: str, wanted: Container[str] = ()
) -> Iterator[tuple[str, bool, bytes]]:
    """Goes through the archive from its start, and yields each member's path, whether it is a folder, and its content.

    Raises:
        RefusedError: A member is something that the data set cannot have.
        LabError: The archive is cut short or damaged.
    """
    files = folders = 0
    reader = CappedReader(stream, size, caps.total_bytes)
    try:
        with (
            Tar.open(fileobj=reader, mode="r|") as tar,
            open_bar(size, f"{verb} the archive", unit="B", unit_scale=True, delay=3) as bar,
        ):
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all 270,000 headers in memory
                folders, files = folders + member.isdir(), files + (not member.isdir())
                if files > caps.files or folders > caps.folders:
                    raise RefusedError(f"more than {caps.files:,} files or {caps.folders:,} folders", cause=OTHER)
                _judge(member, caps)
                bar.update(min(stream.tell(), size) - bar.n)
                path = str(PurePosixPath(member.name))  # "./train" and "train//cat" lose what does not matter
                content = tar.extractfile(member).read() if path in wanted and not member.isdir() else b""
                yield path, member.isdir(), content
            # tarfile takes a damaged header for the end; then something other than zeros follows. It also takes a file
            # that was cut short for a whole one; where no decompressor notices, the last block, of zeros, is missing.
            while block := tar.fileobj.read(65536):
                if block.strip(b"\0"):
                    raise tarfile.ReadError("there is more after the end")
            if not reader.compressed and stream.seek(size - 512) and stream.read(512).strip(b"\0"):
                raise tarfile.ReadError("its end is missing")
    except READING as error:
        raise _explain_damage(file, error) from error


def _judge(member: tarfile.TarInfo, caps: Caps) -> None:
    """Refuses what the data set cannot have."""
    name = member.name
    regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
    if member.issym() or member.islnk():
        cause = f"it was packed from a folder of links ({clean_name(member.linkname, 200)}): pack the files with tar -h"
        raise RefusedError(ODD, name, cause)
    if not regular and not member.isdir():
        raise RefusedError(ODD, name)
    if len(name) > MOST_LETTERS:
        raise RefusedError(f"a name of {len(name):,} letters", name, OTHER)
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise RefusedError("a path that leads out of the archive", name)
    if member.size < 0 or member.size > (caps.image_bytes if is_image(name.rpartition("/")[2]) else caps.other_bytes):
        raise RefusedError(f"a file of {member.size:,} bytes", name, OTHER)
