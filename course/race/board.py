"""The leaderboard: laps of the same code are one entry, whose score is the median of all of them.

Running the same code with many seeds and showing the best lap gains nothing: each lap counts, also one that failed or
was interrupted. An entry with fewer than three laps is provisional and below the others. A change of the code, however
small, begins a new entry; the page therefore also shows how many laps and entries a name has.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.diff import show_diff
from course.race.records import CODE, CODE_BYTES, RECORD, read_record
from course.report.pages import escape_line, make_page, make_table, shorten
from lab_common.files import read_bounded, write_atomically
from lab_common.text import clean, cut_lines

LAPS = 3  # from which on an entry has a place
LEVELS = 3  # folders between a folder that somebody names and the record of a lap
HONOUR = 0.95  # busy share of the devices
NOTES = (
    "The score of an entry is the <strong>median of all its laps</strong>: all laps of the same code with the same "
    "arguments, by the same name. One lucky lap does not help. A lap that failed or was interrupted counts as one that "
    f"did not reach its goal. An entry with fewer than {LAPS} laps is provisional and has no place.",
    "Compare entries <strong>within one table only</strong>. Each table has one data set, one league, and one class of "
    "hardware.",
    "★ is the bar of honour: the devices were busy for 95 % of the training or more.",
)
HEAD = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    "<style>body{max-width:80rem;overflow-wrap:anywhere}td{overflow-wrap:normal}table{display:block;overflow-x:auto}"
    "summary{cursor:pointer;padding:.5rem;background:#f3f5f7}</style>"
)


@dataclass(frozen=True)
class Lap:
    """A lap that somebody recorded: types and ranges in its record are checked, and all texts are untrusted."""

    label: str  # its race folder and its own, as they are shown
    record: dict[str, Any]
    code: str  # the text of its script


@dataclass(frozen=True)
class Entry:
    """All laps of the same code, by the same name, in one race folder, on the same class of hardware."""

    laps: tuple[Lap, ...]  # at least one, from the best to the worst

    @property
    def record(self) -> dict[str, Any]:
        """The record of the median lap, of two in the middle the better one."""
        return self.laps[(len(self.laps) - 1) // 2].record

    @property
    def provisional(self) -> bool:
        """True if it has too few laps for a place."""
        return len(self.laps) < LAPS

    @property
    def score(self) -> float:
        """The median over all laps: seconds, infinite without the threshold."""
        return statistics.median(score_lap(lap.record) for lap in self.laps)

    def median(self, key: str) -> float | None:
        """The median of a number over the laps that have it; None if none has."""
        values = [lap.record[key] for lap in self.laps if lap.record[key] is not None]
        return statistics.median(values) if values else None


def score_lap(record: dict[str, Any]) -> float:
    """Seconds to the threshold, infinite if it was not reached."""
    return record["seconds"] if record["reached"] else math.inf


def read_entries(folders: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """Reads race folders, whoever wrote them.

    Args:
        folders: Race folders, or folders that hold several at most two levels below.

    Returns:
        The entries, the best of a table first; and one line for each lap that is refused, which says why.
    """
    groups, refused = defaultdict(list), []
    for folder in folders:
        found = sorted(path.parent for level in range(1, LEVELS + 1) for path in folder.glob("*/" * level + RECORD))
        if not found:
            refused.append(f"{shorten(folder, 100)}: there are no laps in it")
        for path in found:
            label = shorten(f"{path.parent.relative_to(folder.parent)}/{path.name}", 90)
            try:
                record = read_record(path)
                lap = Lap(label, record, _read_code(path, record["script"]))
                # Of one race folder: otherwise a stranger's bad laps could take another's name.
                same = path.parent, record["name"], record["code"], record["script"]
                groups[*same, *record["args"], record["processes"], _find_table(record)].append(lap)
            except (OSError, ValueError) as error:
                words = f"its record: {error.strerror}" if isinstance(error, OSError) else error
                refused.append(f"{label}: {shorten(words, 300)}")
    for group in groups.values():
        group.sort(key=lambda lap: (score_lap(lap.record), lap.record["seconds"] or math.inf, lap.label))
    entries = [Entry(tuple(group)) for group in groups.values()]
    entries.sort(key=lambda one: (_find_table(one.record), one.provisional, one.score, one.record["name"]))
    return entries, refused


def _read_code(folder: Path, script: str) -> str:
    """Returns the text of a lap's script.

    Raises:
        ValueError: It is missing, too large, or not text.
    """
    try:
        return read_bounded(folder / CODE / script, CODE_BYTES, follow=False).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"its code {shorten(script, 40)} cannot be read") from error


def _find_table(record: dict[str, Any]) -> tuple:
    """Returns what the laps of a table have in common: data set, league, threshold, and class of hardware."""
    data = record["data"]
    # Not the league's name alone: a record may name an easier threshold.
    return data["name"], data["train"], data["valid"], record["threshold"], record["league"], record["class"]


def write_board(entries: Sequence[Entry], refused: Sequence[str], path: Path, *, baseline: str) -> None:
    """Writes the leaderboard as one page that needs no other file.

    Args:
        entries: As :func:`read_entries` returns them.
        refused: One line for each lap that is not on the board.
        path: The page; its folder is made.
        baseline: The text of the script that each entry's script is compared with.

    Raises:
        OSError: The file cannot be written.
    """
    parts = [f'<ul class="notes">{"".join(f"<li>{note}</li>" for note in NOTES)}</ul>']
    for _, group in itertools.groupby(entries, key=lambda entry: _find_table(entry.record)):
        group = list(group)
        record, data, rows = group[0].record, group[0].record["data"], [_list_cells(entry, group) for entry in group]
        goal = f"Reach {record['threshold']:.0%} top-1 in the least time."
        counts = f"{data['train']:,} training images, {data['valid']:,} validation images"
        parts.append(f"<h2>{escape_line(data['name'])}: {record['league']}</h2><p>{goal} {counts}.</p>")
        parts.append(make_table(record["class"], [tuple(row.values()) for row in rows], tuple(rows[0])))
        parts += [_describe_entry(entry, group, baseline) for entry in group]
    if refused:
        lines = "".join(f"<li>{escape_line(line)}</li>" for line in refused)
        parts.append(f"<h2>Refused</h2><p>These laps do not count:</p><ul>{lines}</ul>")
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(make_page("The race", parts, head=HEAD).encode())


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _seconds(seconds: float) -> str:
    return "not reached" if math.isinf(seconds) else f"{seconds:.1f} s"


def _find_place(entry: Entry, group: Sequence[Entry]) -> str:
    return "–" if entry.provisional or math.isinf(entry.score) else str(1 + group.index(entry))


def _list_cells(entry: Entry, group: Sequence[Entry]) -> dict[str, str]:
    """Returns the text of each cell by its column."""
    record, count = entry.record, len(entry.laps)
    best, worst = (_seconds(score_lap(entry.laps[at].record)) for at in (0, -1))
    busy, speed_up = entry.median("busy"), entry.median("speed_up")
    return {
        "place": _find_place(entry, group),
        "name": record["name"] or "(no name)",
        "median seconds": _seconds(entry.score),
        "best to worst": f"{best} to {worst}",
        "laps": f"provisional, {count} of {LAPS} laps" if entry.provisional else str(count),
        "top-1": _percent(entry.median("top1")),
        "device-seconds": f"{entry.median('device_seconds') or 0:,.0f}",
        "nodes": f"{record['nodes']:,}",
        "speed-up": "–" if speed_up is None else f"{speed_up:.2f}",
        "busy": f"{'★ ' if (busy or 0) >= HONOUR else ''}{_percent(busy)}",
    }


def _describe_entry(entry: Entry, group: Sequence[Entry], baseline: str) -> str:
    """Returns the text that is folded away below the table."""
    record, place = entry.record, _find_place(entry, group)
    same = [other for other in group if other.record["name"] == record["name"]]
    count = sum(len(other.laps) for other in same)
    facts = {
        "started as": " ".join([record["script"], *record["args"]]),
        "network": record["net"] or "–",
        "processes": f"{record['processes']:,} on {record['nodes']:,} node{'s' * (record['nodes'] > 1)}",
        "torch": record["versions"]["torch"],
        "this name in this table": f"{count} laps, {len(same)} {'entry' if len(same) == 1 else 'entries'}",
    }
    name = escape_line(record["name"]) or "(no name)"
    return "\n".join(
        [
            f"<details><summary>{'' if place == '–' else f'{place}. '}{name}: script and laps</summary>",
            make_table("Hardware and versions", facts.items()),
            make_table("Laps, the best first", map(_list_lap, entry.laps), ["lap", "seconds", "top-1", "began (UTC)"]),
            *_show_code(entry, baseline),
            "</details>",
        ]
    )


def _list_lap(lap: Lap) -> tuple[str, ...]:
    one = lap.record
    if one["failed"]:
        return lap.label, "–", f"failed: {one['failed']}", one["began"][:16]
    end = f"{_percent(one['top1'])}{'' if one['reached'] else ', not reached'}"
    return lap.label, f"{one['seconds']:.1f}", end, one["began"][:16]


def _show_code(entry: Entry, baseline: str) -> Iterator[str]:
    """Shows the script as a diff; neither a line nor the whole is too long for a page."""
    old, new = (
        cut_lines(clean("\n".join(text.splitlines()).expandtabs(4)), first=400, last=100, longest=160)
        for text in (baseline, entry.laps[0].code)
    )
    yield f"<h4>Changes in <code>{escape_line(entry.record['script'])}</code></h4>"
    if old == new:
        yield "<p>None: it is the baseline's script.</p>"
    else:
        yield f"<p>Compared with the baseline: + is new, − is gone.</p>{show_diff(old, new).data}"
