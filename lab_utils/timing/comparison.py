"""Sets timings side by side in a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab_common import LabError
from lab_utils.timing.measure import Timing

if TYPE_CHECKING:
    import pandas as pd


def compare(timings: Iterable[Timing], *, baseline: str | None = None) -> pd.DataFrame:
    """Sets timings side by side.

    Args:
        timings: The timings, in the order of the rows.
        baseline: Name of the set-up that has speed-up 1; the first where None. Where it ran out of memory, the first
            that did not takes its place, and the index's name says so.

    Returns:
        A DataFrame with the names as index and the columns ``ms`` (median), ``ms low`` and ``ms high`` (quartiles),
        ``images/s``, ``speed-up`` (the baseline's median over this one's) and ``peak MiB``; NaN where nothing is known.
        Where one is no finding there is the column ``noise``: "few", "busy", "jumps" or "".
    """
    import pandas as pd

    rows = {timing.name: timing for timing in timings}
    if not rows or (baseline is not None and baseline not in rows):
        cause, fix = f"the timings are: {', '.join(rows) or 'none'}", "name one of them as baseline"
        raise LabError(f"There is no timing of the baseline {baseline!r}.", cause=cause, fix=fix)
    wanted = rows[baseline] if baseline is not None else next(iter(rows.values()))
    base = next((one for one in (wanted, *rows.values()) if not one.out_of_memory), wanted)
    table = {
        name: {
            "ms": 1e3 * timing.median,
            "ms low": 1e3 * timing.low,
            "ms high": 1e3 * timing.high,
            "images/s": timing.images_per_second,
            "speed-up": base.median / timing.median if timing.median else math.nan,
            "peak MiB": math.nan if timing.peak_bytes is None else timing.peak_bytes / 2**20,
        }
        for name, timing in rows.items()
    }
    noises = {name: timing.noise for name, timing in rows.items()}
    title = "set-up" if base is wanted else f"set-up ({wanted.name} ran out of memory: speed-up over {base.name})"
    frame = pd.DataFrame.from_dict(table, orient="index").rename_axis(title)
    return frame.assign(noise=noises) if any(noises.values()) else frame
