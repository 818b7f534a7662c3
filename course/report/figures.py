"""The figures that are saved in a notebook, whatever has become of its file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from course.notebooks import load_notebook
from course.report.pages import escape_line

# Of one lab; seven labs stay below what a report may have.
FIGURES_BYTES = 6 * 2**20
PNG = b"\x89PNG\r\n\x1a\n"
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


class Figure(NamedTuple):
    """A figure: the heading above it with the cell's name, and its PNG in base 64; "" where it is no PNG."""

    caption: str
    source: str


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
            yield f'<figure><img alt="{text}" src="data:image/png;base64,{figure.source}">'
            yield f"<figcaption>{text}</figcaption></figure>"
        for kind, count in kinds.items():
            if count:
                yield f"<p>{count} of the figures of {escape_line(path.name)} left out: {kind}.</p>"


def read_figures(path: Path) -> list[Figure]:
    """Returns the figures of a notebook.

    A cell without an id (before nbformat 4.5) is named by its number.

    Raises:
        OSError: The file cannot be read, or is none.
        ValueError: It is no notebook of nbformat 4.
    """
    cells = [cell for cell in load_notebook(path)["cells"] if isinstance(cell, dict)]
    figures, heading = [], path.stem
    for number, cell in enumerate(cells, start=1):
        if cell.get("cell_type") == "markdown":
            heading = (HEADING.findall(_join(cell.get("source"))) or [heading])[-1]
        name = cell["id"] if isinstance(cell.get("id"), str) else f"cell {number}"
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else ():
            data = output.get("data") if isinstance(output, dict) else None
            picture = data.get("image/png") if isinstance(data, dict) else None
            if picture:
                figures.append(Figure(f"{heading} ({name})", _read_png(_join(picture))))
    return figures


def _join(text: Any) -> str:
    """A text as notebooks hold it, in one piece or as a list of lines; "" for anything else."""
    parts = text if isinstance(text, list) else [text]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else ""


def _read_png(text: str) -> str:
    """A PNG picture's base 64 without white space; "" where it is none."""
    text = "".join(text.split())
    try:
        return text if base64.b64decode(text, validate=True).startswith(PNG) else ""
    except ValueError:
        return ""
