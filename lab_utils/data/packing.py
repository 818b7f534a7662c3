"""Packs: a data set as arrays that are mapped into memory, made once from pictures in CINIC-10's layout.

    packed/cinic10/manifest.json        class names, mean and std, SHA-256 of each array, where it came from
    packed/cinic10/train-images.npy     uint8 (N, 3, 32, 32)
    packed/cinic10/train-labels.npy     int64 (N,)          ... and the same for valid and test

The pack of somebody's folder is ``cinic10-folder-<hash of its path>``. CINIC-10's layout, in a folder and in an archive
alike, is ``train|valid|test/<class>/<image>``; :func:`survey` reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab_common import LabError, checkout, env_folder, read_folder
from lab_common.files import read_bounded, sync_folder, write_atomically
from lab_common.text import clean_name
from lab_utils.bars import open_bar

SPLITS, KINDS = ("train", "valid", "test"), ("images", "labels")
# The order of the labels is ImageFolder's, which is CIFAR-10's: alphabetical.
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Published with the data set: https://github.com/BayesWatch/cinic-10, "Normalization".
MEAN_STD = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))
# Raise it if the same pictures, files or drawings would give another pack: then packs of before are made again.
FORMAT = 1
MANIFEST = "manifest.json"

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Pillow goes by a file's first bytes and not by its suffix, and knows formats that start a program (EPS) or decode
# while they are opened (ICO). It may open these only.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
IMAGE_BYTES = 1024**2  # 3 KiB of pixels, and generous room for whatever else an image file carries
# A folder with one of these names, in small or capital letters, is a split, or should have been called as one.
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
STRAY = {".DS_Store", "Thumbs.db", "desktop.ini"}  # file managers leave them everywhere, and nobody misses them
WRITABLE = "free some space, or choose another folder: export LAB_DATA=/another/folder"

Part = tuple[str, np.ndarray, np.ndarray]
"""A split, its images uint8 (N, 3, 32, 32) and their labels int64 (N,)."""


class Pack(NamedTuple):
    """An open pack: its folder, its manifest, and per split the images and labels, mapped into memory."""

    folder: Path
    manifest: dict
    arrays: dict[str, list[np.ndarray]]


class Survey(NamedTuple):
    """The names of a data set's images by split, such as train/cat/1.png, and what is left out, in words."""

    images: dict[str, list[str]]
    left_out: str


def choose_root(root: Path | str | None) -> Path:
    """Returns the folder that holds data sets: a named one, else ``LAB_DATA``, else the repository's ``data/``."""
    return read_folder(root or env_folder("LAB_DATA", "data")).resolve()


def list_homes(root: Path) -> list[Path]:
    """Returns the folders for packs, one that can be written first; never inside somebody's data set."""
    own, spare = root / "packed", checkout() / "data" / "packed"
    if root.is_dir() and has_split(root):
        return [spare]
    existing = next(parent for parent in (own, root, *root.parents) if parent.exists())
    return [own, spare] if os.access(existing, os.W_OK | os.X_OK) else [spare, own]


def make_command(arguments: str) -> str:
    """Returns the line that runs a command of this package with this Python."""
    return f"{shlex.quote(sys.executable)} -m lab_utils.data {arguments}"


@contextlib.contextmanager
def explain(what: str, place: Path | None = None, *, fix: str) -> Iterator[None]:
    """Turns an OSError into a LabError that names the file and where a link leads."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or place or ".")
        cause = "it is not there, it belongs to another user, or the disk is full or failing"
        if os.path.islink(place):  # noqa: PTH114 (Path.is_symlink raises an OSError of its own for a long name)
            cause = f"it is a link to {clean_name(place.readlink(), 300)}, which leads nowhere"
        raise LabError(
            f"{what}: {error.strerror or error}.", where=clean_name(place, 1000), cause=cause, fix=fix
        ) from error


# The layout. Names are paths of files, and of folders with a "/" at the end, in a folder or in an archive.


def is_hidden(name: str) -> bool:
    """True if a name is hidden, or one of those that systems add, such as ``__MACOSX``, ``@eaDir``, ``._cat.png``."""
    return name.startswith((".", "@", "__"))


def is_image(name: str) -> bool:
    """True if a file name is an image's."""
    return name.lower().endswith(SUFFIXES) and not is_hidden(name)


def has_split(folder: Path) -> bool:
    """True if a folder has a split in it, right or nearly right."""
    return any(place.name.lower() in SPLIT_NAMES and not place.is_file() for place in folder.iterdir())


def find_cinic10(root: Path) -> Path | None:
    """Returns what ``cinic10`` means under a root: a folder in CINIC-10's layout, an imported pack, or None.

    Raises:
        LabError: Several folders could be meant.
    """
    if root.is_dir() and has_split(root):
        return root
    # A link that leads nowhere is no file either: to look into it raises the error that names its target.
    named = [place for place in sorted(root.glob("*")) if "cinic" in place.name.lower() and not place.is_file()]
    found = [place for place in named if not is_hidden(place.name) and has_split(place)]
    if len(found) > 1:
        where, fix = ", ".join(map(clean_name, found)), f"export LAB_DATA={shlex.quote(clean_name(found[0]))}"
        raise LabError(f"{len(found)} folders could be CINIC-10.", where=where, fix=f"name the one you mean: {fix}")
    packs = [home / "cinic10" for home in list_homes(root) if (home / "cinic10" / MANIFEST).exists()]
    return next(iter(found + packs), None)


def list_names(folder: Path, path: str = "") -> Iterator[str]:
    """Yields the names of all files in a data set's splits, and right beside them, and of the folders."""
    near = path.count("/") < 2  # a link below a class may lead back up
    with os.scandir(folder / path) as entries:
        for entry in entries:
            gone = near and entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110
            if not (gone or entry.is_dir(follow_symlinks=near)):
                yield path + entry.name
            elif path or entry.name.lower() in SPLIT_NAMES:
                yield f"{path}{entry.name}/"
                yield from list_names(folder, f"{path}{entry.name}/")


def survey(names: Iterable[str], where: Path) -> Survey:
    """Finds the images of a data set in CINIC-10's layout, in ImageFolder's order: the one rule for all sources.

    Raises:
        LabError: A split or class is missing or empty, or there is another class.
    """
    images: dict[str, list[str]] = {split: [] for split in SPLITS}
    folders, filled, others = set(), set(), []
    for name in sorted(names):
        *path, file = name.split("/")
        hidden = any(map(is_hidden, path[1:]))
        if not hidden:
            folders |= {"/".join(path[:1]), "/".join(path[:2])}
        if not hidden and len(path) == 2 and path[0] in SPLITS and is_image(file):
            images[path[0]].append(name)
            filled |= {path[0], "/".join(path)}
        elif file and file not in STRAY and (path or is_image(file)):
            others.append(name)
    taken = f"train|valid|test/<class>/*.{'|'.join(suffix[1:] for suffix in SUFFIXES)}"
    left_out = f"left out: {_count(others, 'file', f'other than {taken} ')}" if others else ""
    wanted = {*SPLITS, *(f"{split}/{name}" for split in SPLITS for name in CLASS_NAMES)}
    missing = [name for name in sorted(wanted - filled) if name in SPLITS or name.partition("/")[0] in filled]
    strange = [name for name in sorted(folders - wanted) if name.partition("/")[0] in SPLITS]
    unknown = sorted({*strange, *(name for name in folders - wanted if name.lower() in SPLIT_NAMES)})
    if missing or unknown:
        lists = {"no images in": missing[:12], "unknown": unknown[:12]}
        shown = [f"{label}: {clean_name(', '.join(some), 300)}" for label, some in lists.items() if some]
        raise LabError(
            f"The folders are not those of CINIC-10, such as {clean_name((missing + unknown)[0], 60)!r}.",
            where=f"{clean_name(where)} ({'; '.join([*shown, left_out]).removesuffix('; ')})",
            cause="the data set was copied in part, or its folders have other names",
            fix=f"rename or remove unknown folders, restore missing ones: train|valid|test/{'|'.join(CLASS_NAMES)}",
        )
    return Survey(images, left_out)


def _count(some: list[str], noun: str, kind: str = "") -> str:
    return f"{len(some):,} {noun}{'s' * (len(some) > 1)} {kind}(such as {clean_name(some[0], 200)})"


# Pictures


def decode(content: bytes) -> np.ndarray:
    """Decodes an image file to uint8 (3, 32, 32). Grey, palette and transparent ones become RGB, as with torchvision.

    Raises:
        ValueError: It cannot be decoded, or is not 32×32.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            if picture.size == (32, 32):  # before decoding, which could take very long if the size is forged
                if picture.mode.startswith("I"):  # grey of 16 bits: convert() would make everything above 255 white
                    picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
                return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:  # PIL raises whatever its decoders do: OSError, SyntaxError, struct.error, ...
        raise ValueError("cannot be decoded") from error
    raise ValueError(f"is {picture.width}×{picture.height}, not 32×32")


def pack_images(
    folder: Path,
    found: Survey,
    contents: Iterable[tuple[str, Callable[[], bytes]]],
    *,
    source: dict[str, object],
    where: Path,
    skip_bad: bool = False,
) -> None:
    """Packs what :func:`survey` found ``where``.

    The ``contents`` are names in any order, each with a function that reads the file. The pixels wait in a temporary
    file, so that not all of them have to be in memory at once.

    Raises:
        LabError: Images cannot be read, and ``skip_bad`` does not say to leave them out.
    """
    images, left_out = found
    rows = {name: row for row, name in enumerate(itertools.chain(*images.values()))}
    bad, deep, notes = {}, [], [left_out] if left_out else []
    wanted = ((name, read) for name, read in contents if name in rows)
    with tempfile.TemporaryFile(dir=folder.parent) as file:
        for name, read in open_bar(len(rows), "packing cinic10", iterable=wanted, unit=" images", delay=3):
            try:
                content = read()
                pixels = decode(content)
            except (ValueError, OSError) as error:
                bad[name] = f"{clean_name(name)} ({getattr(error, 'strerror', None) or error})"
                continue
            file.seek(rows[name] * pixels.nbytes)
            file.write(pixels.tobytes())
            if content.startswith(b"\x89PNG") and content[24:25] == b"\x10":
                deep.append(name)
        if bad and not skip_bad:
            again = f", or go on without them: {make_command('prepare --skip-bad')}" if where.is_dir() else ""
            shown = "; ".join([*bad.values()][:5]) + f", and {len(bad) - 5:,} more" * (len(bad) > 5)
            raise LabError(
                f"{len(bad):,} of {len(rows):,} images cannot be used.",
                where=f"{clean_name(where)}: {shown}",
                cause="the copy was damaged, or other files are among the images",
                fix=f"copy them again (32×32 pixels){again}",
            )
        for words, some in (("left out as unreadable", [*bad.values()]), ("scaled from 16 bits a channel to 8", deep)):
            if some:
                notes.append(f"{words}: {_count(some, 'image')}")
        file.truncate(len(rows) * 3 * 32 * 32)
        everything = np.memmap(file, np.uint8, "r", shape=(len(rows), 3, 32, 32))
        good = {split: [name for name in names if name not in bad] for split, names in images.items()}
        labels = {split: [CLASS_NAMES.index(name.split("/")[1]) for name in names] for split, names in good.items()}
        parts = ((split, everything[[rows[name] for name in good[split]]], np.array(labels[split])) for split in SPLITS)
        write_pack(folder, parts, class_names=CLASS_NAMES, source=source | {"notes": notes}, mean_std=MEAN_STD)


def provide_cinic10(root: Path, found: Path | None, *, skip_bad: bool = False) -> Pack:
    """Opens the pack of what :func:`find_cinic10` found; that of a folder is made, or made again after a change."""
    if found is None or not has_split(found):
        if found and (pack := open_pack(found)):
            return pack
        what, cause = "CINIC-10 was not found.", "it was not downloaded yet, or LAB_DATA points elsewhere"
        if found:
            what, cause = "The pack cinic10 is damaged.", "a file was cut short or removed"
        fix = f"{make_command('fetch cinic10')}   (or import CINIC-10.tar.gz, or use data.load('shapes10'))"
        raise LabError(what, where=clean_name(found or root), cause=cause, fix=fix)
    surveyed = images, left_out = survey(list_names(found), found)
    names = [name for split in images.values() for name in split]
    stamp = hashlib.sha256(left_out.encode())
    for name in names:
        state = os.stat(f"{found}/{name}")  # noqa: PTH116 (a Path for each of 270,000 files takes longer)
        stamp.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    source = {"words": "from a folder in CINIC-10's layout", "fingerprint": stamp.hexdigest()}

    def make(folder: Path) -> None:
        contents = ((name, partial(read_bounded, found / name, IMAGE_BYTES)) for name in names)
        pack_images(folder, surveyed, contents, source=source, where=found, skip_bad=skip_bad)

    # The path is a part of the name, because two folders may have their packs in the same place.
    name = f"cinic10-folder-{hashlib.sha256(os.fsencode(found)).hexdigest()[:8]}"
    return provide(name, root, source["fingerprint"], make)


# Packs


def open_pack(folder: Path) -> Pack | None:
    """Maps a pack's arrays into memory; returns None if there is no pack of this format, or it is not whole.

    The maps are copy-on-write (``mode="c"``): torch takes them without a warning, and nothing can change the files.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        arrays = {split: [np.load(folder / f"{split}-{kind}.npy", "c") for kind in KINDS] for split in SPLITS}
        return Pack(folder, manifest, arrays) if manifest["format"] == FORMAT else None
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError, LookupError, TypeError):
        return None


def provide(name: str, root: Path, fingerprint: str, make: Callable[[Path], None]) -> Pack:
    """Opens the pack that was made from exactly this source, or makes it; several processes make it once."""
    from filelock import FileLock

    homes = list_homes(root)

    def find() -> Pack | None:
        packs = filter(None, (open_pack(home / name) for home in homes))
        return next((pack for pack in packs if pack.manifest["source"]["fingerprint"] == fingerprint), None)

    if pack := find():
        return pack
    with explain(f"The pack {clean_name(name, 60)} cannot be written", homes[0], fix=WRITABLE):
        homes[0].mkdir(parents=True, exist_ok=True)
        with FileLock(homes[0] / f".{name}.lock"):
            if not find():
                make(homes[0] / name)
    return find()


def write_pack(
    folder: Path,
    parts: Iterable[Part],
    *,
    class_names: tuple[str, ...],
    source: dict[str, object],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> None:
    """Writes a pack; if it cannot be completed, ``folder`` stays as it was.

    The pack grows in a temporary folder beside it, and is renamed once all of it is on the disk. The ``source`` says in
    ``words`` where the images come from, and its ``fingerprint`` tells if the pack is still up to date. Mean and
    standard deviation are per channel, in 0..1, by default those of the training images.
    """
    temporary = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed process left it
    new, sums = temporary / "new", {}
    new.mkdir(parents=True)
    try:
        for split, images, labels in parts:
            for kind, array in zip(KINDS, (images, labels), strict=True):
                path = new / f"{split}-{kind}.npy"
                with write_atomically(path) as file:
                    np.save(file, array)
                sums[path.name] = hash_file(path, "sha256")
            if split == "train":
                mean_std = mean_std or measure_mean_std(images)
        manifest = {"format": FORMAT, "classes": list(class_names), "sha256": sums}
        manifest |= {"mean": list(mean_std[0]), "std": list(mean_std[1]), "source": {"notes": []} | source}
        with write_atomically(new / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        if folder.exists():
            folder.rename(temporary / "old")  # somebody may have mapped it, and NFS cannot remove it then
        new.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hash_file(path: Path, algorithm: str) -> str:
    """Returns the hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def measure_mean_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation per channel, in 0..1, exactly: from a histogram of the 256 values."""
    values = np.arange(256) / 255
    weights = [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(3)]
    means = [float(np.average(values, weights=each)) for each in weights]
    squares = (np.average((values - mean) ** 2, weights=each) for mean, each in zip(means, weights, strict=True))
    return tuple(means), tuple(float(square) ** 0.5 for square in squares)
