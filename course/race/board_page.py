"""The page of the leaderboard: tables by data set, league and hardware, and the details of each entry."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from course.diff import show_diff
from course.race.board import LAPS, Entry, find_section
from course.race.board_figures import draw_legend, draw_shares
from course.race.board_style import HEAD
from course.report.pages import escape_line, make_page, make_table, shorten
from lab_common import LabError
from lab_common.files import write_atomically
from lab_common.text import clean, cut_lines

HONOUR = 0.95  # busy share of the devices
WORDS = ("place", "name", "laps", "sealed")  # columns that are not numbers to compare
MOST_NODES = 4  # whose utilisation is drawn
# Of all details together; those of an entry have about 50 kB.
PAGE_CHARACTERS = 24 * 2**20
NOTES = (
    "The score of an entry is the <strong>median of all its laps</strong>: all laps of the same code with the same "
    "arguments, by the same name. One lucky lap does not help. A lap that failed or was interrupted counts as one that "
    "did not reach its goal. An entry with fewer than {laps} laps is provisional and has no place.",
    "Compare entries <strong>within one table only</strong>. Each table has one data set, one league, and one class of "
    "hardware.",
    "{star} is the bar of honour: the devices were busy for 95 % of the training or more.",
    "<strong>Hashes find changed files:</strong> a lap whose files do not match its record counts as one that did not "
    "end, and no lap counts after a missing one. Hashes cannot find a lap that was deleted before the next one, nor a "
    "record that was written anew as a whole: run that entry again.",
)
STAR = '<span class="honour"><span aria-hidden="true">★</span> 95 %</span>'


def write_board(entries: Sequence[Entry], refused: Sequence[str], path: Path, *, baseline: str) -> None:
    """Writes the leaderboard as one page that needs no other file.

    Args:
        entries: As :func:`read_entries` returns them.
        refused: One line for each lap that is not on the board.
        path: The page; its folder is made.
        baseline: The text of the script that each entry's script is compared with.

    Raises:
        LabError: The file cannot be written.
    """
    page = make_board(entries, refused, baseline=baseline)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(page.encode())
    except OSError as error:
        cause, fix = error.strerror or "", "give --to FILE in a folder that you may write to"
        raise LabError("The leaderboard cannot be written.", where=shorten(path), cause=cause, fix=fix) from error


def make_board(entries: Sequence[Entry], refused: Sequence[str], *, baseline: str) -> str:
    """Returns the page; entries stand in the order of ``read_entries``."""
    notes = "".join(f"<li>{note.format(laps=LAPS, star=STAR)}</li>" for note in NOTES)
    parts = [f'<ul class="notes">{notes}</ul>']
    left = PAGE_CHARACTERS
    for _, section in itertools.groupby(entries, key=lambda entry: find_section(entry.record)):
        section = list(section)
        if any(entry.ended for entry in section):
            parts += _tell_section(section[0])
        for name, group in itertools.groupby(section, key=lambda entry: entry.record["class"]):
            group = list(group)
            if not (ranked := [entry for entry in group if entry.ended]):
                continue
            parts.append(f"<h3>{_isolate(name)}</h3>{_make_ranking(ranked)}")
            for entry in ranked:
                details = _tell_details(entry, group, baseline) if left > 0 else ""
                left -= len(details)
                parts.append(details or f"<p>{_isolate(entry.record['name'])}: no details, the page is full.</p>")
    if not entries:
        parts.append("<p>There are no laps yet.</p>")
    if failed := [entry for entry in entries if not entry.ended]:
        lines = "".join(f"<li>{_tell_failure(entry)}</li>" for entry in failed)
        parts.append(f"<h2>Without a lap that ended</h2><p>No lap of this code ended:</p><ul>{lines}</ul>")
    if refused:
        lines = "".join(f"<li>{_isolate(line)}</li>" for line in refused)
        parts.append(f"<h2>Refused</h2><p>These laps do not count, or as such that did not end:</p><ul>{lines}</ul>")
    return make_page("The race", parts, head=HEAD)


def _isolate(text: object) -> str:
    """Text of a stranger; what is written from right to left in it turns nothing around beside it."""
    return f"<bdi>{escape_line(text) or '(no name)'}</bdi>"


def _tell_failure(entry: Entry) -> str:
    lap, count = entry.laps[-1], len(entry.laps)
    last = f"{_isolate(lap.label)}, {_isolate(lap.record['script'])}: {_isolate(lap.record['failed'])}"
    return f"{_isolate(lap.record['name'])}, {count} {'lap' if count == 1 else 'laps'}; {last}"


def _tell_section(entry: Entry) -> Iterator[str]:
    record, data = entry.record, entry.record["data"]
    if entry.timed:
        title, rule = record["league"], f"Reach {_round(record['threshold'])} top-1 in the least time."
    else:
        title = f"{record['within']:g} seconds"
        rule = f"Reach the highest top-1 within {record['within']:g} seconds."
    yield f"<h2>{_isolate(data['name'])}: {escape_line(title)}</h2>"
    counts = f"{data['train']:,} training images, {data['valid']:,} validation images, {data['classes']} classes"
    yield f"<p>{rule} {counts}.</p>"


def _percent(share: float | None) -> str:
    """Rounded down: what is below 95 % does not look like it."""
    return "–" if share is None else f"{math.floor(1000 * share + 1e-6) / 10:.1f} %"


def _round(threshold: float) -> str:
    return f"{100 * threshold:.4g} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "not reached"


def _make_ranking(group: Sequence[Entry]) -> str:
    """The table of one class; on a narrow screen each row becomes a card, whose cells name themselves."""
    rows = [[("place", _find_place(entry, group)), *_list_cells(entry)] for entry in group]
    # A column that no entry of the table has is left out.
    empty = {name for index, (name, _) in enumerate(rows[0]) if all(row[index][1] == "–" for row in rows)} - {"place"}
    names = [name for name, _ in rows[0] if name not in empty]
    head = "".join(f'<th scope="col" role="columnheader"{_align(name)}>{name}</th>' for name in names)
    lines = [f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">']
    for entry, row in zip(group, rows, strict=True):
        lines.append('<tr role="row" class="provisional">' if entry.provisional else '<tr role="row">')
        for name, cell in row:
            if name == "name":
                lines.append(f'<th scope="row" role="rowheader">{cell}</th>')
            elif name not in empty:
                lines.append(f'<td role="cell"{_align(name)} data-label="{name}">{cell}</td>')
        lines.append("</tr>")
    return f'<table class="ranking" role="table">{"".join(lines)}</tbody></table>'


def _align(column: str) -> str:
    return "" if column in WORDS else ' class="number"'


def _find_place(entry: Entry, group: Sequence[Entry]) -> str:
    """The place; entries of the same score share one."""
    if entry.provisional or math.isinf(entry.score):
        return "–"
    better = sum(other.order[:2] < entry.order[:2] for other in group)
    return str(better + 1)


def _list_cells(entry: Entry) -> Iterator[tuple[str, str]]:
    """Name and HTML of each cell after the place."""
    record, count, best, worst = entry.record, len(entry.laps), entry.scores[0], entry.scores[-1]
    seconds, top1 = (entry.median(lambda record, key=key: record[key]) for key in ("seconds", "top1"))
    yield "name", _isolate(record["name"])
    if entry.timed:
        yield "median seconds", f"<strong>{_seconds(entry.score)}</strong>"
        yield "fastest to slowest", f"{_seconds(best)} to {_seconds(worst)}"
    else:
        yield "median top-1", f"<strong>{_percent(entry.score)}</strong>"
        yield "lowest to highest", f"{_percent(worst)} to {_percent(best)}"
        yield "seconds", _seconds(seconds)
    yield "laps", f"provisional, {count} of {LAPS} laps" if entry.provisional else str(count)
    if entry.timed:
        yield "top-1", _percent(top1)
    yield "device-seconds", f"{entry.median(lambda record: record['device_seconds']):,.0f}"
    yield "nodes", f"{record['nodes']:,}"
    if entry.timed:
        speed_up, efficiency = (entry.median(lambda record, key=key: record[key]) for key in ("speed_up", "efficiency"))
        yield "speed-up", "–" if speed_up is None else f"{speed_up:.2f}"
        yield "efficiency", _percent(efficiency)
    yield "busy", _tell_busy(entry.median(lambda record: record["busy"]))
    yield "sealed", "sealed" if all(lap.record["sealed"] for lap in entry.laps) else "not sealed"


def _tell_busy(busy: float | None) -> str:
    if busy is None or busy < HONOUR:
        return _percent(busy)
    star = f'<span class="honour"><span aria-hidden="true">★</span> {_percent(busy)}</span>'
    return f'{star}<span class="spoken"> bar of honour</span>'


def _tell_details(entry: Entry, group: Sequence[Entry], baseline: str) -> str:
    """Returns the text that is folded away below the table."""
    record, name = entry.record, _isolate(entry.record["name"])
    count = f"{len(entry.laps)} {'lap' if len(entry.laps) == 1 else 'laps'}"
    place = _find_place(entry, group)
    title = f"{place}. {name}" if place != "–" else name
    call = " ".join([record["script"], *record["args"]])
    parts = [
        f"<details><summary>{title}: script, curve and laps <small>({count})</small></summary>",
        f'<p class="call">Started as <code>{escape_line(call)}</code></p>',
        _draw_figures(entry),
        '<div class="facts">',
        _scroll(make_table("Hardware and versions", _list_facts(entry, group))),
        _scroll(_make_laps(entry), "laps"),
        "</div>",
        *_show_code(entry, baseline),
        "</details>",
    ]
    return "\n".join(parts)


def _scroll(table: str, kind: str = "") -> str:
    return f'<div class="scroll {kind}">{table}</div>'


def _list_facts(entry: Entry, group: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    record, data = entry.record, entry.record["data"]
    same = [other for other in group if other.record["name"] == record["name"]]
    yield "network", record["net"]
    yield "hardware", record["hardware"]
    yield "processes", f"{record['processes']:,} on {record['nodes']:,} node{'s' * (record['nodes'] > 1)}"
    yield "Python", record["versions"]["python"]
    yield "torch", record["versions"]["torch"]
    yield "images", data["source"]
    if alone := record["one_node"]:
        yield "the same on one node", f"{alone['seconds']:.1f} s, top-1 {_percent(alone['top1'])}"
    laps = sum(len(other.laps) for other in same)
    yield "this name in this table", f"{laps} laps, {len(same)} {'entry' if len(same) == 1 else 'entries'}"


def _make_laps(entry: Entry) -> str:
    rows = []
    for lap in entry.laps:
        record = lap.record
        if record["failed"]:
            rows.append((lap.label, "–", f"did not end: {record['failed']}", record["began"][:16]))
            continue
        reached = "" if record["reached"] else ", not reached"
        rows.append((lap.label, f"{record['seconds']:.1f}", _percent(record["top1"]) + reached, record["began"][:16]))
    return make_table("Laps, the best first", rows, ["lap", "seconds", "top-1", "began (UTC)"])


def _draw_figures(entry: Entry) -> str:
    """Top-1 of all laps, and the utilisation of one."""
    record, threshold = entry.record, entry.record["threshold"]
    others = [lap.record["curve"] for lap in entry.laps if lap.record["curve"] and lap.record is not record]
    mark = "" if threshold is None else f"threshold {_round(threshold)}"
    end = f"the {entry.shown} ends with {_percent(record['top1'])} after {record['seconds']:.1f} seconds"
    alt = f"Top-1 over seconds; {end}.{f' Dashed line: {mark}.' if mark else ''}"
    curve = draw_shares([record["curve"]], others=others, mark=threshold, alt=alt, axis="top-1")
    legend = draw_legend([entry.shown if others else "its lap"], others="other laps" * bool(others), mark=mark)
    figures = [f"<figure>{curve}{legend}<figcaption>Top-1 of the saved weights</figcaption></figure>"]
    nodes: dict[int, list] = defaultdict(list)
    for time, node, busy in sorted(record["usage"]):
        nodes[node].append((time, busy))
    if shown := sorted(nodes)[:MOST_NODES]:
        alt = f"Utilisation over seconds, mean in training {_percent(record['busy'])}. Dashed line: 95 %."
        usage = draw_shares([nodes[node] for node in shown], mark=HONOUR, alt=alt, axis="busy")
        legend = draw_legend([f"node {node + 1}" for node in shown], mark="bar of honour 95 %")
        more = f" (the first {MOST_NODES} of {len(nodes)} nodes)" if len(nodes) > MOST_NODES else ""
        caption = f"Utilisation of the devices, {entry.shown}{more}"
        figures.append(f"<figure>{usage}{legend}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="pair">{"".join(figures)}</div>'


def _show_code(entry: Entry, baseline: str) -> Iterator[str]:
    """The script as a diff, and the other files of the code."""
    record, code = entry.record, entry.laps[0].code
    script = record["script"]
    old, new = _prepare(baseline), _prepare(code[script])
    yield f"<h4>Changes in <code>{escape_line(script)}</code></h4>"
    if old == new:
        yield "<p>None: it is the baseline's script.</p>"
    else:
        yield "<p>Compared with the baseline: + is new, − is gone.</p>"
        yield f'<div class="code">{show_diff(old, new).data}</div>'
    for name in sorted(code.keys() - {script}):
        yield f"<h4>Beside it: <code>{escape_line(shorten(name, 60))}</code></h4>"
        yield f'<div class="code">{show_diff(_prepare(code[name]), _prepare(code[name])).data}</div>'


def _prepare(text: str) -> str:
    """Code as it is shown: no character turns it around, and neither a line nor the whole is too long for a page."""
    lines = clean("\n".join(text.splitlines()).expandtabs(4))
    return cut_lines(lines, first=400, last=100, longest=160)
