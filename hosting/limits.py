"""Divides a machine among the teams: memory, CPUs, processes and shared memory of each container.

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
from hosting.settings import AUTO, Settings, parse_size
from hosting.teams import Team
from lab_common import LabError
from lab_common.files import write_atomically

NAME = "shares.json"
MIB, GIB = 1 << 20, 1 << 30
# What the machine itself and the front need, beside a tenth of its memory.
RESERVE = 512 * MIB
FRONT_MEMORY, FRONT_PROCESSES = 256 * MIB, 512
# A container's processes and threads. JupyterLab, kernels and two ranks with their loaders have a few hundred.
MOST_PROCESSES = 4096
LARGEST_SHM, SMALLEST_SHM = 16 * GIB, 64 * MIB
# Of all labs, the largest need (lab 13 with Ray, 3.3 GB), and JupyterLab's own.
ENOUGH = 4 * GIB
# What a container may print before the engine throws the oldest away.
LOG_SIZE = "10m"


@dataclass(frozen=True)
class Share:
    """Resources that one container may use.

    Attributes:
        memory: Bytes, those in /dev/shm included.
        shm: Bytes of /dev/shm.
        processes: Processes and threads.
        cpus: CPU time, in CPUs.
        cpuset: The CPUs of its team alone, such as ``0,1``; "" if teams share CPUs.
    """

    memory: int
    shm: int
    processes: int
    cpus: float
    cpuset: str = ""


Shares = Mapping[str, Sequence[Share]]


def divide(
    machine: Machine, teams: Sequence[Team], settings: Settings, *, kept: Mapping[str, tuple[Share, ...]] | None = None
) -> dict[str, tuple[Share, ...]]:
    """Returns the shares of each team, one for each of its nodes; together they fit the machine.

    Args:
        machine: The machine to divide.
        teams: The class's teams.
        settings: The instructor's choices; the rest is decided here.
        kept: Shares of running teams, which stay. With new ones beside them, the sum may exceed the machine.
    """
    kept = {team.name: kept[team.name] for team in teams if team.name in (kept or {})}
    count = len(teams)
    if settings.memory == AUTO:
        memory = max(machine.memory - machine.memory // 10 - RESERVE, machine.memory // 2) // count
    else:
        memory = parse_size(settings.memory)
    processes = max(256, min(MOST_PROCESSES, machine.processes * 3 // 4 // (count * settings.nodes)))
    taken = {cpu for nodes in kept.values() for cpu in _list_cpus(nodes)}
    free = [cpu for cpu in machine.cpus if str(cpu) not in taken]
    shares = {}
    for team in teams:
        cpus, cpuset = _choose_cpus(machine, settings, count, free)
        parts = [memory] if settings.nodes == 1 else [memory * 2 // 3, memory - memory * 2 // 3]
        shares[team.name] = kept.get(team.name) or tuple(
            Share(part // MIB * MIB, _choose_shm(part, settings), processes, cpus, cpuset) for part in parts
        )
        taken = set(_list_cpus(shares[team.name]))
        free = [cpu for cpu in free if str(cpu) not in taken]
    return shares


def _choose_cpus(machine: Machine, settings: Settings, teams: int, free: list[int]) -> tuple[float, str]:
    """Chooses a team's CPUs: its own if there are enough for each team, otherwise a part of the time of all.

    Its own are better: PyTorch starts as many threads as a process has CPUs, and no other team disturbs timings.
    """
    wanted = len(machine.cpus) / teams if settings.cpus == AUTO else float(settings.cpus)
    own = int(wanted)
    if own and (settings.cpus == AUTO or own == wanted) and own * teams <= len(machine.cpus) and own <= len(free):
        return float(own), ",".join(map(str, free[:own]))
    return round(min(wanted, len(machine.cpus)), 2), ""


def _choose_shm(memory: int, settings: Settings) -> int:
    if settings.shm != AUTO:
        return parse_size(settings.shm)
    return max(SMALLEST_SHM, min(LARGEST_SHM, memory // 2)) // MIB * MIB


def _list_cpus(shares: Sequence[Share]) -> list[str]:
    return [cpu for share in shares for cpu in share.cpuset.split(",") if cpu]


def check_shares(machine: Machine, teams: Sequence[Team], settings: Settings) -> None:
    """Refuses settings that ask for more than this machine has.

    Raises:
        LabError: Names the setting, and what the machine has.
    """
    count, shares = len(teams), divide(machine, teams, settings)
    memory = settings.memory == AUTO or count * parse_size(settings.memory) <= machine.memory - RESERVE
    smallest = min(share.memory for nodes in shares.values() for share in nodes)
    for fine, where, what, cause, fix in (
        (
            memory,
            f"--memory {settings.memory}",
            f"{count} teams with {settings.memory} each are more than this machine has.",
            f"it has {show_size(machine.memory)}, of which {show_size(RESERVE)} are its own",
            f"--memory {AUTO}, fewer teams, or a larger machine",
        ),
        (
            settings.shm == AUTO or parse_size(settings.shm) <= smallest,
            f"--shm {settings.shm}",
            "/dev/shm would be larger than the memory of its container.",
            f"what lies in it counts as memory, of which a container has {show_size(smallest)}",
            f"--shm {AUTO}",
        ),
        (
            settings.cpus == AUTO or float(settings.cpus) <= len(machine.cpus),
            f"--cpus {settings.cpus}",
            "A team would have more CPUs than this machine.",
            f"it has {len(machine.cpus)}",
            f"--cpus {AUTO}",
        ),
    ):
        if not fine:
            raise LabError(what, where=where, cause=cause, fix=fix)


def keep_shares(
    folder: Path, machine: Machine, teams: Sequence[Team], settings: Settings, *, save: bool
) -> dict[str, tuple[Share, ...]]:
    """Returns the teams' shares: those that they have, unless the settings differ, and shares for new teams.

    Args:
        folder: Folder that stores them.
        machine: The machine to divide.
        teams: The class's teams.
        settings: The deployment's settings.
        save: True to store them for the next command.
    """
    told = [settings.memory, settings.cpus, settings.shm, settings.nodes]
    kept: dict[str, tuple[Share, ...]] = {}
    # A file that cannot be read has the machine divided anew.
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        read = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if read["told"] == told:
            kept = {name: tuple(Share(**share) for share in nodes) for name, nodes in read["teams"].items()}
            here = set(map(str, machine.cpus))
            if not all(here.issuperset(_list_cpus(nodes)) for nodes in kept.values()):
                kept = {}  # it was another machine, or had other CPUs
    shares = divide(machine, teams, settings, kept=kept)
    if save and shares != kept:
        found = {name: [asdict(share) for share in nodes] for name, nodes in shares.items()}
        with write_atomically(folder / NAME) as file:
            file.write((json.dumps({"told": told, "teams": found}, indent=2) + "\n").encode())
    return shares


def forget_shares(folder: Path) -> None:
    """Makes the next ``up`` divide the machine again."""
    (folder / NAME).unlink(missing_ok=True)


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
    if share.cpuset and "cpuset" in machine.limits:
        made["cpuset"] = share.cpuset
    elif "cpu" in machine.limits:
        made["cpus"] = share.cpus
    return made


def describe_limits(shares: Shares, machine: Machine) -> list[str]:
    """Describes the teams' shares, in lines for a terminal; teams with equal shares are in one line."""
    groups: dict[tuple, list[str]] = {}
    for name, nodes in shares.items():
        words = [f"{show_size(share.memory)} and /dev/shm {show_size(share.shm)}" for share in nodes]
        cpus = f"{nodes[0].cpus:g} CPUs" + (" of its own" if nodes[0].cpuset else "")
        memory = "; ".join(f"node{number} {text}" for number, text in enumerate(words))
        groups.setdefault((memory, cpus, nodes[0].processes), []).append(name)
    lines = [
        f"limits of {', '.join(names)}: memory {memory}; {cpus}; {processes} processes in a container"
        for (memory, cpus, processes), names in groups.items()
    ]
    missing = sorted({"memory", "swap", "cpu", "pids"} - set(machine.limits))
    if missing:
        lines.append(f"NOT limited, because the engine cannot here: {', '.join(missing)}")
    total = sum(share.memory for nodes in shares.values() for share in nodes)
    if total > machine.memory:
        lines.append(
            f"The limits together ({show_size(total)}) are more than the machine's {show_size(machine.memory)}: a team"
            " came later. After `down`, `up` divides the memory evenly."
        )
    smallest = min(sum(share.memory for share in nodes) for nodes in shares.values())
    if smallest < ENOUGH:
        lines.append(
            f"A team has {show_size(smallest)} of memory, and the largest lab needs 3.3 GB: have fewer teams,"
            " a larger machine, or `--nodes 1`."
        )
    lines.append("disk: NOT limited by the engine; one team can fill it for all (hosting/ISOLATION.md)")
    return lines


def show_size(size: int) -> str:
    """Returns a number of bytes in readable units."""
    return f"{size / GIB:.1f} GB" if size >= GIB else f"{size / MIB:.0f} MB"
