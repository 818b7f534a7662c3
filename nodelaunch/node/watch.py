"""Watches a rank: reports to the launcher that its main thread no longer moves, and if it waits for other ranks.

A rank that waits in a collective executes no instruction, starts no collective and sends no bytes. That alone proves
nothing: another rank may be loading, saving, evaluating, or waiting for a program, and be on its way. So each rank
only reports what it knows, and the launcher puts it together (``nodelaunch.state``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import linecache
import re
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from nodelaunch.node.groups import Groups
from nodelaunch.node.report import Events

# Files of torch whose innermost frame means that the rank waits for others; in those below them it may well work.
# A store that does not answer is waited for in a file of the launcher's own.
WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py", "/torch/futures/")
WAITING += ("/nodelaunch/node/stores.py",)
WORKING = ("/torch/distributed/elastic/", "/torch/distributed/checkpoint/")
# A call by RPC is worked on in threads of the rank that is called, whose main thread tells nothing of it.
CALLING = "/torch/distributed/rpc/"
# Torch's own code that works or waits for a disk, a server or a program, though a collective may be open; as that of
# Python's library may.
OTHERWISE = ("/torch/serialization.py", "/torch/hub.py", "/torch/utils/", "/torch/multiprocessing/")
LIBRARY = f"{Path(threading.__file__).parent}/"
# A thread whose innermost frame is here, and not in its own function, waits for another thread of its process.
IDLE = ("threading.py", "queue.py", "thread.py")
# Where a DDP model is called.
FORWARD = "/torch/nn/parallel/distributed.py"
# More bytes than that between two looks are part of a tensor, and not a beat of a store.
SENT = 2**16
# Lines of a script at which it stands in C: it waits for a collective, or for a tensor behind one.
WORK = re.compile(r"(?<!\bos)\.wait\(")
TENSOR = re.compile(r"\.(item|tolist|cpu|numpy|to|synchronize)\(|^(float|int|bool)\(|[<>]")
# Where <linux/tcp.h> has tcpi_bytes_acked and tcpi_bytes_received in its tcp_info.
TCP_BYTES = slice(120, 136)


class HangWatch(threading.Thread):
    """A thread that checks once a second if the main thread has moved, and reports if it stands for ``seconds``."""

    def __init__(self, events: Events, script: str, seconds: float, groups: Groups) -> None:
        super().__init__(daemon=True, name="hang watch")
        self._events, self._script, self._seconds, self._groups = events, script, seconds, groups
        self.over = False  # set when the script has ended, and only its threads still run

    def run(self) -> None:
        """Watches to the end of the process."""
        with contextlib.suppress(OSError):  # a full disk takes no events
            self._watch(threading.main_thread().ident)

    def _watch(self, main: int) -> None:
        place, sent, since = None, 0, time.monotonic()
        told: dict = {}  # of this standstill
        while True:
            time.sleep(max(0.02, min(1.0, self._seconds / 10)))
            found = self._find_places(main), _count_collectives(), _read_clock(main)
            moved, place = found != place, found
            if not moved:  # a large tensor on a slow network takes minutes
                moved, sent = (total := _count_bytes()) - sent > SENT, total
            if moved:
                if told:
                    self._events.write("moves")
                since, told = time.monotonic(), {}
                continue
            stood = time.monotonic() - since
            if stood > self._seconds and (facts := self._describe(main))["inside"] != told.get("inside"):
                told = facts  # again, if torch has found out meanwhile that its collective is over
                self._events.write("still", seconds=stood, timeout=_find_timeout(), **facts)

    def _find_places(self, main: int) -> list[list[tuple[int, int]]]:
        frames = sys._current_frames()
        threads = [one.ident for one in list_threads()] if self.over else [main]
        return [[(id(frame), frame.f_lasti) for frame in _list_frames(frames.get(one))] for one in threads]

    def _describe(self, main: int) -> dict:
        """The facts that the launcher needs about a thread that stands."""
        frames = sys._current_frames()
        if self.over:
            threads = list_threads()
            idle = all(one.ident in frames and is_idle(frames[one.ident]) for one in threads)
            return {"thread": threads[0].name if threads else "", "idle": idle, "inside": False, "where": ""}
        frame = frames[main]
        codes = [one.f_code for one in _list_frames(frame)]
        meeting = any(one.co_name == "init_process_group" for one in codes)
        facts = {"inside": waits(frame), "meeting": meeting, "where": name_place(frame, self._script)}
        facts["forward"] = any(one.co_filename.endswith(FORWARD) and one.co_name == "forward" for one in codes)
        stack = traceback.extract_stack(frame)
        own = [number for number, one in enumerate(stack) if one.filename == self._script] or [0]
        text = "".join(traceback.format_list(stack[own[0] :]))
        facts["traceback"] = text.replace(self._script, Path(self._script).name)
        raised = sys._current_exceptions().get(main)  # its `finally` or `except` waits for the others
        raised = raised[1] if isinstance(raised, tuple) else raised  # Python 3.11 adds its type and traceback
        if raised is not None:
            facts["raised"] = "".join(traceback.format_exception_only(raised)).strip()[:300]
        return facts | ({"changes": self._groups.list_changes()} if meeting else {})


def list_threads() -> list[threading.Thread]:
    """The threads for which Python waits at its end."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]


def _list_frames(frame: FrameType | None) -> list[FrameType]:
    """A thread's frames, the innermost first."""
    return [one for one, _ in traceback.walk_stack(frame)] if frame else []


def is_idle(frame: FrameType) -> bool:
    """True if a thread waits for another thread, without a timeout."""
    own = [one for one in _list_frames(frame) if Path(one.f_code.co_filename).name in IDLE]
    # Thread.run() is the innermost frame of a thread whose function is written in C.
    if frame not in own or frame.f_code.co_name == "run":
        return False
    return not any(one.f_locals.get("timeout") for one in own)


def _is_library(file: str) -> bool:
    """True for Python's own library; packages may be installed below it."""
    return file.startswith(LIBRARY) and "-packages/" not in file


def waits(frame: FrameType) -> bool:
    """True if a thread that stands here waits for other ranks, and does not work, sleep, or wait for a program."""
    file = frame.f_code.co_filename
    if any(CALLING in one.f_code.co_filename for one in _list_frames(frame)):
        return False
    if any(part in file for part in WAITING) and not any(part in file for part in WORKING):
        return True
    if _is_library(file) or any(part in file for part in OTHERWISE):
        return False
    # `work.wait()` of an asynchronous collective, or `loss.item()` behind one on a GPU: a line of the script, in C.
    text = read_call(frame)
    return bool(WORK.search(text)) or (("/torch/" in file or bool(TENSOR.search(text))) and has_open_work())


def has_open_work() -> bool:
    """True if a collective that this process began has not ended: torch's flight recorder lists them.

    It also records Gloo's collectives, but not its isend and irecv (tried with torch 2.14).
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            entries = json.loads(getattr(sys.modules["torch"]._C._distributed_c10d, name)()).get("entries", [])
            if any(entry.get("retired") is False for entry in entries):
                return True
    return False


def read_call(frame: FrameType) -> str:
    """The source text of the call that a frame is in; the first line if it has several."""
    line, last, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or last is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, line).encode()
    return text[start : end if last == line else None].decode(errors="replace").strip()


def name_place(frame: FrameType, script: str) -> str:
    """The function that the script called in a frame, and the script's line, for a reader of the script."""
    frames = _list_frames(frame)
    own = next((n for n, one in enumerate(frames) if one.f_code.co_filename == script), None)
    if own is None:
        return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"
    line = f"{Path(script).name}, line {frames[own].f_lineno}"
    called = f"{frames[own - 1].f_globals.get('__name__', '?')}.{frames[own - 1].f_code.co_qualname}"
    # A function in C has no frame, and one of torch's with a decorator has the decorator's name.
    if own == 0 or "<locals>" in called or called.startswith("torch.distributed") or called.endswith("_call_impl"):
        called = read_call(frames[own])[:60]
    return f"{called} ({line})"


# What torch and the system know; the first two are not public.


def _count_collectives() -> int:
    """The number of the last collective, which also counts the steps of DDP."""
    with contextlib.suppress(Exception):
        return sys.modules["torch"].distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    return 0


def _find_timeout() -> float | None:
    """The seconds after which the process group gives up; None where torch does not say."""
    with contextlib.suppress(Exception):
        group = sys.modules["torch"].distributed.distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    return None


def _read_clock(thread: int) -> float:
    """Tenths of CPU seconds of a thread; 0 where that tells nothing, since waiting for a GPU takes them, too."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if not hasattr(time, "pthread_getcpuclockid") or (cuda and cuda.is_initialized()):
        return 0.0
    return round(time.clock_gettime(time.pthread_getcpuclockid(thread)), 1)


def _count_bytes() -> int:
    """Bytes that this process's TCP connections have sent and received; 0 where the system is not Linux."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed, no socket, or not of TCP
                link = socket.socket(fileno=int(path.name))
                try:
                    counts = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES.stop)[TCP_BYTES]
                finally:
                    link.detach()  # its owner closes it
                count += sum(int.from_bytes(counts[at : at + 8], sys.byteorder) for at in (0, 8))
    return count
