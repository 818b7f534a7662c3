"""Launches training scripts on nodes of this machine, on SSH hosts and on Slurm, and ends what it began.

``TorchrunJob("train.py", ["--lr", 0.1], nodes=ssh_nodes(["hostA", "hostB"]), root=".").run()`` copies the current
folder to two hosts, starts torchrun on each, shows the output of all ranks, and names the rank that failed first.

* ``local_nodes(2)`` are two nodes on this machine, ``slurm_nodes(2)`` two that Slurm chooses.
* ``.preflight()`` finds in seconds what would otherwise hang for minutes, and the fix; ``run`` does it first.
* ``.write()`` leaves the bash script of each node to read, and to run by hand.
* ``.start()`` returns while the job runs; ``.stop()`` ends it.
* ``last()`` replays the log of the newest job, after a tab was closed or a kernel was restarted.
* ``report(value)``, called in the script, hands a result of a rank to ``JobResult.results``.

In a terminal ``python -m nodelaunch`` checks nodes, lists jobs and stops one. packages/nodelaunch/README.md says more.
"""

from __future__ import annotations

from importlib import import_module

# By the module that holds it, imported at its first use: a rank that reports its result needs nothing of the launcher.
MODULES = {
    "DataFolder": "spec",
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
    "last": "running",
    "local_nodes": "backends.local",
    "report": "node.report",
    "slurm_nodes": "backends.slurm",
    "ssh_nodes": "backends.ssh",
    "watch": "usage",
}
__all__ = list(MODULES)


def __getattr__(name: str) -> object:
    """Imports a public name at its first use (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Lists the names that completion in a notebook offers."""
    return sorted({*globals(), *MODULES})
