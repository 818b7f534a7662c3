"""What messages of torch and of Python mean, and what to do: the likely cause and the fix of each."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean

# By what a message contains: the likely cause, and what to do.
KNOWN = (
    (
        r"unable to (write to|open|mmap) file </?torch_|</torch_\d",
        "the shared memory (/dev/shm) is full, in which a DataLoader's workers hand over their batches",
        "num_workers=0, or start the container with --shm-size=2g",
    ),
    (
        r"appears not to match sizes of the same param|DDP expects same model across all ranks",
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
    (
        r"EADDRINUSE|(?i:address already in use)",
        "another program on that node has this port",
        "another port, or 0, which takes a free one",
    ),
    (
        r"invalid device ordinal",
        "the node has fewer GPUs than processes, and each takes the GPU of its LOCAL_RANK",
        "nproc_per_node= at most the number of GPUs that each node has",
    ),
    (
        r"Duplicate GPU detected|Multiple Ranks are using the same GPU",
        "two processes took the same GPU, and NCCL wants one for each",
        "nproc_per_node= at most the number of GPUs that each node has; in the script: "
        "torch.cuda.set_device(LOCAL_RANK)",
    ),
    (r"out of memory|OutOfMemoryError", "the batch does not fit into the GPU's memory", "a smaller --batch-size"),
    (
        r"No module named",
        "the script imports what this node does not have",
        "install it there; yours: files=, or root='.' for the folder, with env={'PYTHONPATH': '.'} to look in it",
    ),
    (
        r"No such file or directory|FileNotFoundError",
        "a path that is not on this node: a job runs in a folder of its own, with the script and what files= names",
        "root='.' copies the script's project and runs in it; give data as an absolute path",
    ),
)


def look_up(text: str) -> tuple[str, str]:
    """Returns the likely cause and the fix of the first message that the text has; twice nothing for others."""
    return next(((cause, fix) for pattern, cause, fix in KNOWN if re.search(pattern, text)), ("", ""))


def explain_folder(folder: Path, error: OSError) -> LabError:
    """Says why the launcher's own folder of a job cannot be written, and what to do."""
    fix = "export LAB_RUNS=/a/folder/of/yours, then start Python (or JupyterLab) again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = clean(f"The disk is full at {folder}", 110) + "."
        return LabError(what, where=clean(folder), cause=str(error.strerror), fix=f"free some space there, or {fix}")
    cause = f"{error.strerror} ({clean(error.filename or folder, 300)})"
    if isinstance(error, PermissionError) and (umask := _read_umask()) & 0o700:
        cause = f"the umask is {umask:04o}: you yourself may not enter the folders that you make"
        fix = "umask 022, then start Python (or JupyterLab) again; chmod u+rwx the folders that were made"
    return LabError("The folder of the job cannot be written.", where=clean(folder), cause=cause, fix=fix)


def _read_umask() -> int:
    """The umask of this process; 0 where Linux does not say it."""
    # Not by os.umask, which changes it to tell it: another thread may make a file in between.
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(found[1], 8) if (found := re.search(r"^Umask:\s*(\d+)", text, re.MULTILINE)) else 0
