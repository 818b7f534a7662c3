"""Podman for the tests of hosting: images made of this machine's own Debian packages, and no registry.

What is made stays in Podman's own storage under ``localhost/labs-test-…``, so that the next run need not make it again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("podman", "runc", "mmdebstrap")
BASE, IMAGE, FRONT = (f"localhost/labs-test-{name}:latest" for name in ("base", "labs", "front"))
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
    """A Podman that runs here.

    Attributes:
        folder: For what it is told.
        env: The environment of commands that run containers.
    """

    folder: Path
    env: dict[str, str]

    def call(self, *arguments: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs podman and returns what it said."""
        return run("podman", *arguments, env=self.env, check=check, **options)

    def host(self, *arguments: object, state: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs ``python3 -m hosting`` as an instructor does."""
        command = [sys.executable, "-m", "hosting", "--state", state, *arguments]
        return run(*command, env=self.env, cwd=ROOT, check=check)

    def build(self, state: Path) -> None:
        """Builds the teams' image and the front's, with this machine's apt and pip."""
        env = {**self.env, "CONTAINERS_CONF": str(self.folder / "build.conf")}
        if not self.has(BASE):
            self._make_base()
        file = self.folder / "Dockerfile.front"
        file.write_text(FRONT_FILE)
        run("podman", "build", "--network=host", "-f", file, "-t", FRONT, self.folder, env=env)
        host = [sys.executable, "-m", "hosting", "--state", state]
        run(*host, "build", "--base", BASE, "--image", IMAGE, env=env, cwd=ROOT)

    def has(self, image: str) -> bool:
        """Whether an image is there."""
        return self.call("image", "exists", image, check=False).returncode == 0

    def ask(self, container: str, *command: object, check: bool = True) -> str:
        """What a command in a container prints."""
        return self.call("exec", container, *command, check=check).stdout.strip()

    def inspect(self, container: str) -> dict:
        """What podman knows of a container."""
        return json.loads(self.call("inspect", container).stdout)[0]

    def _make_base(self) -> None:
        archive = self.folder / "base.tar"
        sources = [path for path in Path("/etc/apt/sources.list.d").glob("*.sources")] or ["/etc/apt/sources.list"]
        include = "--include=ca-certificates,python3,python3-venv"
        run("mmdebstrap", "--variant=minbase", include, "bookworm", archive, *sources)
        self.call("import", archive, BASE)
        archive.unlink()


def run(*command: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command; where it fails, the error shows the end of what it said."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace", **options)
    if check and ended.returncode:
        raise AssertionError(f"{' '.join(map(str, command))[:300]}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return ended


def find_missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name)]


def prepare(folder: Path) -> Podman:
    """Writes Podman's settings and installs podman-compose beside them."""
    told = [*TOLD, str(Path.home() / ".config" / "pip"), *find_indexes()]
    for name, volumes in {"run": [], "build": [f"{path}:{path}:ro" for path in told if Path(path).exists()]}.items():
        (folder / f"{name}.conf").write_text(SETTINGS.format(volumes=json.dumps(volumes)))
    venv.create(folder / "compose", with_pip=True)
    run(folder / "compose" / "bin" / "python", "-m", "pip", "install", "-q", "podman-compose==1.6.0")
    env = {name: value for name, value in os.environ.items() if name not in ("DOCKER_HOST", "LAB_HOSTING")}
    env |= {"CONTAINERS_CONF": str(folder / "run.conf"), "PATH": f"{folder / 'compose' / 'bin'}:{os.environ['PATH']}"}
    return Podman(folder, env)


def find_indexes() -> list[str]:
    """Folders of this machine in which its pip looks for packages; an index of links has its files beside it."""
    told = run(sys.executable, "-m", "pip", "config", "list", check=False).stdout
    indexes = {str(Path(path).parent) for path in re.findall(r"file://(/[^\s'\"]+)", told)}
    links = set(re.findall(r"(?<=')(/[^\s'\"]+)", told))
    return sorted(path for path in indexes | links if Path(path).is_dir())
