"""What messages of torch and of Python mean, and what to do: the likely cause and the fix of each."""

from __future__ import annotations

import re

# By what a message contains: the likely cause, and what to do.
KNOWN = (
    (
        r"appears not to match sizes of the same param",
        "the ranks built different models",
        "build the model from the same arguments on every rank",
    ),
    (
        r"Unable to find (an? )?address for|Unable to find interface|no socket interface",
        "this network interface is not there, or has no address",
        "job.preflight() lists the interfaces of every node",
    ),
    (
        r"connectFullMesh|Connection refused, remote=\[127\.",
        "a rank is gone, or listens on an address that the others cannot reach, such as the loopback",
        "leave interface= to the preflight, which takes the one on the route between the nodes",
    ),
    (r"out of memory|OutOfMemoryError", "the batch does not fit into the GPU's memory", "a smaller --batch-size"),
    (
        r"No module named",
        "the script imports what this node does not have",
        "install it there, or name your own file in files=",
    ),
    (r"No such file or directory|FileNotFoundError", "a path that is not on this node", "copy it there, or see data="),
)


def look_up(text: str) -> tuple[str, str]:
    """Returns the likely cause and the fix of the first message that the text has; twice nothing for others."""
    return next(((cause, fix) for pattern, cause, fix in KNOWN if re.search(pattern, text)), ("", ""))
