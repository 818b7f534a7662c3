"""The leaderboard: laps of the same code are one entry, whose score is the median of all of them.

Whoever runs the same code with many seeds and shows the best lap gains nothing: each lap counts, also one that failed
or was interrupted, and none can be taken out of the middle of a race folder unseen, since each record names the one
before. Another race folder is not seen. An entry with fewer than three laps is provisional and stands below the others.
A change of the code, however small, begins a new entry; the page therefore also says how many laps and entries a name
has.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.race.board_laps import Lap, read_laps
from course.race.images import evaluate_again
from course.race.leagues import LEAGUES
from course.race.records import WEIGHTS

LAPS = 3  # from which on an entry has a place


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
        return self.laps[min(self._middle, max(self._ended, 1) - 1)].record

    @property
    def shown(self) -> str:
        """Which lap :attr:`record` is."""
        return "median lap" if self._middle < self._ended else "worst lap that ended"

    @property
    def _middle(self) -> int:
        return (len(self.laps) - 1) // 2

    @property
    def _ended(self) -> int:
        return sum(not lap.record["failed"] for lap in self.laps)

    @property
    def ended(self) -> bool:
        """True if any of its laps did."""
        return self._ended > 0

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
        """The median over all laps: the luckiest of many, as with many seeds, moves it as little as any other one."""
        return statistics.median(self.scores)

    @property
    def order(self) -> tuple:
        """The key by which entries of one table are sorted."""
        sign = 1 if self.timed else -1
        seconds = self.median(lambda record: record["seconds"]) or math.inf
        return self.provisional, sign * self.score, seconds, self.record["name"]

    def median(self, get: Callable[[dict[str, Any]], float | None]) -> float | None:
        """The median of a number over the laps that have it; None where none has."""
        values = [value for lap in self.laps if (value := get(lap.record)) is not None]
        return statistics.median(values) if values else None


def score_lap(record: dict[str, Any]) -> float:
    """Seconds to the threshold, infinitely many where it was not reached; or the top-1 within a time, if any."""
    if record["threshold"] is None:
        return record["top1"] or 0.0
    return record["seconds"] if record["reached"] else math.inf


def read_entries(folders: Sequence[Path], *, evaluate: bool = False) -> tuple[list[Entry], list[str]]:
    """Reads race folders, whoever wrote them.

    Args:
        folders: Race folders, or folders that hold several at most two levels below. Links in them are not followed,
            and at most 2,000 laps are read: the same share of each named folder, and in it of each folder.
        evaluate: Whether to evaluate all saved weights again, for which the data set has to be here.

    Returns:
        The entries, the best of a table first; and one line for each lap that is refused, which says why.
    """
    laps, refused = read_laps(folders)
    ended = [lap for lap in laps if evaluate and not lap.record["failed"]]
    # By the folder: two labels may look the same, since they are cut.
    wrong = {lap.folder: why for lap in ended if (why := evaluate_again(lap.record, lap.folder / WEIGHTS))}
    refused += [f"{lap.label}: {wrong[lap.folder]}" for lap in ended if lap.folder in wrong]
    return make_entries(lap for lap in laps if lap.folder not in wrong), refused


def make_entries(laps: Iterable[Lap]) -> list[Entry]:
    """Groups laps by all that makes them comparable, and sorts them."""
    groups = defaultdict(list)
    for lap in laps:
        # Of one race folder: else a stranger's bad laps could take another's name.
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
    """Returns what the laps of one entry have in common; section and class first."""
    code = tuple(sorted(record["code"].items()))
    start = record["script"], tuple(record["args"]), record["processes"]
    return *find_section(record), record["class"], record["name"], code, start
