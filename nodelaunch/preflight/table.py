"""Sets verdicts as text and as HTML, safe for whatever a host calls itself."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from lab_common.markup import COLOURS, TAG, escape
from lab_common.text import clean
from nodelaunch.preflight.verdicts import Verdict

ORDER = ("red", "note", "ok")
WIDTH = 118


def write_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns the lines of an aligned table, what is red first, with cause and fix under each that is not green."""
    rows = [((f"[{v.state}]", clean(v.node), clean(v.check)), v) for v in arrange(verdicts)]
    widths = [min(30, max((len(cells[i]) for cells, _ in rows), default=0)) for i in range(3)]
    lines = []
    for cells, verdict in rows:
        start = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)) + "  "
        lines += _wrap(verdict.found, start, sum(widths) + 6)
        lines += [line for label, text in _hints(verdict) for line in _wrap(text, f"{'':8}{label}: ", 13)]
    return lines


def write_html(verdicts: Sequence[Verdict]) -> str:
    """Returns the same as an HTML table."""
    rows = []
    for verdict in arrange(verdicts):
        hints = "".join(f"<br><i>{label}:</i> {escape(text)}" for label, text in _hints(verdict))
        mark = f'<span style="{TAG};background-color:{COLOURS[verdict.state]}">{verdict.state}</span>'
        cells = [f'<td style="text-align:left">{mark}</td>']
        # JupyterLab would set them to the right.
        texts = (escape(verdict.node), escape(verdict.check), escape(verdict.found) + hints)
        cells += [f'<td style="text-align:left">{text}</td>' for text in texts]
        rows.append(f'<tr style="vertical-align:top">{"".join(cells)}</tr>')
    head = "".join(f'<th style="text-align:left">{title}</th>' for title in ("", "node", "check", "found"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _hints(verdict: Verdict) -> list[tuple[str, str]]:
    hints = (("likely", verdict.cause), ("fix", verdict.fix)) if verdict.state != "ok" else ()
    return [(label, text) for label, text in hints if text]


def arrange(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Puts what is red first, and joins green verdicts that say the same of several nodes."""
    joined: dict[tuple, Verdict] = {}
    for number, verdict in enumerate(verdicts):
        key = (verdict.check, verdict.found) if verdict.state == "ok" else (number,)
        node = f"{joined[key].node}, {verdict.node}" if key in joined else verdict.node
        joined[key] = replace(verdict, node=node)
    checks = list(dict.fromkeys(verdict.check for verdict in verdicts))
    return sorted(joined.values(), key=lambda verdict: (ORDER.index(verdict.state), checks.index(verdict.check)))


def _wrap(text: str, start: str, indent: int) -> list[str]:
    first, *more = clean(text).split("\n")
    # Commands are copied from here: their words stay whole.
    wrapper = textwrap.TextWrapper(WIDTH, start, " " * indent, break_long_words=False, break_on_hyphens=False)
    return (wrapper.wrap(first) or [start.rstrip()]) + [" " * indent + line for line in more]
