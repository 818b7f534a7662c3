"""A slide of each lab for its teacher, out of the notebook's own cells: question, figure, findings, what to ask."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable
from html import escape
from typing import Any

import mistune
from nbformat import NotebookNode

FINDINGS = 3
WIDE = 1.8  # times its height: a figure that gets the whole width
RENDER = mistune.create_markdown(escape=True)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Slides · Distributed Training Labs</title>
<style>
@page {{ size: A4 landscape; margin: 12mm; }}
body {{ margin: 0; font: 1.05rem/1.45 system-ui, sans-serif; color: #1a1a1a; background: #ffffff; }}
section {{ max-width: 70rem; margin: 0 auto; padding: 1.5rem; break-after: page; border-bottom: 1px solid #767676; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; margin: 0 0 .3rem; }}
h3 {{ font-size: 1rem; margin: .8rem 0 .2rem; }}
.question {{ font-size: 1.35rem; margin: 0 0 1rem; }}
.halves {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1rem 1.5rem; align-items: start; }}
figure {{ margin: 0; grid-row: 1 / span 2; }}
.wide {{ grid-template-columns: 3fr 2fr; }}
.wide figure {{ grid-row: 1; grid-column: 1 / -1; }} figcaption {{ font-size: .9em; }}
img {{ max-width: 100%; max-height: 24rem; background: white; }} p {{ margin: .2rem 0; }} li {{ margin-bottom: .4rem; }}
code {{ font-size: .92em; overflow-wrap: anywhere; }}
@media (max-width: 50rem) {{ .halves, .wide {{ grid-template-columns: 1fr; }} figure {{ grid-row: auto; }} }}
@media screen and (prefers-color-scheme: dark) {{
  body {{ color: #e6e6e6; background: #131416; }} a {{ color: #8ab4f8; }}
}}
@media print {{
  body {{ font-size: 10.5pt; }} .question {{ font-size: 14pt; margin-bottom: 3mm; }}
  img {{ max-height: 66mm; }} li {{ margin-bottom: .2rem; }}
  section {{ max-width: none; border: 0; padding: 0; break-inside: avoid; }}
  section:last-of-type {{ break-after: auto; }}
  .halves {{ grid-template-columns: 1fr 1fr; }} .wide {{ grid-template-columns: 3fr 2fr; }} header {{ display: none; }}
}}
</style></head><body><main>
<header><section><h1>Slides of the Distributed Training Labs</h1>
<p>One page a lab, out of its notebook: the question, a figure of the stored run, what it finds, what to ask the class.
Print them, or save them as PDF, in landscape. <a href="../index.html">The labs</a></p></section></header>
{slides}
</main></body></html>
"""
SLIDE = """<section id="{id}"><h2>{title}</h2>
<p class="question">{question}</p>
<div class="halves{wide}"><figure><img alt="{alt}" src="data:image/png;base64,{figure}">{note}</figure>
<div><h3>What the lab finds</h3>
<ul>{findings}</ul></div>
<div><h3>Ask the class</h3>
<ul>{ask}</ul></div></div></section>
"""


def read_slide(notebook: NotebookNode) -> dict[str, Any]:
    """Returns what a lab's slide says.

    Returns:
        ``title``; ``question``, the bold sentence of the first cell; ``findings``, three points of "What you saw";
        ``ask``, the questions of the section "Predict"; ``figure``, that of the cell with the tag ``slide``, a PNG in
        base64; ``alt``, its text for who cannot see it; and ``note``, words below it, mostly "". The metadata ``slide``
        of the cell "What you saw" may say which points (``findings``, their numbers from 0; else the first ones), what
        to ``ask`` where the questions make no sense without their cell, and the ``note``.

    Raises:
        ValueError: One of them is not in the notebook.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    texts, given = [cell.source for cell in cells], cells[-1].metadata.get("slide", {})
    title = _find(r"\A# ([^\n]+)", texts[0])
    question = _find(r"^\*\*(.+?)\*\*", texts[0])
    seen = _find(r"^## What you saw\n(.*?)(?=^## |\Z)", texts[-1])
    # Cells are kept apart by a heading, since what follows in the next one is no longer the prediction.
    predict = _find(r"^#+ [^\n]*Predict[^\n]*\n(.*?)(?=^#+ |\Z)", "\n# \n".join(texts))
    findings = re.findall(r"^[*-] (.+?)(?=^[*-] |\n\n|\Z)", seen, re.MULTILINE | re.DOTALL)
    sentences = re.split(r"(?<=[.?!:])\s+", _join(re.sub(r"^[*-] |\*\*", "", predict, flags=re.MULTILINE)))
    questions = [sentence[0].upper() + sentence[1:] for sentence in sentences if sentence.endswith("?")]
    figures = [
        (cell.metadata.get("alt", ""), output.data["image/png"])
        for cell in notebook.cells
        if "slide" in cell.metadata.get("tags", ())
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if not (findings and questions and figures):
        raise ValueError(f"{title!r} has no finding, no question or no figure")
    alt, png = figures[-1]
    slide = {"title": title, "question": _join(question), "alt": alt, "figure": "".join(png.split())}
    chosen = [findings[number] for number in given["findings"]] if "findings" in given else findings[:FINDINGS]
    slide["findings"] = [_join(finding) for finding in chosen]
    return slide | {"ask": given.get("ask", questions), "note": given.get("note", "")}


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"there is no {pattern!r} in {text[:60]!r}")
    return found[1]


def write_slides(notebooks: Iterable[NotebookNode]) -> str:
    """Returns one HTML file with a page for each lab, which needs no other file."""
    slides = []
    for number, notebook in enumerate(notebooks):
        slide = read_slide(notebook)
        points = {
            name: "\n".join(f"<li>{_render(point)}</li>" for point in slide.pop(name)) for name in ("findings", "ask")
        }
        slide["question"] = _render(slide["question"])
        slide["note"] = f"<figcaption>{_render(slide['note'])}</figcaption>" if slide["note"] else ""
        # The first chunk of a PNG has width and height, as two numbers of four bytes from byte 16 on.
        width, height = struct.unpack(">II", base64.b64decode(slide["figure"][:32])[16:24])
        slide["wide"] = " wide" if width > WIDE * height else ""
        texts = {name: escape(slide[name]) for name in ("title", "alt")}
        slides.append(SLIDE.format(id=f"lab{number}", **(slide | points | texts)))
    return PAGE.format(slides="\n".join(slides))


def _render(text: str) -> str:
    """Returns a sentence in Markdown as HTML; HTML in it is shown as it is typed, and links lose their targets."""
    text = re.sub(r"(?<!!)\[([^\]]+)\]\([^)]*\)", r"\1", text)
    return RENDER(text).strip().removeprefix("<p>").removesuffix("</p>")


def _join(text: str) -> str:
    return " ".join(text.split())
