"""Finds the laps in race folders, and refuses those whose record or whose place in the chain is not whole."""

from __future__ import annotations

import errno
import hashlib
import heapq
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course.race.board_record import check_numbers, read_record
from course.race.records import CODE, CODE_BYTES, NOTHING, RECORD, WEIGHTS, WEIGHTS_BYTES
from course.report.pages import shorten
from lab_common.files import read_bounded

MOST_LAPS = 2000  # in all; each folder that somebody names has the same share
# In one folder, and on one level below a folder that somebody names.
MOST_FOLDERS = 1000
MOST_FILES = 10_000  # in one folder, with the folders in it
LEVELS = 2
MISSING, FORKED = "a lap before it is missing or was changed", "two laps name the same lap before them"


@dataclass(frozen=True)
class Lap:
    """A lap whose record is whole; where its code or weights are not, it counts as one that did not end.

    Attributes:
        folder: Where it lies, in its race folder.
        label: Its race folder and its own, as they are shown.
        record: What the judge wrote; types and ranges are checked, texts are as hostile as ever.
        code: The text of each file of its code.
    """

    folder: Path
    label: str
    record: dict[str, Any]
    code: dict[str, str]


def read_laps(folders: Sequence[Path]) -> tuple[list[Lap], list[str]]:
    """Reads all laps of race folders, or of folders that hold race folders at most two levels below.

    Returns:
        The laps, and one line for each that is refused, and for each folder that has no laps.
    """
    laps, refused = [], []
    roots = [*dict.fromkeys(map(_resolve, folders))]
    races, cuts = _find_races(roots)
    owners = {race: next(root for root in roots if race.is_relative_to(root)) for race in races}
    for folder in folders:
        if not any(race.is_relative_to(_resolve(folder)) for race in races):
            refused.append(f"{shorten(folder, 100)}: there are no laps in it")
    common = os.path.commonpath([root.parent for root in roots]) if roots else ""
    names = {folder: shorten(os.path.relpath(folder, common), 50) for folder in [*races, *cuts]}
    refused += [f"{names[folder]}: {why}" for folder, why in cuts.items()]
    for race, most in _share_laps(races, owners, len(roots)).items():
        if len(races[race]) > most:
            refused.append(f"{names[race]}: only {most} of its laps are read: {MOST_LAPS} is the most in all")
        whole, lines = _read_race(names[race], map(Path, races[race][:most]))
        laps += whole
        refused += lines
    counted, lines = _refuse_copies(laps, owners)
    return counted, refused + lines


def _refuse_copies(laps: Iterable[Lap], owners: dict[Path, Path]) -> tuple[list[Lap], list[str]]:
    """Refuses laps with equal weights; ``owners`` has the named folder of each race folder."""
    counted, refused = [], []
    alike = defaultdict(list)
    for lap in laps:
        alike[lap.record["weights"] or lap.folder].append(lap)
    # Two laps that train do not end with the same weights: order and labels of the images are drawn anew for each.
    # Who copied from whom, a hash does not tell.
    for lap in laps:
        # A whole folder that was copied at two times has the very same records, and stands on the board twice.
        same = alike[lap.record["weights"] or lap.folder]
        others = [one for one in same if one.record["sha256"] != lap.record["sha256"]]
        if others:
            why = f"its weights are also those of {others[0].label}"
            refused.append(f"{lap.label}: {why}")
            # A stranger may have copied them into his folder; but nobody gets rid of laps of his own in this way.
            if any(owners[one.folder.parent] == owners[lap.folder.parent] for one in others):
                counted.append(_fail(lap, why))
        else:
            counted.append(lap)
    return counted, refused


def _fail(lap: Lap, why: str) -> Lap:
    """A lap that counts as one that did not end: whoever could take it away by a changed file would choose his laps."""
    return replace(lap, record=lap.record | NOTHING | {"failed": why})


def _resolve(path: Path) -> Path:
    # Path.resolve raises for links in a circle.
    return Path(os.path.realpath(path))


def _find_races(roots: Iterable[Path]) -> tuple[dict[Path, list[str]], dict[Path, str]]:
    """Each race folder once, with the folders of its laps; and what is not looked into, by its folder."""
    races: dict[Path, list[str]] = {}
    cuts: dict[Path, str] = {}
    for root in roots:
        level = [root]
        for depth in range(LEVELS + 1):
            below: dict[Path, list[str]] = {}
            for folder in level:
                inner, why = _list_folders(folder)
                if why:
                    cuts[folder] = why
                laps = {path for path in inner if os.path.lexists(f"{path}/{RECORD}")}
                if laps:
                    races[folder] = sorted(laps)
                # Also beside laps: else one record among the folders of all teams would hide these.
                below[folder] = [path for path in inner if path not in laps]
            if depth == LEVELS:
                break
            level = []
            for (folder, inner), most in zip(
                below.items(), _share(map(len, below.values()), MOST_FOLDERS), strict=True
            ):
                level += map(Path, inner[:most])
                if len(inner) > most:
                    cuts[folder] = f"only the first {most} of its folders are looked into"
    return races, cuts


def _share(sizes: Iterable[int], most: int) -> list[int]:
    """Divides what there is: who wants little gets it, and all others get the same."""
    wanted = list(sizes)
    given, left = [0] * len(wanted), len(wanted)
    for place in sorted(range(left), key=wanted.__getitem__):
        given[place] = min(wanted[place], most // left)
        most, left = most - given[place], left - 1
    return given


def _share_laps(races: dict[Path, list[str]], owners: dict[Path, Path], roots: int) -> dict[Path, int]:
    """How many laps of each race folder are read; in a named folder each folder, such as a team's, has the same."""
    teams: dict[Path, dict[Path, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for race, root in owners.items():
        teams[root][root.joinpath(*race.relative_to(root).parts[:1])].append(race)
    most = {}
    for groups in teams.values():
        shares = _share([sum(len(races[race]) for race in group) for group in groups.values()], MOST_LAPS // roots)
        for group, share in zip(groups.values(), shares, strict=True):
            most |= zip(group, _share([len(races[race]) for race in group], share), strict=True)
    return most


def _list_folders(folder: Path) -> tuple[list[str], str]:
    """The first folders in a folder by name, without links; and which are left out, if any."""
    try:
        with os.scandir(folder) as found:
            some = itertools.islice(found, MOST_FILES)
            inner = (one.path for one in some if one.is_dir(follow_symlinks=False))
            first = heapq.nsmallest(MOST_FOLDERS + 1, inner)
            if next(found, None) is not None:
                return [], f"it holds more than {MOST_FILES} files, and nothing of it is read"
    except (OSError, ValueError):
        return [], ""
    more = f"only the first {MOST_FOLDERS} of its folders are looked into"
    return first[:MOST_FOLDERS], more if len(first) > MOST_FOLDERS else ""


def _read_race(name: str, folders: Iterable[Path]) -> tuple[list[Lap], list[str]]:
    """Reads the laps of one race folder; the lines say which are refused, and why."""
    records, problems = {}, {}
    for folder in folders:
        try:
            records[folder] = read_record(folder)
        except (OSError, ValueError) as error:
            problems[folder] = _tell(error)
    broken = _check_chain(list(records.values()))
    laps = []
    for folder, record in records.items():
        try:
            if why := broken.get(record["sha256"]):
                raise ValueError(why)
            check_numbers(record)
        except (OSError, ValueError) as error:
            problems[folder] = _tell(error)
            continue
        lap = Lap(folder, f"{name}/{shorten(folder.name, 40)}", record, {})
        try:
            laps.append(replace(lap, code=_read_files(folder, record)))
        except (OSError, ValueError) as error:
            problems[folder] = _tell(error)
            laps.append(_fail(lap, problems[folder]))
    return laps, [f"{name}/{shorten(folder.name, 40)}: {why}" for folder, why in sorted(problems.items())]


def _tell(error: OSError | ValueError) -> str:
    return shorten(f"its record: {error.strerror}" if isinstance(error, OSError) else error, 100)


def _check_chain(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Follows the chain of a race folder from its first lap.

    Returns:
        Why a record is not part of it, by the record's hash. Nothing is said of a lap that is taken away from the end:
        no other one names it.
    """
    later = defaultdict(list)
    for record in records:
        later[record["previous"]].append(record["sha256"])
    end = ""
    while len(later[end]) == 1:
        end = later.pop(end)[0]
    reasons = dict.fromkeys(itertools.chain(*later.values()), MISSING)
    forked = list(later[end])
    while forked:
        one = forked.pop()
        reasons[one] = FORKED
        forked += later.pop(one, [])
    return reasons


def _read_files(folder: Path, record: dict[str, Any]) -> dict[str, str]:
    """Returns the code of a lap; it and the weights are those that the record names.

    Raises:
        ValueError: A file is another one, or cannot be read, or is no regular file.
    """
    code, left = {}, CODE_BYTES
    if (folder / CODE).is_symlink():
        raise ValueError("its code: the folder is a symbolic link")
    for name, digest in record["code"].items():
        shown = shorten(name, 40)
        try:
            content = read_bounded(folder / CODE / name, left, follow=False)
            code[name] = content.decode()
        except OSError as error:
            large = f"its code has more than {CODE_BYTES // 1024} KiB"
            raise ValueError(large if error.errno == errno.EFBIG else f"its {shown}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"its {shown} is no text") from error
        left -= len(content)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"its {shown} is not the code that the record names")
    if record["failed"]:
        return code
    try:
        weights = read_bounded(folder / WEIGHTS, WEIGHTS_BYTES, follow=False)
    except OSError as error:
        raise ValueError(f"its weights: {error.strerror}") from error
    if hashlib.sha256(weights).hexdigest() != record["weights"]:
        raise ValueError("its weights are not those that the record names")
    return code
