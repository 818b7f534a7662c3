"""Downloads CINIC-10's archive; packs CIFAR-10 and Fashion-MNIST, which torchvision downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab_common import LabError, read_path
from lab_common.text import clean_name
from lab_utils import load_torchvision
from lab_utils.bars import open_bar
from lab_utils.data import packing
from lab_utils.data.archive import MD5
from lab_utils.data.packing import WRITABLE, explain, hash_file, make_command

# The DataShare of the University of Edinburgh, DOI 10.7488/ds/2448, under its addresses of three generations.
URLS = (
    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    "https://datashare.ed.ac.uk/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
    "https://datashare.ed.ac.uk/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/download",
)
NAME, SIZE = "CINIC-10.tar.gz", 687_544_992  # bytes
VALID = 5_000  # CIFAR-10 and Fashion-MNIST have no validation split: the last 5,000 training images become it


def fetch_archive(
    folder: Path | str, *, urls: Sequence[str] = URLS, size: int = SIZE, md5: str = MD5, timeout: float = 30
) -> Path:
    """Downloads CINIC-10's archive into a folder, or finds it there, and returns its path.

    What has arrived is kept in ``CINIC-10.tar.gz.part`` and continued the next time, from the same or another address.
    The file gets its name only if its MD5 is right. An address is given up after ``timeout`` seconds without a byte.

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
        block = next(blocks, b"")
        # Many servers answer with a page of their own (log in, not found) and call it a success.
        if "html" in response.headers.get("Content-Type", "") or not (start or block.startswith(b"\x1f\x8b")):
            return f"it sent a web page or another file instead of the archive: {block[:60]!r}"
        # Only now: a server without Range costs what had arrived, a web page does not.
        with (
            part.open("ab" if start else "wb") as file,
            open_bar(size, NAME, initial=start, unit="B", unit_scale=True, delay=1) as bar,
        ):
            while block:
                file.write(block)
                bar.update(len(block))
                block = next(blocks, b"")
    return "the connection was cut"


def pack_torchvision(name: str, folder: Path) -> None:
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
    source = {"words": "downloaded by torchvision", "fingerprint": name}
    packing.write_pack(folder, parts, class_names=tuple(whole.classes), source=source)


def _convert(images: np.ndarray) -> np.ndarray:
    """Returns CIFAR-10's (N, 32, 32, 3) or Fashion-MNIST's (N, 28, 28) as uint8 (N, 3, 32, 32)."""
    if images.ndim == 4:
        return images.transpose(0, 3, 1, 2)
    return np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].repeat(3, axis=1)
