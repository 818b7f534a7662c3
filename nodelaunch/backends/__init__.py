"""The kinds of nodes (local, ssh, slurm), and the modules that launch jobs on them: direct for the first two, slurm.

A node's ``backend`` is the name of that module, whose functions are those of :class:`Backend`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nodelaunch.backends.nodes import Link, Node
    from nodelaunch.bundle import Bundle
    from nodelaunch.preflight import Preflight
    from nodelaunch.script import Placement
    from nodelaunch.spec import JobSpec, Launch

Say = Callable[[str], None]


class Backend(Protocol):
    """The functions of a module that launches jobs on nodes of a kind.

    Attributes:
        BY_HAND: True if a user may start some of the nodes.
    """

    BY_HAND: bool

    def check(self, spec: JobSpec, job_id: str) -> Preflight:
        """Checks in seconds if a job can run, and changes nothing."""

    def needs_preflight(self, spec: JobSpec) -> bool:
        """True if the scripts cannot be written before the nodes were asked."""

    def write(self, spec: JobSpec, launch: Launch, places: Sequence[Placement]) -> dict[str, str]:
        """Returns the scripts by their file's name, in the order of the nodes."""

    def copy(
        self, spec: JobSpec, launch: Launch, bundle: Bundle, found: Preflight | None, *, force: bool, say: Say
    ) -> None:
        """Copies code and scripts to the nodes, and data to those that lack it; what is there already stays.

        Raises:
            LabError: A node was not reached, its disk is full, or code there was changed.
        """

    def start(
        self,
        spec: JobSpec,
        launch: Launch,
        places: Sequence[Placement],
        *,
        by_hand: Sequence[str],
        say: Say,
        stop: threading.Event,
    ) -> Mapping[str, Link]:
        """Starts every node but those that are started by hand; returns the links by the node's name.

        Raises:
            LabError: A node could not be started; the others are ended.
        """


def find_backend(nodes: Sequence[Node]) -> Backend:
    """Returns the module that launches on these nodes; JobSpec has checked that they share it."""
    return import_module(nodes[0].backend)
