"""The leaderboard: laps of the same code are one entry, whose score is the median of all of them.

Running the same code with many seeds and showing the best lap gains nothing: each lap counts, also one that failed or
was interrupted. An entry with fewer than three laps is provisional and below the others. A change of the code, however
small, begins a new entry; the page therefore also shows how many laps and entries a name has.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.race import images
from course.race.evaluate import evaluate
from course.race.leagues import LEAGUES
from course.race.records import CODE, CODE_BYTES, RECORD, WEIGHTS, read_record
from course.report.pages import shorten
from lab_common import LabError
from lab_common.files import read_bounded
from lab_utils import data

LAPS = 3  # from which on an entry has a place
LEVELS = 3  # folders between a folder that somebody names and the record of a lap
MOST_LAPS = 2000
# Another device sums in another order, and a few images lie just between two classes.
ROUNDING = 0.005


@dataclass(frozen=True)
class Lap:
    """A lap that somebody recorded.

    Attributes:
        folder: The lap's folder, in its race folder.
        label: Its race folder and its own, as they are shown.
        record: What the judge wrote; types and ranges are checked, texts are untrusted.
        code: The text of each file of its code.
    """

    folder: Path
    label: str
    record: dict[str, Any]
    code: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """All laps of the same code, by the same name, in one race folder, on the same class of hardware.

    Attributes:
        laps: At least one, from the best to the worst.
    """

    laps: tuple[Lap, ...]

    @property
    def record(self) -> dict[str, Any]:
        """The record of the median lap, of two in the middle the better one; or of the worst one that ended."""
        ended = sum(not lap.record["failed"] for lap in self.laps)
        return self.laps[min((len(self.laps) - 1) // 2, max(ended, 1) - 1)].record

    @property
    def ended(self) -> bool:
        """True if any of its laps did."""
        return not all(lap.record["failed"] for lap in self.laps)

    @property
    def timed(self) -> bool:
        """True if the time to a threshold is the score; else it is the top-1 within a time."""
        return self.record["threshold"] is not None

    @property
    def provisional(self) -> bool:
        """True if it has too few laps for a place."""
        return len(self.laps) < LAPS

    @property
    def scores(self) -> list[float]:
        """The score of each lap, the best first: seconds, infinite without the threshold; or top-1."""
        return [score_lap(lap.record) for lap in self.laps]

    @property
    def score(self) -> float:
        """The median over all laps."""
        return statistics.median(self.scores)

    @property
    def order(self) -> tuple:
        """The key by which entries of one table are sorted."""
        seconds = self.median(lambda record: record["seconds"]) or math.inf
        return self.provisional, self.score if self.timed else -self.score, seconds, self.record["name"]

    def median(self, get: Callable[[dict[str, Any]], float | None]) -> float | None:
        """The median of a number over the laps that have it; None if none has."""
        values = [value for lap in self.laps if (value := get(lap.record)) is not None]
        return statistics.median(values) if values else None


def score_lap(record: dict[str, Any]) -> float:
    """Seconds to the threshold, infinite if it was not reached; or the top-1 within a time."""
    if record["threshold"] is None:
        return record["top1"] or 0.0
    return record["seconds"] if record["reached"] else math.inf


def read_entries(folders: Sequence[Path], *, evaluate: bool = False) -> tuple[list[Entry], list[str]]:
    """Reads race folders, whoever wrote them.

    Args:
        folders: Race folders, or folders that hold several at most two levels below.
        evaluate: True to evaluate all saved weights again, for which the data set has to be here.

    Returns:
        The entries, the best of a table first; and one line for each lap that is refused, which says why.
    """
    laps, refused, seen = [], [], set()
    for folder in folders:
        found = sorted(path for level in range(1, LEVELS + 1) for path in folder.glob("*/" * level + RECORD))
        if not found:
            refused.append(f"{shorten(folder, 100)}: there are no laps in it")
        if len(found) > MOST_LAPS:
            refused.append(f"{shorten(folder, 100)}: only {MOST_LAPS} of its laps are read")
        for path in found[:MOST_LAPS]:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            label = shorten(f"{path.parents[1].relative_to(folder.parent)}/{path.parent.name}", 90)
            try:
                record = read_record(path.parent)
                lap = Lap(path.parent, label, record, _read_code(path.parent, record))
                if evaluate and not record["failed"]:
                    _evaluate_again(lap)
                laps.append(lap)
            except (OSError, ValueError) as error:
                words = f"its record: {error.strerror}" if isinstance(error, OSError) else error
                refused.append(f"{label}: {shorten(words, 300)}")
    return make_entries(laps), refused


def _read_code(folder: Path, record: dict[str, Any]) -> dict[str, str]:
    """Returns the text of each file of a lap's code.

    Raises:
        ValueError: A file is missing, too large, or not text.
    """
    code = {}
    for name in record["code"]:
        try:
            code[name] = read_bounded(folder / CODE / name, CODE_BYTES, follow=False).decode()
        except (OSError, ValueError) as error:
            raise ValueError(f"its code {shorten(name, 40)} cannot be read") from error
    if record["script"] not in code:
        raise ValueError("its script is not in its code")
    return code


def _evaluate_again(lap: Lap) -> None:
    """Evaluates the weights of a lap once more, on the same images.

    Raises:
        ValueError: The record is wrong, or it cannot be tested; the message says why.
    """
    told = lap.record["data"]
    if told["name"] not in images.NAMES:  # nobody is made to fetch another data set
        raise ValueError("it cannot be evaluated again: the race does not use its data set")
    try:
        dataset = data.load(told["name"])
    except LabError as error:
        raise ValueError(f"it cannot be evaluated again: {error.what}") from error
    classes = len(dataset.class_names)
    if (told["classes"], told["valid"]) != (classes, len(dataset.valid)):
        raise ValueError("it cannot be evaluated again: its data set differs from the one on this machine")
    if isinstance(told["seed"], float) or (told["seed"] is None) != (images.choose_seed(dataset) is None):
        raise ValueError("its images were not chosen by the judge")
    if sorted(told["mapping"]) != list(range(classes)):
        raise ValueError("its classes were not numbered by the judge")
    (found,) = evaluate([lap.folder / WEIGHTS], images.find_images(dataset, told["mapping"], told["seed"]))
    if isinstance(found, str):
        raise ValueError(f"its weights cannot be evaluated: {found}")
    net, top1 = found
    if net != lap.record["net"] or abs(top1 - lap.record["top1"]) > ROUNDING:
        raise ValueError(f"its weights fit the network {net} and reach {top1:.1%} top-1, the record says otherwise")


def make_entries(laps: Iterable[Lap]) -> list[Entry]:
    """Groups laps by all that makes them comparable, and sorts them."""
    groups = defaultdict(list)
    for lap in laps:
        # Of one race folder: otherwise a stranger's bad laps could take another's name.
        groups[_find_key(lap.record), lap.folder.parent].append(lap)
    entries: list[Entry] = []
    for group in groups.values():
        sign = 1 if group[0].record["threshold"] is not None else -1
        group.sort(key=lambda lap: (sign * score_lap(lap.record), lap.record["seconds"] or math.inf, lap.label))
        entries.append(Entry(tuple(group)))
    return sorted(entries, key=_find_place)


def _find_place(entry: Entry) -> tuple:
    """Returns an entry's place on the page: data set, league, class, then its place in this table."""
    *size, league, threshold, within = find_section(entry.record)
    rule = [*LEAGUES, ""].index(league), threshold or 0, within or 0
    return *size, *rule, entry.record["class"], entry.order


def find_section(record: dict[str, Any]) -> tuple:
    """Returns what the laps of a section have in common: data set, league, threshold, and time."""
    data = record["data"]
    size = data["name"], data["train"], data["valid"], data["classes"]
    # Not the league's name alone: a record may name an easier threshold.
    return *size, record["league"], record["threshold"], record["within"]


def _find_key(record: dict[str, Any]) -> tuple:
    """Returns what the laps of one entry have in common."""
    code = tuple(sorted(record["code"].items()))
    start = record["script"], tuple(record["args"]), record["processes"]
    return *find_section(record), record["class"], record["name"], code, start
