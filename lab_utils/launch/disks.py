"""Full disks: what programs say of them, where they are, and what to do."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from lab_utils.text import clean

if TYPE_CHECKING:
    from lab_utils.launch.story import NodeStory, Story

# What programs say of a full disk: Python and the shell's tools, and torch.save, which leaves the reason out.
FULL = re.compile(
    r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT|PytorchStreamWriter failed writing|file write failed"
    r"|tar: .*: Wrote only \d+ of \d+ bytes|enforce fail at inline_container\.cc:\d+\] \. unexpected pos"
)
# Where such a message names a path: "…: '/path'" (Python), "… '/path': …" (coreutils), "/path: …" (tar, bash).
NAMED = (
    re.compile(r"(?:No space left on device|Disk quota exceeded): [b]?['\"](?P<path>[^'\"\n]+)['\"]"),
    re.compile(r"[‘'`](?P<path>[^‘’'`\n]*/[^‘’'`\n]*)[’']: (?:No space left on device|Disk quota exceeded)"),
    re.compile(r"(?P<path>/[^\s:]+): (?:Cannot \w+: )?(?:No space left on device|Disk quota exceeded)"),
    re.compile(r"tar: (?P<path>.+): Wrote only \d+ of \d+ bytes"),
)
TOOL = re.compile(r"(subprocess\.)?CalledProcessError")  # says with which status a program ended, and not why
ROOM = 64 * 2**10  # bytes; a disk with less is full


def advise_room(path: str) -> str:
    """What to do where a disk is full."""
    return (
        f"free some space there (df -h {clean(path, 200)}), or use a folder on a larger disk; then run the cell again"
    )


def name_full_disk(text: str) -> str:
    """The path that a message about a full disk names; "" where it names none."""
    return next((found["path"] for pattern in NAMED if (found := pattern.search(text))), "")


def find_full_disk(error: BaseException) -> str:
    """The path at which a disk ran full, for an error that says so; "" for other errors.

    Not every such error names its file. Then it is, of all paths that the functions on the way to the error had in
    their variables, the one whose disk has the least room.
    """
    text = "".join(traceback.format_exception_only(error))
    if not FULL.search(text):
        return ""
    if named := name_full_disk(text):
        return named
    rooms = {str(path): room for path in _list_paths(error) if (room := measure_room(path)) is not None}
    return min(rooms, key=rooms.get, default="")


def _list_paths(error: BaseException) -> Iterator[Path]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            name = getattr(value, "name", None) if hasattr(value, "fileno") else value
            if isinstance(name, str | PurePath) and "/" in str(name) and len(str(name)) < 4096:
                yield Path(name)
    yield Path.cwd()


def measure_room(path: Path) -> int | None:
    """The free bytes of the disk on which a path lies, or will lie; None where that cannot be found out."""
    for folder in (path, *path.parents):
        try:
            usage = os.statvfs(folder)
        except (OSError, ValueError):
            continue
        return usage.f_bavail * usage.f_frsize if usage.f_favail or not usage.f_files else 0
    return None


def explain_disk(part: NodeStory, path: str = "") -> tuple[str, str] | None:
    """The cause and the fix where a disk of a node is full, as far as it was said or measured; None where it is not."""
    ended = part.ended or {}
    full = ended.get("room") is not None and ended["room"] < ROOM
    path = path or name_full_disk(part.full) or (ended["folder"] if full else "")
    if path:
        return f"the disk is full at {path}", advise_room(path)
    if part.full:
        fix = f"on {part.name}: df -h; free some space, or use a folder on a larger disk, then run the cell again"
        return f"a disk is full: {clean(part.full, 200)}", fix
    return None


def explain_full_disk(story: Story, error: dict) -> tuple[str, str] | None:
    """The cause and the fix where a rank failed because a disk is full."""
    text = f"{error['message']}\n{error['traceback']}"
    part = story.nodes[error["node"]]
    if FULL.search(text):
        return explain_disk(part, error.get("disk") or name_full_disk(text))
    # A rank that says nothing more: its own words, or those of a program that it ran, may have found no room.
    return explain_disk(part) if error["kind"] == "exit" or TOOL.match(error["message"]) else None
