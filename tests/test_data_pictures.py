"""Drill 40: what is named ``.png`` and is none. Refused by format and size; no other program, and little memory."""

import gc
import io
import multiprocessing
import os
import random
import re
import struct
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from harness.fuzzing import mutate_bytes
from PIL import Image

from lab_utils.data.packing import IMAGE_BYTES, decode

forked = multiprocessing.get_context("fork")
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


def save(format, picture=PICTURE, **settings):
    file = io.BytesIO()
    picture.save(file, format, **settings)
    return file.getvalue()


def make_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def make_png(width, height, *more, pixels=b""):
    """A PNG of grey pixels with further chunks before the pixels."""
    header = make_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + make_chunk(b"IDAT", pixels) + make_chunk(b"IEND", b"")


def make_webp(width, height):
    """A WEBP whose canvas is of any size; its one frame is not."""
    frame = save("WEBP")[12:]
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def enlarge_jpeg(size):
    content = bytearray(save("JPEG"))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", size, size)
    return bytes(content)


ZEROS = zlib.compress(bytes(2**24), 9)
ROWS = zlib.compress(bytes(33 * 32), 9)
HOSTILE = {
    "EPS": EPS,
    "ICO": save("ICO", sizes=[(32, 32)]),
    "PNG of 100,000 × 100,000": make_png(100_000, 100_000, pixels=zlib.compress(bytes(10**6))),
    "JPEG of 65,500 × 65,500": enlarge_jpeg(65_500),
    "WEBP of 16,384 × 16,384": make_webp(16_384, 16_384),
    "zTXt that takes gigabytes": make_png(32, 32, *[make_chunk(b"zTXt", b"k\0\0" + ZEROS)] * 40, pixels=ROWS),
    "a page": b"<html>not found</html>",
}
ODD = {
    "pixels that go on": make_png(32, 32, pixels=ZEROS),
    "JPEG of several pictures": save("MPO", save_all=True, append_images=[PICTURE.rotate(90)]),
}


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that appears when Ghostscript is started."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("gs", "gswin64c", "convert", "magick"):
        (programs / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/was started'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path / "was started"


def read_peak():
    """The most memory that this process has had at once so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure(function):
    """Runs a function in a process of its own: its result or its error, the seconds, and the bytes it took at most."""

    def work():
        gc.freeze()  # what tests before this one left open would be warned of here
        before, start = read_peak(), time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                result = function()
            except Exception as error:
                result = error
        ours.send((result, time.perf_counter() - start, read_peak() - before, [str(one.message) for one in said]))

    theirs, ours = forked.Pipe()
    process = forked.Process(target=work, daemon=True)
    process.start()
    try:
        assert theirs.poll(30), "it hangs"
        return theirs.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.drill
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads the peak of memory in Linux's way")
@pytest.mark.parametrize("kind", HOSTILE | ODD)
def test_a_picture_of_another_kind_or_size_starts_nothing_and_takes_little_memory(mark, kind):
    content = (HOSTILE | ODD)[kind]
    assert len(content) <= IMAGE_BYTES, "it would be refused for its length alone"
    result, seconds, peak, said = measure(lambda: decode(content))
    if kind in HOSTILE:
        assert isinstance(result, ValueError), result
        assert re.fullmatch(r"cannot be decoded|is \d+×\d+, not 32×32", str(result))
    else:
        assert result.shape == (3, 32, 32) and result.dtype == np.uint8
    assert peak < 100e6, f"it took {peak / 1e6:.0f} MB"
    assert seconds < 5
    assert not said, "a learner would see a warning of a library"
    assert not mark.exists(), "another program was started"


def test_mutated_pictures_are_decoded_or_refused():
    originals = [save("PNG"), save("JPEG"), save("BMP"), save("WEBP"), save("PNG", PICTURE.convert("P"))]
    refused = 0
    for seed in range(300):
        dice = random.Random(seed)
        content = mutate_bytes(dice.choice(originals), dice)
        try:
            assert decode(content).shape == (3, 32, 32), seed
        except ValueError:
            refused += 1
    assert refused > 20
