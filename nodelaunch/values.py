"""What each field of a job, a node, a request and a plan may hold: its type and its range, in one table each.

The values stand in scripts that bash runs. So they are checked as they are set, and what is kept is of Python's own
types: a text that was to be a number never comes as far as a script.
"""

from __future__ import annotations

import ipaddress
import json
import numbers
import operator
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.kinds import (
    Kind,
    UnfitError,
    choice,
    optional,
    read_flag,
    read_name,
    read_path,
    read_place,
    read_seconds,
    read_sequence,
    read_text,
    show,
    whole,
)

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the script itself sets, and what bash does not let anyone set, or changes by itself.
TAKEN = re.compile(
    r"code|job|work|options|arguments|supervise|names|peer|route|own|head|known|interface|is_host|PYTHONSAFEPATH|PET_\w+"
    r"|LAB_(JOB_\w+|LEASE|NODE|WORLD_SIZE|\w+_TIMEOUT|LIMIT)"
    r"|_|E?UID|PPID|PWD"
    r"|OLDPWD|IFS|OPT(IND|ERR|ARG)|SHLVL|POSIXLY_CORRECT|SHELLOPTS|BASH\w*|SECONDS|S?RANDOM|LINENO|EPOCH\w+|GROUPS|DIRSTACK|FUNCNAME|HISTCMD"
)
DATA_EXAMPLE = "DataFolder('/my/digits', 'digits', 'index.json')"
MODULE = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
THREADS = re.compile(r"[1-9][0-9]{0,3}")


def _read_inner(value: object) -> str:
    """A path below a folder, which it cannot leave."""
    read_path(value)
    text = read_name(value)
    if {"", ".", ".."} & {*text.split("/")}:
        raise UnfitError("it is a path below another folder: no slash at its ends, and no . or .. in it")
    return text


def _read_file_name(value: object) -> str:
    text = _read_inner(value)
    if "/" in text:
        raise UnfitError("it is the name of a file in the folder, and no path")
    return text


def _read_data(value: object) -> object:
    if isinstance(value, type) or not all(hasattr(value, part) for part in ("path", "identity", "find_on")):
        raise UnfitError(f"it is of the type {type(value).__name__}")
    return value


def _read_absolute(value: object) -> str:
    text = read_name(value)
    if not text.startswith("/"):
        raise UnfitError("it does not begin with a slash")
    return text


def _read_script(value: object) -> Path | None:
    if value is None:  # a module runs in its place
        return None
    if callable(value):
        fix = "put it into a file (%%writefile train.py on a cell's first line) and give the file's name"
        cause = "the nodes start Python anew, where nothing of this session exists"
        raise LabError("A job runs a file, not a function.", where="TorchrunJob", cause=cause, fix=fix)
    return read_place(value)


def _read_module(value: object) -> str:
    text = read_name(value)
    if text.endswith(".py") or not MODULE.fullmatch(text) or len(text) > 255:
        name = ".".join(part for part in text.removesuffix(".py").split("/") if part not in ("", "."))
        cause = "a module is named by dots, without .py; script= takes the path of a file"
        raise UnfitError(cause, f"module={name!r}" if MODULE.fullmatch(name) and len(name) <= 255 else "")
    return text


def _read_address(value: object) -> str:
    return str(ipaddress.IPv4Address(read_name(value)))


def _read_argument(value: object) -> str:
    if isinstance(value, numbers.Number | PurePath) or type(value).__name__ == "bool":  # numpy's bool is no Number
        # An exact number, whatever a subclass says of itself.
        value = str(operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value)
    elif not isinstance(value, str):
        raise UnfitError(f"an element is of the type {type(value).__name__}, neither a text nor a number")
    return read_text(value)


def _read_arguments(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        text = read_text(value)
        try:
            parts = shlex.split(text)
        except ValueError:  # a quote that is not closed
            parts = [text]
        raise UnfitError("one text is one argument; a list has one text for each", f"args={parts!r}")
    return read_sequence(value, _read_argument)


def _read_files(value: object) -> tuple[Path, ...]:
    if isinstance(value, str | PurePath):
        raise UnfitError("it is one path; several files are named in a list", f"files=[{show(str(value), 200)}]")
    return read_sequence(value, read_place)


def _read_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise UnfitError("it is one text; a list has one text for each", f"[{show(value, 200)}]")
    return read_sequence(value, read_name)


def _read_node(value: object) -> object:
    # Not its folder or interpreter: a host would be asked for them.
    if isinstance(value, type) or not all(hasattr(value, part) for part in ("name", "popen", "explain")):
        raise UnfitError(
            f"an element is of the type {type(value).__name__}, and no node", "nodes=launch.local_nodes(2)"
        )
    return value


def _read_nodes(value: object) -> list:
    if hasattr(value, "popen") and not isinstance(value, type):
        raise UnfitError("it is one node; a list has one or several", "nodes=[node]")
    nodes, fix = list(read_sequence(value, _read_node)), "TorchrunJob('train.py', nodes=launch.local_nodes(2))"
    if not nodes:
        raise LabError("A job needs at least one node.", where="TorchrunJob", fix=fix)
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        fix = "name each node once; several processes on one node are nproc_per_node"
        raise LabError("A node of this job is in the list twice.", where=nodes[0].name, fix=fix)
    if len({hasattr(node, "request") for node in nodes}) > 1:  # a node of Slurm says what is asked of it
        where = clean(", ".join(names), 200)
        raise LabError("A job runs on nodes of Slurm or on others, not on both.", where=where, fix=fix)
    return nodes


def _read_env(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise UnfitError(f"it is of the type {type(value).__name__}, not a dictionary")
    env = {}
    for name, text in dict(value).items():
        if not isinstance(name, str):
            raise UnfitError(f"a name in it is of the type {type(name).__name__}, not a text")
        name = str.__str__(name)
        if not VARIABLE.fullmatch(name):
            fix = "letters, digits and _ only, for example LAB_DATA"
            raise LabError(f"No variable can be called {json.dumps(name[:60])[:60]}.", where="env", fix=fix)
        if TAKEN.fullmatch(name):
            cause = "the script of the node, or bash itself, uses a variable of this name"
            raise LabError(f"{name[:60]} cannot be set for a job.", where="env", cause=cause, fix="choose another name")
        env[name] = _read_argument(text)
        if name == "OMP_NUM_THREADS":
            read_threads(env[name], where="env")
    return MappingProxyType(env)  # what was checked does not change


def read_threads(text: str, *, where: str) -> int | None:
    """Returns the number of threads that OMP_NUM_THREADS names; None where it is empty.

    Raises:
        LabError: It names something else, such as OpenMP's list for nested threads, which torch does not use.
    """
    if not text.strip():
        return None
    if not THREADS.fullmatch(text.strip()):
        raise LabError(
            f"OMP_NUM_THREADS={show(text, 60)} is no number of threads.",
            where=where,
            cause="a job takes one whole number from 1 to 9999",
            fix="export OMP_NUM_THREADS=4, then start Python (or JupyterLab) again" if where != "env" else "env={…: 4}",
        )
    return int(text)


TEXT = Kind("a text", "'text'", read_text)
NAME = Kind("a text that is not empty", "'name'", read_name)
PATH = Kind("a path", "'folder/file'", read_path)
PLACE = Kind("a path", "'folder/file'", read_place)
NAMES = Kind("a list of texts", "['one', 'two']", _read_names)
ABSOLUTE = Kind("an absolute path", "'/home/me/labs'", _read_absolute)
ADDRESS = Kind("an IPv4 address", "'10.0.0.11'", _read_address)
PYTHON = Kind("the path of a Python", "'/home/me/labs/.venv/bin/python'", read_name)
INTERFACE = Kind("the name of a network interface", "'eth0'", read_name)
PORT = optional(whole(1, 65535, 29500))
PROCESSES = whole(1, 256, 1)
RESTARTS = whole(0, 1000, 3)
SECONDS = Kind("a number of seconds from 0.1 to 1e+08", "60", lambda value: read_seconds(value, 0.1, 1e8))
RANK_ORDER = choice("address", "nodes")
FLAG = Kind("True or False", "True", read_flag)
ENV = Kind("a dictionary of texts", "{'LAB_SCALE': 'small'}", _read_env)
ARGUMENTS = Kind("a list of texts and numbers", "['--lr', 0.1]", _read_arguments)
PROGRAM = Kind("a list of texts", "['python']", _read_names)

JOB = {
    "script": Kind("the path of a file", "'train.py'", _read_script),
    "args": ARGUMENTS,
    "nodes": Kind("a list of nodes", "launch.local_nodes(2)", _read_nodes),
    "nproc_per_node": PROCESSES,
    "env": ENV,
    "port": PORT,
    "join_timeout": SECONDS,
    "hang_timeout": SECONDS,
    "limit": SECONDS,
    "max_restarts": RESTARTS,
    "rank_order": RANK_ORDER,
    "root": optional(PLACE),
    "program": PROGRAM,
    "files": Kind("a list of paths", "['helper.py']", _read_files),
    "data": optional(Kind("a DataFolder", f"nodelaunch.{DATA_EXAMPLE}", _read_data)),
    "needs_group": FLAG,
    "module": optional(Kind("the name of a module", "'package.train'", _read_module)),
}
DATA_FOLDER = {
    "path": PLACE,
    "name": Kind("a path below the data folder of a node", "'images/digits'", _read_inner),
    "identity": Kind("the name of a file", "'index.json'", _read_file_name),
    "copy_data": FLAG,
    "fix": TEXT,
}
PLAN = {
    "job_id": TEXT,
    "rendezvous_id": TEXT,
    "node": whole(0, 999, 0),
    "node_name": TEXT,
    "nodes": whole(1, 1000, 2),
    "nproc_per_node": PROCESSES,
    "python": TEXT,
    "job_folder": TEXT,
    "code_folder": TEXT,
    "work_folder": TEXT,
    "script": TEXT,
    "args": ARGUMENTS,
    "address": optional(TEXT),  # on Slurm the script finds it out; another script checks it
    "head_address": optional(TEXT),
    "port": whole(0, 65535, 29500),  # 0: as with the addresses
    "interface": optional(TEXT),
    "threads": optional(whole(1, 9999, 4)),
    "join_timeout": SECONDS,
    "hang_timeout": SECONDS,
    "limit": SECONDS,
    "max_restarts": RESTARTS,
    "rank_order": RANK_ORDER,
    "env": ENV,
    "program": PROGRAM,
    "project": FLAG,
    "module": optional(TEXT),
}
NODE = {"address": optional(ADDRESS), "interface": optional(INTERFACE), "data": optional(NAME)}
LOCAL_NODES = {"count": whole(1, 16, 2, "number of nodes"), "folder": optional(PLACE)}
LOCAL_NODE = {**NODE, "name": NAME, "folder": ABSOLUTE, "python": PYTHON}
LOCAL_NODE |= {"index": whole(0, 15, 0), "together": LOCAL_NODES["count"]}
HOSTS = Kind("a list of hosts", "['n1', 'n2']", lambda value: read_sequence(value, read_text))
SSH_NODES = {"python": optional(PYTHON), "folder": PATH, "config": optional(PLACE)}
SSH_NODE = {**NODE, "name": NAME, "wanted_python": optional(PYTHON), "wanted_folder": NAME}
SLURM_NODES = {"folder": optional(PLACE), "python": optional(PYTHON)}
SLURM_NODE = {**NODE, "name": NAME, "folder": ABSOLUTE, "python": PYTHON}
SLURM_REQUEST = {"count": whole(1, 1000, 2, "number of nodes"), "partition": optional(TEXT)}
SLURM_REQUEST |= {"time_limit": TEXT, "extra": NAMES}
