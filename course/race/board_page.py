"""The page of the leaderboard: tables by data set, league and hardware, and the details of each entry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from course.diff import show_diff
from course.race.board import LAPS, Entry, find_section
from course.report.pages import escape_line, make_page, make_table, shorten
from lab_common import LabError
from lab_common.files import write_atomically
from lab_common.text import clean, cut_lines

HONOUR = 0.95  # busy share of the devices
NOTES = (
    "The score of an entry is the <strong>median of all its laps</strong>: all laps of the same code with the same "
    "arguments, by the same name. One lucky lap does not help. A lap that failed or was interrupted counts as one that "
    f"did not reach its goal. An entry with fewer than {LAPS} laps is provisional and has no place.",
    "Compare entries <strong>within one table only</strong>. Each table has one data set, one league, and one class of "
    "hardware.",
    "★ is the bar of honour: the devices were busy for 95 % of the training or more.",
)
STYLE = """
:root{color-scheme:light dark;--text:#1d2126;--back:#fff;--soft:#565d66;--line:#d5d9de;--band:#f3f5f7;--link:#005a8c}
@media (prefers-color-scheme:dark){:root{--text:#e6e8eb;--back:#15181c;--soft:#a9b1bb;--line:#3a4048;--band:#1f242a;
--link:#7cc4f5}.code span[style*="#D3E8F8"]{background:#0f3a55!important;color:#d6ecfb!important}
.code span[style*="#FBE3C4"]{background:#4d3210!important;color:#fbe3c4!important}}
body{color:var(--text);background:var(--back);max-width:80rem;overflow-wrap:anywhere}
h2{margin-top:3rem;border-top:3px solid var(--text)}
th,td{border:0;border-bottom:1px solid var(--line)}
td{font-variant-numeric:tabular-nums;overflow-wrap:normal}
pre,.notes,summary{background:var(--band)}
summary{cursor:pointer;padding:.5rem;color:var(--link)}
bdi{display:inline-block;max-width:100%;overflow:hidden;vertical-align:bottom}
.scroll{overflow-x:auto}
svg{max-width:32rem;width:100%}svg text{font-size:11px;fill:var(--text)}
polyline{fill:none;stroke:var(--link);stroke-width:2}.other{stroke:var(--soft);stroke-width:1}
.grid{stroke:var(--line)}.mark{stroke:var(--text);stroke-dasharray:6 4}
""".replace("\n", "")
HEAD = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>'
)
WIDTH, HEIGHT, EDGE = 400, 220, 40  # of the figure


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
    """Returns the page; entries are in the order of ``read_entries``."""
    parts = [f'<ul class="notes">{"".join(f"<li>{note}</li>" for note in NOTES)}</ul>']
    ended = [entry for entry in entries if entry.ended]
    for _, section in itertools.groupby(ended, key=lambda entry: find_section(entry.record)):
        section = list(section)
        parts += _describe_section(section[0])
        for name, group in itertools.groupby(section, key=lambda entry: entry.record["class"]):
            group = list(group)
            parts.append(f"<h3>{_isolate(name)}</h3>{_make_ranking(group)}")
            parts += [_describe_entry(entry, group, baseline) for entry in group]
    if not entries:
        parts.append("<p>There are no laps yet.</p>")
    if failed := [_describe_failure(entry) for entry in entries if not entry.ended]:
        parts.append(f"<h2>Entries without a finished lap</h2><ul>{''.join(failed)}</ul>")
    if refused:
        lines = "".join(f"<li>{_isolate(line)}</li>" for line in refused)
        parts.append(f"<h2>Refused</h2><p>These laps do not count:</p><ul>{lines}</ul>")
    return make_page("The race", parts, head=HEAD)


def _isolate(text: object) -> str:
    """Returns untrusted text as HTML whose reading direction does not affect its neighbours."""
    return f"<bdi>{escape_line(text) or '(no name)'}</bdi>"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return "not reached" if math.isinf(seconds) else f"{seconds:.1f} s"


def _describe_failure(entry: Entry) -> str:
    lap, count = entry.laps[-1], len(entry.laps)
    last = f"{_isolate(lap.label)}, {_isolate(lap.record['script'])}: {_isolate(lap.record['failed'])}"
    return f"<li>{_isolate(lap.record['name'])}, {count} {'lap' if count == 1 else 'laps'}; {last}</li>"


def _describe_section(entry: Entry) -> Iterator[str]:
    record, data = entry.record, entry.record["data"]
    if entry.timed:
        title, rule = record["league"], f"Reach {record['threshold']:.0%} top-1 in the least time."
    else:
        title = f"{record['within'] or 0:g} seconds"
        rule = f"Reach the highest top-1 within {title}."
    yield f"<h2>{_isolate(data['name'])}: {escape_line(title)}</h2>"
    counts = f"{data['train']:,} training images, {data['valid']:,} validation images, {data['classes']} classes"
    yield f"<p>{rule} {counts}.</p>"


def _find_place(entry: Entry, group: Sequence[Entry]) -> str:
    """Returns the place; entries of the same score share one."""
    if entry.provisional or math.isinf(entry.score):
        return "–"
    return str(1 + sum(other.order[:2] < entry.order[:2] for other in group))


def _make_ranking(group: Sequence[Entry]) -> str:
    rows = [_list_cells(entry, group) for entry in group]
    head = "".join(f'<th scope="col">{name}</th>' for name in rows[0])
    lines = [f"<thead><tr>{head}</tr></thead>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row.values()) + "</tr>" for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _list_cells(entry: Entry, group: Sequence[Entry]) -> dict[str, str]:
    """Returns the HTML of each cell by its column."""
    record, count, best, worst = entry.record, len(entry.laps), entry.scores[0], entry.scores[-1]
    show = _seconds if entry.timed else _percent

    def median(key: str) -> float | None:
        return entry.median(lambda one: one[key])

    busy, speed_up = median("busy"), median("speed_up")
    return {
        "place": _find_place(entry, group),
        "name": _isolate(record["name"]),
        "median seconds" if entry.timed else "median top-1": f"<strong>{show(entry.score)}</strong>",
        "best to worst": f"{show(best)} to {show(worst)}",
        "laps": f"provisional, {count} of {LAPS} laps" if entry.provisional else str(count),
        "top-1" if entry.timed else "seconds": _percent(median("top1")) if entry.timed else _seconds(median("seconds")),
        "device-seconds": f"{median('device_seconds') or 0:,.0f}",
        "nodes": f"{record['nodes']:,}",
        "speed-up": "–" if speed_up is None else f"{speed_up:.2f}",
        "efficiency": _percent(median("efficiency")),
        "busy": f"{'★ ' if (busy or 0) >= HONOUR else ''}{_percent(busy)}",
    }


def _describe_entry(entry: Entry, group: Sequence[Entry], baseline: str) -> str:
    """Returns the text that is folded away below the table."""
    record, name = entry.record, _isolate(entry.record["name"])
    same = [other for other in group if other.record["name"] == record["name"]]
    count = sum(len(other.laps) for other in same)
    facts = {
        "network": record["net"],
        "hardware": record["hardware"],
        "processes": f"{record['processes']:,} on {record['nodes']:,} node{'s' * (record['nodes'] > 1)}",
        "Python": record["versions"]["python"],
        "torch": record["versions"]["torch"],
        "images": record["data"]["source"],
        "this name in this table": f"{count} laps, {len(same)} {'entry' if len(same) == 1 else 'entries'}",
    }
    place = _find_place(entry, group)
    return "\n".join(
        [
            f"<details><summary>{'' if place == '–' else f'{place}. '}{name}: script, curve and laps</summary>",
            f"<p>Started as <code>{escape_line(' '.join([record['script'], *record['args']]))}</code></p>",
            _draw_curves(entry),
            f'<div class="scroll">{make_table("Hardware and versions", facts.items())}</div>',
            f'<div class="scroll">{_make_laps(entry)}</div>',
            *_show_code(entry, baseline),
            "</details>",
        ]
    )


def _make_laps(entry: Entry) -> str:
    rows = []
    for lap in entry.laps:
        one = lap.record
        end = f"{_percent(one['top1'])}{'' if one['reached'] else ', not reached'}"
        result = ("–", f"failed: {one['failed']}") if one["failed"] else (f"{one['seconds']:.1f}", end)
        rows.append((lap.label, *result, one["began"][:16]))
    return make_table("Laps, the best first", rows, ["lap", "seconds", "top-1", "began (UTC)"])


def _draw_curves(entry: Entry) -> str:
    """Draws top-1 over seconds as SVG: the shown lap, the others in grey, and the threshold as a dashed line."""
    record: dict[str, Any] = entry.record
    others = [lap.record["curve"] for lap in entry.laps if lap.record is not record]
    last = max((float(seconds) for curve in [record["curve"], *others] for seconds, _ in curve), default=1.0)

    def place(seconds: float, share: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * seconds / last
        return f"{x:.1f},{_find_y(share):.1f}"

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _find_y(share)
        parts.append(f'<line class="grid" x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for share, seconds in ((0, "0"), (0.5, f"{last / 2:.3g}"), (1, f"{last:.3g} s")):
        x = EDGE + (WIDTH - 2 * EDGE) * share
        parts.append(f'<text x="{x}" y="{HEIGHT - EDGE + 16}" text-anchor="middle">{seconds}</text>')
    for kind, curves in (("other", others), ("", [record["curve"]])):
        for curve in curves:
            points = " ".join(place(seconds, share) for seconds, share in curve if seconds and share is not None)
            parts.append(f'<polyline class="{kind}" points="{points}"/>')
    if record["threshold"] is not None:
        y = _find_y(record["threshold"])
        parts.append(f'<line class="mark" x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y}" y2="{y}"/>')
    end = f"it ends with {_percent(record['top1'])} after {record['seconds']:.1f} seconds"
    caption = f"Top-1 of the saved weights over seconds; {end}; other laps are grey, a dashed line is the threshold"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{caption}"'
    return f"<figure><svg {box}>{''.join(parts)}</svg><figcaption>{caption}</figcaption></figure>"


def _find_y(share: float) -> float:
    return HEIGHT - EDGE - (HEIGHT - EDGE - 10) * share


def _show_code(entry: Entry, baseline: str) -> Iterator[str]:
    """Shows the script as a diff, and the other files of the code."""
    code, script = entry.laps[0].code, entry.record["script"]
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
    """Returns code as it is shown: printable, and neither a line nor the whole is too long for a page."""
    lines = clean("\n".join(text.splitlines()).expandtabs(4))
    return cut_lines(lines, first=400, last=100, longest=160)
