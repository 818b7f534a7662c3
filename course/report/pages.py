"""The HTML that both pages are made of; all text passes through ``escape`` or ``escape_line``."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from lab_common.text import clean

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "nav ul{display:flex;flex-wrap:wrap;gap:1rem;list-style:none;padding:0}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(26rem,1fr));gap:1rem}"
    ".wide{grid-column:1/-1}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:.85em}"
    "caption{text-align:left;font-weight:bold;font-size:1.15em}"
    "th,td{border:1px solid #ccc;padding:.2rem .5rem;text-align:left}"
    "img{max-width:100%;display:block}figure{margin:1rem 0}"
    "pre{background:#f4f4f4;padding:.6rem;max-height:20rem;overflow:auto;font-size:.85em}"
    # Paper has no scroll bars: what is longer than a line wraps.
    "@media print{body{font-size:12px;margin:0}nav{display:none}h2[id]{break-before:page}h2,h3{break-after:avoid}"
    ".figures{grid-template-columns:1fr 1fr}figure,img,thead,tr{break-inside:avoid}"
    "pre{max-height:none;overflow:visible;white-space:pre-wrap}}"
)
LINE = 200  # characters of a text that stands on one line
TEXT = 20_000  # characters of a text of many lines, such as an answer


def shorten(text: object, longest: int = LINE) -> str:
    """Returns a text as one clean line."""
    # Cut off before it is split as well: a name may be a megabyte long.
    return clean(" ".join(str(text)[: 2 * longest].split()), longest)


def escape_line(text: object) -> str:
    """Returns a text as one clean line of HTML."""
    return html.escape(shorten(text))


def escape(text: str) -> str:
    """Returns a text of many lines as HTML, for a ``pre`` element."""
    return html.escape(clean("\n".join(text[:TEXT].splitlines()).expandtabs(4), TEXT))


def make_table(caption: str, rows: Iterable[Sequence], head: Sequence[str] = ()) -> str:
    """Returns a table; the first cell of each row is its heading."""
    lines = [f"<table><caption>{escape_line(caption)}</caption>"]
    if head:
        names = "".join(f'<th scope="col">{escape_line(name)}</th>' for name in head)
        lines.append(f"<thead><tr>{names}</tr></thead>")  # which a printed table repeats on each page
    for first, *rest in rows:
        cells = (f"{cell:.3g}" if isinstance(cell, float) else cell for cell in rest)
        cells = "".join(f"<td>{escape_line(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape_line(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</table>"])


def make_page(title: str, parts: Iterable[str], *, head: str = "") -> str:
    """Returns a page that needs no other file, of parts that are HTML; ``head`` comes after its own style."""
    title = escape_line(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>{head}'
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'
