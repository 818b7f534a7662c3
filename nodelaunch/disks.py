"""Explains full disks and folders that cannot be written."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.messages import look_up
from nodelaunch.node.errors import FULL, name_full_disk

if TYPE_CHECKING:
    from nodelaunch.state import JobState, NodeState

TOOL = re.compile(r"(subprocess\.)?CalledProcessError")  # says with which status a program ended, and not why
ROOM = 64 * 2**10  # bytes; a disk with less is full


def advise_room(path: str) -> str:
    """What to do where a disk is full."""
    return f"free some space there (df -h {clean(path, 200)}), or use a folder on a larger disk; then run the job again"


def explain_disk(part: NodeState, path: str = "") -> tuple[str, str] | None:
    """The cause and the fix where a disk of a node is full, as far as it was said or measured; None where it is not."""
    ended = part.ended or {}
    full = ended.get("room") is not None and ended["room"] < ROOM
    path = path or name_full_disk(part.full) or (ended["folder"] if full else "")
    if path.startswith("/dev/shm/"):
        return look_up(f"No space left on device: '{path}'")
    if path:
        return f"the disk is full at {path}", advise_room(path)
    if part.full:
        fix = f"on {part.name}: df -h; free some space, or use a folder on a larger disk, then run the job again"
        return f"a disk is full: {clean(part.full, 200)}", fix
    return None


def explain_full_disk(state: JobState, error: dict) -> tuple[str, str] | None:
    """The cause and the fix where a rank failed because a disk is full."""
    text = f"{error['message']}\n{error['traceback']}"
    part = state.nodes[error["node"]]
    if FULL.search(text):
        return explain_disk(part, error.get("disk") or name_full_disk(text))
    # A rank that says nothing more: its own words, or those of a program that it ran, may have found no room.
    return explain_disk(part) if error["kind"] == "exit" or TOOL.match(error["message"]) else None


def explain_folder(folder: Path, error: OSError) -> LabError:
    """The error for a folder of a job, on the launcher's side, that cannot be written."""
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
