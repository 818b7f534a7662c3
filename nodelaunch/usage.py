"""How busy every node of a job is, over time, while a block runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.node import sampler
from nodelaunch.program import make_command

# How long the last line may take once a node was told to stop.
PATIENCE = 3.0


@dataclass(frozen=True)
class GpuUsage:
    """One GPU at one moment, as ``nvidia-smi`` tells it.

    Args:
        index: Its number on the node.
        busy: Share of the last moments, 0 to 1, in which any kernel ran; one that waits for another rank counts too.
        memory_bytes: Memory in use, by all processes.
        memory_total: Memory that there is, in bytes.
    """

    index: int
    busy: float
    memory_bytes: int
    memory_total: int


@dataclass(frozen=True)
class Usage:
    """One node at one moment.

    Args:
        node: Its name.
        time: Seconds since 1970, by the node's own clock; a preflight tells how far those are apart.
        cores: Number of cores that a process may use there, or a container's share if there is a quota.
        busy: Share of these cores, 0 to 1, that all programs of the machine used since the moment before.
        job_busy: Share that the processes of this node's jobs used, which tells several nodes on one machine apart.
            None if that cannot be read.
        memory_bytes: Main memory in use on the machine; None if that cannot be read.
        memory_total: Main memory that there is, in bytes; None likewise.
        gpus: The GPUs that the node's job may use; all of the machine while no job says otherwise.
        how: The source of ``busy``: ``/proc/stat``, or on macOS the load average, which is rough and late.
    """

    node: str
    time: float
    cores: float
    busy: float
    job_busy: float | None
    memory_bytes: int | None
    memory_total: int | None
    gpus: tuple[GpuUsage, ...]
    how: str


@dataclass
class Watch:
    """The samples so far.

    Attributes:
        samples: In the order in which they came.
        problems: For each node that could not be watched, why.
    """

    samples: list[Usage] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def watch(nodes: Sequence[Node], *, every: float = 0.5) -> Iterator[Watch]:
    """Watches nodes while the block runs: cores, memory and GPUs.

    On each node runs a small program (about 1 % of a core, and an ``nvidia-smi`` if there is one) that ends when its
    standard input does, so that it does not outlive us. A node that cannot be watched is named in ``problems`` and
    disturbs nothing: a picture is not worth a job.

    Args:
        nodes: In the order of the job, such as ``launch.local_nodes(2)``.
        every: Seconds between samples.

    Yields:
        The Watch, whose ``samples`` grow meanwhile and stay afterwards.

    Raises:
        LabError: ``every`` is too short to measure anything.
    """
    if every < 0.05:
        raise LabError("Samples closer than 0.05 s measure nothing.", where=f"watch(every={every})", fix="every=0.5")
    seen = Watch()
    running: list[tuple[subprocess.Popen, threading.Thread]] = []
    try:
        for index, node in enumerate(nodes):
            try:
                process = node.popen(make_command(node.python, sampler, str(every), str(index), node.folder))
            except (OSError, LabError) as error:
                seen.problems[node.name] = str(error)
                continue
            reader = threading.Thread(target=_follow, args=(node.name, process, seen), daemon=True)
            running.append((process, reader))
            reader.start()
        yield seen
    finally:
        for process, _ in running:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process, reader in running:
            reader.join(PATIENCE)
            _end(process)


def _follow(name: str, process: subprocess.Popen, seen: Watch) -> None:
    """Turns the lines of one node's program into samples until they end."""
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed under us
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a login shell may greet on the same stream
                seen.samples.append(_parse(name, json.loads(line)))
        if not any(sample.node == name for sample in seen.samples):
            last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            seen.problems[name] = (last or ["it ended before the first sample"])[0]


def _parse(name: str, line: dict[str, Any]) -> Usage:
    same = {key: line[key] for key in ("time", "cores", "busy", "how")}
    same |= {key: line.get(key) for key in ("job_busy", "memory_total")}
    chosen = {device.strip() for device in (line.get("devices") or "").split(",")}
    gpus = [gpu for gpu in line["gpus"] if line.get("devices") is None or {str(gpu["index"]), gpu["uuid"]} & chosen]
    shown = tuple(GpuUsage(gpu["index"], gpu["busy"], gpu["memory"], gpu["memory_total"]) for gpu in gpus)
    return Usage(node=name, memory_bytes=line.get("memory"), gpus=shown, **same)


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        pipe.close()
