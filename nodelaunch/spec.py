"""What runs, and on which nodes: the values that a job was given, checked once; and the names of one launch of it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab_common import env_folder
from nodelaunch import kinds, values
from nodelaunch.backends.nodes import Node


@dataclass(frozen=True)
class JobSpec:
    """A training script that torchrun runs on one or more nodes.

    Args:
        script: The training script, on this machine.
        args: Its arguments.
        nodes: From ``local_nodes``, ``ssh_nodes`` or ``slurm_nodes``.
        nproc_per_node: Processes on each node, one per device.
        env: More environment variables for it. No secrets: they stand in the scripts.
        port: Port of the rendezvous on the first node; None takes a free one.
        join_timeout: Seconds to wait until all nodes have joined.
        hang_timeout: Seconds after which a rank that does not move is said to hang.
        limit: Seconds after which the job is ended in any case.
        max_restarts: How often torchrun starts the workers anew after a failure.
        rank_order: "address": rank 0 is on the node with the lowest address, compared as text (torchrun's c10d);
            "nodes": on the first of the list (torchrun's static rendezvous).
        files: Other files that the script imports or reads beside itself.
        dataset: Folder in ``LAB_DATA/packed`` of the data set, which the preflight compares; None skips that.
        pack: That folder here, where it has another name: ``Dataset.pack``.
        copy_data: Whether to copy that pack from this machine to the nodes that lack it.

    Raises:
        LabError: A field cannot hold its value, which would stand in scripts that bash runs.
    """

    script: str | Path
    args: Sequence[object] = ()
    nodes: Sequence[Node] = ()
    nproc_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    join_timeout: float = 60.0
    hang_timeout: float = 60.0
    limit: float = 3600.0
    max_restarts: int = 0
    rank_order: str = "address"
    files: Sequence[str | Path] = ()
    dataset: str | None = None
    pack: Path | None = None
    copy_data: bool = False

    def __post_init__(self) -> None:
        """Checks every field, and finds the pack."""
        kinds.settle(self, values.JOB, owner="TorchrunJob")
        pack = self.pack or env_folder("LAB_DATA", "data") / "packed" / str(self.dataset)
        object.__setattr__(self, "pack", pack)

    @property
    def manifest(self) -> str:
        """Path within ``LAB_DATA`` of what identifies the data set; "" where there is none."""
        return f"packed/{self.dataset}/manifest.json" if self.dataset else ""


@dataclass(frozen=True)
class Launch:
    """The names of one launch, new each time: what is left of an earlier one must not be joined.

    Attributes:
        id: Of the job, as it stands in the names of folders and in the environment of every process.
        rendezvous_id: torchrun's ``--rdzv-id``: a secret, so that no stranger guesses it.
        folder: On this machine, with the scripts and ``output.log``.
    """

    id: str
    rendezvous_id: str
    folder: Path


def make_launch(script: Path) -> Launch:
    """Makes the names of a launch of a script."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", script.stem)[:30].strip("-") or "job"
    identity = f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Launch(identity, secrets.token_hex(16), env_folder("LAB_RUNS", "runs") / "jobs" / identity)
