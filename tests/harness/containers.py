"""Podman for the tests of hosting: images made from this machine's own Debian packages, without a registry.

The images stay in Podman's storage under ``localhost/labs-test-…``, so that the next run need not build them again.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosting.deployment import Deployment
from hosting.engine import Engine, Machine
from hosting.limits import divide
from hosting.settings import Settings
from hosting.teams import Team
from nodelaunch.node.probe import find_free_port

ROOT = Path(__file__).resolve().parents[2]
# Of a class without an engine.
MACHINE = Machine(64 << 30, tuple(range(8)))
PROJECT = "labtest"
PROGRAMS = ("podman", "runc", "mmdebstrap")
BASE, HUB_BASE, IMAGE, FRONT = (f"localhost/labs-test-{name}:latest" for name in ("base", "hub-base", "labs", "front"))
HUB = f"localhost/{PROJECT}-hub:latest"
# runc and cgroupfs, and no more files and processes than a container may be given inside another one.
SETTINGS = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=16384:16384"]
log_driver = "k8s-file"
volumes = {volumes}
[network]
network_backend = "netavark"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
# Where this machine's apt and pip are told what to ask; a build asks the same.
TOLD = ("/etc/apt/sources.list.d", "/etc/apt/apt.conf.d", "/etc/apt/auth.conf.d", "/etc/pip.conf", "/etc/ssl/certs")
FRONT_FILE = f"""FROM {BASE}
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends caddy
"""


@dataclass(frozen=True)
class Podman:
    """A Podman on this machine.

    Attributes:
        folder: Folder of its settings.
        env: The environment of commands that run containers.
    """

    folder: Path
    env: dict[str, str]

    def call(self, *arguments: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs podman and returns its output."""
        return run("podman", *arguments, env=self.env, check=check, **options)

    def host(self, *arguments: object, state: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs ``python3 -m hosting`` as an instructor does."""
        command = [sys.executable, "-m", "hosting", "--state", state, *arguments]
        return run(*command, env=self.env, cwd=ROOT, check=check)

    def build(self, state: Path) -> None:
        """Builds the teams' image and the front's, with this machine's apt and pip."""
        env = {**self.env, "CONTAINERS_CONF": str(self.folder / "build.conf")}
        if not self.has(BASE):
            sources = [path for path in Path("/etc/apt/sources.list.d").glob("*.sources")] or ["/etc/apt/sources.list"]
            self._make_base(BASE, "bookworm", sources, "ca-certificates,python3,python3-venv")
        file = self.folder / "Dockerfile.front"
        file.write_text(FRONT_FILE)
        run("podman", "build", "--network=host", "-f", file, "-t", FRONT, self.folder, env=env)
        host = [sys.executable, "-m", "hosting", "--state", state]
        before = self.call("images", "-q", "--no-trunc", IMAGE).stdout.strip()
        run(*host, "build", "--base", BASE, "--image", IMAGE, env=env, cwd=ROOT)
        if before and before != self.call("images", "-q", "--no-trunc", IMAGE).stdout.strip():
            self.call("rmi", before, check=False)  # gigabytes that have no name any more

    def build_hub(self) -> None:
        """Builds the hub's image, on the next Debian: this one's Node.js is too old for the proxy."""
        sources = write_next_sources(self.folder / "next")
        if not self.has(HUB_BASE):
            self._make_base(HUB_BASE, "trixie", [sources], "ca-certificates")
        npmrc = self.folder / "npmrc"
        asked = run("npm", "config", "get", "registry", check=False).stdout if shutil.which("npm") else ""
        npmrc.write_text(f"registry={asked.strip()}\ncafile=/etc/ssl/certs/ca-certificates.crt\n" if asked else "")
        told_there = {TOLD[0]: sources.parent, "/root/.npmrc": npmrc}
        volumes = [f"{told_there.get(path, path)}:{path}:ro" for path in (*find_told(), "/root/.npmrc")]
        (self.folder / "hub.conf").write_text(SETTINGS.format(volumes=json.dumps(volumes)))
        env = {**self.env, "CONTAINERS_CONF": str(self.folder / "hub.conf")}
        base = f"BASE={HUB_BASE}"
        run("podman", "build", "--network=host", "--build-arg", base, "-t", HUB, ROOT / "hosting" / "hub", env=env)

    @contextmanager
    def serve(self) -> Iterator[Path]:
        """Serves Docker's API on a socket, as the hub needs it."""
        path = self.folder / "engine.sock"
        service = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{path}"], env=self.env)
        try:
            yield path
        finally:
            service.terminate()
            service.wait(30)

    def has(self, image: str) -> bool:
        """Returns True if an image exists."""
        return self.call("image", "exists", image, check=False).returncode == 0

    def ask(self, container: str, *command: object, check: bool = True) -> str:
        """Returns the output of a command in a container."""
        return self.call("exec", container, *command, check=check).stdout.strip()

    def inspect(self, container: str) -> dict:
        """Returns podman's description of a container."""
        return json.loads(self.call("inspect", container).stdout)[0]

    def _make_base(self, name: str, suite: str, sources: Sequence[Path], packages: str) -> None:
        archive = self.folder / "base.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={packages}", suite, archive, *sources)
        self.call("import", archive, name)
        archive.unlink()


def make_deployment(folder: Path, teams: Sequence[Team], settings: Settings | None = None) -> Deployment:
    """Makes a class on ``MACHINE`` in a folder, with an engine that answers nothing."""
    settings = settings or Settings()
    tokens, shares = {team.name: team.name[0] * 48 for team in teams}, divide(MACHINE, teams, settings)
    return Deployment(folder, settings, [*teams], tokens, Engine("true", (), folder), MACHINE, shares)


def run(*command: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command; if it fails, the error shows the end of its output."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace", **options)
    if check and ended.returncode:
        raise AssertionError(f"{' '.join(map(str, command))[:300]}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return ended


def install(folder: Path, *packages: str) -> Path:
    """Installs packages from PyPI into their own environment; returns the folder of its programs."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", *packages)
    return folder / "bin"


def write_next_sources(folder: Path) -> Path:
    """Writes apt's source list for the next Debian; returns the file."""
    (told,) = Path("/etc/apt/sources.list.d").glob("*.sources")
    folder.mkdir()
    (folder / "next.sources").write_text(told.read_text().replace("bookworm", "trixie"))
    return folder / "next.sources"


def find_docker_compose(folder: Path) -> list[str]:
    """Returns the command of Docker's own Compose: this machine's, or the next Debian's, which needs no engine."""
    usual = ["docker", "compose"]
    if shutil.which("docker") and not run(*usual, "version", check=False).returncode:
        return usual
    told = write_next_sources(folder / "sources")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    places = {"State::lists": "lists", "Cache": "cache", "Etc::sourceparts": told.parent.name}
    apt = ["apt-get", "-o", "Dir::Etc::sourcelist=/dev/null"]
    apt += [part for key, name in places.items() for part in ("-o", f"Dir::{key}={folder / name}")]
    run(*apt, "update")
    run(*apt, "-o", "APT::Sandbox::User=root", "download", "docker-compose", cwd=folder)
    (package,) = folder.glob("docker-compose_*.deb")
    run("dpkg-deb", "-x", package, folder / "found")
    (program,) = (folder / "found").rglob("cli-plugins/docker-compose")
    return [str(program)]


def insecure() -> ssl.SSLContext:
    """Returns a context that accepts the front's self-signed certificate."""
    return ssl._create_unverified_context()


def find_missing() -> list[str]:
    """Returns the programs that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name)]


def prepare(folder: Path) -> Podman:
    """Writes Podman's settings and installs podman-compose beside them."""
    for name, volumes in {"run": [], "build": [f"{path}:{path}:ro" for path in find_told()]}.items():
        (folder / f"{name}.conf").write_text(SETTINGS.format(volumes=json.dumps(volumes)))
    programs = install(folder / "compose", "podman-compose==1.6.0")
    env = {name: value for name, value in os.environ.items() if name not in ("DOCKER_HOST", "LAB_HOSTING")}
    env |= {"CONTAINERS_CONF": str(folder / "run.conf"), "PATH": f"{programs}:{os.environ['PATH']}"}
    return Podman(folder, env)


def find_told() -> list[str]:
    """Returns the files and folders that configure this machine's apt and pip."""
    told = [*TOLD, str(Path.home() / ".config" / "pip"), *find_indexes()]
    return [path for path in told if Path(path).exists()]


def find_indexes() -> list[str]:
    """Returns the local folders in which pip looks for packages; an index of links has its files beside it."""
    told = run(sys.executable, "-m", "pip", "config", "list", check=False).stdout
    indexes = {str(Path(path).parent) for path in re.findall(r"file://(/[^\s'\"]+)", told)}
    links = set(re.findall(r"(?<=')(/[^\s'\"]+)", told))
    return sorted(path for path in indexes | links if Path(path).is_dir())


@dataclass(frozen=True)
class Hosted:
    """A running class.

    Attributes:
        podman: The Podman that runs it.
        state: The instructor's folder.
        teams: The list of teams.
        port: The port of the front.
        seconds: How long ``up`` took.
    """

    podman: Podman
    state: Path
    teams: Path
    port: int
    seconds: float

    def token(self, team: str) -> str:
        """Returns a team's token, from the instructor's file."""
        return re.search(rf"^TOKEN_{team.upper()}=(\w+)$", (self.state / "tokens.env").read_text(), re.M)[1]

    def host(self, *arguments: object, check: bool = True):
        """Runs ``python3 -m hosting``."""
        return self.podman.host(*arguments, state=self.state, check=check)

    def ask(self, path: str, *, token: str = "", method: str = "GET", **headers: str) -> tuple[int, str]:
        """Returns status and body of the front's answer; redirections are not followed."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.open(path, method, sent | ({"Authorization": f"token {token}"} if token else {}))
        return answer.status, answer.read().decode(errors="replace")

    def open(self, path: str, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Returns the front's raw answer; its certificate is self-signed."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=insecure(), timeout=60)
        connection.request(method, path, headers={"Host": f"localhost:{self.port}", "Connection": "close"} | headers)
        return connection.getresponse()

    def log_in(self, team: str) -> str:
        """Returns a browser's cookies after a login with the team's token."""
        answer = self.open(f"/{team}/lab?token={self.token(team)}", "GET", {})
        return "; ".join(line.partition(";")[0] for line in answer.headers.get_all("Set-Cookie"))

    def started(self) -> dict[str, str]:
        """Returns the start time of each container."""
        names = self.podman.call("ps", "-a", "--filter", f"name=^{PROJECT}-", "--format", "{{.Names}}").stdout.split()
        return {name: self.podman.inspect(name)["State"]["StartedAt"] for name in names}


@contextmanager
def bring_up(podman: Podman, folder: Path, *options: object) -> Iterator[Hosted]:
    """Brings up teams red and blue with one command; removes everything at the end."""
    teams = folder / "teams.csv"
    teams.write_text("team,gpus\nred,\nblue,\n")
    port = find_free_port()
    remove(podman)
    usual = ["--port", port, "--image", IMAGE, "--front", FRONT, "--project", PROJECT, "--shm", "512m"]
    # All that there are: on a machine with few, a team that works would otherwise wait.
    usual += ["--cpus", os.cpu_count()]
    try:
        begun = time.monotonic()
        podman.host("up", teams, *usual, *options, state=folder / "state")
        found = Hosted(podman, folder / "state", teams, port, time.monotonic() - begun)
        yield found
        found.host("down")
        assert not found.started(), "down ends all containers"
        assert "prohibit" not in run("ip", "rule").stdout, "and takes away what the guard laid"
        assert f"dport {port} " not in run("iptables", "-w", "-t", "nat", "-S").stdout, "and where the port led"
    finally:
        remove(podman)


def remove(podman: Podman) -> None:
    """Removes leftovers of an earlier run, and the volumes that `down` keeps."""
    for kind, command in (("", "rm"), ("volume", "volume rm"), ("network", "network rm")):
        listed = ["ps", "-a"] if not kind else [kind, "ls"]
        shape = "{{.Names}}" if not kind else "{{.Name}}"
        names = podman.call(*listed, "--filter", f"name=^{PROJECT}", "--format", shape).stdout.split()
        if names:
            podman.call(*command.split(), "-f", *names)
    # What containers leave that were killed with the machine's other processes: names, which would be answered with
    # addresses of then, and the guard's rules; pref is that of hosting/image/guard.sh.
    for told in Path("/run/containers/networks/aardvark-dns").glob(f"{PROJECT}*"):
        told.unlink()
    for family in ("-4", "-6"):
        for priority in ("5101", "5102"):
            run("ip", family, "rule", "flush", "pref", priority, check=False)
    # And where ports of this machine led: whatever serves at one of these next cannot be reached ("No route to host").
    # Netavark lays its rules anew for each container.
    if not podman.call("ps", "-aq").stdout.strip():
        run("iptables", "-w", "-t", "nat", "-F", "NETAVARK-HOSTPORT-DNAT", check=False)


LOOK = """
import socket, sys
for name in sys.argv[1:]:
    try:
        socket.create_connection((name, 8888), 3).close()
        print(name, "reached")
    except OSError as error:
        print(name, type(error).__name__)
"""


def assert_apart(hosted: Hosted, team: str, other: str, *, others: Sequence[str] = ()) -> None:
    """Asserts that a team's container cannot reach another team's by name or address, and has no extra rights."""
    podman, mine, theirs = hosted.podman, f"{PROJECT}-{team}-node0", f"{PROJECT}-{other}-node0"
    address = podman.inspect(theirs)["NetworkSettings"]["Networks"][f"{PROJECT}-{other}"]["IPAddress"]
    names = [theirs, address, *others]
    said = podman.ask(mine, "python", "-c", LOOK, *names)
    assert "reached" not in said and len(said.splitlines()) == len(names), said
    assert podman.ask(theirs, "python", "-c", LOOK, address).endswith("reached"), "it can be reached"
    for name in [name for name in hosted.started() if re.search("-node[01]$", name)]:
        found = podman.inspect(name)
        mounts = {mount["Destination"]: mount.get("Name", mount["Source"]) for mount in found["Mounts"]}
        assert not any("sock" in place for place in (*mounts, *mounts.values()))
        assert not any((other if f"-{team}-" in name else team) in str(source) for source in mounts.values())
        assert not found["HostConfig"]["Privileged"] and podman.ask(name, "id", "-u") == "10001"
        assert "CapEff:\t0000000000000000" in podman.ask(name, "cat", "/proc/self/status")
        assert int(podman.ask(name, "df", "-k", "--output=size", "/dev/shm").split()[-1]) == 512 * 1024
