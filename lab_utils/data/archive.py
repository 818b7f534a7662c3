"""Imports CINIC-10.tar.gz: looks through all of it first, then decodes its members straight into the packed arrays.

Nothing is ever unpacked to files, so no member can be written anywhere. What CINIC-10 cannot contain is refused all the
same, before the pack is begun: such an archive is not what it says it is.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lab_common import LabError
from lab_common.files import open_regular
from lab_common.text import clean_name
from lab_utils.bars import open_bar
from lab_utils.data.fetch import MD5
from lab_utils.data.folder import CLASS_NAMES, MEAN_STD, Listing, check_listing, has_layout
from lab_utils.data.headers import MOST_LETTERS, ODD, CappedReader, Caps, RefusedError, Tar
from lab_utils.data.images import decode, describe_bad, is_image, refuse_bad
from lab_utils.data.pack import SPLITS, digest
from lab_utils.data.system import choose_root, expand, make_command, quote
from lab_utils.data.write import write_pack


def import_archive(
    file: Path | str, root: Path | str | None = None, *, skip_bad: bool = False, caps: Caps | None = None
) -> Path:
    """Packs an archive in CINIC-10's layout, with or without a top folder, and returns the pack's folder.

    Args:
        file: A .tar.gz of any number of images.
        root: The folder that holds data sets; by default ``LAB_DATA``, else the repository's ``data/``.
        skip_bad: Go on without the images that cannot be read.
        caps: What to refuse.

    Raises:
        LabError: The file is not there or damaged, has what the data set cannot have, or images that cannot be read.
    """
    file, root, caps = expand(file), choose_root(root), caps or Caps()
    refuse_data_set(root)
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > caps.archive_bytes:
                raise RefusedError(f"{size:,} bytes")
            md5 = digest(stream, "md5")
            listing = _survey(stream, file, size=size, caps=caps)
            check_listing(listing, file, CLASS_NAMES)
            verified = "CINIC-10.tar.gz, checksum verified" if md5 == MD5 else "an archive in CINIC-10's layout"
            source = {"kind": "archive", "words": f"imported from {verified}", "fingerprint": f"md5 {md5}"}
            source |= {"archive": file.name, "bytes": size, "md5": md5}
            return _pack(stream, file, root / "packed" / "cinic10", listing, source, caps, skip_bad=skip_bad)
    except OSError as error:
        cause, fix = "a mistyped path, or the file was moved", make_command("fetch cinic10")
        what = f"Cannot open the archive: {error.strerror or error}."
        raise LabError(what, where=clean_name(file), cause=cause, fix=fix) from error
    except RefusedError as refusal:
        raise LabError(
            f"The archive is refused: it has {refusal.reason}.",
            where=clean_name(file) + (f", member '{clean_name(refusal.member, 200)}'" if refusal.member else ""),
            cause="it is not CINIC-10's archive, or was made to do harm; nothing was written",
            fix=make_command("fetch cinic10"),
        ) from refusal


def refuse_data_set(root: Path) -> None:
    """Raises a LabError where a root is itself a data set: nothing is written into it."""
    if has_layout(root):
        raise LabError(
            "An archive cannot be imported into a folder that is itself a data set.",
            where=root,
            cause="LAB_DATA points right at a folder with train, valid and test in it",
            fix="unset LAB_DATA, or let it name another folder: export LAB_DATA=/another/folder",
        )


def _survey(stream: BinaryIO, file: Path, *, size: int, caps: Caps) -> Listing:
    """Reads the whole archive once, judges every member, and lists the images."""
    found: set[tuple[str, str, str]] = set()
    for _, place in _read_members(stream, file, size=size, caps=caps, verb="looking through"):
        if place in found:
            raise RefusedError("the same file twice", "/".join(place))
        found.add(place)
    listing: Listing = {}
    for split, class_name, name in sorted(found):
        listing.setdefault(split, {}).setdefault(class_name, []).append(name)
    return listing


def _pack(
    stream: BinaryIO, file: Path, pack: Path, listing: Listing, source: dict, caps: Caps, *, skip_bad: bool
) -> Path:
    """Reads the archive again and decodes each image to its sorted position, the one that ImageFolder would give it."""
    counts = {split: sum(map(len, listing[split].values())) for split in SPLITS}
    positions: dict[tuple[str, str, str], int] = {}
    with write_pack(pack, counts, class_names=CLASS_NAMES, source=source, mean_std=MEAN_STD) as draft:
        for split in SPLITS:
            places = [(split, class_name, name) for class_name in CLASS_NAMES for name in listing[split][class_name]]
            positions |= {place: position for position, place in enumerate(places)}
            draft.labels[split][:] = [CLASS_NAMES.index(class_name) for _, class_name, _ in places]
        bad: list[str] = []
        for image, place in _read_members(stream, file, size=source["bytes"], caps=caps, verb="packing"):
            if (position := positions.pop(place, None)) is None:
                raise RefusedError("changed while it was read", "/".join(place))
            try:
                draft.images[place[0]][position] = decode(image)
            except ValueError as error:
                bad.append(describe_bad("/".join(place), error))
                draft.skipped[place[0]].append(position)
        if positions:
            raise RefusedError("changed while it was read")
        if not skip_bad:
            refuse_bad(bad, sum(counts.values()), file, option=f"import {quote(file)} --skip-bad")
        draft.notes["bad"] = bad[:100]
    return pack


def _read_members(
    stream: BinaryIO, file: Path, *, size: int, caps: Caps, verb: str
) -> Iterator[tuple[bytes, tuple[str, str, str]]]:
    """Goes through the archive from its start, and yields each image with its split, class and file name.

    Raises:
        RefusedError: A member is something that the data set cannot have.
        LabError: The archive is cut short or damaged.
    """
    stream.seek(0)
    files = folders = 0
    top: set[str] = set()
    try:
        with (
            Tar.open(fileobj=CappedReader(stream, size, caps.total_bytes), mode="r|") as tar,
            open_bar(size, f"{verb} the archive", unit="B", unit_scale=True, delay=3) as bar,
        ):
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all 270,000 headers in memory
                folders, files = folders + member.isdir(), files + (not member.isdir())
                if files > caps.files or folders > caps.folders:
                    raise RefusedError(f"more than {caps.files:,} files or {caps.folders:,} folders")
                place = _judge(member, caps, top)
                bar.update(min(stream.tell(), size) - bar.n)
                if place:
                    yield tar.extractfile(member).read(), place
            # tarfile takes a damaged header for the end; then something other than zeros follows.
            while block := tar.fileobj.read(65536):
                if block.strip(b"\0"):
                    raise tarfile.ReadError("there is more after the end")
    # The last two come out of tarfile for headers that nobody's tar has written.
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise LabError(
            "The archive is cut short or damaged.",
            where=clean_name(file),
            cause=f"the download or copy ended early, or it is no .tar.gz file ({clean_name(error, 200)})",
            fix=f"{make_command('fetch cinic10')}, or copy the file again",
        ) from error


def _judge(member: tarfile.TarInfo, caps: Caps, top: set[str]) -> tuple[str, str, str] | None:
    """Returns the place of an image: its split, class and file name; None for folders and files that only describe.

    ``top`` collects the top folder, of which there may be one or none.
    """
    name = member.name
    regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
    if not regular and not member.isdir():
        raise RefusedError(ODD, name)
    if len(name) > MOST_LETTERS:
        raise RefusedError(f"a name of {len(name):,} letters", name)
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise RefusedError("a path that leads out of the archive", name)
    parts = PurePosixPath(name).parts  # "./train" and "train//cat" lose what does not matter
    if member.size < 0 or member.size > (caps.image_bytes if is_image(name) else caps.other_bytes):
        raise RefusedError(f"a file of {member.size:,} bytes", name)
    if not regular or not parts or not is_image(parts[-1]):
        return None
    place = parts if parts[0] in SPLITS else parts[1:]
    top.add("" if place == parts else parts[0])
    if len(place) != 3 or place[0] not in SPLITS or len(top) > 1:
        raise RefusedError("an image outside train|valid|test/<class>/", name)
    return place
