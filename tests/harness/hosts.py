"""Two realistic hosts on this machine, n1 and n2, and a launcher's side, n0: for tests that need a network.

Each host is a network, UTS, PID, IPC and mount namespace: it has a name, an address (10.77.x.11 and .12), an
/etc/hosts, a /dev/shm, a disk at /node, a home on that disk, and an sshd on port 22 as process 1. /tmp and the checkout
are shared, as on a cluster with a shared file system. The root namespace has no route to the hosts and is not touched.

How a test reaches them: through ``hosts.ssh_config``, whose ProxyCommand connects inside n0 and then *hands the
connected socket over* to ssh (ProxyUseFdpass) and ends. So ssh works from any process of the machine, resolves names
by n0's /etc/hosts, needs no nc, copies no data through a third process, and its keep-alive and time-outs act on the
real connection. The connector words its errors as ssh does; ``hosts.tools`` has an ``ssh`` that runs entirely inside
n0, for tests of OpenSSH's own messages (put it first in PATH, and use ``hosts.inner_config``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STATE = Path("/var/lib/lab-hosts")  # on a disk, and root's alone, so that what is left there can be trusted
NETNS = Path("/etc/netns")  # `ip netns exec NAME` mounts what lies in NAME/ there over /etc
NODES = ("n1", "n2")
PROGRAMS = {
    "ip": "iproute2",
    "iptables": "iptables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
CONNECTOR = """
import socket, sys
host, port = sys.argv[1:]
try:
    link = socket.create_connection((host, int(port)), timeout=5)
except socket.gaierror as error:
    sys.exit(f"ssh: Could not resolve hostname {host}: {error.strerror}")
except OSError as error:
    sys.exit(f"ssh: connect to host {host} port {port}: {error.strerror or 'Connection timed out'}")
link.settimeout(None)
socket.send_fds(socket.socket(fileno=1), [b"-"], [link.fileno()])
"""
# What turns a fresh set of namespaces into a host: $1 its name, $2 its disk, $3 the configuration of its sshd.
BOOT = 'hostname "$1"; mount --bind "$2" /node; mount -t tmpfs tmpfs /dev/shm; exec "$(command -v sshd)" -D -e -f "$3"'
SSHD = """Port 22
ListenAddress {address}
HostKey {folder}/hostkey
PidFile none
AuthorizedKeysFile {state}/id.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
UseDNS no
MaxStartups 100
SetEnv HOME=/node/home
"""


def find_missing() -> str:
    """Describes what is missing here for such hosts; "" if nothing is."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "only root on Linux can make hosts out of namespaces"
    missing = {package for program, package in PROGRAMS.items() if not _which(program)}
    if missing:
        return f"not installed: {', '.join(sorted(missing))}"
    # Root in a container may be none as far as namespaces and firewalls are concerned.
    trial = ["unshare", "--net", "--uts", "--pid", "--ipc", "--fork", "--mount-proc"]
    for command in ([*trial, "true"], [*trial, _which("iptables"), "-w", "-L", "INPUT"]):
        if subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode:
            return f"this root may not do: {shlex.join(command)}"
    return ""


class Hosts:
    """The two hosts, for the duration of the context. Instances do not interfere, not even in different processes."""

    def __init__(self) -> None:
        self._network = f"10.77.{1 + os.getpid() % 250}"
        self._nodes: dict[str, subprocess.Popen] = {}
        self._dirty = False

    def __enter__(self) -> Hosts:
        with _locked():
            STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
            _clear_leftovers()
            number = next(k for k in range(1000) if not (STATE / f"{os.getpid()}-{k}").exists())
            self.state = STATE / f"{os.getpid()}-{number}"
            self.state.mkdir(mode=0o700)
            self._owner = (self.state / "owner").open("w")
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            Path("/node").mkdir(exist_ok=True)
        self._prefix = f"lab{self.state.name}-"
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, node: str) -> str:
        """Returns the IPv4 address of n0, n1 or n2."""
        return f"{self._network}.{ {'n0': 1, 'n1': 11, 'n2': 12}[node] }"

    @property
    def ssh_config(self) -> Path:
        """File for ``ssh -F`` anywhere on this machine."""
        return self.state / "ssh_config"

    @property
    def inner_config(self) -> Path:
        """File for ``ssh -F`` inside n0, or with the ssh of ``tools``: keys and names only."""
        return self.state / "inner_config"

    @property
    def tools(self) -> Path:
        """A folder with an ``ssh`` that runs inside n0."""
        return self.state / "tools"

    @property
    def hosts_text(self) -> str:
        """The unchanged /etc/hosts of each of them."""
        lines = ["127.0.0.1 localhost", *(f"{self.address(node)} {node}" for node in ("n0", *NODES))]
        return "\n".join(lines) + "\n"

    def disk(self, node: str) -> Path:
        """Returns the path, outside the node, of its /node."""
        return self.state / node / "disk"

    def run_on(self, node: str, argv: Sequence[str], *, check: bool = True, timeout: float = 30.0) -> str:
        """Runs a program on a host, not through ssh, and returns what it printed."""
        command = [*self._enter(node), *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        if check and done.returncode:
            raise RuntimeError(f"{node}: {shlex.join(argv)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def popen_in_n0(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **kwargs) -> subprocess.Popen:
        """Starts a program on the launcher's side; its pid is that program's own."""
        return subprocess.Popen([*self._enter("n0"), *argv], env=dict(env) if env is not None else None, **kwargs)

    def boot(self, node: str) -> None:
        """Starts a host."""
        folder = self.state / node
        command = [*("ip", "netns", "exec", self._prefix + node), "unshare"]
        command += ["--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc"]
        command += ["sh", "-ec", BOOT, "sh", node, str(self.disk(node)), str(folder / "sshd_config")]
        with (folder / "log").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.link_up(node)
        _wait(lambda: self._listens(node), f"{node} has no sshd: see {folder / 'log'}")

    def link_down(self, node: str) -> None:
        """Pulls the cable."""
        self._dirty = True
        _run("ip", "-n", self._prefix + node, "link", "set", "eth0", "down")

    def link_up(self, node: str) -> None:
        """Puts the cable back."""
        _run("ip", "-n", self._prefix + node, "link", "set", "eth0", "up")

    def drop(self, source: str, target: str, port: int | None = None, *, new: bool = False) -> None:
        """Makes a firewall on ``target`` drop packets from ``source``; with ``new`` only new connections."""
        self._dirty = True
        rule = ["INPUT", "-s", self.address(source)]
        rule += ["-p", "tcp"] if port or new else []
        rule += ["--dport", str(port)] if port else []
        rule += ["--syn"] if new else []
        _run("ip", "netns", "exec", self._prefix + target, "iptables", "-w", "-I", *rule, "-j", "DROP")

    def set_hosts(self, node: str, text: str) -> None:
        """Changes /etc/hosts of n0, n1 or n2, immediately and for running programs, too."""
        # Written in place: the file is mounted over the host's, and a new file would not be.
        self._dirty = True
        (NETNS / (self._prefix + node) / "hosts").write_text(text)

    def mend(self) -> None:
        """Undoes the tests' changes to names, links and firewalls; files on the disks stay."""
        if not self._dirty:
            return
        for node in ("n0", *NODES):
            self.set_hosts(node, self.hosts_text)
            _run("ip", "netns", "exec", self._prefix + node, "iptables", "-w", "-F", "INPUT")
        for node in NODES:
            self.link_up(node)
        self._dirty = False

    def close(self) -> None:
        """Ends everything on the hosts and removes them."""
        for node in self._nodes:
            self._kill(node)
        with _locked():
            self._owner.close()
            _remove(self.state)
            _turn_off_the_light()

    def _enter(self, node: str) -> list[str]:
        if node == "n0":
            name = ["unshare", "--uts", "sh", "-c", 'hostname n0; exec "$@"', "sh"]
            return ["ip", "netns", "exec", f"{self._prefix}n0", *name]
        own = ["nsenter", f"--target={self._find_init(node)}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        return [*own, "env", "HOME=/node/home"]

    def _find_init(self, node: str) -> int:
        """Returns the outer process id of the host's process 1."""
        pid = self._nodes[node].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise RuntimeError(f"{node} is not running: see {self.state / node / 'log'}")
        return int(children[0])

    def _listens(self, node: str) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            table = Path(f"/proc/{self._find_init(node)}/net/tcp").read_text().splitlines()
            return any(row.split()[1].endswith(":0016") and row.split()[3] == "0A" for row in table[1:])
        return False

    def _kill(self, node: str) -> None:
        self._nodes[node].kill()  # --kill-child: process 1 dies with it, and with that one all the others
        self._nodes[node].wait()

    def _build(self) -> None:
        zero = f"{self._prefix}n0"
        for node in ("n0", *NODES):
            name = self._prefix + node
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._write_etc(node)
        _run("ip", "-n", zero, "link", "add", "eth0", "type", "bridge")
        self._give_address("n0")
        _keygen(self.state / "id")
        known = []
        for node in NODES:
            # Made inside n0, so that not even for a moment a device of ours is in the root namespace.
            far = ["type", "veth", "peer", "name", "eth0", "netns", self._prefix + node]
            _run("ip", "-n", zero, "link", "add", f"to-{node}", *far)
            _run("ip", "-n", zero, "link", "set", f"to-{node}", "master", "eth0", "up")
            self._give_address(node)
            (self.disk(node) / "home").mkdir(parents=True)
            folder = self.state / node
            _keygen(folder / "hostkey")
            text = SSHD.format(address=self.address(node), folder=folder, state=self.state)
            (folder / "sshd_config").write_text(text)
            public = (folder / "hostkey.pub").read_text().rsplit(" ", 1)[0]
            known.append(f"{node},{self.address(node)} {public}\n")
        (self.state / "known_hosts").write_text("".join(known))
        self._write_client()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd will not start without it
        for node in NODES:
            self.boot(node)
        self._dirty = False

    def _give_address(self, node: str) -> None:
        name = self._prefix + node
        _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    def _write_etc(self, node: str) -> None:
        folder = NETNS / (self._prefix + node)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(self.hosts_text)
        if Path("/etc/nsswitch.conf").exists():  # no name server is reachable from there: do not even ask one
            (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")

    def _write_client(self) -> None:
        common = ["IdentitiesOnly yes", f"IdentityFile {self.state}/id", "GlobalKnownHostsFile /dev/null"]
        common += [f"UserKnownHostsFile {self.state}/known_hosts", "User root"]
        connect = self.state / "connect.py"
        connect.write_text(CONNECTOR)
        enter = ["ip", "netns", "exec", f"{self._prefix}n0", sys.executable, "-IS", str(connect)]
        proxy = [f"ProxyCommand {shlex.join(enter).replace('%', '%%')} %h %p", "ProxyUseFdpass yes"]
        names = [line for node in NODES for line in (f"Host {node}", f"  HostName {self.address(node)}")]
        for path, own in ((self.ssh_config, proxy), (self.inner_config, [])):
            path.write_text("\n".join([*names, "Host *", *(f"  {line}" for line in [*common, *own])]) + "\n")
        self.tools.mkdir()
        inside = ["ip", "netns", "exec", f"{self._prefix}n0", _which("ssh")]
        (self.tools / "ssh").write_text(f'#!/bin/sh\nexec {shlex.join(inside)} "$@"\n')
        (self.tools / "ssh").chmod(0o755)


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _keygen(path: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path))


def _wait(holds, complaint: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(complaint)
        time.sleep(0.02)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with Path("/run/lab-hosts.lock").open("w") as lock:  # stays: to unlink a lock is to lose it
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clear_leftovers() -> None:
    """Removes hosts whose owners died without removing them: they no longer hold their lock.

    The owner's process id would not do: in another PID namespace it means another process, or none.
    """
    for folder in STATE.iterdir():
        with contextlib.suppress(FileNotFoundError), (folder / "owner").open() as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        _remove(folder)


def _remove(folder: Path) -> None:
    for node in ("n0", *NODES):
        name = f"lab{folder.name}-{node}"
        if Path("/run/netns", name).exists():
            for pid in map(int, _run("ip", "netns", "pids", name).split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _run("ip", "netns", "del", name)
        shutil.rmtree(NETNS / name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _turn_off_the_light() -> None:
    """Removes the shared parts if no hosts are left; not called with leftovers, whose remover needs those parts."""
    with contextlib.suppress(OSError):
        STATE.rmdir()
        Path("/node").rmdir()
        NETNS.rmdir()
