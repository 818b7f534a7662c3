"""Packs: a data set as arrays that are mapped into memory, made once from pictures in CINIC-10's layout.

    packed/cinic10/manifest.json        counts, class names, mean and std, SHA-256 of each array, where it came from
    packed/cinic10/train-images.npy     uint8 (N, 3, 32, 32)
    packed/cinic10/train-labels.npy     int64 (N,)          ... and the same for valid and test

CINIC-10's layout is ``train|valid|test/<class>/<image>``. :func:`survey` reads it in a folder and in an archive alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

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
FORMAT = 1  # of arrays and manifest: a pack of another format counts as none
MANIFEST = "manifest.json"
# In the fingerprint of a pack that was made from a folder. Raise it if the same files would give different arrays or
# notes, so that such packs are made again.
PACKING = b"packing 3\n"

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Pillow goes by a file's first bytes and not by its suffix, and knows formats that start a program (EPS) or decode
# while they are opened (ICO). It may open these only.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
IMAGE_BYTES = 1024**2  # 3 KiB of pixels, and generous room for whatever else an image file carries
# A folder with one of these names is a split, or should have been called train, valid or test.
SPLIT_NAMES = {"train": "train", "training": "train", "val": "valid", "valid": "valid", "validation": "valid"}
SPLIT_NAMES |= {"test": "test", "testing": "test"}
STRAY = {".DS_Store", "Thumbs.db", "desktop.ini"}  # file managers leave them everywhere, and nobody misses them
WRITABLE = "free some space, or choose another folder: export LAB_DATA=/another/folder"

Part = tuple[str, np.ndarray, np.ndarray]
"""A split, its images uint8 (N, 3, 32, 32) and their labels int64 (N,)."""
Pack = tuple[Path, dict, dict[str, list[np.ndarray]]]
"""An open pack: its folder, its manifest, and per split the images and labels, mapped into memory."""


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


def is_image(name: str) -> bool:
    """True if a file name is an image's. Hidden files, such as macOS's ``._cat.png``, are not images."""
    return name.lower().endswith(SUFFIXES) and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """True if a name is hidden, or one of those that systems add, such as ``__MACOSX`` and ``@eaDir``."""
    return name.startswith((".", "@", "__"))


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
        raise LabError(
            f"{len(found)} folders could be CINIC-10.",
            where=", ".join(map(clean_name, found)),
            cause="more than one folder here has cinic in its name and train, valid or test in it",
            fix=f"name the one you mean: export LAB_DATA={shlex.quote(clean_name(found[0]))}",
        )
    packs = [home / "cinic10" for home in list_homes(root) if read_manifest(home / "cinic10")]
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


def survey(names: Iterable[str], where: Path) -> tuple[dict[str, list[str]], str]:
    """Returns the images of a data set in CINIC-10's layout by split, and in words what is left out.

    This is the one rule for folders and archives. The images are in ImageFolder's order.

    Raises:
        LabError: A split or class is missing or empty, or there is another class.
    """
    files, folders, filled, left_out = defaultdict(set), set(), set(), set()
    for name in names:
        folder, _, file = name.rpartition("/")
        files[folder].add(file)
    images: dict[str, list[str]] = {split: [] for split in SPLITS}
    for folder in sorted(files):
        split, *below = folder.split("/")
        others = files[folder] - {"", *STRAY}
        if not any(map(is_hidden, below)):
            folders |= {split, "/".join([split, *below[:1]])}
            if split in SPLITS and len(below) == 1 and (taken := set(filter(is_image, others))):
                images[split] += [f"{folder}/{file}" for file in sorted(taken)]
                filled |= {split, folder}
                others -= taken
        left_out |= {f"{folder}/{file}".lstrip("/") for file in others if folder or is_image(file)}
    words = ""
    if left_out:
        kinds = "|".join(suffix[1:] for suffix in SUFFIXES)
        words = f"left out: {len(left_out):,} file{'s' * (len(left_out) > 1)} other than "
        words += f"train|valid|test/<class>/*.{kinds} (such as {clean_name(min(left_out), 200)})"
    wanted = {*SPLITS, *(f"{split}/{name}" for split in SPLITS for name in CLASS_NAMES)}
    missing = [name for name in sorted(wanted - filled) if name in SPLITS or name.partition("/")[0] in filled]
    unknown = [
        name for name in sorted(folders - wanted) if name.partition("/")[0] in SPLITS or name.lower() in SPLIT_NAMES
    ]
    if missing or unknown:
        raise _explain_layout(where, missing, unknown, words)
    return images, words


def _explain_layout(where: Path, missing: list[str], unknown: list[str], left_out: str) -> LabError:
    if missing:
        what = f"The data set has no images in {len(missing)} of its folders, such as {missing[0]!r}."
    else:
        what = f"The folder '{clean_name(unknown[0], 60)}' is none of CINIC-10's ten classes."
    lists = {"no images in": ", ".join(missing[:12]), "unknown": clean_name(", ".join(unknown), 300), "": left_out}
    shown = "; ".join(f"{label}: {text}".lstrip(": ") for label, text in lists.items() if text)
    return LabError(
        what,
        where=f"{clean_name(where)} ({shown})",
        cause="it was copied in part, or its folders have other names",
        fix=f"rename or remove unknown folders, restore missing ones: train|valid|test/{'|'.join(CLASS_NAMES)}",
    )


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
    found: tuple[dict[str, list[str]], str],
    read: Callable[[str], bytes],
    *,
    source: dict[str, object],
    where: Path,
    skip_bad: bool = False,
) -> None:
    """Packs what :func:`survey` found ``where``; ``read`` returns the content of an image such as train/cat/1.png."""
    images, left_out = found
    total, bad, deep, notes = sum(map(len, images.values())), [], [], [left_out] if left_out else []

    def decode_all() -> Iterator[Part]:
        for split, names in images.items():
            pixels, labels, good = np.empty((len(names), 3, 32, 32), np.uint8), np.empty(len(names), np.int64), 0
            for name in names:
                bar.update()
                try:
                    content = read(name)
                    pixels[good] = decode(content)
                except (ValueError, OSError) as error:
                    bad.append(f"{clean_name(name)} ({getattr(error, 'strerror', None) or error})")
                    continue
                labels[good] = CLASS_NAMES.index(name.split("/")[1])
                good += 1
                if content.startswith(b"\x89PNG") and content[24:25] == b"\x10":
                    deep.append(name)
            yield split, pixels[:good], labels[:good]
        if bad and not skip_bad:
            again = f", or go on without them: {make_command('prepare --skip-bad')}" if where.is_dir() else ""
            raise LabError(
                f"{len(bad):,} of {total:,} images cannot be used.",
                where=f"{clean_name(where)}: {'; '.join(bad[:5])}" + f", and {len(bad) - 5:,} more" * (len(bad) > 5),
                cause="the copy was damaged, or other files are among the images",
                fix=f"copy them again (32×32 pixels){again}",
            )
        for words, some in (("left out as unreadable", bad), ("scaled from 16 bits a channel to 8", deep)):
            if some:
                such = f"(such as {clean_name(some[0], 200)})"
                notes.append(f"{words}: {len(some):,} image{'s' * (len(some) > 1)} {such}")

    with open_bar(total, "packing cinic10", unit=" images", delay=3) as bar:
        write_pack(folder, decode_all(), class_names=CLASS_NAMES, source=source | {"notes": notes}, mean_std=MEAN_STD)


def provide_cinic10(root: Path, found: Path | None, *, skip_bad: bool = False) -> Pack:
    """Opens the pack of what :func:`find_cinic10` found; that of a folder is made, or made again after a change."""
    if found and (pack := open_pack(found)):
        return pack
    if found is None or read_manifest(found):
        what, cause = "CINIC-10 was not found.", "it was not downloaded yet, or LAB_DATA points elsewhere"
        if found:
            what, cause = "The pack cinic10 is damaged.", "a file was cut short or removed"
        fix = f"{make_command('fetch cinic10')}   (or import CINIC-10.tar.gz, or use data.load('shapes10'))"
        raise LabError(what, where=clean_name(found or root), cause=cause, fix=fix)
    images = survey(list_names(found), found)
    source = {"words": "from a folder in CINIC-10's layout", "fingerprint": hash_folder(found, images)}

    settings = {"source": source, "where": found, "skip_bad": skip_bad}

    def make(folder: Path) -> None:
        pack_images(folder, images, lambda name: read_bounded(found / name, IMAGE_BYTES), **settings)

    # The path is a part of the name, because two folders may have their packs in the same place.
    name = f"cinic10-folder-{hashlib.sha256(os.fsencode(found)).hexdigest()[:8]}"
    return provide(name, root, source["fingerprint"], make)


def hash_folder(folder: Path, found: tuple[dict[str, list[str]], str]) -> str:
    """Returns a fingerprint of what :func:`survey` found in a folder, with the files' sizes and times of change."""
    images, left_out = found
    stamp = hashlib.sha256(PACKING + left_out.encode())
    for name in (name for names in images.values() for name in names):
        try:
            state = os.stat(f"{folder}/{name}")  # noqa: PTH116 (a Path for each of 270,000 files takes longer)
            text = f"{state.st_size}\0{state.st_mtime_ns}"
        except OSError:
            text = "unreadable"  # such as a link to nothing, which counts as bad when it is read
        stamp.update(f"{name}\0{text}\n".encode(errors="surrogateescape"))
    return stamp.hexdigest()


# Packs


def read_manifest(folder: Path) -> dict | None:
    """Returns the manifest of a pack, or None if there is no pack of this format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest if manifest["format"] == FORMAT and manifest["source"]["fingerprint"] else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def open_pack(folder: Path) -> Pack | None:
    """Maps a pack's arrays into memory; returns None if there is no pack, or an array is cut short or missing.

    The maps are copy-on-write (``mode="c"``): torch takes them without a warning, and nothing can change the files.
    """
    if not (manifest := read_manifest(folder)):
        return None
    try:
        arrays = {split: [np.load(folder / f"{split}-{kind}.npy", "c") for kind in KINDS] for split in SPLITS}
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return folder, manifest, arrays


def provide(name: str, root: Path, fingerprint: str, make: Callable[[Path], None]) -> Pack:
    """Opens the pack that was made from exactly this source, or makes it; several processes make it once."""
    homes = list_homes(root)

    def find() -> Pack | None:
        packs = filter(None, (open_pack(home / name) for home in homes))
        return next((pack for pack in packs if pack[1]["source"]["fingerprint"] == fingerprint), None)

    if pack := find():
        return pack
    with lock_pack(homes[0] / name):
        if not find():
            make(homes[0] / name)
        return find()


@contextlib.contextmanager
def lock_pack(folder: Path) -> Iterator[None]:
    """Keeps a pack's place for one process at a time, while it is written; the others wait."""
    from filelock import FileLock

    with explain(f"The pack {clean_name(folder.name, 60)} cannot be written", folder.parent, fix=WRITABLE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            yield


def write_pack(
    folder: Path,
    parts: Iterable[Part],
    *,
    class_names: tuple[str, ...],
    source: dict[str, object],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> None:
    """Writes a pack; if it cannot be completed, ``folder`` stays as it was.

    The pack grows in a temporary folder beside it, which is renamed once all of it is on the disk. The ``source`` says
    in ``words`` where the images come from, and its ``fingerprint`` tells if the pack is still up to date. Mean and
    standard deviation are per channel, in 0..1, by default those of the training images.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("draft", "old"))
    manifest: dict = {"format": FORMAT, "classes": list(class_names), "splits": {}, "sha256": {}}
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)  # a killed process left it
    temporary.mkdir(parents=True)
    try:
        for split, images, labels in parts:
            manifest["splits"][split] = {"images": len(labels)}
            for kind, array in zip(KINDS, (images, labels), strict=True):
                path = temporary / f"{split}-{kind}.npy"
                with write_atomically(path) as file:
                    np.save(file, array)
                manifest["sha256"][path.name] = hash_file(path, "sha256")
            if split == "train":
                mean_std = mean_std or measure_mean_std(images)
        manifest |= {"mean": list(mean_std[0]), "std": list(mean_std[1]), "source": {"notes": []} | source}
        with write_atomically(temporary / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        if folder.exists():
            folder.rename(old)  # renamed and not removed: somebody may have mapped it, which NFS does not allow
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def hash_file(path: Path, algorithm: str) -> str:
    """Returns the hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def measure_mean_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation per channel, in 0..1, exactly: from a histogram of the 256 values."""
    values, means, stds = np.arange(256) / 255, [], []
    for channel in range(3):
        # In slices, because bincount makes int64 of its input: eight times the bytes.
        slices = (images[i : i + 4096, channel].reshape(-1) for i in range(0, len(images), 4096))
        histogram = sum(np.bincount(part, minlength=256) for part in slices)
        means.append(float(np.average(values, weights=histogram)))
        stds.append(float(np.average((values - means[-1]) ** 2, weights=histogram)) ** 0.5)
    return tuple(means), tuple(stds)
