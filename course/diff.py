"""Shows what changed between two versions of a function."""

from __future__ import annotations

import difflib
import html
import inspect
import itertools
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import HTML


def show_diff(before: Callable[..., object] | str, after: Callable[..., object] | str) -> HTML:
    """Shows the lines that differ between two functions (or two texts): + is new, − is gone.

    The functions may be defined in the notebook. The markers around an exercise's solution are left out.
    """
    from IPython.display import HTML

    old, new = _source_lines(before), _source_lines(after)
    # Without its three header lines a unified diff with unlimited context is every line of both texts, marked.
    lines = list(itertools.islice(difflib.unified_diff(old, new, n=len(old) + len(new), lineterm=""), 3, None))
    lines = lines or [" " + line for line in old]
    width = max(map(len, lines), default=0) + 1
    rows = []
    for line in lines:
        mark, text = line[0].replace("-", "−"), f"{line[1:]:<{width}}"
        colours = {"+": "background:#D3E8F8;color:#003A5D", "−": "background:#FBE3C4;color:#5A3000"}.get(mark, "")
        # Blocks: the background of a line that is none would be painted over the underscores of the line above.
        rows.append(f'<span style="display:block;{colours}">{html.escape(f"{mark} {text}", quote=False)}</span>')
    return HTML('<pre style="line-height:1.35">' + "".join(rows) + "</pre>")


def _source_lines(source: Callable[..., object] | str) -> list[str]:
    text = source if isinstance(source, str) else inspect.getsource(source)
    lines = textwrap.dedent(text).strip("\n").splitlines()
    return [line.rstrip() for line in lines if line.strip() not in ("### BEGIN SOLUTION", "### END SOLUTION")]
