"""Packs: a data set as arrays that are mapped into memory, made once from pictures in CINIC-10's layout.

    packed/cinic10/manifest.json        counts, class names, mean and std, SHA-256 of each array, where it came from
    packed/cinic10/train-images.npy     uint8 (N, 3, 32, 32)
    packed/cinic10/train-labels.npy     int64 (N,)          ... and the same for valid and test

CINIC-10's layout is ``train|valid|test/<class>/<image>``. :func:`survey` reads it in a folder and in an archive alike.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab_common import LabError, checkout, env_folder, read_folder
from lab_common.files import sync_folder
from lab_common.text import clean_name
from lab_utils.bars import open_bar

SPLITS = ("train", "valid", "test")
# The order of the labels is ImageFolder's, which is CIFAR-10's: alphabetical.
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Published with the data set: https://github.com/BayesWatch/cinic-10, "Normalization".
MEAN_STD = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))
FORMAT = 1  # of arrays and manifest: a pack of another format counts as none
MANIFEST = "manifest.json"
# In the fingerprint of a pack that was made from a folder. Raise it if the same files would give different arrays or
# notes, so that such packs are made again.
PACKING = b"packing 2\n"

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Pillow goes by a file's first bytes and not by its suffix, and knows formats that start a program (EPS) or decode
# while they are opened (ICO). It may open these only.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
IMAGE_BYTES = 1024**2  # 3 KiB of pixels, and generous room for whatever else an image file carries
# Names that others give to a split, by their letters: Train, val, validation, test_images.
SPLIT_NAME = re.compile(r"(?:images|cinic)?(train|val|test)(?:ing|id|idation)?(?:set|data|images?|split)?")
STRAY = {".DS_Store", "Thumbs.db", "desktop.ini"}  # file managers leave them everywhere, and nobody misses them
# A home has many folders: how deep a data set is looked for, and in how many folders.
DEEPEST, MOST_FOLDERS = 4, 1000

Listing = dict[str, list[str]]
"""The images' names per split, such as "cat/1.png", in ImageFolder's order."""


def choose_root(root: Path | str | None) -> Path:
    """Returns the folder that holds data sets: a named one, else ``LAB_DATA``, else the repository's ``data/``."""
    try:
        return read_folder(root or env_folder("LAB_DATA", "data")).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: Python before 3.13
        what, cause = "The path leads nowhere.", f"the system says: {clean_name(error, 200)}"
        raise LabError(what, where=clean_name(root, 300), cause=cause, fix="name another folder") from error


def list_homes(root: Path) -> list[Path]:
    """Returns the folders for packs, one that can be written first; never inside somebody's data set."""
    own, spare = root / "packed", checkout() / "data" / "packed"
    if root.is_dir() and any(map(read_split, _scan(root, "")[0])):
        return [spare]
    existing = next(parent for parent in (own, root, *root.parents) if parent.exists())
    return [own, spare] if os.access(existing, os.W_OK | os.X_OK) else [spare, own]


def quote(path: object) -> str:
    """Returns a path in quotes, as one word of a shell's command, and safe to print."""
    return "'" + clean_name(path).replace("'", "'\\''") + "'"


def make_command(arguments: str) -> str:
    """Returns the line that runs a command of this package with this Python, typed in the repository's root."""
    python = Path(sys.executable or "python")
    if python.is_absolute():
        python = python.parent.resolve() / python.name  # the file itself is a link that leads out of the environment
        if python.is_relative_to(checkout()):
            python = python.relative_to(checkout())
    return f"{shlex.quote(os.fspath(python))} -m lab_utils.data {arguments}".rstrip()


def find_target(path: Path | str) -> str:
    """Returns where a symbolic link leads, safe to print; "" if there is no link."""
    try:
        return clean_name(Path(path).readlink(), 300)
    except OSError:
        return ""


@contextlib.contextmanager
def explain(what: str, place: Path | None = None, *, fix: str) -> Iterator[None]:
    """Turns an OSError of a block or function into a LabError that names the file and where a link leads."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or place or ".")
        cause = "it is not there, it belongs to another user, or the disk is full or failing"
        if target := find_target(place):
            cause = f"it is a link to {target}, which leads nowhere"
        what = f"{what}: {error.strerror or error}."
        raise LabError(what, where=clean_name(place, 1000), cause=cause, fix=fix) from error


explain_unreadable = functools.partial(
    explain,
    "A part of the data set cannot be read",
    fix="ask its owner to type chmod -R a+rX on it; if it is a link to nothing, remove it",
)
WRITABLE = "free some space, or choose another folder: export LAB_DATA=/another/folder"


@contextlib.contextmanager
def lock(path: Path, *, timeout: float = -1) -> Iterator[None]:
    """Holds a lock between processes, which is a file beside ``path``; one process may hold it twice."""
    from filelock import FileLock, SoftFileLock

    path = path.with_name(f".{path.name}.lock")
    held = FileLock(path, timeout, is_singleton=True)
    try:
        held.acquire()
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        # A network share without locks.
        held = SoftFileLock(path.with_suffix(".held"), timeout, is_singleton=True)
        held.acquire()
    try:
        yield
    finally:
        held.release()


# The layout. Names are paths of files, and of folders with a "/" at the end, in a folder or in an archive.


def is_image(name: str) -> bool:
    """True if a file name is an image's. Hidden files, such as macOS's ``._cat.png``, are not images."""
    return name.lower().endswith(SUFFIXES) and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """True if a name is hidden, or one of those that systems add to archives and shares."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "lost+found")


@functools.cache
def read_split(name: str) -> str:
    """Returns the split that a folder's name means, such as ``valid`` for Validation; "" if it means none."""
    found = SPLIT_NAME.fullmatch(re.sub("[^a-z]", "", name.casefold()))
    return {"train": "train", "val": "valid", "test": "test"}[found[1]] if found else ""


def find_data_sets(names: Iterable[str], *, meant: bool = False) -> list[str]:
    """Returns the folders that have splits, right or nearly right, and are least deep.

    One split is enough at the top, in a folder with cinic in its path, and anywhere if CINIC-10 is ``meant`` to be
    there. Other folders must have all three, with CINIC-10's classes.
    """
    splits, classes = defaultdict(set), defaultdict(set)
    for name in names:
        *folders, _ = name.split("/")
        for depth, folder in enumerate(folders):
            if split := read_split(folder):
                top = "/".join(folders[:depth])
                splits[top].add(split)
                classes[top].update(folders[depth + 1 : depth + 2])
    whole = [top for top in splits if splits[top] == {*SPLITS} and classes[top] >= {*CLASS_NAMES}]
    found = [top for top in splits if meant or not top or "cinic" in top.lower() or top in whole]
    found = [top for top in found if "cinic" in top.lower()] or found
    return [top for top in found if _count_levels(top) == min(map(_count_levels, found))]


def _count_levels(path: str) -> int:
    return len(path.split("/")) if path else 0


def list_folders(root: Path, deepest: int) -> Iterator[str]:
    """Yields the folders below ``root`` that :func:`find_data_sets` needs, for data sets ``deepest`` folders below."""
    level, left = [""], MOST_FOLDERS
    for depth in range(deepest + 2):
        below = []
        for path in level[:left]:
            try:
                folders = [f"{path}{name}/" for name in _scan(root, path)[0] if not is_hidden(name)]
            except LabError:
                if not path or "cinic" in path.lower():  # the others are somebody else's, and we may not read them
                    raise
                continue
            yield from folders
            if not (path and read_split(path.split("/")[-2])):  # what is below the classes does not matter
                below += [name for name in folders if depth < deepest or read_split(name.split("/")[-2])]
        level, left = below, left - len(level)


def list_names(folder: Path, path: str = "") -> Iterator[str]:
    """Yields the names of all files in a data set's splits, and right beside them, and of the folders."""
    depth = path.count("/")
    folders, files = _scan(folder, path, follow=depth < 2)  # a link below a class may lead back up
    yield from (f"{path}{name}" for name in files)
    for name in folders:
        if depth or read_split(name):
            yield f"{path}{name}/"
            yield from list_names(folder, f"{path}{name}/")


@explain_unreadable()
def _scan(root: Path, path: str, *, follow: bool = True) -> tuple[list[str], list[str]]:
    """Returns the sorted names of the folders and files in a folder; a link to nothing counts as a folder."""
    folders, files = [], []
    with os.scandir(root / path) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=follow)
            if follow and entry.is_symlink() and not is_image(entry.name):
                is_folder = not Path(entry.path).is_file()
            (folders if is_folder else files).append(entry.name)
    return sorted(folders), sorted(files)


def survey(names: Iterable[str], where: Path) -> tuple[Listing, str]:
    """Returns the images of a data set in CINIC-10's layout, and in words what is left out.

    This is the one rule for folders and archives.

    Raises:
        LabError: A split or class is missing or empty, or there is another class.
    """
    images: Listing = {split: [] for split in SPLITS}
    folders, left_out = set(), {}
    for name in names:
        *path, file = name.split("/")
        folders |= {"/".join(path[:1]), "/".join(path[:2])}
        if reason := _explain_left_out(path, file):
            left_out.setdefault(reason, []).append(name)
        elif is_image(file):
            images[path[0]].append(f"{path[1]}/{file}")
    each = (
        f"{len(names):,} file{'s' * (len(names) > 1)} {reason} (such as {clean_name(names[0], 200)})"
        for reason, names in left_out.items()
    )
    words = f"left out: {'; '.join(each)}" if left_out else ""
    _check_layout(folders, images, where, words)
    return {split: sorted(names) for split, names in images.items()}, words


def _explain_left_out(folders: list[str], file: str) -> str:
    """Returns why a file of a data set is left out; "" for an image in its place, and for what nobody misses."""
    if not file or file in STRAY or not (folders or is_image(file)):
        return ""
    if any(map(is_hidden, [*folders, file])):
        return "hidden or in a hidden folder"
    if len(folders) > 2:
        return "in folders below a class"
    if not is_image(file):
        return f"of another kind than {', '.join(SUFFIXES)}"
    if not folders or folders[0] not in SPLITS:
        return "outside train|valid|test"
    return "" if len(folders) == 2 else "outside the classes' folders"


def _check_layout(folders: set[str], images: Listing, where: Path, left_out: str) -> None:
    """Refuses a data set that does not have exactly three splits of ten classes, each with at least one image."""
    places = {f"{split}/{name.partition('/')[0]}" for split in SPLITS for name in images[split]}
    missing, strange = [split for split in SPLITS if split not in folders], []
    for name in sorted(folders):
        split, _, class_name = name.rpartition("/")
        if split in SPLITS and class_name not in CLASS_NAMES and not is_hidden(class_name):
            strange.append(name)
        if not split and name not in SPLITS and read_split(name) in missing:
            strange.append(name)
    missing += [f"{s}/{c}" for s in SPLITS for c in CLASS_NAMES if s in folders and f"{s}/{c}" not in places]
    if not (missing or strange):
        return
    renames = {}
    for name in strange:
        split, _, class_name = name.rpartition("/")
        near = difflib.get_close_matches(class_name.casefold(), CLASS_NAMES, 1, 0.7) if split else [read_split(name)]
        renames |= {new: name for one in near if (new := f"{split}/{one}".lstrip("/")) in missing}
    fix = f"restore the folder train|valid|test/<class>/*.png, or type: {make_command('import CINIC-10.tar.gz')}"
    if renames:
        top = Path() if where.is_file() else where  # in an archive nothing can be renamed
        fix = " && ".join(f"mv {quote(top / old)} {quote(top / new)}" for new, old in renames.items())
        fix = f"unpack it, type in its folder: {fix}, and: export LAB_DATA=THAT_FOLDER" if where.is_file() else fix
    elif strange:
        fix = "take that folder out of the data set, or give it the name of the class that its pictures show"
    what = f"The data set has no images in {len(missing)} of its folders, such as {missing[0]!r}." if missing else ""
    if strange and "/" in strange[0]:
        what = f"The folder '{clean_name(strange[0], 60)}' is none of CINIC-10's ten classes."
    lists = {"no images in": ", ".join(missing[:12]), "unknown": clean_name(", ".join(strange), 300), "": left_out}
    shown = "; ".join(f"{label}: {text}".lstrip(": ") for label, text in lists.items() if text)
    cause = f"it was copied in part, or folders have other names than train|valid|test/{'|'.join(CLASS_NAMES)}"
    raise LabError(what, where=f"{clean_name(where)} ({shown})", cause=cause, fix=fix)


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
    except Image.DecompressionBombError as error:
        raise ValueError("is far larger than 32×32") from error
    except Exception as error:  # PIL raises whatever its decoders do: OSError, SyntaxError, struct.error, ...
        raise ValueError("cannot be decoded") from error
    raise ValueError(f"is {picture.width}×{picture.height}, not 32×32")


@contextlib.contextmanager
def refuse_cut_images() -> Iterator[None]:
    """Makes Pillow refuse files that are cut short, even if a notebook has told it to fill in what is missing."""
    from PIL import ImageFile

    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def pack_images(
    pack: Path,
    found: tuple[Listing, str],
    read: Callable[[str], bytes],
    *,
    source: dict[str, object],
    where: Path,
    option: str,
) -> None:
    """Packs what :func:`survey` found.

    Args:
        pack: Where the pack goes.
        found: The images, and what was left out.
        read: Returns the content of an image such as "train/cat/1.png"; it may raise an OSError.
        source: For the manifest: where the images come from.
        where: The folder or archive.
        option: The command that leaves bad images out; "" if that was asked for.
    """
    listing, left_out = found
    counts = {split: len(names) for split, names in listing.items()}
    total, bad, deep, notes = sum(counts.values()), [], [], [left_out] if left_out else []
    with (
        write_pack(
            pack, counts, class_names=CLASS_NAMES, source=source | {"bad": bad, "notes": notes}, mean_std=MEAN_STD
        ) as draft,
        open_bar(total, "packing cinic10", unit=" images", delay=3) as bar,
        refuse_cut_images(),
    ):
        for split, position, name in ((s, n, f"{s}/{name}") for s in SPLITS for n, name in enumerate(listing[s])):
            draft.labels[split][position] = CLASS_NAMES.index(name.split("/")[1])
            try:
                content = read(name)
                draft.images[split][position] = decode(content)
                if content.startswith(b"\x89PNG") and content[24:25] == b"\x10":
                    deep.append(name)
            except (ValueError, OSError) as error:
                target = find_target(getattr(error, "filename", None) or "")
                reason = getattr(error, "strerror", None) or error  # an OSError's own text repeats the path
                bad.append(f"{clean_name(name)} ({reason})" + (f", a link to '{target}'" if target else ""))
                draft.skipped[split].append(position)
            bar.update()
        if bad and option:
            more = f", and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            raise LabError(
                f"{len(bad):,} of {total:,} images cannot be used.",
                where=f"{clean_name(where)}: {'; '.join(bad[:5])}{more}",
                cause="the copy was damaged, or other files are among the images",
                fix=f"copy them again (32×32 pixels), or go on without them: {make_command(option)}",
            )
        del bad[100:]
        if deep:
            few = f"{len(deep):,} image{'s' * (len(deep) > 1)} (such as {clean_name(deep[0], 200)})"
            notes.append(f"scaled from 16 bits a channel to 8: {few}")
    for note in notes:
        print(f"Note: {note}.", file=sys.stderr)


def hash_folder(folder: Path, found: tuple[Listing, str]) -> str:
    """Returns a fingerprint of what :func:`survey` found in a folder, with the files' sizes and times of change."""
    listing, left_out = found
    stamp = hashlib.sha256(PACKING + left_out.encode())
    for file in (f"{split}/{name}" for split in SPLITS for name in listing[split]):
        try:
            state = os.stat(f"{folder}/{file}")  # noqa: PTH116 (a Path for each of 270,000 files takes longer)
            text = f"{state.st_size}\0{state.st_mtime_ns}"
        except OSError:
            text = "unreadable"  # such as a link to nothing, which counts as bad when it is read
        stamp.update(f"{file}\0{text}\n".encode(errors="surrogateescape"))
    return stamp.hexdigest()


# Packs


class Pack(NamedTuple):
    """A pack that was opened: its folder, its manifest, and per split the images and labels."""

    folder: Path
    manifest: dict
    arrays: dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass
class Draft:
    """The arrays of a pack that is being written, to be filled by position; ``skipped`` positions are taken out."""

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    skipped: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})


@explain_unreadable()
def read_manifest(folder: Path) -> dict | None:
    """Returns the manifest of a pack, or None if there is no pack of this format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest if manifest["format"] == FORMAT and manifest["source"]["fingerprint"] else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


@explain_unreadable()
def open_pack(folder: Path) -> Pack | None:
    """Maps a pack's arrays into memory; returns None if there is no pack, or an array is damaged or missing.

    The maps are copy-on-write (``mode="c"``): torch takes them without a warning, and nothing can change the files.
    """
    manifest, arrays = read_manifest(folder), {}
    if manifest is None:
        return None
    for split in SPLITS:
        count = manifest["splits"][split]["images"]
        try:
            images, labels = (np.load(folder / f"{split}-{kind}.npy", "c") for kind in ("images", "labels"))
        except (FileNotFoundError, ValueError, EOFError):
            return None
        if (images.shape, images.dtype) != ((count, 3, 32, 32), np.uint8) or labels.shape != (count,):
            return None
        labels = np.array(labels)
        if labels.dtype != np.int64 or not ((labels >= 0) & (labels < len(manifest["classes"]))).all():
            return None
        arrays[split] = images, labels
    return Pack(folder, manifest, arrays)


def find_damage(folder: Path) -> list[str]:
    """Returns the names of the files of a pack that are missing or whose SHA-256 is not the one in its manifest."""
    if not (manifest := read_manifest(folder)):
        return [MANIFEST]
    files = {folder / name: expected for name, expected in manifest["sha256"].items()}
    return [file.name for file, sha in files.items() if not file.is_file() or hash_file(file, "sha256") != sha]


def hash_file(path: Path, algorithm: str) -> str:
    """Returns the hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def lock_pack(folder: Path) -> Iterator[None]:
    """Keeps a pack's place for one process at a time, while it is written; the others wait."""
    with explain(f"The pack {clean_name(folder.name, 60)} cannot be written", folder.parent, fix=WRITABLE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder):
            yield


@contextlib.contextmanager
def write_pack(
    folder: Path,
    counts: Mapping[str, int],
    *,
    class_names: tuple[str, ...],
    source: dict[str, object],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Iterator[Draft]:
    """Opens a draft of ``counts`` images per split; if the block ends without an error, it becomes the pack ``folder``.

    Otherwise ``folder`` stays as it was. The draft is a temporary folder beside it that is renamed once it is whole.

    Args:
        folder: The pack's place.
        counts: Images per split.
        class_names: In the order of the labels.
        source: Where the images come from; its ``fingerprint`` tells if the pack is still up to date.
        mean_std: Per channel, in 0..1; by default computed from the training images.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("draft", "old"))
    with lock_pack(folder):
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)  # a killed process left it
        temporary.mkdir()
        try:
            draft = Draft(
                {
                    split: _make_array(temporary, split, "images", np.uint8, (n, 3, 32, 32))
                    for split, n in counts.items()
                },
                {split: _make_array(temporary, split, "labels", np.int64, (n,)) for split, n in counts.items()},
            )
            yield draft
            _finish(temporary, draft, class_names, source, mean_std)
            if folder.exists():
                folder.rename(old)  # renamed and not removed: somebody may have mapped it, which NFS does not allow
            temporary.rename(folder)
            sync_folder(folder.parent)
        finally:
            for left in (temporary, old):
                shutil.rmtree(left, ignore_errors=True)


def _make_array(folder: Path, split: str, kind: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Makes an array in a file, all of whose bytes are on the disk.

    A mapped file has holes at first. If the disk filled up meanwhile, writing into one would kill the process (SIGBUS).
    """
    path = folder / f"{split}-{kind}.npy"
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("rb+") as file:
        file.seek(array.offset)
        for at in range(0, array.nbytes, 2**20):
            file.write(bytes(min(2**20, array.nbytes - at)))
    return array


def _finish(folder: Path, draft: Draft, class_names: tuple[str, ...], source: dict, mean_std: tuple | None) -> None:
    """Takes the skipped images out, writes the manifest, and waits until all of it is on the disk."""
    manifest: dict = {"format": FORMAT, "classes": list(class_names), "splits": {}, "sha256": {}}
    for split in SPLITS:
        for kind, arrays in (("images", draft.images), ("labels", draft.labels)):
            path = folder / f"{split}-{kind}.npy"
            arrays[split].flush()
            if draft.skipped[split]:
                kept = np.delete(arrays[split], draft.skipped[split], axis=0)
                path.unlink()
                np.save(path, kept)
                arrays[split] = kept
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            manifest["sha256"][path.name] = hash_file(path, "sha256")
        per_class = np.bincount(draft.labels[split], minlength=len(class_names))
        if not per_class.all():
            raise LabError(
                f"Not one image of the class {class_names[per_class.argmin()]!r} in {split} can be used.",
                where=source["words"],
                cause="all of its images are damaged or have another size",
                fix=f"copy the data set again: {make_command('fetch cinic10')}",
            )
        manifest["splits"][split] = {
            "images": len(draft.labels[split]),
            "per_class": dict(zip(class_names, per_class.tolist(), strict=True)),
            "skipped": len(draft.skipped[split]),
        }
    mean, std = mean_std or measure_mean_std(draft.images["train"])
    manifest |= {"mean": list(mean), "std": list(std), "source": {"bad": [], "notes": []} | source}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def measure_mean_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation per channel, in 0..1, exactly: from a histogram of the 256 values."""
    values, means, stds = np.arange(256) / 255, [], []
    for channel in range(3):
        # In slices, because bincount makes int64 of its input: eight times the bytes.
        slices = (images[i : i + 4096, channel].reshape(-1) for i in range(0, len(images), 4096))
        histogram = sum(np.bincount(part, minlength=256) for part in slices)
        mean = float(np.average(values, weights=histogram))
        means.append(mean)
        # 1 if all pixels have one value: nothing can be divided by 0.
        stds.append(float(np.average((values - mean) ** 2, weights=histogram)) ** 0.5 or 1.0)
    return tuple(means), tuple(stds)
