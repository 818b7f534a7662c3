"""Counts the collectives that this rank has started, from outside, whatever code has called them."""

from __future__ import annotations

import torch.distributed as dist

from lab_common import LabError


def count_collectives(group: dist.ProcessGroup | None = None) -> int:
    """Returns how many collectives this rank has started in a process group, the default one if None.

    The group numbers them itself, so that those count, too, that torch's DDP starts in C++, and those that a program
    calls under another name.

    Raises:
        LabError: This process is no rank.
    """
    if not dist.is_initialized():
        fix = "call it in a %%px cell, after engines.start()"
        raise LabError("This process is no rank.", where="count_collectives()", fix=fix)
    return (group or dist.group.WORLD)._get_sequence_number_for_group()
