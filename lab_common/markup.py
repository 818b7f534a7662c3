"""Sets errors as HTML for a notebook, safe for whatever a job or a host wrote.

The colours can be read on white and on the dark background of JupyterLab's dark theme. Text takes the theme's colour.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from lab_common.text import clean, clean_message, cut_lines

COLOURS = {"red": "#d93025", "note": "#a86200", "ok": "#1e8040"}
# Half transparent grey: a little darker than a light page, a little lighter than a dark one.
SHADE = "background-color:rgba(127,127,127,0.15)"
FONT = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
CARD = "margin:4px 0px;padding:6px 12px;line-height:1.5;overflow-wrap:anywhere;background-color:rgba(127,127,127,0.07)"
TAG = "color:#ffffff;font-weight:bold;padding:1px 8px;border-radius:3px"
PRE = f"{SHADE};{FONT};color:inherit;margin:4px 0px;padding:6px 8px;max-height:30em;overflow:auto;white-space:pre"
# The most characters of one line of a card.
LONGEST = 600
# What in a fix can be typed: a command up to the end of its clause, a call, an argument, an option, a dotted name.
PROGRAMS = "export|unset|umask|sudo|python3?|ssh|ssh-keygen|ssh-copy-id|bash|scontrol|cd|rm|df|ps|chmod|make"
CODE = re.compile(
    rf"(?:^|(?<=: )|(?<=; )|(?<=then ))(?:{PROGRAMS})\s(?:[^,;()\n]*[^\s,;()])"
    r"|\b[\w.]+\((?:[^()\n]|\([^()\n]*\))*\)"
    r"|\b\w+=(?:\{[^{}\n]*\}|\[[^\[\]\n]*\]|'[^'\n]*'|\"[^\"\n]*\"|[^\s,;()]*)"
    r"|(?<!\S)--[a-z][\w-]*(?:=[^\s,;()]+)?"
    r"|\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*){2,}"
)


def escape(text: str) -> str:
    """Makes text safe in HTML; lines stay lines."""
    return html.escape(clean(text)).replace("\n", "<br>").replace("  ", "&nbsp; ")


def write_card(
    kind: str,
    what: str,
    rows: Sequence[tuple[str, str]],
    *,
    place: str = "",
    colour: str = "red",
    title: str = "",
    lines: str = "",
) -> str:
    """Returns a card with a coloured left edge.

    Args:
        kind: One word for what it is, on the colour.
        what: One sentence.
        rows: A label and a text each; what can be typed in a fix, and the path of a log, are set as code.
        place: Where it happened, beside the kind.
        colour: One of ``COLOURS``.
        title: Of the folded part.
        lines: What is folded, such as a traceback; of very many lines the first and the last. "" folds nothing.
    """
    tag = f'<span style="{TAG};background-color:{COLOURS[colour]}">{_shorten(kind)}</span>'
    head = f"<div>{tag}&nbsp; <b>{_shorten(place)}</b></div><div><b>{_shorten(what)}</b></div>"
    body = "".join(f"<div><i>{escape(label)}:</i> {_write_text(label, text)}</div>" for label, text in rows if text)
    fold = ""
    if lines:
        text = html.escape(cut_lines(clean_message(lines)))
        fold = f'<details><summary>{_shorten(title)}</summary><pre style="{PRE}">{text}</pre></details>'
    return f'<div style="border-left:5px solid {COLOURS[colour]};{CARD}">{head}{body}{fold}</div>'


def mark_code(text: str) -> str:
    """Makes text safe in HTML, with all that can be typed set as code."""
    parts, end = [], 0
    for found in CODE.finditer(text):
        parts += [escape(text[end : found.start()]), _write_code(found[0])]
        end = found.end()
    return "".join([*parts, escape(text[end:])])


def _write_text(label: str, text: str) -> str:
    text = _cut(clean_message(text))
    write = {"fix": mark_code, "log": _write_code}.get(label, escape)
    return write(text)


def _write_code(text: str) -> str:
    style = f"{SHADE};{FONT};color:inherit;padding:1px 4px;white-space:pre-wrap"
    return f'<code style="{style}">{html.escape(clean(text))}</code>'


def _shorten(text: str) -> str:
    return escape(_cut(clean_message(text)))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
