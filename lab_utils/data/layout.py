"""CINIC-10's layout, ``train|valid|test/<class>/<image>``: one rule for folders and archives.

What is in the layout is found below any number of other folders; what nearly is in it is named, with what to rename;
and what is left out is counted.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean_name
from lab_utils.data.images import SUFFIXES, is_image
from lab_utils.data.pack import SPLITS
from lab_utils.data.system import find_target, make_command, quote

# The order of the labels is ImageFolder's, which is CIFAR-10's: alphabetical.
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Names that others give to a split, by their letters: Train, val, validation, test_images.
SPLIT_NAME = re.compile(r"(?:images|cinic)?(train|val|test)(?:ing|id|idation)?(?:set|data|images?|split)?")
# What file managers leave in every folder that they show; nobody misses it.
STRAY = {".DS_Store", "Thumbs.db", "desktop.ini"}
HIDDEN, OTHER_KIND = "hidden or in a hidden folder", f"of another kind than {', '.join(SUFFIXES)}"
# How far a data set is looked for in a folder of data sets: a home has many folders.
DEEPEST, MOST_FOLDERS = 4, 200

Listing = dict[str, dict[str, list[str]]]
"""Split to class to sorted file names."""


class Folder:
    """A folder on the disk, as a tree; a path in it is a text such as "data/train", and "" is its top."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def list(self, path: str, *, follow: bool = True) -> tuple[list[str], list[str]]:
        """Returns the sorted names of the folders and of the files in a folder; with ``follow``, through links.

        Raises:
            LabError: It cannot be read.
        """
        folders, files = [], []
        with explain_unreadable(self.where / path), os.scandir(self.where / path) as entries:
            for entry in entries:
                # A link that leads nowhere counts as a folder: whoever wants to list it is told where it leads.
                folder = not is_image(entry.name) and (
                    entry.is_dir(follow_symlinks=False)
                    or (follow and entry.is_symlink() and not Path(entry.path).is_file())
                )
                (folders if folder else files).append(entry.name)
        return sorted(folders), sorted(files)

    def list_outside(self, top: str) -> Iterator[str]:
        """Returns the files that lie right beside the splits, or in what has nearly the name of one."""
        folders, files = self.list(top)
        yield from files
        for name in folders:
            if name not in SPLITS and read_split(name):
                yield from _list_files(self, _join(top, name))

    def rename(self, names: Sequence[tuple[str, str]]) -> str:
        """Returns the command that renames folders, from old to new paths."""
        return " && ".join(f"mv {quote(self.where / old)} {quote(self.where / new)}" for old, new in names)


class Members:
    """The folders and files of an archive, as a tree."""

    def __init__(self, where: Path) -> None:
        self.where, self._folders, self._files = where, {}, {}

    def add(self, path: str, *, folder: bool) -> bool:
        """Adds a member and the folders above it; returns False where such a file is there already."""
        *above, name = path.split("/")
        parent = "/".join(above)
        if parent not in self._files:
            for depth, inside in enumerate(above):
                self._folders.setdefault("/".join(above[:depth]), set()).add(inside)
        held = (self._folders if folder else self._files).setdefault(parent, set())
        new = folder or name not in held
        held.add(name)
        return new

    def list(self, path: str, *, follow: bool = True) -> tuple[list[str], list[str]]:
        """Returns the sorted names of the folders and of the files in a folder; there are no links."""
        return sorted(self._folders.get(path, ())), sorted(self._files.get(path, ()))

    def list_outside(self, top: str) -> Iterator[str]:
        """Returns all files that lie in none of the splits."""
        splits = tuple(f"{_join(top, split)}/" for split in SPLITS)
        for folder, names in self._files.items():
            if not f"{folder}/".startswith(splits):
                yield from (_join(folder, name) for name in sorted(names))

    def rename(self, names: Sequence[tuple[str, str]]) -> str:
        """Returns words: nothing in an archive can be renamed."""
        wanted = ", ".join(f"{old} to {new}" for old, new in names)
        return f"unpack it into a folder, rename {wanted}, and type: export LAB_DATA=THAT_FOLDER" if names else ""


Tree = Folder | Members


class LeftOut:
    """Counts the files that are not taken, by reason, and keeps one name of each."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, paths: Sequence[str]) -> None:
        """Counts files."""
        if paths:
            count, first = self._found.get(reason, (0, paths[0]))
            self._found[reason] = count + len(paths), first

    def add_others(self, folder: str, names: Sequence[str]) -> None:
        """Counts those of a folder's files that are no pictures, or of a kind that is not read."""
        for name in names:
            if not is_image(name) and name not in STRAY:
                self.add(HIDDEN if is_hidden(name) else OTHER_KIND, [f"{folder}/{name}"])

    def describe(self) -> str:
        """Returns one sentence without its full stop; "" where nothing was left out."""
        each = (
            f"{count:,} file{'s' * (count > 1)} {reason} (such as {clean_name(path, 200)})"
            for reason, (count, path) in self._found.items()
        )
        return f"left out: {'; '.join(each)}" if self._found else ""


@contextlib.contextmanager
def explain_unreadable(folder: Path | str) -> Iterator[None]:
    """Names a folder that a block cannot enter or list; the one in the error, where it tells, else ``folder``.

    Raises:
        LabError: In place of the block's OSError.
    """
    try:
        yield
    except OSError as error:
        place = Path(error.filename or folder)
        cause = "it belongs to another user, or the disk is failing"
        fix = "have its owner run: chmod -R a+rX on the data set"
        if target := find_target(place):
            cause = f"it is a link to {target}, which leads nowhere"
            fix = f"remove the link, or let it lead to a folder: ln -sfn /the/folder {quote(place)}"
        what = f"A folder of the data set cannot be read: {error.strerror}."
        raise LabError(what, where=clean_name(place, 1000), cause=cause, fix=fix) from error


def is_hidden(name: str) -> bool:
    """Returns True if a name is hidden, or one of those that systems add to archives and shares."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "lost+found")


def read_split(name: str) -> str:
    """Returns the split that a folder's name means, whoever named it: ``valid`` for val or Validation; "" for none."""
    found = SPLIT_NAME.fullmatch(re.sub("[^a-z]", "", name.casefold()))
    return {"train": "train", "val": "valid", "test": "test"}[found[1]] if found else ""


def is_data_set(tree: Tree, path: str = "", *, sure: bool = True) -> bool:
    """Returns True if a folder is meant to be in the layout, right or nearly right.

    Args:
        tree: Where it is.
        path: The folder.
        sure: CINIC-10 is expected here: one split or the classes will do. Otherwise all of them have to be there.

    Raises:
        LabError: It cannot be read.
    """
    folders = tree.list(path)[0]
    named = {split: name for name in folders if (split := read_split(name))}
    if sure and (len(named) > 1 or set(named.values()) & {*SPLITS}):
        return True
    if len(named) < len(SPLITS) and not sure:
        return False
    inside = [_count_classes(tree.list(_join(path, name))[0]) for name in named.values()]
    return max(inside, default=_count_classes(folders)) >= len(CLASS_NAMES) // 2


def find_data_sets(tree: Tree, *, sure: bool = False, deepest: int = DEEPEST) -> list[str]:
    """Returns the folders of a tree that are in the layout, or nearly: those that lie least deep.

    Args:
        tree: A folder of data sets, or an archive.
        sure: It is an archive of CINIC-10. Otherwise a folder says so itself: the tree, or one with cinic in its name.
        deepest: The most folders above the splits.

    Raises:
        LabError: A folder that has to be looked into cannot be read.
    """
    level = [""]
    for _ in range(deepest + 1):
        found, below = [], []
        for path in level[:MOST_FOLDERS]:
            meant = sure or not path or "cinic" in path.lower()
            try:
                if is_data_set(tree, path, sure=meant):
                    found.append(path)
                below += [_join(path, name) for name in tree.list(path)[0] if not is_hidden(name)]
            except LabError:
                if meant:
                    raise
        if found:
            return [path for path in found if "cinic" in path.lower()] or found
        level = [path for path in below if path != "packed"]
    return []


def survey(tree: Tree, top: str = "") -> tuple[Listing, str]:
    """Lists all images below a folder in CINIC-10's layout.

    Returns:
        The images, and in words what was left out.

    Raises:
        LabError: A split or class is missing or empty, there is a class that CINIC-10 does not have, or a folder cannot
            be read.
    """
    left_out, listing = LeftOut(), {}
    _check_splits(tree, top)
    left_out.add("outside train|valid|test", [path for path in tree.list_outside(top) if is_image(path)])
    for split in SPLITS:
        listing[split] = list_split(tree, _join(top, split), left_out)
        _check_classes(tree, _join(top, split), listing[split], left_out)
    return listing, left_out.describe()


def list_split(tree: Tree, path: str, left_out: LeftOut) -> dict[str, list[str]]:
    """Lists the images of one split, class by class, and counts what is not taken.

    Raises:
        LabError: A folder cannot be read.
    """
    listing = {}
    split = path.rpartition("/")[2]
    classes, files = tree.list(path)
    left_out.add("outside the classes' folders", [f"{split}/{name}" for name in files if is_image(name)])
    left_out.add_others(split, files)
    for class_name in classes:
        place, below = _join(path, class_name), [class_name]
        if not is_hidden(class_name):
            below, files = tree.list(place)
            listing[class_name] = [file for file in files if is_image(file)]
            if len(listing[class_name]) < len(files):
                left_out.add_others(f"{split}/{class_name}", files)
            below = [_join(class_name, name) for name in below]
        for name in below:
            reason = HIDDEN if is_hidden(name.rpartition("/")[2]) else "in folders below a class"
            left_out.add(reason, [f"{split}/{file}" for file in _list_files(tree, _join(path, name), name)])
    return listing


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _count_classes(names: Sequence[str]) -> int:
    return len({name.casefold() for name in names} & {*CLASS_NAMES})


def _list_files(tree: Tree, path: str, shown: str = "") -> list[str]:
    """Lists the files below a folder, as ``shown``/…; not through links, which may lead in a circle."""
    shown = shown or path
    try:
        folders, files = tree.list(path, follow=False)
    except LabError:  # it may not be read, or is a link that leads nowhere
        return [shown]
    found = [f"{shown}/{name}" for name in files if name not in STRAY]
    return sum((_list_files(tree, _join(path, name), f"{shown}/{name}") for name in folders), found)


def _check_splits(tree: Tree, top: str) -> None:
    folders, place = tree.list(top)[0], tree.where / top
    missing = [split for split in SPLITS if split not in folders]
    if not missing:
        return
    near = {split: name for name in folders if (split := read_split(name)) in missing}
    cause = "the folder was copied or unpacked in part"
    fix = f"{make_command('import CINIC-10.tar.gz')}, or restore the folder train|valid|test/<class>/*.png"
    if near:
        names = ", ".join(f"'{clean_name(name, 40)}' is {split!r} here" for split, name in near.items())
        cause = f"the splits have other names: {names}"
        fix = tree.rename([(_join(top, name), _join(top, split)) for split, name in near.items()])
    elif missing == ["valid"] and all(_count_classes(tree.list(_join(top, one))[0]) == 10 for one in ("train", "test")):
        cause = "CINIC-10's enlarged set has none, since its train holds those pictures, too; or the copy is not whole"
        fix = f"name the set that it was made from, or restore valid: {make_command('import CINIC-10.tar.gz')}"
    elif _count_classes(folders):
        cause = "the classes lie right in this folder, and not in train, valid and test"
        if read_split(place.name):
            fix = f"name the folder above it, which has all three splits: export LAB_DATA={quote(place.parent)}"
    several = len(missing) > 1
    what = f"The split{'s' * several} {', '.join(map(repr, missing))} {'are' if several else 'is'} missing."
    raise LabError(what, where=clean_name(place if several else place / missing[0]), cause=cause, fix=fix)


def _check_classes(tree: Tree, path: str, listing: dict[str, list[str]], left_out: LeftOut) -> None:
    """Refuses a split that does not have exactly the ten classes, each with at least one image."""
    split, where = path.rpartition("/")[2], tree.where / path
    missing = [name for name in CLASS_NAMES if name not in listing]
    if not listing and (flat := [name for name in tree.list(path)[1] if is_image(name)]):
        raise LabError(
            f"The split {split!r} has {len(flat):,} images, and no folders of classes.",
            where=clean_name(where),
            cause="the labs read an image's class from the name of its folder",
            fix=f"sort them by their labels into {split}/<class>/ ({', '.join(CLASS_NAMES)})",
        )
    others = [name for name in listing if name not in CLASS_NAMES]
    if others:
        near = {}
        for name in others:
            for match in difflib.get_close_matches(name.casefold(), missing, 1, 0.7):
                near.setdefault(match, name)
        more = f"; others: {clean_name(', '.join(others[1:]), 300)}" if others[1:] else ""
        more += f"; missing: {', '.join(missing)}" if missing else ""
        raise LabError(
            f"The folder '{clean_name(others[0], 40)}' in {split} is none of CINIC-10's ten classes.",
            where=clean_name(where / others[0], 1000),
            cause="a folder of your own lies among the classes, or a class has another name (CINIC-10 has "
            + ", ".join(CLASS_NAMES) + f"){more}",
            fix=tree.rename([(_join(path, name), _join(path, match)) for match, name in near.items()])
            or "take that folder out, or give it the class's name",
        )  # fmt: skip
    for name in CLASS_NAMES:
        if not listing.get(name):
            cause = (
                f"the folder was copied or unpacked in part: it has {len(CLASS_NAMES) - len(missing)} of ten classes"
            )
            fix = f"{make_command('import CINIC-10.tar.gz')}, or restore the folder train|valid|test/<class>/*.png"
            if name in listing and left_out.describe():
                cause, fix = left_out.describe(), f"put pictures right into that folder ({', '.join(SUFFIXES)})"
            what = f"The class {name!r} in {split} {'has no images' if name in listing else 'is missing'}."
            raise LabError(what, where=clean_name(where / name), cause=cause, fix=fix)
