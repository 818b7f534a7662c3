"""Packs CINIC-10 from an archive, which is read twice, and never unpacked to 270,000 files.

The published archive is known by its MD5. Any other passes tarfile's data filter, within bounds on its size.
"""

from __future__ import annotations

import lzma
import posixpath
import re
import shlex
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lab_common import LabError, read_path
from lab_common.text import clean_name
from lab_utils.data import packing
from lab_utils.data.packing import IMAGE_BYTES, SPLIT_NAMES, choose_root, explain, hash_file, make_command

MD5 = "6ee4d0c996905fe93221de577967a372"  # the only checksum of CINIC-10.tar.gz that is published
# The most that an archive of this data set can have: 270,004 files in 34 folders, of about 1 GiB, and some room.
MEMBERS, ARCHIVE_BYTES = 270_200, 2 * 1024**3
# What tarfile and the decompressors raise if a file is damaged or no archive.
DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, LookupError)
SPLIT = re.compile(rf"(?:^|/)({'|'.join(SPLIT_NAMES)})/", re.IGNORECASE)


def import_archive(file: Path | str, root: Path | str | None = None) -> Path:
    """Packs an archive in CINIC-10's layout, with or without folders above it, and returns the pack's folder.

    Args:
        file: A .tar, .tar.gz, .tar.bz2 or .tar.xz with any number of images.
        root: The folder that holds data sets; by default ``LAB_DATA``, else the repository's ``data/``.

    Raises:
        LabError: The file is not there or damaged, has what the data set cannot have, or images that cannot be read.
    """
    file, root = read_path(file), choose_root(root)
    fix = f"{make_command('fetch cinic10')}   (a folder needs no import: export LAB_DATA=THE_FOLDER)"
    with explain("Cannot open the archive", file, fix=fix):
        md5 = hash_file(file, "md5")
    try:
        names = {name for name, _ in _read_archive(file, trusted=md5 == MD5)}  # of two with one name the last counts
    except tarfile.FilterError as error:
        where, fix = f"{clean_name(file)}: {clean_name(error, 600)}", make_command("fetch cinic10")
        cause = "it is not CINIC-10's archive, or was packed from other files as well"
        raise LabError("The archive is refused, and nothing was written.", where=where, cause=cause, fix=fix) from error
    except DAMAGE as error:
        raise _explain_damage(file, error) from error
    tops = {name[: split.start(1)] for name in names if (split := SPLIT.search(name))}
    top = min(sorted(tops), key=len, default="")  # of two, the outer or the first one
    found = packing.survey((name.removeprefix(top) for name in names if name.startswith(top)), file)
    words = "CINIC-10.tar.gz, checksum verified" if md5 == MD5 else "an archive in CINIC-10's layout"
    source = {"words": f"imported from {words}", "fingerprint": f"md5 {md5}"}

    def make(folder: Path) -> None:
        contents = ((name.removeprefix(top), read) for name, read in _read_archive(file, trusted=True))
        packing.pack_images(folder, found, contents, source=source, where=file)

    return packing.provide("cinic10", root, source["fingerprint"], make).folder


def _read_archive(file: Path, *, trusted: bool) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yields the path of each file in an archive, and of each folder, with a "/" at its end, and what reads the file.

    Raises:
        FilterError: The archive is not ``trusted``, and has what the data set cannot have.
    """
    members = 0
    with tarfile.open(file) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # tarfile would keep all 270,000 in memory
            members += 1
            if not trusted:
                tarfile.data_filter(member, str(file.parent))
            if members > MEMBERS or tar.offset > ARCHIVE_BYTES:
                raise tarfile.FilterError(f"it has more than {MEMBERS:,} files or folders, or {ARCHIVE_BYTES:,} bytes")
            path = posixpath.normpath(member.name.lstrip("/"))
            yield path + "/" * member.isdir(), partial(_read_member, tar, member)
        # tarfile takes a damaged header for the end, and a file that was cut between two members for a whole one.
        end = tar.fileobj.read(2**20)
        if not end or end.strip(b"\0"):
            raise tarfile.ReadError("its end is missing")


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg():
        raise ValueError(f"is a link: pack files, with tar {'--hard-dereference' if member.islnk() else '-h'}")
    return tar.extractfile(member).read(IMAGE_BYTES)


def _explain_damage(file: Path, error: Exception) -> LabError:
    """Returns the error of a file that cannot be read as a tar archive; its first bytes tell what it is instead."""
    with file.open("rb") as raw:
        start = raw.read(512).lstrip()
    where, fix = clean_name(file), f"{make_command('fetch cinic10')}, or copy the file again"
    what = "The archive is cut short or damaged."
    cause = f"the download or copy ended early ({clean_name(str(error).partition(chr(10))[0], 200)})"
    if start.startswith(b"<"):
        what, cause = "The file is a web page, and not a tar archive.", "a log-in page"
    elif start.startswith(b"PK"):
        what, cause = "The file is a zip archive, and not a tar archive.", "it was packed by another program"
        unpack = f"{shlex.quote(sys.executable)} -m zipfile -e {shlex.quote(where)} ."
        fix = f"{unpack}, then name the new folder: export LAB_DATA=THAT_FOLDER"
    return LabError(what, where=where, cause=cause, fix=fix)
