"""The kinds of nodes (local, ssh, slurm), and the modules that launch jobs on them: direct for the first two, slurm.

A node's ``backend`` is the name of that module. Its functions are ``check``, ``write`` and ``start``, which
:mod:`nodelaunch.backends.direct` explains. ``ONE_BY_ONE`` is True if the launcher reaches each node by itself: a user
may then start some of them, and their addresses are found before the scripts are written.
"""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
