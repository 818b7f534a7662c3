"""Nodes that are reached with the OpenSSH client and the user's own configuration.

Host keys are always checked. A question of ssh, such as for a password, is an error that says what to do by hand.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lab_common import LabError
from lab_common.text import clean
from nodelaunch import values
from nodelaunch.backends.nodes import Node

# ServerAlive…: a dead host is noticed after 6 s, not after hours. Control…: all programs on a host share a connection.
OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=2", "ServerAliveCountMax=3")
OPTIONS += ("ControlMaster=auto", "ControlPersist=30")
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
HOST = values.rule(
    lambda name: isinstance(name, str) and re.fullmatch(r"[^\s-]\S{0,254}", name) and name.isprintable(),
    "a name as you would type it after `ssh`",
    "['n1', 'n2']",
)
# By a pattern of OpenSSH's words: what happened, the likely cause, and the fix.
REFUSALS = {
    r"HOST IDENTIFICATION HAS CHANGED": (
        "{host} shows another host key than before.",
        "the host was installed again, its address now belongs to another one, or somebody is in between",
        "ask the host's owner which of these; only if it was installed again: ssh-keygen -R {bare}  and log in once by "
        "hand",
    ),
    r"Host key verification failed": (
        "The host key of {host} is not known yet, so nobody can say that it is that host.",
        "this account never logged in there",
        "run once by hand: {ssh}  (compare the fingerprint with the one from the host's owner, then answer yes)",
    ),
    r"Could not resolve hostname": (
        "{host} is not known on this machine: not in /etc/hosts, nor to a name server.",
        "a typo, or a name that only the hosts or another configuration of ssh know",
        "use the host's IP address in ssh_nodes, or add to /etc/hosts: <IP address> {host}",
    ),
    r"Permission denied|Too many authentication failures": (
        "{host} does not accept any of your keys.",
        "{last}; here are {keys} and {agent} ssh agent; a password is never asked for",
        "ssh-keygen -t ed25519 if you have no key yet, then {copy_key}",
    ),
    r"Connection refused|timed out|No route to host|Network is unreachable|not responding": (
        "{host} does not answer.",
        "it is off, no sshd runs there, the address is another host's, or a firewall drops what comes from here",
        "see that it is on and that port 22 is open to this machine, then try by hand: {ssh} true",
    ),
    r"": ("The connection to {host} ended.", "{last}", "try it by hand: {ssh} true"),
}


def make_connections() -> tempfile.TemporaryDirectory:
    """Makes the private folder of the sockets by which all programs of a list of nodes share connections."""
    # macOS's own temporary folder has a longer path than a socket may have.
    return tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp", ignore_cleanup_errors=True)


@dataclass(frozen=True, kw_only=True)
class SshNode(Node):
    """A host that ssh reaches; attributes as in :class:`nodelaunch.backends.nodes.Node`.

    ``python`` and ``folder`` are looked up there at their first use, once, if they were not given in full.
    """

    wanted_python: str | None = values.checked(values.optional(values.NAME), default=None)
    wanted_folder: str = values.checked(values.FOLDER, default=FOLDER)
    config: Path | None = values.checked(values.optional(values.check_path), default=None)
    connections: tempfile.TemporaryDirectory = field(default_factory=make_connections, repr=False, compare=False)
    maker: ClassVar[str] = "ssh_nodes"

    @property
    def python(self) -> str:
        """The interpreter there."""
        given = self.wanted_python or ""
        return given if given.startswith("/") else self._home_and_python[1]

    @property
    def folder(self) -> str:
        """Our folder there, absolute."""
        if self.wanted_folder.startswith("/"):
            return self.wanted_folder
        return f"{self._home_and_python[0]}/{self.wanted_folder.removeprefix('~').lstrip('/')}".rstrip("/")

    def popen(self, argv: Sequence[str]) -> subprocess.Popen:
        """Starts a program there; the arguments arrive unchanged. If the host refuses, the process ends."""
        options = [f"-o{option}" for option in (*OPTIONS, f"ControlPath={self.connections.name}/%C")]
        given = ["-F", str(self.config)] if self.config else []
        # sshd hands one string to the login shell, so they are quoted; `exec`, so that no shell is in between.
        command = ["ssh", "-T", *given, *options, "--", self.name, "exec " + shlex.join(argv)]
        try:
            return super().popen(command)
        except FileNotFoundError as error:
            cause = "it is not installed, or PATH does not have its folder"
            fix = "Debian, Ubuntu: sudo apt-get install openssh-client; or use local_nodes(2)"
            what = "The OpenSSH client (ssh) is not on this machine."
            raise LabError(what, where="PATH", cause=cause, fix=fix) from error

    def explain(self, returncode: int, stderr: str) -> LabError:
        """The error of a program that ssh could not run there; 255 is ssh's own failure, else it is the program's."""
        # A server's banner and ssh's warnings come first; what ended it comes last.
        last = clean((stderr.strip().splitlines() or [""])[-1].strip(), 300)
        ssh = f"ssh {f'-F {shlex.quote(str(self.config))} ' if self.config else ''}{shlex.quote(self.name)}"
        if returncode == 255:
            texts = next(texts for pattern, texts in REFUSALS.items() if re.search(pattern, stderr, re.IGNORECASE))
            facts = {
                "host": self.name[:40],
                "bare": shlex.quote(self.name.rpartition("@")[2]),
                "ssh": ssh,
                "copy_key": ssh.replace("ssh ", "ssh-copy-id ", 1),
                "last": last or "the host went away, or its sshd refused; it gave no reason",
                "keys": ", ".join(sorted(path.stem for path in Path.home().glob(".ssh/id_*.pub"))) or "no key file",
                "agent": "an" if os.environ.get("SSH_AUTH_SOCK") else "no",
            }
            what, cause, fix = (text.format_map(facts) for text in texts)
            return LabError(what, where=ssh, cause=cause, fix=fix)
        if returncode in (126, 127):  # a shell's status if the program does not exist or cannot be run
            what, where = f"The Python for the job is not on {self.name[:40]}.", self.wanted_python or "python3"
            fix = f"install Python and torch there ({ssh}), or name the one to use: ssh_nodes(…, python='/its/path')"
            return LabError(what, where=where, cause=last, fix=fix)
        return super().explain(returncode, stderr)

    @functools.cached_property
    def _home_and_python(self) -> tuple[str, str]:
        wanted = [self.wanted_python] if self.wanted_python else [sys.executable, "python3"]
        with self.popen(["sh", "-c", LOOK, "sh", *wanted]) as process:
            try:
                out, err = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise self.explain(255, "the host did not answer: timed out") from None
        found = re.findall(r"^LAB-NODE (.*)$", out.decode(errors="surrogateescape"), re.MULTILINE)
        if process.returncode or len(found) != 2:
            raise self.explain(255, err.decode(errors="replace"))
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
        names: Names or addresses as you would type them after ``ssh``: ``n1``, ``me@10.0.0.2``.
        python: The interpreter on the hosts; None takes this one's path if it exists there, otherwise python3.
        folder: The folder for all that is ours on the hosts; ``~`` is the home there.
        interface: The network interface between the hosts; None finds it by the route.
        data: ``LAB_DATA`` on the hosts.
        config: A configuration of ssh in place of ``~/.ssh/config``.

    Raises:
        LabError: A name is invalid or is given twice.
    """
    names = values.check_value("ssh_nodes", "names", names, values.list_of(HOST, "a list of hosts", "['n1', 'n2']"))
    if len(set(names)) < len(names):
        fix = "name each host once; several processes on one host are nproc_per_node"
        raise LabError("Each node needs its own host.", where=clean(", ".join(names), 200), fix=fix)
    options = {"wanted_folder": str(folder) if isinstance(folder, Path) else folder, "wanted_python": python}
    options |= {"interface": interface, "data": data, "config": config, "connections": make_connections()}
    return [SshNode(name=name, **options) for name in names]
