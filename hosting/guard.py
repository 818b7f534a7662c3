"""Keeps the teams' containers from the cloud's metadata service, which hands out the machine's own credentials.

A firewall in a container would need a capability that its team could use, too. So one container of ours, the guard, has
this machine's network and lays rules into its routing: what comes from a team's network is not forwarded to those
addresses. It starts with the machine, as the teams' containers do, and these wait for it (start.sh). It works with
Docker and with Podman, and whoever may start containers may start it. An engine without root cannot: `up` says so then.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence

from hosting.engine import Engine
from hosting.settings import Settings
from hosting.teams import Team
from lab_common import LabError
from lab_common.text import clean_name

PROGRAM = "/srv/labs/hosting/image/guard.sh"
START_SECONDS = 20.0
NETWORK = re.compile(r"[0-9a-fA-F:.]+/\d+")
# What the program ends with where it may not change the routing.
REFUSED = 3
# The clouds' own way, which needs no rule on the machine.
REMEDY = (
    "use the cloud's own setting: on AWS `aws ec2 modify-instance-metadata-options --http-tokens required"
    " --http-put-response-hop-limit 1 --instance-id ID`; elsewhere give the machine no role or service account"
)


def name_guard(settings: Settings) -> str:
    """Returns the name of the guard's container."""
    return f"{settings.project}-guard"


def can_guard(engine: Engine, settings: Settings) -> bool:
    """Returns True if the engine's containers may change this machine's routing; needs the image.

    Raises:
        LabError: They could before, and the check fails now: a running guard must not end by accident.
    """
    name = f"{name_guard(settings)}-trial-{secrets.token_hex(4)}"
    tried = engine.ask("run", "--rm", *_make_options(settings, name), "try", timeout=60)
    if tried.returncode == 124:
        engine.ask("rm", "-f", name, timeout=60)
    if tried.returncode not in (0, REFUSED) and settings.guarded:
        what = "Whether the teams can be kept from the cloud's metadata service cannot be found out."
        cause = clean_name((tried.stderr or tried.stdout).strip()[-300:]) or f"exit status {tried.returncode}"
        fix = "python3 -m hosting up, once more; if it stays so, `down` first"
        raise LabError(what, where=name, cause=cause, fix=fix)
    return tried.returncode == 0


def start_guard(engine: Engine, settings: Settings, teams: Sequence[Team], *, image_id: str) -> None:
    """Starts the guard for the teams' networks, which must exist, if it does not run for them yet.

    Raises:
        LabError: It does not start.
    """
    name, networks = name_guard(settings), find_networks(engine, settings, teams)
    mark = hashlib.sha256(" ".join([image_id, *networks]).encode()).hexdigest()[:16]
    shape = '{{.State.Running}} {{index .Config.Labels "labs.guard"}} {{index .Config.Labels "labs.networks"}}'
    found = engine.ask("inspect", "-f", shape, name).stdout.split()
    if found[:2] == ["true", mark]:
        return
    # Killed, it takes no rule away: the teams that run are guarded while another takes its place.
    engine.ask("kill", "-s", "KILL", name, timeout=60)
    engine.ask("rm", "-f", name, timeout=60)
    options = ["-d", "--restart=always", f"--label=labs.guard={mark}", f"--label=labs.networks={' '.join(networks)}"]
    gone = [network for network in found if NETWORK.fullmatch(network) and network not in networks]
    told = [*networks, *(["gone", *gone] if gone else [])]
    begun = engine.ask("run", *options, *_make_options(settings, name), *told, timeout=60)
    end = time.monotonic() + START_SECONDS
    while begun.returncode or "guarded" not in (logs := engine.ask("logs", name)).stdout:
        if begun.returncode or time.monotonic() > end:
            cause = (begun.stderr if begun.returncode else logs.stdout + logs.stderr)[-300:]
            what = "The teams' containers cannot be kept from the cloud's metadata service."
            raise LabError(what, where=name, cause=cause or "it says nothing", fix=f"python3 -m hosting logs {name}")
        time.sleep(0.2)


def stop_guard(engine: Engine, settings: Settings) -> None:
    """Ends the guard, which removes its rules."""
    engine.ask("stop", "-t", "10", name_guard(settings), timeout=60)
    engine.ask("rm", "-f", name_guard(settings), timeout=60)


def is_guarded(engine: Engine, settings: Settings) -> bool:
    """Returns True if the guard runs."""
    return engine.ask("inspect", "-f", "{{.State.Running}}", name_guard(settings)).stdout.strip() == "true"


def find_networks(engine: Engine, settings: Settings, teams: Sequence[Team]) -> list[str]:
    """Returns the addresses of the teams' networks, as Docker or Podman gives them, such as ``10.89.0.0/24``.

    Raises:
        LabError: The engine does not know one of the networks, or no address of it.
    """
    found = set()
    for name in (f"{settings.project}-{team.name}" for team in teams):
        asked = engine.ask("network", "inspect", name)
        addresses = re.findall(rf'"[Ss]ubnet":\s*"({NETWORK.pattern})"', asked.stdout)
        if not addresses:
            what = "A team's network is not known, so its containers cannot be kept from the cloud's metadata service."
            cause = clean_name(asked.stderr.strip()[-300:]) or "the engine names no address of it"
            raise LabError(what, where=name, cause=cause, fix="python3 -m hosting down, then `up`")
        found.update(addresses)
    return sorted(found)


def _make_options(settings: Settings, name: str) -> list[str]:
    """Returns the guard's options: this machine's network, the one capability it needs, nothing writable."""
    limits = ["--memory=64m", "--pids-limit=32", "--read-only", "--log-driver=json-file", "--log-opt=max-size=1m"]
    may = ["--network=host", "--user=0:0", "--cap-drop=ALL", "--cap-add=NET_ADMIN", "--security-opt=no-new-privileges"]
    return [f"--name={name}", *may, *limits, settings.image, PROGRAM]
