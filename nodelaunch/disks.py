"""Says of a full disk where it is and what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lab_common.text import clean
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
