"""The files of images that a data set is made of: which are taken, read and decoded, and how a bad one is named."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab_common import LabError
from lab_common.files import read_bounded
from lab_common.text import clean_name
from lab_utils.data.system import find_target, make_command, quote

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Pillow goes by a file's first bytes, not by its suffix, and knows formats that start a program (EPS) or decode while
# they are opened (ICO): it is told which ones may be opened.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
IMAGE_BYTES = 1024**2
"""The most bytes of an image file: 3 KiB of pixels, and generous room for whatever else it carries."""


def is_image(name: str) -> bool:
    """Says whether a file name is an image's; hidden files (such as macOS's ``._cat.png``) are not."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def decode(image: bytes) -> np.ndarray:
    """Decodes an image file to uint8 (3, 32, 32); grey, palette and transparent ones become RGB, as with torchvision.

    Raises:
        ValueError: It cannot be decoded, or is not 32×32.
    """
    return np.asarray(open_picture(image)).transpose(2, 0, 1)


def open_picture(content: bytes) -> Image.Image:
    """Decodes an image file of one of FORMATS to RGB of 8 bits, after a look at its size.

    Raises:
        ValueError: It cannot be decoded, or is not 32×32.
    """
    from PIL import Image

    file = io.BytesIO(content)
    try:
        with _refuse_cut(), warnings.catch_warnings(action="ignore"), Image.open(file, formats=FORMATS) as picture:
            if picture.size == (32, 32):  # asked before decoding, which a forged size could make very long
                if picture.mode.startswith("I"):  # grey of 16 bits: convert() makes white of all that is above 255
                    picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
                return picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise ValueError("is far larger than 32×32") from error
    except Exception as error:  # PIL raises whatever its decoders do: OSError, SyntaxError, struct.error, ...
        raise ValueError("cannot be decoded") from error
    raise ValueError(f"is {picture.width}×{picture.height}, not 32×32")


@contextlib.contextmanager
def _refuse_cut() -> Iterator[None]:
    """Has Pillow refuse files that are cut short, also if a notebook has told it to fill up what is missing."""
    from PIL import ImageFile

    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def is_deep(content: bytes) -> bool:
    """Returns True if an image file is a PNG of 16 bits a channel, of which decoding leaves the upper 8."""
    return content.startswith(b"\x89PNG") and content[24:25] == b"\x10"


def read_image(path: Path) -> bytes:
    """Reads an image file.

    Raises:
        OSError: It is not there, may not be read, is no regular file, or larger than an image of a data set can be.
    """
    return read_bounded(path, IMAGE_BYTES)


def describe_bad(name: str, error: ValueError | OSError) -> str:
    """Names an image that cannot be used, with the reason."""
    reason = getattr(error, "strerror", None) or error  # an OSError's own text repeats the path
    target = find_target(getattr(error, "filename", None) or "")
    target = f", a link to '{target}'" if target else ""
    return f"{clean_name(name)} ({reason}){target}"


def refuse_bad(bad: Sequence[str], total: int, where: Path, *, option: str = "prepare --skip-bad") -> None:
    """Raises the LabError that names the first few bad images and counts them, if there are any."""
    if bad:
        more = f", and {len(bad) - 5:,} more" if len(bad) > 5 else ""
        sizes = len(bad) == total and all("not 32×32" in text for text in bad)
        raise LabError(
            f"{len(bad):,} of {total:,} images cannot be used.",
            where=f"{clean_name(where)}: {'; '.join(bad[:5])}{more}",
            cause="they are not CINIC-10's pictures"
            if sizes
            else "the copy was damaged, or other files lie among the images",
            fix="resize them to 32×32" if sizes else f"copy them again, or go on without them: {make_command(option)}",
        )


def load_picture(path: str) -> Image.Image:
    """Opens a picture for ImageFolder, whose own loader opens every format that Pillow knows."""
    try:
        return open_picture(read_image(Path(path)))
    except (ValueError, OSError) as error:
        raise LabError(
            "An image cannot be used.",
            where=describe_bad(path, error),
            cause="the copy was cut short or is damaged, or a file of another kind lies among the images",
            fix=f"rm {quote(path)}",
        ) from error
