"""Divides a machine among the teams: memory, CPUs and shared memory of each container.

A team's share is fixed while the class runs, so that adding a team restarts nobody else's container.
``down`` forgets the shares; the next ``up`` divides the machine evenly again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hosting.engine import Machine
from hosting.settings import Settings, write_text
from hosting.teams import Team

SHARES = "shares.json"
MIB, GIB = 1 << 20, 1 << 30
# What the machine itself and the front need, beside a tenth of its memory.
RESERVE = 512 * MIB
# A container's processes and threads. JupyterLab, kernels and two ranks with their loaders have a few hundred.
MOST_PROCESSES = 4096
LARGEST_SHM, SMALLEST_SHM = 16 * GIB, 64 * MIB
# What a container may print before the engine throws the oldest away.
LOG_SIZE = "10m"


@dataclass(frozen=True)
class Share:
    """Resources that one container may use.

    Attributes:
        memory: Bytes, those in /dev/shm included.
        shm: Bytes of /dev/shm.
        cpus: CPU time, in CPUs.
        cpuset: The CPUs of its team alone, such as ``0,1``; "" if teams share CPUs.
        processes: Processes and threads.
    """

    memory: int
    shm: int
    cpus: float
    cpuset: str = ""
    processes: int = MOST_PROCESSES


Shares = Mapping[str, Sequence[Share]]


def divide(machine: Machine, teams: Sequence[Team], settings: Settings, kept: Shares | None = None) -> Shares:
    """Returns the shares of each team, one for each of its nodes; together they fit the machine.

    Those that are kept stay as they are. With new ones beside them, the sum may exceed the machine.
    """
    shares = {team.name: kept[team.name] for team in teams if team.name in (kept or {})}
    memory = settings.memory or max(machine.memory * 9 // 10 - RESERVE, machine.memory // 2) // len(teams)
    taken = {cpu for nodes in shares.values() for cpu in nodes[0].cpuset.split(",")}
    free = [cpu for cpu in map(str, machine.cpus) if cpu not in taken]
    # CPUs of its own are better: PyTorch starts as many threads as a process has CPUs, and no other team disturbs
    # timings. With too few for all, a team has a part of the time of all CPUs.
    cpus = min(settings.cpus or len(machine.cpus) / len(teams), len(machine.cpus))
    own = int(cpus) if not settings.cpus or settings.cpus == int(cpus) else 0
    if own * len(teams) > len(machine.cpus) or "cpuset" not in machine.limits:
        own = 0
    for team in teams:
        if team.name in shares:
            continue
        mine, free = (free[:own], free[own:]) if len(free) >= own else ([], free)
        parts = [memory] if settings.nodes == 1 else [memory * 2 // 3, memory - memory * 2 // 3]
        shares[team.name] = tuple(
            Share(
                part // MIB * MIB,
                settings.shm or max(SMALLEST_SHM, min(LARGEST_SHM, part // 2)) // MIB * MIB,
                float(own) if mine else round(cpus, 2),
                ",".join(mine),
            )
            for part in parts
        )
    return shares


def keep_shares(folder: Path, machine: Machine, teams: Sequence[Team], settings: Settings, *, save: bool) -> Shares:
    """Returns the shares stored in the folder, unless settings or CPUs differ, and shares for new teams."""
    told = [settings.memory, settings.cpus, settings.shm, settings.nodes, list(machine.cpus), sorted(machine.limits)]
    kept: dict[str, tuple[Share, ...]] = {}
    with suppress(FileNotFoundError):
        read = json.loads((folder / SHARES).read_text(encoding="utf-8"))
        if read["told"] == told:
            kept = {name: tuple(Share(**share) for share in nodes) for name, nodes in read["teams"].items()}
    shares = divide(machine, teams, settings, kept)
    if save:
        found = {name: [asdict(share) for share in nodes] for name, nodes in shares.items()}
        write_text(folder / SHARES, json.dumps({"told": told, "teams": found}, indent=2) + "\n")
    return shares


def limit(share: Share, machine: Machine) -> dict:
    """Returns a container's share in Compose's terms, as far as the engine can enforce it."""
    made: dict = {"shm_size": f"{share.shm}b", "logging": {"driver": "json-file", "options": {"max-size": LOG_SIZE}}}
    if "memory" in machine.limits:
        made["mem_limit"] = f"{share.memory}b"
    if "swap" in machine.limits:
        # None beside the memory: training that swaps slows every team down.
        made["memswap_limit"] = f"{share.memory}b"
    if "pids" in machine.limits:
        made["pids_limit"] = share.processes
    if share.cpuset:
        made["cpuset"] = share.cpuset
    elif "cpu" in machine.limits:
        made["cpus"] = share.cpus
    return made


def describe_limits(shares: Shares, machine: Machine) -> list[str]:
    """Describes the teams' shares, in lines for a terminal; teams with equal shares are in one line."""
    groups: dict[str, list[str]] = {}
    for name, nodes in shares.items():
        memory = "; ".join(
            f"node{number} {show_size(share.memory)} and /dev/shm {show_size(share.shm)}"
            for number, share in enumerate(nodes)
        )
        cpus = f"{nodes[0].cpus:g} CPUs" + (" of its own" if nodes[0].cpuset else "")
        words = f"memory {memory}; {cpus}; {nodes[0].processes} processes in a container"
        groups.setdefault(words, []).append(name)
    lines = [f"limits of {', '.join(names)}: {words}" for words, names in groups.items()]
    missing = sorted({"memory", "swap", "cpu", "pids"} - machine.limits)
    if missing:
        lines.append(f"NOT limited, because the engine cannot here: {', '.join(missing)}")
    total = sum(share.memory for nodes in shares.values() for share in nodes)
    if total > machine.memory:
        lines.append(
            f"The limits together ({show_size(total)}) are more than the machine's {show_size(machine.memory)}."
            " After `down`, `up` without --memory divides the memory evenly."
        )
    lines.append("disk: NOT limited by the engine; one team can fill it for all (hosting/ISOLATION.md)")
    return lines


def show_size(size: int) -> str:
    """Returns a number of bytes in readable units."""
    return f"{size / GIB:.1f} GB" if size >= GIB else f"{size / MIB:.0f} MB"
