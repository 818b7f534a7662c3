"""Downloads an archive: several addresses in order, resumed where it was cut, checked before it gets its name."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import shutil
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from lab_common import LabError, read_path
from lab_common.files import hold_lock, open_regular
from lab_common.text import clean_name
from lab_utils.bars import open_bar
from lab_utils.data.pack import digest
from lab_utils.data.system import make_command

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
_GZIP = b"\x1f\x8b"
_RESUMES = 20  # per address, and only after attempts that brought something


class _Failure(Exception):
    """Why one address did not bring the file; the next may."""


def fetch_archive(
    folder: Path | str,
    *,
    urls: Sequence[str] = URLS,
    name: str = NAME,
    size: int = SIZE,
    md5: str = MD5,
    timeout: float = 30,
) -> Path:
    """Downloads an archive into a folder, or finds it there, and returns its path.

    What has arrived is kept in ``<name>.part`` and continued the next time, from the same or another address. The file
    gets its name only when size and MD5 are right.

    Args:
        folder: Where to put it.
        urls: Addresses, tried in order.
        name: The file's name.
        size: Its size in bytes.
        md5: Its MD5, in hexadecimal.
        timeout: Seconds without a byte after which an address is given up.

    Raises:
        LabError: No address brought the right file; or it cannot be written here, or the disk is too small; or another
            process is fetching it.
    """
    path = read_path(folder) / name
    part = path.with_name(f"{name}.part")
    with _explain(path):
        if _is_there(path, size=size, md5=md5):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
    with _explain(part), _open_part(part) as file:
        try:
            hold_lock(file.fileno())
        except BlockingIOError as error:
            cause = "another terminal or notebook is fetching the same file"
            raise LabError(f"{name} is being downloaded.", where=part, cause=cause, fix="wait for it to end") from error
        _require_space(file, size)
        failures = []
        for url in urls:
            try:
                _fetch_from(url, file, size=size, md5=md5, timeout=timeout)
                part.replace(path)
                return path
            except _Failure as failure:
                failures.append(f"{url}: {clean_name(failure, 300)}")
        kept = file.seek(0, os.SEEK_END)
    if not kept:
        part.unlink(missing_ok=True)
    raise LabError(
        f"{name} could not be downloaded from any of {len(urls)} addresses.",
        where="\n         ".join(failures),
        cause="no connection, or the addresses have changed"
        + (f"; {kept:,} bytes are kept and continued when you run it again" if kept else ""),
        fix=f"{make_command('import FILE.tar.gz')}   (with a copy from your instructor or another computer)",
    )


@contextlib.contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Turns the error of a file that cannot be written into a message that says where it is."""
    try:
        yield
    except OSError as error:
        cause = "the folder is not yours to write, or something else has the file's name"
        fix = "move away what lies there, or choose another folder: export LAB_DATA=/another/folder"
        what = f"Cannot download: {error.strerror or error}."
        raise LabError(what, where=clean_name(path), cause=cause, fix=fix) from error


def _is_there(path: Path, *, size: int, md5: str) -> bool:
    """Says whether the right file has its final name already.

    Raises:
        OSError: A folder has, over which no file can be moved; or it cannot be read.
    """
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "it is a folder and no regular file")
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open_regular(path) as file:
        return digest(file, "md5") == md5


@contextlib.contextmanager
def _open_part(part: Path) -> Iterator[BinaryIO]:
    """Opens the part file for appending, or makes it; what may lead elsewhere is not written through.

    Raises:
        OSError: Something else has its name, or it cannot be written; ``strerror`` says which.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(part, follow=False):
        pass  # its error names what lies there
    # Asked again once it is open, since it may be replaced in between; a pipe would wait for somebody to read.
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(part, "ab+", opener=lambda name, flags: os.open(name, flags | more, 0o666)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def _require_space(part: BinaryIO, size: int) -> None:
    missing = size - part.seek(0, os.SEEK_END) - shutil.disk_usage(Path(part.name).parent).free
    if missing > 0:
        raise LabError(
            f"The disk has {missing / 1e6:,.0f} MB too little free space for the download.",
            where=part.name,
            cause=f"the archive has {size / 1e6:,.0f} MB, and its pack takes about 20 % more beside it",
            fix="free some space, or choose another disk: export LAB_DATA=/another/folder",
        )


def _fetch_from(url: str, part: BinaryIO, *, size: int, md5: str, timeout: float) -> None:
    """Completes the part file from one address.

    Raises:
        _Failure: It did not; whatever arrived well is still in the part file.
    """
    for _ in range(_RESUMES):
        before = part.seek(0, os.SEEK_END)
        if before > size:
            part.truncate(before := 0)
        reason = "the connection was cut"
        if before < size:
            try:
                _receive(url, part, size=size, timeout=timeout)
            except (OSError, http.client.HTTPException, ValueError) as error:
                # A URLError wraps what happened; an HTTPError's own text has the number.
                wrapped = None if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", None)
                reason = str(wrapped or error) or repr(error)
        after = part.seek(0, os.SEEK_END)
        if after == size:
            found = digest(part, "md5")
            if found == md5:
                os.fsync(part.fileno())
                return
            part.truncate(0)  # it can never become right
            raise _Failure(f"wrong checksum: MD5 {found}, expected {md5}; what had arrived was removed")
        if after <= before:
            raise _Failure(reason)
    raise _Failure("the connection was cut again and again")


def _receive(url: str, part: BinaryIO, *, size: int, timeout: float) -> None:
    """Makes one request for what is missing and appends what comes."""
    start = part.seek(0, os.SEEK_END)
    headers = {"User-Agent": "distributed-training-labs", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={start}-"} if start else {}))
    with urllib.request.urlopen(request, timeout=timeout) as response:
        if response.status == 206:
            answer = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers["Content-Range"] or "bytes ?")
            begin, total = answer.groups() if answer else ("?", "*")
            if begin != str(start):
                raise _Failure(f"it continued at byte {begin} when asked for byte {start}")
        else:
            start, total = 0, response.headers["Content-Length"] or "*"
        first = response.read(65536)
        # Many servers answer with a page of their own (log in, not found) and call it a success.
        if "html" in response.headers.get_content_type() or (start == 0 and first and not first.startswith(_GZIP)):
            raise _Failure(f"it sent a web page or another file instead of the archive: {_gist(first)!r}")
        if total != "*" and int(total) != size:
            raise _Failure(f"its file has {int(total):,} bytes, expected {size:,}")
        if start == 0:
            part.truncate(0)  # only now: a server without Range costs what had arrived, a web page does not
        with open_bar(size, Path(part.name).stem, initial=start, unit="B", unit_scale=True, delay=1) as bar:
            while first and start + len(first) <= size:
                part.write(first)
                part.flush()
                start += len(first)
                bar.update(len(first))
                first = response.read(65536)


def _gist(page: bytes) -> str:
    """The title of a web page, or its first words."""
    text = page[:4096].decode("utf-8", "replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    return " ".join((title.group(1) if title else text).split())[:60]
