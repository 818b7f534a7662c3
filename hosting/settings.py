"""A deployment's settings, which ``up`` stores beside the tokens so that other commands can read them."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from lab_common import LabError
from lab_common.files import write_atomically

NAME = "settings.json"
HOST = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
TLS = ("auto", "internal", "none")
# In place of a number: decided from the machine's size and the number of teams (hosting/limits.py).
AUTO = "auto"


@dataclass(frozen=True)
class Settings:
    """The options of ``up``, which ``up --help`` explains. Sizes are in bytes; a 0 stands for ``auto``.

    ``guarded`` is no option: ``up`` finds out if the guard can keep the containers from the cloud's metadata.
    """

    teams: str = "hosting/teams.csv"
    address: str = "localhost"
    port: int = 8443
    bind: str = "127.0.0.1"
    tls: str = "internal"
    nodes: int = 2
    data: str = ""
    memory: int = 0
    cpus: float = 0
    shm: int = 0
    image: str = "localhost/distributed-training-labs:latest"
    front: str = "docker.io/library/caddy:2"
    project: str = "labs"
    subdomains: bool = False
    share_gpus: bool = False
    hub: bool = False
    guarded: bool = False

    @property
    def url(self) -> str:
        """Start of every team's URL, without a slash at the end."""
        return self._make_url(self.address)

    def find_url(self, team: str) -> str:
        """Returns the URL of a team's JupyterLab, with a slash at the end."""
        return self._make_url(f"{team}.{self.address}" if self.subdomains else self.address) + f"/{team}/"

    def _make_url(self, host: str) -> str:
        scheme, usual = ("http", 80) if self.tls == "none" else ("https", 443)
        return f"{scheme}://{host}" + ("" if self.port == usual else f":{self.port}")


def read_host(text: str) -> str:
    """Reads a host name from the command line."""
    if not HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:60]!a} is no host name; give the name alone: labs.example.org")
    return text


def read_size(text: str) -> int:
    """Reads a size such as ``16gb`` or ``512m`` from the command line, in bytes; 0 for ``auto``."""
    found = re.fullmatch(r"([1-9]\d{0,6})([mg])b?", text)
    if not found and text != AUTO:
        raise argparse.ArgumentTypeError(f"{text[:60]!a} is no size, such as 8gb or 512mb, and not {AUTO}")
    return int(found[1]) << {"m": 20, "g": 30}[found[2]] if found else 0


def read_cpus(text: str) -> float:
    """Reads a number of CPUs from the command line; 0 for ``auto``."""
    if text != AUTO and not re.fullmatch(r"0?\.[1-9]\d?|[1-9]\d{0,3}(?:\.\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{text[:60]!a} is no number of CPUs, such as 2 or 1.5, and not {AUTO}")
    return 0.0 if text == AUTO else float(text)


def check_settings(settings: Settings) -> None:
    """Refuses settings that are unsafe or cannot work; for commands that start containers.

    Raises:
        LabError: An open port without TLS, an address for which no certificate is given, or a folder that the teams
            could not use.
    """
    name, tls = settings.address, settings.tls
    local = ipaddress.ip_address(settings.bind).is_loopback
    named = not re.fullmatch(r"[\d.]+", name)
    if tls == "none" and not local:
        what = "Without TLS, everybody on the way could read the teams' tokens."
        cause = "--tls none is for a front that this machine alone can reach"
        raise LabError(what, where=settings.bind, cause=cause, fix="--tls auto, or --bind 127.0.0.1")
    if tls == "auto" and (local or not named or "." not in name):
        what = "Let's Encrypt gives certificates for public names only, and looks at them from outside."
        cause = "an address without a public name, or one that only this machine reaches"
        fix = "--address labs.example.org --bind 0.0.0.0; for a trial on this machine: --tls internal"
        raise LabError(what, where=f"{name} on {settings.bind}", cause=cause, fix=fix)
    absent = [file for file in ("cert.pem", "key.pem") if tls not in TLS and not (Path(tls) / file).is_file()]
    if absent:
        what = f"The folder of the certificate has no {' and no '.join(absent)}."
        fix = f"--tls {'|'.join(TLS)}, or a folder with cert.pem and key.pem"
        raise LabError(what, where=tls, cause="another folder, or other names", fix=fix)
    if settings.subdomains and (settings.hub or not named):
        what = "The teams cannot have host names of their own here."
        cause = "an address without a name, or the variant with accounts, which has one address"
        fix = "--no-subdomains, or --no-hub and --address labs.example.org"
        raise LabError(what, where=name, cause=cause, fix=fix)
    if settings.data:
        _check_data(Path(settings.data))


def _check_data(folder: Path) -> None:
    """Refuses a folder that is useless to the teams, who can only read it."""
    packs = [manifest.parent for manifest in folder.glob("packed/*/manifest.json")]
    if not packs:
        what, cause = "The data folder has no packed data set.", "another path, or nobody has packed what is in it"
        fix = f"LAB_DATA={shlex.quote(str(folder))} .venv/bin/python -m lab_utils.data fetch cinic10"
        raise LabError(what, where=folder, cause=cause, fix=fix)
    for path in (folder, folder / "packed", *packs, *(file for pack in packs for file in pack.iterdir())):
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            what, cause = "The teams cannot read the data.", "they were made for their owner alone"
            raise LabError(what, where=path, cause=cause, fix=f"chmod -R a+rX {shlex.quote(str(folder))}")


def save_settings(settings: Settings, folder: Path) -> None:
    """Stores the settings in a folder, for ``load_settings``."""
    write_text(folder / NAME, json.dumps(asdict(settings), indent=2) + "\n")


def load_settings(folder: Path) -> Settings:
    """Returns what ``save_settings`` stored.

    Raises:
        LabError: No class was started here.
    """
    try:
        return Settings(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        fix = "python3 -m hosting up hosting/teams.csv"
        raise LabError("No class was started here.", where=folder, cause="another folder", fix=fix) from error


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a file of a deployment, whole or not at all."""
    with write_atomically(path, mode=mode) as file:
        file.write(text.encode())
