"""The reasons to stop a job, and classes of error messages: a full disk, or a failure that another rank caused."""

from __future__ import annotations

import contextlib
import re
import shutil
import traceback
from enum import StrEnum
from pathlib import Path, PurePath


class StopReason(StrEnum):
    """Why a job was ended before it had ended by itself. The first four are a supervisor's."""

    LIMIT = "limit"
    SILENCE = "silence"  # no heartbeat
    RELEASE = "release"  # the launcher let go
    SIGNAL = "signal"
    JOIN = "join"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    STANDSTILL = "standstill"  # no rank can move any more


# Messages about a full disk: of Python and the shell's tools, and of torch.save, which leaves the reason out.
FULL = re.compile(
    r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT|PytorchStreamWriter failed writing|file write failed"
    r"|enforce fail at inline_container\.cc:\d+\] \. unexpected pos"
)
# Where such a message names a path: "…: '/path'" (Python), "… '/path': …" (coreutils), "/path: …" (bash).
NAMED = (
    re.compile(r"(?:No space left on device|Disk quota exceeded): [b]?['\"](?P<path>[^'\"\n]+)['\"]"),
    re.compile(r"[‘'`](?P<path>[^‘’'`\n]*/[^‘’'`\n]*)[’']: (?:No space left on device|Disk quota exceeded)"),
    re.compile(r"(?P<path>/[^\s:]+): (?:No space left on device|Disk quota exceeded)"),
)
# What a rank prints when another one is gone or does not answer (Gloo, NCCL, and torch's store): never the first cause
# while any rank has another error.
FOLLOWED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|connectFullMesh|Connection refused"
    r"|Application timeout caused pair closure|Timed out waiting|wait timeout|Socket Timeout|recvValue failed"
    r"|DistNetworkError|DistStoreError|NCCL error|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|Watchdog caught collective"
)
# Such an error is torch's: a script's own URLError, "Connection refused", is a cause.
OF_TORCH = re.compile(r"(RuntimeError|TimeoutError|torch\.distributed\.\w+|\w*Dist\w*Error)\b")
# A cause, though torch raises the same error: of a store that a script opens itself, and of NCCL, which refuses two
# ranks on one GPU, or has no memory.
TAKEN = re.compile(r"EADDRINUSE|EADDRNOTAVAIL|address already in use|ncclInvalidUsage|out of memory")
# Words of torch in an error that it raises in C for a line of the script, which has errors of these types, too.
MARKS = re.compile(r"(?i)gloo|c10d|nccl|Dist\w+Error|TCPStore|by peer \[|error \[|ms for \w+ operation")


def name_full_disk(text: str) -> str:
    """The path that a message about a full disk names; "" if it names none."""
    return next((found["path"] for pattern in NAMED if (found := pattern.search(text))), "")


def find_full_disk(error: BaseException) -> str:
    """The path at which a disk is full, for an error about that; "" for other errors.

    Not every such error names its file. Then it is, of all paths that the functions on the way to the error had in
    their variables, the one whose disk has the least room.
    """
    text = "".join(traceback.format_exception_only(error))
    if not FULL.search(text) or name_full_disk(text):
        return name_full_disk(text)
    paths = [Path.cwd()]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = [getattr(value, "name", value) for value in list(frame.f_locals.values())]
        names = [value for value in values if isinstance(value, str | PurePath) and len(str(value)) < 4096]
        paths += [Path(name) for name in names if "/" in str(name)]
    rooms = {str(path): room for path in paths if (room := measure_room(path)) is not None}
    return min(rooms, key=rooms.get, default="")


def measure_room(path: Path) -> int | None:
    """The free bytes of the disk on which a path lies, or will lie; None if that is not known."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError, ValueError):
            return shutil.disk_usage(folder).free
    return None


def failed_as_consequence(message: str, file: str = "/torch/") -> bool:
    """True if an error says only that another rank is gone; ``file`` is the innermost one of its traceback."""
    known = OF_TORCH.match(message) and FOLLOWED.search(message) and not TAKEN.search(message)
    return bool(known and ("/torch/" in file or MARKS.search(message)))


def shorten_gloo(message: str) -> str:
    """Leaves out the line of Gloo's own source, and its advice to look for what is shown here anyway."""
    return re.sub(r"\[/\S+\.cc:\d+\] |\. This is typically.*", "", message)
