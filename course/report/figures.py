"""The figures that are saved in a notebook, whatever has become of its file."""

from __future__ import annotations

import base64
import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from course.notebooks import load_notebook
from course.report.pages import escape_line

# Of one lab; ten labs stay below what a report may have.
FIGURES_BYTES = 6 * 2**20
PNG = b"\x89PNG\r\n\x1a\n"
# In pixels; a figure of one panel has 750.
WIDE = 900
LAB = re.compile(r"# Lab ([0-9]{1,2})\b")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


class Figure(NamedTuple):
    """A figure: the heading above it, numbered if it has several; and its PNG in base 64, "" if it is none.

    Attributes:
        caption: The heading.
        source: The PNG.
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
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            yield f"<p>{escape_line(path.name)} could not be read: {escape_line(why)}</p>"
            continue
        kinds = {"no PNG": 0, "too large": 0}
        for figure in figures:
            if not figure.source or len(figure.source) > left:
                kinds["too large" if figure.source else "no PNG"] += 1
                continue
            left -= len(figure.source)
            text = escape_line(figure.caption)
            place = ' class="wide"' if figure.wide else ""
            yield f'<figure{place}><img alt="{text}" src="data:image/png;base64,{figure.source}">'
            yield f"<figcaption>{text}</figcaption></figure>"
        for kind, count in kinds.items():
            if count:
                yield f"<p>{count} of the figures of {escape_line(path.name)} left out: {kind}.</p>"


def read_figures(path: Path) -> list[Figure]:
    """Returns the figures of a notebook.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It is no notebook of nbformat 4.
    """
    cells = [cell for cell in load_notebook(path)["cells"] if isinstance(cell, dict)]
    figures, heading, count = [], path.stem, Counter()
    for cell in cells:
        if cell.get("cell_type") == "markdown":
            heading = (HEADING.findall(_join(cell.get("source"))) or [heading])[-1]
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else ():
            data = output.get("data") if isinstance(output, dict) else None
            picture = data.get("image/png") if isinstance(data, dict) else None
            if picture:
                count[heading] += 1
                number = f" ({count[heading]})" if count[heading] > 1 else ""
                figures.append(Figure(heading + number, *_read_png(_join(picture))))
    return figures


def find_lab(path: Path) -> int:
    """The number of the lab that a notebook is: by its first heading, otherwise by its name; -1 if neither says one."""
    with contextlib.suppress(OSError, ValueError):
        for cell in load_notebook(path)["cells"]:
            if isinstance(cell, dict) and (found := LAB.match(_join(cell.get("source")))):
                return int(found[1])
    return int(path.name[:2]) if re.match(r"[0-9]{2}_", path.name) else -1


def _join(text: Any) -> str:
    """A text as notebooks hold it, in one piece or as a list of lines; "" for anything else."""
    parts = text if isinstance(text, list) else [text]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else ""


def _read_png(text: str) -> tuple[str, bool]:
    """A PNG picture's base 64 without white space, and whether it is a wide one; "" if it is none."""
    text = "".join(text.split())
    try:
        picture = base64.b64decode(text, validate=True)
    except ValueError:
        picture = b""
    # Its first part says how many pixels wide it is.
    return (text, int.from_bytes(picture[16:20]) > WIDE) if picture.startswith(PNG) else ("", False)
