"""Sets errors as HTML for a notebook, safe for whatever a job or a host wrote.

The colours can be read on white and on JupyterLab's dark theme. Text takes the theme's colour.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from lab_common.text import clean_message, cut_lines

COLOURS = {"red": "#d93025", "note": "#a86200"}
CARD = "margin:4px 0px;padding:6px 12px;line-height:1.5;overflow-wrap:anywhere;background-color:rgba(127,127,127,0.07)"
TAG = "color:#ffffff;font-weight:bold;padding:1px 8px;border-radius:3px"
PRE = "margin:4px 0px;padding:6px 8px;max-height:30em;overflow:auto;background-color:rgba(127,127,127,0.15)"
# The most characters of one line of a card.
LONGEST = 600


def escape(text: str) -> str:
    """Makes text safe in HTML, and not too long; lines stay lines."""
    shown = clean_message(text)
    shown = shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
    return html.escape(shown).replace("\n", "<br>").replace("  ", "&nbsp; ")


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
        rows: A label and a text each; an empty text is left out.
        place: Where it happened, beside the kind.
        colour: One of ``COLOURS``.
        title: Of the folded part.
        lines: The folded part, such as a traceback; of very many lines the first and the last. "" folds nothing.
    """
    tag = f'<span style="{TAG};background-color:{COLOURS[colour]}">{escape(kind)}</span>'
    head = f"<div>{tag}&nbsp; <b>{escape(place)}</b></div><div><b>{escape(what)}</b></div>"
    body = "".join(f"<div><i>{escape(label)}:</i> {escape(text)}</div>" for label, text in rows if text)
    fold = ""
    if lines:
        text = html.escape(cut_lines(clean_message(lines)))
        fold = f'<details><summary>{escape(title)}</summary><pre style="{PRE}">{text}</pre></details>'
    return f'<div style="border-left:5px solid {COLOURS[colour]};{CARD}">{head}{body}{fold}</div>'
