"""Writes and launches torchrun scripts on the nodes of this machine, on SSH hosts and on Slurm, and ends what it began.

``TorchrunJob(script, args, nodes=local_nodes(2)).run()`` is the whole of it; ``.write()`` leaves the scripts to read
and to run by hand, ``.preflight()`` says in seconds what would otherwise hang for minutes.
"""

from __future__ import annotations

from lab_utils.launch.choose import choose_nodes
from lab_utils.launch.job import TorchrunJob
from lab_utils.launch.local import local_nodes
from lab_utils.launch.outcome import Failure, JobError, JobResult, Rank, find_log
from lab_utils.launch.report import report
from lab_utils.launch.slurm import slurm_nodes
from lab_utils.launch.ssh import ssh_nodes

__all__ = [
    "Failure",
    "JobError",
    "JobResult",
    "Rank",
    "TorchrunJob",
    "choose_nodes",
    "find_log",
    "local_nodes",
    "report",
    "slurm_nodes",
    "ssh_nodes",
]
