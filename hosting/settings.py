"""A deployment's settings, which ``up`` stores beside the tokens so that other commands can read them."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lab_common import LabError
from lab_common.files import write_atomically

NAME = "settings.json"
HOST = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
TLS = ("auto", "internal", "none")
# Decided from the machine's size and the number of teams (hosting/limits.py).
AUTO = "auto"
SIZE = re.compile(r"([1-9]\d{0,6})(mb|gb|m|g)")


@dataclass(frozen=True)
class Settings:
    """The settings of one deployment.

    Attributes:
        teams: Path of ``teams.csv``.
        address: The host name of the URLs; learners' computers must resolve it to this machine.
        port: The port of the front.
        bind: The address of this machine on which the front listens.
        tls: ``auto`` (a certificate of Let's Encrypt), ``internal`` (of the front's own authority), ``none``, or the
            folder with ``cert.pem`` and ``key.pem``.
        nodes: Containers of each team, 1 or 2.
        data: A folder with data sets for all teams, read-only; "" for the drawn one in the image.
        memory: Memory of each team, for all its containers.
        cpus: CPUs of each team.
        shm: Size of each container's /dev/shm, which counts towards its memory.
        image: The teams' image.
        front: The image with Caddy.
        project: Prefix of the names of containers, networks and volumes.
        subdomains: True if each team has its own host name, such as red.labs.example.org: a browser then isolates the
            teams' pages as it does unrelated sites.
        share_gpus: True if two teams may use the same GPU.
        hub: True if JupyterHub serves the teams (hosting/hub.py), in place of a JupyterLab each.
        guarded: True if the guard keeps the containers from the cloud's metadata (hosting/guard.py); `up` finds out.
    """

    teams: str = "hosting/teams.csv"
    address: str = "localhost"
    port: int = 8443
    bind: str = "127.0.0.1"
    tls: str = "internal"
    nodes: int = 2
    data: str = ""
    memory: str = AUTO
    cpus: str = AUTO
    shm: str = AUTO
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
        """Returns the URL of a team's JupyterLab."""
        return self._make_url(f"{team}.{self.address}" if self.subdomains else self.address) + f"/{team}/"

    def _make_url(self, host: str) -> str:
        scheme, usual = ("http", 80) if self.tls == "none" else ("https", 443)
        return f"{scheme}://{host}" + ("" if self.port == usual else f":{self.port}")


def check_settings(settings: Settings, *, starts: bool = True) -> Settings:
    """Returns the settings if they are safe and can work.

    Args:
        settings: Of the deployment.
        starts: True if containers are started with them, so that their folders must exist.

    Raises:
        LabError: An open port without TLS, an address for which no certificate is given, an invalid value, or a
            folder that the teams could not use.
    """
    name, tls = settings.address, settings.tls
    try:
        local = ipaddress.ip_address(settings.bind).is_loopback
    except ValueError:
        local = None
    public = "." in name and not re.fullmatch(r"[\d.]+", name)
    files = ("cert.pem", "key.pem") if starts and tls not in TLS else ()
    absent = [file for file in files if not (Path(tls) / file).is_file()]
    for fine, where, what, cause, fix in (
        (
            HOST.fullmatch(name),
            ascii(name)[:60],
            "The address is no host name.",
            "a URL, a port or a space in it",
            "the name in the teams' URLs alone: --address labs.example.org",
        ),
        (
            local is not None,
            ascii(settings.bind)[:60],
            "The address to listen on is no IP address.",
            "a name in its place",
            "--bind 0.0.0.0, or --bind 127.0.0.1",
        ),
        (
            tls != "none" or local,
            settings.bind,
            "Without TLS, everybody on the way could read the teams' tokens.",
            "--tls none is for a front that this machine alone can reach",
            "--tls auto, or --bind 127.0.0.1",
        ),
        (
            tls != "auto" or (public and not local),
            f"{name} on {settings.bind}",
            "Let's Encrypt gives certificates for public names only, and looks at them from outside.",
            "an address without a public name, or one that only this machine reaches",
            "--address labs.example.org --bind 0.0.0.0; for a trial on this machine: --tls internal",
        ),
        (
            not absent,
            tls,
            f"The folder of the certificate has no {' and no '.join(absent)}.",
            "another folder, or other names",
            f"--tls {'|'.join(TLS)}, or a folder with cert.pem and key.pem",
        ),
        (
            not settings.subdomains or (not settings.hub and not re.fullmatch(r"[\d.]+", name)),
            name,
            "The teams cannot have host names of their own here.",
            "an address without a name, or the variant with accounts, which has one address",
            "--no-subdomains, or --no-hub and --address labs.example.org",
        ),
        (1 <= settings.port <= 65535, settings.port, "There is no such port.", "ports go up to 65535", "--port 443"),
        (settings.nodes in (1, 2), settings.nodes, "A team has one or two nodes.", "no lab uses more", "--nodes 2"),
        (
            settings.shm == AUTO or SIZE.fullmatch(settings.shm),
            ascii(settings.shm)[:60],
            "The size of /dev/shm is no size.",
            "a number without its unit",
            f"--shm 2gb, or --shm {AUTO}",
        ),
        (
            settings.memory == AUTO or (SIZE.fullmatch(settings.memory) and parse_size(settings.memory) >= 512 << 20),
            ascii(settings.memory)[:60],
            "The memory of a team is no size, or less than JupyterLab needs.",
            "a number without its unit",
            f"--memory 8gb, or --memory {AUTO}",
        ),
        (
            settings.cpus == AUTO or re.fullmatch(r"0?\.[1-9]\d?|[1-9]\d{0,3}(?:\.\d{1,2})?", settings.cpus),
            ascii(settings.cpus)[:60],
            "The CPUs of a team are no number.",
            "zero, a word, or a range",
            f"--cpus 2, or --cpus {AUTO}",
        ),
        (
            re.fullmatch(r"[a-z][a-z0-9]{0,15}", settings.project),
            ascii(settings.project)[:60],
            "The project has an odd name.",
            "names of containers, networks and volumes begin with it",
            "1 to 16 of a-z and 0-9: --project labs",
        ),
    ):
        if not fine:
            raise LabError(what, where=where, cause=cause, fix=fix)
    if starts and settings.data:
        _check_data(Path(settings.data))
    return settings


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as ``16gb`` or ``512m``."""
    number, unit = SIZE.fullmatch(text).groups()
    return int(number) << {"m": 20, "g": 30}[unit[0]]


def _check_data(folder: Path) -> None:
    """Refuses a folder that is useless to the teams, who can only read it."""
    packs = [manifest.parent for manifest in folder.glob("packed/*/manifest.json")]
    inside = [folder, folder / "packed", *packs, *(file for pack in packs for file in pack.iterdir())] if packs else []
    modes = {path: path.stat().st_mode for path in inside}
    private = [path for path, mode in modes.items() if not mode & 0o004 or (stat.S_ISDIR(mode) and not mode & 0o001)]
    prepare = f"LAB_DATA={shlex.quote(str(folder))} .venv/bin/python -m lab_utils.data fetch cinic10"
    for fine, where, what, cause, fix in (
        (folder.is_dir(), folder, "The data folder is not there.", "another path, or not prepared yet", prepare),
        (packs, folder, "The data folder has no packed data set.", "nobody has packed what is in it", prepare),
        (
            not private,
            private and private[0],
            "The teams cannot read the data.",
            "they were made for their owner alone",
            f"chmod -R a+rX {shlex.quote(str(folder))}",
        ),
    ):
        if not fine:
            raise LabError(what, where=where, cause=cause, fix=fix)


def save_settings(settings: Settings, folder: Path) -> None:
    """Stores the settings in a folder, for ``load_settings``."""
    with write_atomically(folder / NAME) as file:
        file.write((json.dumps(asdict(settings), indent=2) + "\n").encode())


def load_settings(folder: Path) -> Settings:
    """Returns what ``save_settings`` stored; the folders need not exist, so that a deployment can always be ended.

    Raises:
        LabError: No class was started here, or the file is broken.
    """
    path = folder / NAME
    known = {field.name for field in fields(Settings)}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        settings = Settings(**{name: value for name, value in kept.items() if name in known})
        return check_settings(settings, starts=False)
    except FileNotFoundError as error:
        fix = "python3 -m hosting up hosting/teams.csv"
        raise LabError("No class was started here.", where=folder, cause="another folder", fix=fix) from error
    except (ValueError, TypeError, AttributeError) as error:
        fix = f"rm {path}, and `up` once more, with its options"
        raise LabError("The settings of the class cannot be read.", where=path, cause=str(error), fix=fix) from error
