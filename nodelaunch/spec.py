"""What runs, and on which nodes: the values that a job was given, checked once; and the names of one launch of it."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch import kinds, values
from nodelaunch.backends.nodes import Node
from nodelaunch.data import DataFolder


@dataclass(frozen=True)
class JobSpec:
    """A training script that torchrun, or another program, runs on one or more nodes.

    Without ``root`` the nodes get the script, ``files``, and the modules of one's own that these import; with ``root``
    they get that whole folder. Nothing else has to be on a node but Python, and torch where torchrun runs.

    Args:
        script: The training script, on this machine; with ``root``, relative to that.
        args: Its arguments.
        nodes: From ``local_nodes``, ``ssh_nodes`` or ``slurm_nodes``.
        nproc_per_node: Processes on each node, one per device.
        env: More environment variables for it. No secrets: they stand in the scripts. PYTHONPATH is added to ours.
        port: Port of the rendezvous on the first node; None takes a free one.
        join_timeout: Seconds to wait until all nodes have joined.
        hang_timeout: Seconds after which a rank that does not move is said to hang; at most three quarters of the
            process group's own timeout, so that the launcher always comes first and says where each rank stands.
        limit: Seconds after which the job is ended in any case.
        max_restarts: How often torchrun starts the workers anew after a failure.
        rank_order: "address": rank 0 is on the node with the lowest address, compared as text (torchrun's c10d);
            "nodes": on the first of the list (torchrun's static rendezvous).
        root: Folder of the project that the script is part of. Each node gets a copy of it, without what git ignores
            and without files over 8 MiB, and the script runs in that copy, which stays for the next job.
        program: What runs the script in place of torchrun, with its options: ``["python"]`` (the node's own),
            ``["bash"]``. It is started ``nproc_per_node`` times on each node, with RANK, WORLD_SIZE, MASTER_ADDR and
            torchrun's other variables. Nobody looks whether such a process hangs; ``limit`` ends it.
        files: Other files that the script imports or reads beside itself; not with ``root``.
        data: A :class:`nodelaunch.DataFolder`: what data each node needs; the preflight compares them. None: no data.

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
    root: str | Path | None = None
    program: Sequence[str] = ()
    files: Sequence[str | Path] = ()
    data: DataFolder | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.root is not None:
            root = kinds.check_value("TorchrunJob", "root", self.root, values.JOB["root"]).resolve()
            if isinstance(self.script, str | PurePath):
                object.__setattr__(self, "script", root / self.script)
            object.__setattr__(self, "root", root)
        kinds.settle(self, values.JOB, owner="TorchrunJob")
        if self.root is not None:
            self._check_root()

    @property
    def command(self) -> str:
        """The command that this job stands for, to be typed by hand on each node, in the folder of the script.

        The job's own command adds what finds errors and ends all ranks together; ``write()`` leaves it to be read.
        """
        script = self.script.relative_to(self.root) if self.root else Path(self.script.name)
        if self.program:
            return shlex.join([*self.program, str(script), *self.args])
        head = self.nodes[0]
        address = head.address or head.name.rpartition("@")[2]
        port = self.port or 29500  # torchrun's own choice
        options = ["--standalone"]
        if len(self.nodes) > 1 and self.rank_order == "address":
            options = [f"--nnodes={len(self.nodes)}", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}"]
        elif len(self.nodes) > 1:  # each node says which one it is: 0 on the first
            options = [f"--nnodes={len(self.nodes)}", "--node-rank=0"]
            options += [f"--master-addr={address}", f"--master-port={port}"]
        options.append(f"--nproc-per-node={self.nproc_per_node}")
        return shlex.join(["torchrun", *options, str(script), *self.args])

    def _check_root(self) -> None:
        """Checks that the project is a folder that holds the script.

        Raises:
            LabError: It is none, it does not, or ``files`` are named besides.
        """
        shown, fix = clean(self.root, 300), "root='.' is the current folder"
        if not self.root.is_dir():
            raise LabError("The root of a project is a folder.", where=shown, cause="there is none", fix=fix)
        if self.root not in self.script.parents:
            where = clean(self.script, 300)
            raise LabError("The script is not within root=.", where=where, cause=f"root is {shown}", fix=fix)
        if self.files:
            fix = "leave files= away: the whole folder is copied"
            cause = "root= copies the whole folder; files= names what is copied one by one"
            raise LabError("A project has all of its files.", where="files=, root=", cause=cause, fix=fix)


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
