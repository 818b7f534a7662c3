"""A job as its user describes it: what runs, on which nodes, and with which data. Its values are checked once, here."""

from __future__ import annotations

import numbers
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

from lab_common import LabError, env_folder
from lab_common.text import clean
from nodelaunch import values
from nodelaunch.backends.nodes import Node
from nodelaunch.values import NAME, InvalidValue, check_value, checked, optional, rule

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_script(value: Any) -> Path:
    """Takes the path of a script; a function of the notebook exists on no node."""
    if callable(value):
        cause = "the nodes start a new Python, in which nothing of this session exists"
        fix = "put it into a file (%%writefile train.py on a cell's first line) and give the file's name"
        raise LabError("A job runs a file, not a function.", where="TorchrunJob", cause=cause, fix=fix)
    if not isinstance(value, str | PurePath):
        raise InvalidValue("the path of a file", "'train.py'")
    return Path(NAME(str(value)))


def check_argument(value: Any) -> str:
    """Takes a text, a number or a path, and returns it as a text."""
    if not isinstance(value, str | numbers.Number | PurePath):
        raise InvalidValue("a text or a number", "'text'")
    return values.TEXT(str(value))


def check_node_list(value: Any) -> tuple[Node, ...]:
    """Takes a list of nodes that can run one job together."""
    what = "a list of nodes", "launch.local_nodes(2)"
    nodes = values.list_of(rule(lambda node: hasattr(node, "popen"), *what), *what)(value)
    names = [node.name for node in nodes]
    if not nodes:
        raise InvalidValue(*what, "a job needs at least one node")
    if double := [name for name in names if names.count(name) > 1]:
        raise InvalidValue(*what, f"{double[0]} is in it twice; several processes on one node are nproc_per_node")
    if len({node.backend for node in nodes}) > 1:  # one module launches on all of them
        raise InvalidValue(*what, "a job runs on nodes of Slurm or on others, not on both")
    return nodes


def check_env(value: Any) -> dict[str, str]:
    """Takes a dictionary of variables that a script can set."""
    wanted, example = "a dictionary of texts", "{'LAB_SCALE': 'small'}"
    if not isinstance(value, Mapping):
        raise InvalidValue(wanted, example)
    for name in value:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise InvalidValue(wanted, example, f"a variable's name has letters, digits and _ only, unlike {name!r}")
    return {name: check_value("TorchrunJob", f"env[{name!r}]", text, check_argument) for name, text in value.items()}


@dataclass(frozen=True)
class DataFolder(values.Checked):
    """A folder of data that each node of a job needs: the preflight compares the copies, the job may make them.

    A script finds its folder in the variable LAB_DATA_FOLDER: on a node of this machine ``path`` itself, and on another
    node ``name`` below the node's data folder, which is in LAB_DATA.
    """

    path: str | Path = checked(values.check_path)  #: the folder on this machine
    name: str = checked(NAME)  #: its path below the data folder of a node
    #: The file in it that is compared by its SHA-256. If it is JSON with ``sha256``, an object by the names of files,
    #: those have to be there, too; with ``classes`` besides, nothing else is compared.
    identity: str = checked(NAME)
    copy_data: bool = checked(values.FLAG, default=False)  #: copies it to the nodes that lack it, and changes none
    fix: str = checked(values.TEXT, default="")  #: the command that makes the folder on a machine, for messages
    maker: ClassVar[str] = "DataFolder"

    @property
    def is_here(self) -> bool:
        """True if this machine has the folder."""
        return (self.path / self.identity).is_file()

    def find_on(self, node: Node) -> str:
        """Returns the path of the folder on a node."""
        # A node of this machine needs no copy, unless it was given a data folder of its own.
        own = node.here and not node.data and self.is_here
        return str(self.path) if own else f"{node.data_folder}/{self.name}"


ARGUMENTS = values.list_of(check_argument, "a list of texts and numbers", "['--lr', 0.1]")
EXAMPLE = "nodelaunch.DataFolder('/my/digits', 'digits', 'index.json')"
DATA = rule(lambda value: isinstance(value, DataFolder), "a DataFolder", EXAMPLE)
RANK_ORDER = rule(lambda value: value in ("address", "nodes"), "'address' or 'nodes'", "'address'")


@dataclass(frozen=True)
class JobSpec(values.Checked):
    """A training script that torchrun, or another program, runs on one or more nodes.

    Each node gets the script and ``files``, or the project ``root``. What it imports besides is installed there.

    Args:
        script: The training script, on this machine; with ``root``, relative to that.
        args: Its arguments.
        nodes: From ``local_nodes``, ``ssh_nodes`` or ``slurm_nodes``.
        nproc_per_node: Processes on each node, one per device.
        env: More environment variables for it. No secrets, because the scripts contain them. PYTHONPATH is added to
            ours.
        port: Port of the rendezvous on the first node; None takes a free one.
        join_timeout: Seconds to wait until all nodes have joined.
        hang_timeout: Seconds after which the launcher looks at a rank that does not move. Once all ranks wait for each
            other, it ends the job and says where each one stands. A rank that does something else is only named.
        limit: Seconds after which the job is ended in any case.
        max_restarts: How often torchrun restarts the workers after a failure; not with ``program`` or
            ``rank_order="nodes"``.
        rank_order: "address": rank 0 is on the node with the lowest address, compared as text (torchrun's c10d);
            "nodes": on the first of the list (torchrun's static rendezvous).
        root: Folder of the project that the script is part of. Each node gets a copy of it, without what git ignores
            and files over 8 MiB, and the script runs in that copy, which stays for the next job.
        program: What runs the script in place of torchrun, with its options: ``["python"]`` (the node's own),
            ``["bash"]``. It gets torchrun's variables. Nobody looks whether such a process hangs; ``limit`` ends it.
        files: Other files that the script imports or reads beside itself; not with ``root``.
        data: A :class:`nodelaunch.DataFolder`: what data each node needs; the preflight compares them. None: no data.
        needs_group: True if torchrun's ranks have to form one process group: otherwise each of them trained alone, and
            the job fails.

    Raises:
        LabError: A field does not take its value.
    """

    script: str | Path = checked(check_script)
    args: Sequence[object] = checked(ARGUMENTS, default=())
    nodes: Sequence[Node] = checked(check_node_list, default=())
    nproc_per_node: int = checked(values.PROCESSES, default=1)
    env: Mapping[str, str] = checked(check_env, default_factory=dict)
    port: int | None = checked(values.PORT, default=None)
    join_timeout: float = checked(values.SECONDS, default=60.0)
    hang_timeout: float = checked(values.SECONDS, default=60.0)
    limit: float = checked(values.SECONDS, default=3600.0)
    max_restarts: int = checked(values.whole(0, 1000, 3), default=0)
    rank_order: str = checked(RANK_ORDER, default="address")
    root: str | Path | None = checked(optional(values.check_path), default=None)
    program: Sequence[str] = checked(values.list_of(NAME, example="['python']"), default=())
    files: Sequence[str | Path] = checked(values.list_of(values.check_path, "a list of paths"), default=())
    data: DataFolder | None = checked(optional(DATA), default=None)
    needs_group: bool = checked(values.FLAG, default=True)
    maker: ClassVar[str] = "TorchrunJob"

    def __post_init__(self) -> None:
        """Checks every field, and those that have to fit together."""
        super().__post_init__()
        script = self.script if str(self.script).startswith("~") else (self.root or Path()) / self.script
        script = check_value("TorchrunJob", "script", script, values.check_path)
        object.__setattr__(self, "script", script)
        if self.root:
            self._check_root()

    def _check_root(self) -> None:
        """Checks that the project is a folder with the script in it, and that it is not combined with ``files``."""
        if self.files:
            what, cause = "files= and root= do not go together.", "root= copies the whole folder"
        elif self.root not in self.script.parents:
            what, cause = "The script is not within root=.", f"the script is {clean(self.script, 300)}"
        else:
            return
        fix = "root='.' is the current folder, which is copied as a whole"
        raise LabError(what, where=f"root={clean(self.root, 300)}", cause=cause, fix=fix)

    @property
    def world_size(self) -> int:
        """Number of ranks, on all nodes together."""
        return len(self.nodes) * self.nproc_per_node

    @property
    def script_path(self) -> str:
        """The script's path within the project, or its name if there is no project."""
        return self.script.relative_to(self.root).as_posix() if self.root else self.script.name

    @property
    def command(self) -> str:
        """The command that this job stands for, to be typed by hand on each node, in the folder of the script.

        On Slurm: once, on a login node, in the folder that ``write()`` fills.
        """
        if self.nodes[0].backend.endswith(".slurm"):
            return "sbatch job.sbatch"
        start = self.program
        if not start:
            head = self.nodes[0].address or self.nodes[0].name.rpartition("@")[2]
            meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:{self.port or 29500}"]  # torchrun's own choice
            many = [f"--nnodes={len(self.nodes)}", *meet] if len(self.nodes) > 1 else ["--standalone"]
            start = ["torchrun", *many, f"--nproc-per-node={self.nproc_per_node}"]
        return shlex.join([*start, self.script_path, *self.args])


@dataclass(frozen=True)
class Launch:
    """The names of one launch, new each time: what is left of an earlier one must not be joined."""

    id: str  # the job's, in the names of folders and in the environment of every process
    rendezvous_id: str  # torchrun's --rdzv-id: a secret, so that no stranger guesses it
    folder: Path  # on this machine, with the scripts and output.log


def make_launch(name: str) -> Launch:
    """Makes the names of a launch, after the name of what runs."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:30].strip("-") or "job"
    identity = f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Launch(identity, secrets.token_hex(16), env_folder("LAB_RUNS", "runs") / "jobs" / identity)
