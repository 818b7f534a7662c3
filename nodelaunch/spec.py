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
from nodelaunch.packages import find_module


@dataclass(frozen=True)
class JobSpec:
    """A training script or module that torchrun, or another program, runs on one or more nodes.

    Without ``root`` the nodes get the script, ``files``, and the modules of one's own that these import; with ``root``
    they get that whole folder. Nothing else has to be on a node but Python, and torch where torchrun runs.

    Args:
        script: The training script, on this machine; with ``root``, relative to that. None if ``module`` is given.
        args: Its arguments.
        nodes: From ``local_nodes``, ``ssh_nodes`` or ``slurm_nodes``.
        nproc_per_node: Processes on each node, one per device.
        env: More environment variables for it. No secrets: they stand in the scripts. PYTHONPATH is added to ours.
        port: Port of the rendezvous on the first node; None takes a free one.
        join_timeout: Seconds to wait until all nodes have joined.
        hang_timeout: Seconds after which the launcher looks at a rank that does not move. Once all ranks wait for each
            other, it ends the job and says where each one stands. A rank that does something else meanwhile (it loads,
            evaluates, waits for a program) is only named; then the process group's own timeout decides.
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
        needs_group: Whether torchrun's ranks have to form one process group; a job whose ranks formed none failed,
            since each of them trained alone. False for a script that needs no group.
        module: The name of a module, in place of ``script``. It starts as ``torchrun -m package.train`` does, so its
            relative imports work. With ``root`` it is found in that folder. A module that is installed on the nodes
            needs no ``root``, and nothing of it is copied.

    Raises:
        LabError: A field cannot hold its value, which would stand in scripts that bash runs.
    """

    script: str | Path | None = None
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
    needs_group: bool = True
    module: str | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        if (self.script is None) == (self.module is None):
            cause = f"{'neither' if self.script is None else 'both'} of script= and module= are given"
            fix = "TorchrunJob('train.py', …) runs a file, TorchrunJob(module='package.train', …) a module"
            raise LabError("A job runs either a script or a module.", where="TorchrunJob", cause=cause, fix=fix)
        if self.root is not None:
            root = kinds.check_value("TorchrunJob", "root", self.root, values.JOB["root"]).resolve()
            if isinstance(self.script, str | PurePath) and not str(self.script).startswith("~"):
                object.__setattr__(self, "script", root / self.script)
            object.__setattr__(self, "root", root)
        kinds.settle(self, values.JOB, owner="TorchrunJob")
        if self.root is not None:
            self._check_root()
        if self.module is not None:
            self._check_module()

    @property
    def name(self) -> str:
        """What a launch is called after: the script's name without its ending, or the last part of the module's."""
        return self.module.rpartition(".")[2] if self.module else self.script.stem

    @property
    def script_path(self) -> str:
        """The script's path within the project, or its name if there is no project; "" for a module."""
        if self.script is None:
            return ""
        return self.script.relative_to(self.root).as_posix() if self.root else self.script.name

    @property
    def source(self) -> Path | None:
        """The file of this machine that the ranks run; None for a module that is installed on the nodes."""
        return find_module(self.module, self.root) if self.module else self.script

    @property
    def command(self) -> str:
        """The command that this job stands for, to be typed by hand on each node, in the folder of the script.

        A module is started in the folder of its project. The job's own command adds what finds errors and ends all
        ranks together; ``write()`` leaves it to be read.
        """
        target = ["-m", self.module] if self.module else [self.script_path]
        if self.program:
            return shlex.join([*self.program, *target, *self.args])
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
        return shlex.join(["torchrun", *options, *target, *self.args])

    def _check_root(self) -> None:
        """Checks that the project is a folder that holds the script.

        Raises:
            LabError: It is none, it does not, or ``files`` are named besides.
        """
        shown, fix = clean(self.root, 300), "root='.' is the current folder"
        if not self.root.is_dir():
            raise LabError("The root of a project is a folder.", where=shown, cause="there is none", fix=fix)
        if self.script and self.root not in self.script.parents:
            where = clean(self.script, 300)
            raise LabError("The script is not within root=.", where=where, cause=f"root is {shown}", fix=fix)
        if self.files:
            fix = "leave files= away: the whole folder is copied"
            cause = "root= copies the whole folder; files= names what is copied one by one"
            raise LabError("A project has all of its files.", where="files=, root=", cause=cause, fix=fix)

    def _check_module(self) -> None:
        """Checks that the module is in the project, or may be installed on the nodes.

        Raises:
            LabError: It is not, or ``files`` are named besides.
        """
        find_module(self.module, self.root)
        if self.files:
            cause = "files= lie beside a script, and a module that is installed on the nodes has none"
            fix = "root='.' copies the current folder, and the module runs in the copy"
            raise LabError("A module has no files beside it.", where="files=, module=", cause=cause, fix=fix)


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


def make_launch(name: str) -> Launch:
    """Makes the names of a launch, after the name of what runs."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:30].strip("-") or "job"
    identity = f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Launch(identity, secrets.token_hex(16), env_folder("LAB_RUNS", "runs") / "jobs" / identity)
