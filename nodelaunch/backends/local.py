"""Nodes on this machine, each with its own folder, address and share of the cores."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lab_common import env_folder
from nodelaunch import values
from nodelaunch.backends.nodes import ThisMachine


@dataclass(frozen=True, kw_only=True)
class LocalNode(ThisMachine):
    """A node on this machine; attributes as in :class:`nodelaunch.backends.nodes.Node`."""

    index: int = 0  # among the nodes that were made together
    # The number of those. Its share of the machine stays even if a job takes only some, so that one and two compare.
    together: int = 1
    here: ClassVar[bool] = True
    maker: ClassVar[str] = "local_nodes"

    @property
    def data_folder(self) -> str:
        """LAB_DATA of a job: this machine's own."""
        return self.data or str(env_folder("LAB_DATA", "data"))


def local_nodes(count: int, *, folder: str | Path | None = None) -> list[LocalNode]:
    """Makes nodes on this machine, which share its cores and talk over the loopback interface.

    On Linux each has an address of its own (127.0.0.1, 127.0.0.2, …), as real hosts have.

    Args:
        count: How many nodes.
        folder: Parent of their folders; None is ``LAB_RUNS/nodes``.

    Raises:
        LabError: ``count`` is not from 1 to 16, or ``folder`` is not a path.
    """
    count = values.check_value("local_nodes", "count", count, values.whole(1, 16, 2))
    base = values.check_value("local_nodes", "folder", folder, values.optional(values.check_path))
    base = base or env_folder("LAB_RUNS", "runs") / "nodes"
    linux = sys.platform.startswith("linux")
    return [
        LocalNode(
            name=f"node{index}",
            folder=str(base / f"node{index}"),
            address=f"127.0.0.{1 + index}" if linux else "127.0.0.1",
            interface="lo" if linux else "lo0",
            index=index,
            together=count,
        )
        for index in range(count)
    ]
