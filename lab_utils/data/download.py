"""Downloads CINIC-10's archive and packs it; packs CIFAR-10 and Fashion-MNIST, which torchvision downloads."""

from __future__ import annotations

import itertools
import lzma
import posixpath
import re
import shlex
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lab_common import LabError, read_path
from lab_common.text import clean_name
from lab_utils import load_torchvision
from lab_utils.bars import open_bar
from lab_utils.data import packing
from lab_utils.data.packing import IMAGE_BYTES, SPLIT_NAMES, WRITABLE, choose_root, explain, hash_file, make_command

# The DataShare of the University of Edinburgh, DOI 10.7488/ds/2448, under its addresses of three generations.
URLS = (
    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    "https://datashare.ed.ac.uk/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
    "https://datashare.ed.ac.uk/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/download",
)
NAME = "CINIC-10.tar.gz"
SIZE = 687_544_992  # bytes
MD5 = "6ee4d0c996905fe93221de577967a372"  # the only checksum that is published

# The most that an archive of this data set can have: 270,004 files in 34 folders, of about 1 GiB, and some room.
MEMBERS, ARCHIVE_BYTES = 270_200, 2 * 1024**3
# What tarfile and the decompressors raise if a file is damaged or no archive.
DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, LookupError)
SPLIT = re.compile(rf"(?:^|/)({'|'.join(SPLIT_NAMES)})/", re.IGNORECASE)
VALID = 5_000  # CIFAR-10 and Fashion-MNIST have no validation split: the last 5,000 training images become it


def fetch_archive(
    folder: Path | str, *, urls: Sequence[str] = URLS, size: int = SIZE, md5: str = MD5, timeout: float = 30
) -> Path:
    """Downloads CINIC-10's archive into a folder, or finds it there, and returns its path.

    What has arrived is kept in ``CINIC-10.tar.gz.part`` and continued the next time, from the same or another address.
    The file gets its name only if its MD5 is right.

    Args:
        folder: Where to put it.
        urls: Addresses, tried in order.
        size: In bytes.
        md5: In hexadecimal.
        timeout: Seconds without a byte after which an address is given up.

    Raises:
        LabError: No address brought the right file, or it cannot be written here.
    """
    from filelock import FileLock
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    path = read_path(folder) / NAME
    part, failures = path.with_name(f"{NAME}.part"), []
    with explain("Cannot download", part, fix=WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{NAME}.lock")):  # whoever fetches it at the same time waits, and finds it
            if path.is_file() and hash_file(path, "md5") == md5:
                return path
            part.touch()
            for url in urls:
                try:
                    reason = _receive(url, part, size=size, timeout=timeout)
                except (RequestException, HTTPError) as error:
                    reason = str(error)
                if part.stat().st_size >= size:
                    if (found := hash_file(part, "md5")) == md5:
                        part.replace(path)
                        return path
                    part.write_bytes(b"")  # it can never become right
                    reason = f"wrong checksum: MD5 {found}, expected {md5}; what had arrived was removed"
                failures.append(f"{url}: {clean_name(reason, 300)}")
            if not (kept := part.stat().st_size):
                part.unlink()
    raise LabError(
        f"{NAME} could not be downloaded from any of {len(urls)} addresses.",
        where="\n         ".join(failures),
        cause="no connection, or the addresses have changed"
        + (f"; {kept:,} bytes are kept and continued when you run it again" if kept else ""),
        fix=f"{make_command('import FILE.tar.gz')}   (with a copy from your instructor or another computer)",
    )


def _receive(url: str, part: Path, *, size: int, timeout: float) -> str:
    """Makes one request for what is missing and appends what comes; returns why it may not be whole."""
    import requests

    start = part.stat().st_size
    if start >= size:
        return ""
    headers = {"User-Agent": "distributed-training-labs", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    with requests.get(url, headers=headers, timeout=timeout, stream=True) as response:
        response.raise_for_status()
        start = start if response.status_code == 206 else 0
        blocks = response.raw.stream(2**16, decode_content=False)
        first = next(blocks, b"")
        # Many servers answer with a page of their own (log in, not found) and call it a success.
        if "html" in response.headers.get("Content-Type", "") or not (start or first.startswith(b"\x1f\x8b")):
            return f"it sent a web page or another file instead of the archive: {first[:60]!r}"
        # Only now: a server without Range costs what had arrived, a web page does not.
        with (
            part.open("ab" if start else "wb") as file,
            open_bar(size, NAME, initial=start, unit="B", unit_scale=True, delay=1) as bar,
        ):
            for block in itertools.chain([first], blocks):
                file.write(block)
                bar.update(len(block))
    return "the connection was cut"


def import_archive(file: Path | str, root: Path | str | None = None) -> Path:
    """Packs an archive in CINIC-10's layout, with or without folders above it, and returns the pack's folder.

    The archive is read twice, first for its names and then for its images, and never unpacked to 270,000 files.

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

    return packing.provide("cinic10", root, source["fingerprint"], make)[0]


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
    if start.startswith(b"<"):
        return LabError("The file is a web page, and not a tar archive.", where=where, cause="a log-in page", fix=fix)
    if start.startswith(b"PK"):
        unpack = f"{shlex.quote(sys.executable)} -m zipfile -e {shlex.quote(where)} ."
        fix = f"{unpack}, then name the new folder: export LAB_DATA=THAT_FOLDER"
        cause = "it was packed by another program"
        return LabError("The file is a zip archive, and not a tar archive.", where=where, cause=cause, fix=fix)
    cause = f"the download or copy ended early ({clean_name(str(error).partition(chr(10))[0], 200)})"
    return LabError("The archive is cut short or damaged.", where=where, cause=cause, fix=fix)


def pack_torchvision(name: str, folder: Path, fingerprint: str) -> None:
    """Packs ``cifar10`` or ``fashion_mnist``, which torchvision downloads beside the packs' folder, and checks.

    Fashion-MNIST's images are padded with two black pixels on each side to 32×32 and repeated to three channels.

    Raises:
        LabError: The download failed.
    """
    datasets, home = load_torchvision().datasets, folder.parent.parent
    maker = datasets.CIFAR10 if name == "cifar10" else datasets.FashionMNIST
    try:
        whole, test = (maker(str(home), train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError, EOFError) as error:  # URLError and a wrong checksum are among them
        cause = f"no connection, or the server is down: {clean_name(error, 200)}"
        fix = "try again later, copy the downloaded files into that folder, or work with data.load('shapes10')"
        raise LabError(f"{name} could not be downloaded.", where=home, cause=cause, fix=fix) from error
    cuts = {"train": (whole, slice(-VALID)), "valid": (whole, slice(-VALID, None)), "test": (test, slice(None))}
    parts = (
        (split, _convert(np.asarray(part.data[cut])), np.asarray(part.targets[cut]))
        for split, (part, cut) in cuts.items()
    )
    source = {"words": "downloaded by torchvision", "fingerprint": fingerprint}
    packing.write_pack(folder, parts, class_names=tuple(whole.classes), source=source)


def _convert(images: np.ndarray) -> np.ndarray:
    """Returns CIFAR-10's (N, 32, 32, 3) or Fashion-MNIST's (N, 28, 28) as uint8 (N, 3, 32, 32)."""
    if images.ndim == 4:
        return images.transpose(0, 3, 1, 2)
    return np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, axis=1)
