"""Nodes on this machine: as many agents as asked for, each with its own folder, address and share of the cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lab_common import LabError, env_folder
from nodelaunch import values
from nodelaunch.ends import explain_end

COUNT = values.whole(1, 16, 2)


@dataclass(frozen=True)
class LocalNode:
    """A node on this machine; attributes as in :class:`nodelaunch.backends.nodes.Node`.

    Attributes:
        index: Which of the nodes that were made together, from 0.
        together: How many those are. A node keeps its share of the machine where a job takes some of them only, so
            that one node and two can be compared.
    """

    name: str = values.checked(values.NAME)
    folder: str = values.checked(values.FOLDER)
    address: str | None = values.checked(values.optional(values.check_address))
    interface: str | None = values.checked(values.optional(values.NAME))
    python: str = values.checked(values.NAME, default=sys.executable)
    data: str | None = values.checked(values.optional(values.NAME), default=None)
    index: int = values.checked(values.whole(0, 15, 0), default=0)
    together: int = values.checked(COUNT, default=1)
    backend: ClassVar[str] = "nodelaunch.backends.direct"
    here: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks every field."""
        values.check_fields(self, "local_nodes")

    @property
    def data_folder(self) -> str:
        """LAB_DATA of a job: this machine's own."""
        return self.data or str(env_folder("LAB_DATA", "data"))

    def name_job_folder(self, job_id: str, index: int) -> str:
        """Where a job's files go: each node has its own."""
        return f"{self.folder}/jobs/{job_id}/node{index}"

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        """Starts a program in a session of its own, so that an interrupt in the terminal reaches the launcher alone."""
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def explain(self, returncode: int, stderr: str) -> LabError:
        """Says why a program could not be run here, or ended."""
        if end := explain_end(self.name, self.folder, returncode, stderr):
            return end
        last = (stderr.strip().splitlines() or [f"exit status {returncode}"])[-1]
        return LabError(
            f"A program could not be run on {self.name}.",
            where=self.folder,
            cause=last[:300],
            fix="see that the folder can be written to and that the disk has room, then run the job again",
        )


def local_nodes(count: int, *, folder: str | Path | None = None) -> list[LocalNode]:
    """Makes nodes on this machine, which share its cores and talk over the loopback interface.

    On Linux each has an address of its own (127.0.0.1, 127.0.0.2, …: all of 127/8 answers without set-up), so that the
    nodes can be told apart by it as real hosts can. On macOS there is only 127.0.0.1.

    Args:
        count: How many nodes.
        folder: Where their folders go; ``LAB_RUNS/nodes`` where None.

    Raises:
        LabError: ``count`` is not from 1 to 16, or ``folder`` is no path.
    """
    count = values.check_value("local_nodes", "count", count, COUNT)
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
