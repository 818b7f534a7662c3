"""Writes the site's first page: the promise, the picture, two ways to begin, and a card for each part of the course."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat

from course.parts import PARTS, Part

# A lab in the README: "- [0 · Start here](notebooks/00_start_here.ipynb): find out where the time goes."
LAB = re.compile(r"^- \[(\d+) · (.+)\]\((notebooks/\w+)\.ipynb\): (.+)$", re.MULTILINE)
PAGE = """# Distributed Training Labs

{promise}

{picture}

```{{raw}} html
<div class="ways">
<section><h2>Read it</h2>
<p>Every lab is a page here, with its figures and without the solutions. <a href="notebooks/00_start_here.html">Begin
with lab 0</a>, or choose one below.</p></section>
<section><h2>Run it</h2>
<p>Get the course's folder and type <code>make lab</code> in it: on a laptop, on a machine with GPUs, or
<a href="docs/where-to-run.html">somewhere else</a>. Then you guess, write and measure yourself.</p></section>
<section><h2>Teach it</h2>
<p>There are <a href="slides.html">slides</a>, <a href="hosting/README.html">a container for each team</a>, and
<a href="hosting/RACE.html">a race in 90 minutes</a>.</p></section>
</div>
<div class="parts">
{cards}
</div>
```
"""


def write_front(root: Path) -> str:
    """Returns the first page in Markdown, made from the README, the parts and what the notebooks say they take.

    Args:
        root: The checkout.

    Raises:
        ValueError: The README has no line for a lab of a part.
    """
    readme = (root / "README.md").read_text(encoding="utf-8")
    promise = readme.split("\n\n")[1]
    (picture,) = re.findall(r"^!\[.*figures/learner\.png\)$", readme, re.MULTILINE)
    labs = {int(number): (title, page, does) for number, title, page, does in LAB.findall(readme)}
    cards = "\n".join(_write_card(root, part, labs) for part in PARTS)
    return PAGE.format(promise=promise, picture=picture, cards=cards)


def _write_card(root: Path, part: Part, labs: dict[int, tuple[str, str, str]]) -> str:
    rows = []
    for number in part.labs:
        if number not in labs:
            raise ValueError(f"README.md has no line for lab {number}")
        title, page, does = labs[number]
        stored = nbformat.read(root / f"{page}.ipynb", as_version=4).metadata.get("lab", {})
        needs = f"{stored['minutes']} minutes, {stored['peak_gib']:.1f} GiB of memory" if stored else ""
        rows.append(
            f'<li><a href="{page}.html">{number} · {html.escape(title)}</a>'
            f"<p>{html.escape(does[0].upper() + does[1:])}</p><small>{needs}</small></li>"
        )
    title, promise = html.escape(part.title), html.escape(part.promise)
    return f"<section><h2>{title}</h2><p>{promise}</p><ul>\n" + "\n".join(rows) + "\n</ul></section>"
