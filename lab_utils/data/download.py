"""Downloads CINIC-10's archive and packs it; packs CIFAR-10 and Fashion-MNIST, which torchvision downloads."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import posixpath
import shlex
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lab_common import LabError, read_path
from lab_common.text import clean_name
from lab_utils import load_torchvision
from lab_utils.bars import open_bar
from lab_utils.data import packing
from lab_utils.data.packing import IMAGE_BYTES, WRITABLE, choose_root, explain, hash_file, make_command

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
DAMAGE = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, LookupError, RecursionError)
COMPRESSIONS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# What may come in place of a tar archive: how it begins, what it is, and how to unpack it.
KINDS = {
    b"PK": ("a zip archive", f"{shlex.quote(sys.executable)} -m zipfile -e {{}} ."),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "tar --zstd -xf {}"),
    b"7z\xbc\xaf": ("a 7z archive", "7z x {}"),
    b"<": ("a web page", ""),
}
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
        size: Its size in bytes.
        md5: Its MD5, in hexadecimal.
        timeout: Seconds without a byte after which an address is given up.

    Raises:
        LabError: No address brought the right file, or it cannot be written here.
    """
    from filelock import FileLock

    path = read_path(folder) / NAME
    part, failures = path.with_name(f"{NAME}.part"), []
    with explain("Cannot download", part, fix=WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{NAME}.lock")):  # whoever fetches it at the same time waits, and finds it
            if path.is_file() and hash_file(path, "md5") == md5:
                return path
            for url in urls:
                if not (reason := _fetch_from(url, part, size=size, md5=md5, timeout=timeout)):
                    part.replace(path)
                    return path
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


def _fetch_from(url: str, part: Path, *, size: int, md5: str, timeout: float) -> str:
    """Completes the part file from one address; returns why it could not, or "" if it is whole and right."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    part.touch()
    while True:
        before, reason = part.stat().st_size, "the connection was cut"
        if before < size:
            try:
                reason = _receive(url, part, size=size, timeout=timeout) or reason
            except (RequestException, HTTPError) as error:
                reason = str(error)
        after = part.stat().st_size
        if after >= size:
            if (found := hash_file(part, "md5")) == md5:
                return ""
            part.write_bytes(b"")  # it can never become right
            return f"wrong checksum: MD5 {found}, expected {md5}; what had arrived was removed"
        if after <= before:
            return reason


def _receive(url: str, part: Path, *, size: int, timeout: float) -> str:
    """Makes one request for what is missing and appends what comes; returns why nothing was taken."""
    import requests

    start = part.stat().st_size
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
    return ""


def import_archive(file: Path | str, root: Path | str | None = None) -> Path:
    """Packs an archive in CINIC-10's layout, with or without folders above it, and returns the pack's folder.

    The images are kept in memory, and not unpacked to 270,000 files. That takes 0.9 GB for CINIC-10.

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
    contents = _read_members(file)
    tops = set()
    for name in contents:
        folders = name.split("/")[:-1]
        splits = [depth for depth, folder in enumerate(folders) if folder.lower() in packing.SPLIT_NAMES]
        tops |= {"/".join([*folders[:depth], ""]) for depth in splits[:1]}
    top = min(tops, key=lambda top: top.count("/"), default="")
    found = packing.survey((name.removeprefix(top) for name in contents if name.startswith(top)), file)
    words = "CINIC-10.tar.gz, checksum verified" if md5 == MD5 else "an archive in CINIC-10's layout"
    source = {"words": f"imported from {words}", "fingerprint": f"md5 {md5}"}
    pack = packing.list_homes(root)[0] / "cinic10"
    with packing.lock_pack(pack):
        packing.pack_images(pack, found, lambda name: contents[top + name], source=source, where=file)
    return pack


def _read_members(file: Path) -> dict[str, bytes]:
    """Reads an archive: the content of its images by their paths, and of whatever else it has the paths alone.

    Raises:
        LabError: The archive is cut short or damaged, or has something that the data set cannot have.
    """
    contents, members, size = {}, 0, 0
    with file.open("rb") as raw:
        start = raw.read(512)
    open_plain = next((way for mark, way in COMPRESSIONS.items() if start.startswith(mark)), open)
    try:
        with open_plain(file, "rb") as plain, open_bar(None, "reading the archive", unit=" files", delay=3) as bar:
            while block := plain.read(2**20):  # a small file may decompress to any size
                size += len(block)
                if size > ARCHIVE_BYTES:
                    raise _refuse(file, f"it has more than {ARCHIVE_BYTES:,} bytes")
            plain.seek(0)
            tar = tarfile.open(fileobj=plain, mode="r:")  # noqa: SIM115 (which closes nothing but plain)
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all 270,000 in memory
                members += 1
                if members > MEMBERS:
                    raise _refuse(file, f"it has more than {MEMBERS:,} files and folders")
                if member.size < 0:
                    raise tarfile.ReadError("a size below 0")  # tarfile would go back, and read in circles
                if not (member.isreg() or member.isdir()):
                    raise _refuse(file, f"{member.name!r} is a link or a device (pack files, with tar -h)")
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise _refuse(file, f"{member.name!r} leads out of it")
                path = posixpath.normpath(member.name)
                wanted = member.isreg() and packing.is_image(posixpath.basename(path))
                contents[path + "/" * member.isdir()] = tar.extractfile(member).read(IMAGE_BYTES) if wanted else b""
                bar.update()
            # tarfile takes a damaged header for the end, and a file that was cut between two members for a whole one.
            plain.seek(tar.offset)
            if size < tar.offset + 512 or plain.read(2**20).strip(b"\0"):
                raise tarfile.ReadError("its end is missing")
    except DAMAGE as error:
        raise _explain_damage(file, start, error) from error
    return contents


def _refuse(file: Path, reason: str) -> LabError:
    return LabError(
        "The archive is refused, and nothing was written.",
        where=f"{clean_name(file)}: {clean_name(reason, 600)}",
        cause="it is not CINIC-10's archive, or was packed from other files as well",
        fix=make_command("fetch cinic10"),
    )


def _explain_damage(file: Path, start: bytes, error: Exception) -> LabError:
    """Returns the error of a file that cannot be read as a tar archive; its first bytes tell what it is instead."""
    what, fix = "The archive is cut short or damaged.", f"{make_command('fetch cinic10')}, or copy the file again"
    cause = f"the download or copy ended early, or it is no tar archive ({clean_name(error, 200)})"
    if kind := next((KINDS[mark] for mark in KINDS if start.lstrip().startswith(mark)), None):
        what = f"The file is {kind[0]}, and not a tar archive."
        cause = "the download was answered with another file, or it was packed by another program"
        unpack = kind[1].format(shlex.quote(clean_name(file)))
        fix = f"{unpack}, then name the new folder: export LAB_DATA=THAT_FOLDER" if unpack else fix
    return LabError(what, where=clean_name(file), cause=cause, fix=fix)


def pack_torchvision(name: str, folder: Path, source: dict[str, object]) -> None:
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
        raise LabError(
            f"{name} could not be downloaded.",
            where=home,
            cause=f"no connection, or the server is down: {clean_name(error, 200)}",
            fix="try again later, copy the downloaded files into that folder, or work with data.load('shapes10')",
        ) from error

    def convert() -> Iterator[packing.Part]:
        cuts = {"train": (whole, slice(-VALID)), "valid": (whole, slice(-VALID, None)), "test": (test, slice(None))}
        for split, (part, cut) in cuts.items():
            images = np.asarray(part.data[cut])
            if images.ndim == 4:  # CIFAR-10's (N, 32, 32, 3)
                images = images.transpose(0, 3, 1, 2)
            else:  # Fashion-MNIST's (N, 28, 28)
                images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, axis=1)
            yield split, images, np.asarray(part.targets[cut])

    packing.write_pack(folder, convert(), class_names=tuple(whole.classes), source=source)
