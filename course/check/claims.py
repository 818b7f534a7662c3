"""A claim of a lab that its own cells try: a line with a tick where it holds, and what was found where it does not."""

from __future__ import annotations

import torch

from lab_common import LabError
from lab_common.text import clean


def claim(what: str, found: object, expected: object, *, within: float = 0.0) -> None:
    """Prints a claim with a tick, where it holds.

    Args:
        what: The claim, in words.
        found: What a cell found: a tensor, or anything that ``==`` compares.
        expected: What it has to be.
        within: How far numbers may be off: this part of the expected number, or of 1 where that is smaller.

    Raises:
        LabError: It does not hold; the message says what was found and expected.
    """
    if _agree(found, expected, within):
        print(f"✔ {what}")
        return
    bound = f" (within {within:g})" if within else ""
    raise LabError(
        f"✘ This does not hold here: {clean(what, 90)}",
        where=f"found {clean(found, 300)}, expected {clean(expected, 300)}{bound}",
        cause="an earlier cell was changed or left out. No time is part of it, so a busy machine is not the cause",
        fix="Kernel > Restart Kernel and Run up to Selected Cell; if it fails again, please report it",
    )


def _agree(found: object, expected: object, within: float) -> bool:
    if not within and not isinstance(found, torch.Tensor):
        return bool(found == expected)
    found, expected = (torch.as_tensor(one, dtype=torch.float64) for one in (found, expected))
    if found.shape != expected.shape:
        return False
    return bool(((found - expected).abs() <= within * expected.abs().clamp(min=1)).all())
