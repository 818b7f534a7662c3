"""Writes and launches torchrun scripts on the nodes of this machine, on SSH hosts and on Slurm, and ends what it began.

``TorchrunJob(script, args, nodes=local_nodes(2)).run()`` is the whole of it; ``.write()`` leaves the scripts to read
and to run by hand, ``.preflight()`` says in seconds what would otherwise hang for minutes.

Each launch leaves its code and its job's folder on the nodes. A launch that copies to a node keeps there the newest 20
copies of code and the newest 100 jobs; it removes older ones, unless they are in use or were changed within the last
hour. ``python -m nodelaunch clean`` removes more. Neither touches ``work``, or data.
"""

from __future__ import annotations

from importlib import import_module

# By the module that holds it. Imported at its first use: a rank that reports its result needs nothing of the launcher.
PLACES = {
    "Failure": "result",
    "GpuUsage": "usage",
    "JobError": "result",
    "JobResult": "result",
    "Rank": "result",
    "TorchrunJob": "job",
    "Usage": "usage",
    "Watch": "usage",
    "choose_nodes": "choose",
    "find_log": "result",
    "local_nodes": "backends.local",
    "report": "node.report",
    "slurm_nodes": "backends.slurm",
    "ssh_nodes": "backends.ssh",
    "watch": "usage",
}
__all__ = list(PLACES)


def __getattr__(name: str) -> object:
    """Imports a public name at its first use (PEP 562)."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What completion in a notebook offers."""
    return sorted({*globals(), *PLACES})
