"""Nodes that are reached with the OpenSSH client and the user's own configuration.

Host keys are always checked, and nothing ever asks for a password: a question of ssh is an error here, which explains
what to do once by hand.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lab_common import LabError
from lab_common.text import clean
from nodelaunch import values
from nodelaunch.backends.refusals import explain_refusal

# BatchMode: never a question. ServerAlive…: a dead host is noticed after 6 s, not after hours.
OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=2", "ServerAliveCountMax=3")
FOLDER = "~/distributed-training-labs"
# Prints the home and the first interpreter that exists; with a mark, since a ~/.bashrc may print, too.
LOOK = r"""
for python do
    case $python in '~/'*) python=$HOME/${python#'~/'};; esac
    command -v "$python" > /dev/null 2>&1 && break
    python=
done
printf '\nLAB-NODE %s\nLAB-NODE %s\n' "$HOME" "$(command -v "$python")"
"""


class Connections:
    """One connection per host for all programs of a list of nodes (OpenSSH's ControlMaster), in a private folder.

    A connection takes a few tenths of a second, and a preflight needs several. They end with ``close``, with the
    nodes, or with the interpreter; if that was killed, 30 s after the last program.
    """

    def __init__(self, config: Path | None) -> None:
        self.config = config
        self._folder: Path | None = None
        self._close = None

    def options(self, name: str) -> list[str]:
        """The options of ssh that go before the host's name, ``-T`` to ``--``."""
        given = ["-F", str(self.config)] if self.config else []
        shared = ["ControlMaster=auto", f"ControlPath={self._find_folder()}/%C", "ControlPersist=30"]
        return ["-T", *given, *(part for option in (*OPTIONS, *shared) for part in ("-o", option)), "--", name]

    def _find_folder(self) -> Path:
        if self._folder is None or not self._folder.exists():
            # A socket's path may have some 100 characters, which macOS's own temporary folder exceeds.
            short = "/tmp" if Path("/tmp").is_dir() else None
            self._folder = Path(tempfile.mkdtemp(prefix="lab-", dir=short))
            self._folder.chmod(0o700)  # a socket there is a way in; and the umask may exclude us
            self._close = weakref.finalize(self, _close_connections, self._folder)
        return self._folder

    def close(self) -> None:
        """Ends all connections and removes their folder; the next program makes new ones."""
        if self._close:
            self._close()


def _close_connections(folder: Path) -> None:
    for socket in folder.iterdir() if folder.exists() else ():
        # ssh requires the name of a host, and finds the socket without it.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["ssh", "-F", os.devnull, "-o", f"ControlPath={socket}", "-O", "exit", "--", "localhost"]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class SshNode:
    """A host that ssh reaches; attributes as in :class:`nodelaunch.backends.nodes.Node`.

    Nothing is asked of the host before the first use: ``python`` and ``folder`` are looked up there, once, if they
    were not given in full.

    Attributes:
        name: An argument of ssh: a name of the user's configuration or of the network, an address, ``user@host``.
        wanted_python: As the user gave it; None looks for this interpreter's own path there, then for python3.
        wanted_folder: As the user gave it, with ``~`` for the home on the host.
        connections: Shared by the nodes of one list.
    """

    name: str = values.checked(values.NAME)
    address: str | None = values.checked(values.optional(values.check_address), default=None)
    interface: str | None = values.checked(values.optional(values.NAME), default=None)
    data: str | None = values.checked(values.optional(values.NAME), default=None)
    wanted_python: str | None = values.checked(values.optional(values.NAME), default=None)
    wanted_folder: str = values.checked(values.FOLDER, default=FOLDER)
    connections: Connections = field(default_factory=lambda: Connections(None), repr=False, compare=False)
    backend: ClassVar[str] = "nodelaunch.backends.direct"
    here: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks every field."""
        values.check_fields(self, "ssh_nodes")

    @property
    def python(self) -> str:
        """The interpreter there."""
        given = self.wanted_python or ""
        return given if given.startswith("/") else self._facts[1]

    @property
    def folder(self) -> str:
        """Our folder there, absolute."""
        if self.wanted_folder.startswith("/"):
            return self.wanted_folder
        return f"{self._facts[0]}/{self.wanted_folder.removeprefix('~').lstrip('/')}".rstrip("/")

    @property
    def data_folder(self) -> str:
        """LAB_DATA of a job there."""
        return self.data or f"{self.folder}/data"

    def name_job_folder(self, job_id: str, index: int) -> str:
        """The folder of a job's files there: each node has its own, since several may share a home."""
        return f"{self.folder}/jobs/{job_id}/node{index}"

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        """Starts a program there; the arguments arrive unchanged. If the host refuses, the process ends.

        Raises:
            LabError: There is no ssh on this machine.
        """
        # sshd hands one string to the login shell, so they are quoted; `exec`, so that no shell is in between.
        command = ["ssh", *self.connections.options(self.name), "exec " + shlex.join(argv)]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError as error:
            what, fix = (
                "The OpenSSH client",
                "Debian, Ubuntu: sudo apt-get install openssh-client; or use local_nodes(2)",
            )
            cause = "there is no program `ssh`"
            raise LabError(f"{what} is not on this machine.", where="PATH", cause=cause, fix=fix) from error
        # The connections end when nothing refers to them any more; a program must not lose its own.
        process.connections = self.connections
        return process

    def explain(self, returncode: int, stderr: str) -> LabError:
        """The error of a program that could not be run there."""
        python = self.wanted_python or self.__dict__.get("_facts", ("", "python3"))[1]
        return explain_refusal(self.name, returncode, stderr, python=python, config=self.connections.config)

    def close(self) -> None:
        """Ends the connections to this node and to the others of its list."""
        self.connections.close()

    @functools.cached_property
    def _facts(self) -> tuple[str, str]:
        """The home and the interpreter there.

        Raises:
            LabError: The host was not reached, or has no Python.
        """
        wanted = [self.wanted_python] if self.wanted_python else [sys.executable, "python3"]
        process = self.popen(["sh", "-c", LOOK, "sh", *wanted])
        with process:
            try:
                out, err = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise self.explain(255, "the host did not answer: timed out") from None
        found = re.findall(r"^LAB-NODE (.*)$", out.decode(errors="surrogateescape"), re.MULTILINE)
        if process.returncode or len(found) != 2:
            raise self.explain(process.returncode, err.decode(errors="replace"))
        if not found[1]:
            raise self.explain(127, f"not found: {' and '.join(wanted)}")
        return found[0], found[1]


def ssh_nodes(
    names: Sequence[str],
    *,
    python: str | None = None,
    folder: str = FOLDER,
    interface: str | None = None,
    data: str | None = None,
    config: str | Path | None = None,
) -> list[SshNode]:
    """Makes nodes out of hosts that ``ssh NAME`` reaches without a question.

    Args:
        names: Names or addresses as you would type them after ``ssh``.
        python: The interpreter on the hosts; None takes this one's path if it exists there, otherwise python3.
        folder: The folder for all that is ours on the hosts; ``~`` is the home there.
        interface: The network interface between the hosts; None finds it by the route.
        data: ``LAB_DATA`` on the hosts.
        config: A configuration of ssh in place of ``~/.ssh/config``.

    Raises:
        LabError: A name is invalid, or appears twice; the configuration does not exist.
    """
    hosts = values.list_of(values.check_text, "a list of hosts", "['n1', 'n2']")
    names = [names] if isinstance(names, str) else values.check_value("ssh_nodes", "names", names, hosts)
    for name in names:
        if not name or name.startswith("-") or not name.isprintable() or " " in name or len(name) > 255:
            cause = "a name is empty, begins with a dash, or contains spaces or control characters"
            fix = "give it as you would type it after `ssh`, for example ssh_nodes(['n1', 'n2'])"
            raise LabError(f"{name[:40]!r} is no host.", where="ssh_nodes", cause=cause, fix=fix)
    if not names or len(set(names)) != len(names):
        raise LabError(
            "Each node needs its own host.",
            where=f"ssh_nodes({', '.join(names)[:80]})",
            cause="the list is empty, or a name is in it twice",
            fix="name each host once; several processes on one host are nproc_per_node",
        )
    path = values.check_value("ssh_nodes", "config", config, values.optional(values.check_path))
    if path and not path.is_file():
        where = clean(path, 300)
        raise LabError("The configuration of ssh is not there.", where=where, fix="give the path of a file to config=")
    shared = Connections(path)
    return [
        SshNode(
            name,
            interface=interface,
            data=data,
            wanted_python=python,
            wanted_folder=str(folder) if isinstance(folder, Path) else folder,
            connections=shared,
        )
        for name in names
    ]
