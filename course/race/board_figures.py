"""Small figures as inline SVG: shares over seconds, legible on a light page and on a dark one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from course.report.pages import escape_line
from lab_utils.plots.style import COLOURS

Line = Sequence[Sequence[float]]  # (seconds, share) in each row

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 42, 14, 12, 38
POINTS = 200  # of a line
FEW = 40  # points that are marked, each
# Readable on white and on dark grey; dashes tell the lines apart without colours.
LINES = ((COLOURS["DDP"], ""), ("#5B8FD6", "7 3"), ("#B0578D", "2 3"), ("#B5651D", "9 3 2 3"))
OTHERS = 12  # laps beside the median one


def draw_shares(lines: Sequence[Line], *, others: Sequence[Line] = (), mark: float | None, alt: str, axis: str) -> str:
    """Draws shares between 0 and 100 % over seconds.

    Args:
        lines: Each with its own colour and dashes; points where it has few.
        others: Thin grey lines behind them.
        mark: The share at which a dashed line stands.
        alt: What the figure shows, for those who do not see it.
        axis: What the share is.
    """
    last = max((float(row[0]) for line in [*lines, *others] for row in line), default=1.0)
    step = _choose_step(max(last, 1e-3))
    end = max(last, step)
    parts = [*_draw_axes(end, step, axis)]
    parts += [f'<polyline class="other" points="{_place_all(line, end)}"/>' for line in others[:OTHERS]]
    for number, line in enumerate(lines):
        parts += _draw_line(line, end, number)
    if mark is not None:
        y = _find_y(mark)
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_line(alt)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def _draw_line(line: Line, end: float, number: int) -> Iterator[str]:
    style = _find_style(number)
    yield f'<polyline class="line" {style} points="{_place_all(line, end)}"/>'
    for seconds, share in line if len(line) <= FEW else ():
        yield f'<circle cx="{_find_x(seconds, end):.1f}" cy="{_find_y(share):.1f}" r="3" {style}/>'


def draw_legend(names: Sequence[str], *, others: str = "", mark: str = "") -> str:
    """Returns the legend as HTML: as many lines, then the thin grey ones and the dashed one where they are named."""
    keys = [(name, f'class="line" {_find_style(number)}') for number, name in enumerate(names)]
    keys += [(name, f'class="{kind}"') for name, kind in ((others, "other"), (mark, "mark")) if name]
    items = []
    for name, style in keys:
        line = f'<line {style} x1="0" x2="28" y1="5" y2="5"/>'
        key = f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true">{line}</svg>'
        items.append(f"<li>{key}{escape_line(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _find_style(number: int) -> str:
    colour, dashes = LINES[number % len(LINES)]
    return f'stroke="{colour}" fill="{colour}" stroke-dasharray="{dashes}"'


def _draw_axes(end: float, step: float, axis: str) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _find_y(share)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f}</text>'
    for count in range(math.floor(end / step + 1e-9) + 1):
        x = _find_x(count * step, end)
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{count * step:g}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">seconds since the launch</text>'
    height = (TOP + HEIGHT - BOTTOM) / 2
    place = f'transform="rotate(-90 11 {height})" x="11" y="{height}" text-anchor="middle"'
    yield f"<text {place}>{escape_line(axis)} in %</text>"


def _choose_step(last: float) -> float:
    """A round step, of which three to seven make the axis."""
    power = 10 ** math.floor(math.log10(last / 3))
    return power * max(factor for factor in (1, 2, 5) if factor * power <= last / 3 * (1 + 1e-9))


def _find_x(seconds: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * max(0.0, seconds) / end


def _find_y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _place_all(line: Line, end: float) -> str:
    step = max(1, math.ceil(len(line) / POINTS))
    # The last point stays, whatever is left out before it.
    kept = [*line[:-1:step], line[-1]] if line else []
    return " ".join(f"{_find_x(seconds, end):.1f},{_find_y(share):.1f}" for seconds, share in kept)
