"""Keeps the teams' containers from the cloud's metadata service, which hands out the machine's own credentials.

A firewall in a container would need a capability that its team could use, too. So one container of ours, the guard, has
this machine's network and lays rules into its routing: what a container sends is not forwarded to those addresses. It
starts with the machine, as the teams' containers do, and these wait for it (start.sh). It works with Docker and with
Podman, and whoever may start containers may start it. An engine without root cannot: `up` says so then.
"""

from __future__ import annotations

import secrets

from hosting.engine import Engine
from hosting.settings import Settings

PROGRAM = "/srv/labs/hosting/image/guard.sh"
# The clouds' own way, which needs no rule on the machine.
REMEDY = (
    "use the cloud's own setting: on AWS `aws ec2 modify-instance-metadata-options --http-tokens required"
    " --http-put-response-hop-limit 1 --instance-id ID`; elsewhere give the machine no role or service account"
)


def make_guard(settings: Settings, image_id: str = "") -> dict:
    """Returns Compose's service: this machine's network, the one capability it needs, nothing writable."""
    return {
        "image": settings.image,
        "container_name": f"{settings.project}-guard",
        "labels": {"labs.image": image_id},
        "command": [PROGRAM],
        "network_mode": "host",
        "user": "0:0",
        "cap_drop": ["ALL"],
        "cap_add": ["NET_ADMIN"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "logging": {"driver": "json-file", "options": {"max-size": "1m"}},
        "restart": "always",
    }


def can_guard(engine: Engine, settings: Settings) -> bool:
    """Returns True if the engine's containers may change this machine's routing; needs the image."""
    name = f"{settings.project}-guard-trial-{secrets.token_hex(4)}"
    may = ["--network=host", "--user=0:0", "--cap-drop=ALL", "--cap-add=NET_ADMIN"]
    tried = engine.ask("run", "--rm", f"--name={name}", *may, settings.image, PROGRAM, "try", timeout=60)
    if tried.returncode < 0:
        engine.ask("rm", "-f", name, timeout=60)
    return tried.returncode == 0


def describe_guard(engine: Engine, settings: Settings) -> str:
    """Describes whether the teams are kept from the metadata, in a line for a terminal."""
    if not settings.guarded:
        return f"the cloud's metadata service: NOT kept from the teams, this engine may not; {REMEDY}"
    if engine.ask("inspect", "-f", "{{.State.Running}}", f"{settings.project}-guard").stdout.strip() == "true":
        return "the cloud's metadata service: kept from the teams"
    return "The guard does NOT run: the teams' containers can reach the cloud's metadata. fix: python3 -m hosting up"
