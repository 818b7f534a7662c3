"""The nodes that the variable LAB_NODES names; two on this machine if it is not set."""

from __future__ import annotations

import os

from nodelaunch.backends.local import local_nodes
from nodelaunch.backends.nodes import Node
from nodelaunch.backends.slurm import slurm_nodes
from nodelaunch.backends.ssh import ssh_nodes


def choose_nodes() -> list[Node]:
    """Returns the nodes that ``LAB_NODES`` names: ``local:2`` (the default), ``slurm:2``, or hosts, ``hostA,hostB``.

    Any other text is read as names of hosts; the preflight says which of them it does not find. Options of sbatch
    follow the number of nodes, as in ``slurm:2 --gpus-per-node=1 --account=course``.
    ``LAB_SSH_CONFIG`` may name a configuration of ssh for the hosts in place of your own, and ``LAB_NODES_DATA`` the
    folder in which they have data sets.

    Raises:
        LabError: There is no such number of nodes, a host is named twice or cannot be one, or an option does not fit.
    """
    text = os.environ.get("LAB_NODES", "").strip() or "local:2"
    kind, colon, rest = text.partition(":")
    if kind == "local" and colon:
        return local_nodes(int(rest) if rest.isdecimal() else rest)
    if kind == "slurm" and colon:
        count, *extra = rest.split() or [""]
        return slurm_nodes(int(count) if count.isdecimal() else count, extra=extra)
    names = [name.strip() for name in text.split(",") if name.strip()]
    config, folder = (os.environ.get(name) or None for name in ("LAB_SSH_CONFIG", "LAB_NODES_DATA"))
    return ssh_nodes(names, config=config, data=folder)
