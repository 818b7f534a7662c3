"""Watches how busy every node of a job is, over time, while a block runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.node import sampler
from nodelaunch.transfer import make_command

PATIENCE = 3.0  # seconds that the last line may take once a node was told to stop


@dataclass(frozen=True)
class GpuUsage:
    """One GPU at one moment, as ``nvidia-smi`` tells it; memory is in bytes, of all processes."""

    index: int  #: its number on the node
    busy: float  #: share of the last moments, 0 to 1, in which any kernel ran; one that waits for another rank, too
    memory_bytes: int
    memory_total: int


@dataclass(frozen=True)
class Usage:
    """One node at one moment. Without /proc (macOS) the last three are None."""

    node: str
    time: float  #: seconds since 1970, by the node's own clock
    cores: float  #: that a process may use there, or a container's share if there is a quota
    busy: float  #: the share of these, 0 to 1, that all programs used: the load average of the last minute
    gpus: tuple[GpuUsage, ...]  #: that the node's job may use; all of the machine while no job says otherwise
    #: The share, since the moment before, of this node's jobs: it tells several nodes on one machine apart.
    job_busy: float | None = None
    memory_bytes: int | None = None  #: main memory in use on the machine, and all that there is
    memory_total: int | None = None


@dataclass
class Watch:
    """The ``samples`` so far, in the order in which they came."""

    samples: list[Usage] = field(default_factory=list)


@contextlib.contextmanager
def watch(nodes: Sequence[Node], *, every: float = 0.5) -> Iterator[Watch]:
    """Watches nodes while the block runs, with a small program on each: cores, memory and GPUs.

    A node that cannot be watched has no samples, and disturbs nothing: a picture is not worth a job.

    Args:
        nodes: In the order of the job, such as ``launch.local_nodes(2)``.
        every: Seconds between samples.

    Yields:
        The Watch, whose ``samples`` grow meanwhile and stay afterwards.
    """
    seen = Watch()
    running: list[tuple[subprocess.Popen, threading.Thread]] = []
    try:
        for index, node in enumerate(nodes):
            if not import_module(node.backend).ONE_BY_ONE:
                continue  # Slurm chooses the machine, and this one is another
            with contextlib.suppress(OSError, LabError):
                process = node.popen(make_command(node.python, sampler, str(every), str(index), node.folder))
                reader = threading.Thread(target=_follow, args=(node.name, process, seen), daemon=True)
                running.append((process, reader))
                reader.start()
        yield seen
    finally:
        for process, _ in running:  # its end is also that of the program
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process, reader in running:
            reader.join(PATIENCE)
            with process:  # whose end waits for it, and closes its pipes
                process.kill()


def _follow(name: str, process: subprocess.Popen, seen: Watch) -> None:
    """Turns the lines of one node's program into samples until they end."""
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed under us
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a login shell may greet on the same stream
                sample = json.loads(line)
                gpus = tuple(GpuUsage(**gpu) for gpu in sample.pop("gpus"))
                seen.samples.append(Usage(name, gpus=gpus, **sample))
