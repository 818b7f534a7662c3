"""A folder of data that each node of a job needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nodelaunch import kinds, values
from nodelaunch.backends.nodes import Node


@dataclass(frozen=True)
class DataFolder:
    """A folder of data that each node of a job needs: the preflight compares the copies, the job may make them.

    A script finds its folder in the variable LAB_DATA_FOLDER: on a node of this machine ``path`` itself, and on another
    node ``name`` below the node's data folder, which is in LAB_DATA.

    Args:
        path: The folder on this machine.
        name: Its path below the data folder of a node.
        identity: The name of the file in it that is compared by its SHA-256, such as a list of the other files. Where
            it is JSON with ``sha256``, an object by the names of files, those files have to be there too; where it has
            ``classes`` besides, nothing else in it is compared.
        copy_data: Whether to copy the folder to the nodes that lack it. One that is there is never changed.
        fix: The command that makes the folder on a machine, which the messages name; "" where there is none.

    Raises:
        LabError: A field cannot hold its value.
    """

    path: str | Path
    name: str
    identity: str
    copy_data: bool = False
    fix: str = ""

    def __post_init__(self) -> None:
        """Checks every field."""
        kinds.settle(self, values.DATA_FOLDER, owner="DataFolder")

    @property
    def identity_path(self) -> str:
        """Path of the identity file below the data folder of a node."""
        return f"{self.name}/{self.identity}"

    @property
    def is_here(self) -> bool:
        """Whether this machine has the folder."""
        return (self.path / self.identity).is_file()

    def find_on(self, node: Node) -> str:
        """The path of the folder on a node."""
        # A node of this machine needs no copy, unless it was given a data folder of its own.
        own = node.here and not node.data and self.is_here
        return str(self.path) if own else f"{node.data_folder}/{self.name}"
