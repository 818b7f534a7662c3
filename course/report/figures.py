"""The figures that are saved in a notebook."""

from __future__ import annotations

import base64
import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from course.notebooks import load_notebook
from course.report.pages import escape_line

# Of one lab; together the labs stay below comparison.PAGE_BYTES, the most that an instructor's comparison reads.
FIGURES_BYTES = 3 * 2**20
# In pixels; a figure of one panel has 750.
WIDE = 900
LAB = re.compile(r"# Lab ([0-9]{1,2})\b")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


class Figure(NamedTuple):
    """A figure.

    Attributes:
        caption: The heading above it, numbered if that has several.
        source: The PNG in base 64.
        wide: Whether it has several panels in a row, which nobody could read in half of a page.
    """

    caption: str
    source: str
    wide: bool


def show_figures(paths: Iterable[Path]) -> Iterator[str]:
    """Returns the figures of one lab's notebooks as HTML, and a sentence for what had to be left out."""
    left = FIGURES_BYTES
    for path in paths:
        try:
            figures = read_figures(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = getattr(error, "strerror", None) or error
            yield f"<p>{escape_line(path.name)} could not be read: {escape_line(why)}</p>"
            continue
        large = 0
        for figure in figures:
            if len(figure.source) > left:
                large += 1
                continue
            left -= len(figure.source)
            text = escape_line(figure.caption)
            place = ' class="wide"' if figure.wide else ""
            yield f'<figure{place}><img alt="{text}" src="data:image/png;base64,{figure.source}">'
            yield f"<figcaption>{text}</figcaption></figure>"
        if large:
            yield f"<p>{large} of the figures of {escape_line(path.name)} left out: too large.</p>"


def read_figures(path: Path) -> list[Figure]:
    """Returns the figures of a notebook.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It is no notebook of nbformat 4; or another error of a half-written one.
    """
    figures, heading, count = [], path.stem, Counter()
    for cell in load_notebook(path)["cells"]:
        if cell["cell_type"] == "markdown":
            heading = (HEADING.findall("".join(cell["source"])) or [heading])[-1]
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                # Decoded and encoded again: what stands in the page is base 64 and nothing else.
                picture = base64.b64decode("".join(output["data"]["image/png"]))
                count[heading] += 1
                number = f" ({count[heading]})" if count[heading] > 1 else ""
                # The first part of a PNG says how many pixels wide it is.
                wide = int.from_bytes(picture[16:20]) > WIDE
                figures.append(Figure(heading + number, base64.b64encode(picture).decode(), wide))
    return figures


def find_lab(path: Path) -> int:
    """The number of the lab that a notebook is: by its first heading, otherwise by its name; -1 if neither says one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        for cell in load_notebook(path)["cells"]:
            if found := LAB.match("".join(cell["source"])):
                return int(found[1])
    return int(path.name[:2]) if re.match(r"[0-9]{2}_", path.name) else -1
