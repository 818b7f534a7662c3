"""The device on which the labs train and how much work they do: what suits the machine, or LAB_SCALE."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lab_common import LabError

if TYPE_CHECKING:
    import torch

SCALES = ("small", "full")


def device() -> torch.device:
    """Returns the device that the labs train on: the first GPU, or the CPU if there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def scale(device_type: str = "") -> str:
    """Returns how much work the labs do, "small" or "full": ``LAB_SCALE``, or what suits the device.

    Args:
        device_type: "cuda" or "cpu", if the work is done elsewhere; by default this machine's.

    Raises:
        LabError: ``LAB_SCALE`` says something else.
    """
    wanted = os.environ.get("LAB_SCALE", "")
    if not wanted:
        return "full" if (device_type or device().type) == "cuda" else "small"
    if wanted not in SCALES:
        raise LabError(
            f"LAB_SCALE has to be {' or '.join(SCALES)}, and is {wanted[:40]!r}.",
            where="the environment variable LAB_SCALE",
            cause="a spelling mistake",
            fix="export LAB_SCALE=small",
        )
    return wanted


def scale_reason() -> str:
    """Explains in a few words why ``scale`` is what it is."""
    if os.environ.get("LAB_SCALE"):
        return "LAB_SCALE says so"
    if device().type == "cuda":
        return "there is a GPU; LAB_SCALE=small does less"
    return "there is no GPU; LAB_SCALE=full does more in most labs"
