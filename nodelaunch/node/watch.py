"""Watches a rank: reports to the launcher that its main thread no longer moves, and if it waits for other ranks.

A rank that waits in a collective executes no instruction, starts no collective and sends no bytes. That alone proves
nothing: another rank may be loading, saving, evaluating, or waiting for a program, and be on its way. So each rank
only reports what it knows, and the launcher puts it together (``nodelaunch.state``).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import linecache
import math
import os
import re
import socket
import stat
import sys
import threading
import time
import traceback
from pathlib import Path
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

from nodelaunch.node.groups import Groups
from nodelaunch.node.report import Events
from nodelaunch.node.target import shorten_path

# The exit status of a rank that has waited for too long; the launcher ends all ranks long before.
HANG_EXIT = 75
# A group's own timeout ends a rank without a word about where it stands. So the launcher is told earlier: by this part
# of the timeout, and at most by this many seconds.
EARLIER, EARLIEST = 0.1, 10.0
# Files of torch whose innermost frame means that the rank waits for others; in those below them it may well work.
# A store that does not answer is waited for in a file of the launcher's own.
WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py", "/torch/futures/")
WAITING += ("/nodelaunch/node/stores.py",)
WORKING = ("/torch/distributed/elastic/", "/torch/distributed/checkpoint/")
# A call by RPC is worked on in threads of the rank that is called, whose main thread tells nothing of it.
CALLING = "/torch/distributed/rpc/"
# Torch's own code that works or waits for a disk, a server or a program, though a collective may be open.
OTHERWISE = ("/torch/serialization.py", "/torch/hub.py", "/torch/utils/", "/torch/multiprocessing/")
# A thread that stands here waits for another thread of its own process.
IDLE = ("threading.py", "queue.py")
LIBRARY = str(Path(threading.__file__).parent)
# Where a DDP model is called.
FORWARD = "/torch/nn/parallel/distributed.py"
# Seconds of a wait that a thread repeats, since it only looks now and then if it has to end.
POLL = 5.0
# More bytes than that between two looks are part of a tensor, and not a beat of a store.
SENT = 2**16
# Calls that wait for a tensor or a collective, if their object is not known.
TENSOR = re.compile(r"\.(item|tolist|cpu|synchronize)\(")
HANDLE = re.compile(r"\b(isend|irecv|all_\w+|broadcast|reduce\w*|gather|scatter|works?|handles?|requests?)\b.*\.wait\(")
# Where <linux/tcp.h> has tcpi_bytes_acked and tcpi_bytes_received in its tcp_info.
TCP_BYTES = slice(120, 136)


class Watch(threading.Thread):
    """A thread that checks once a second if the main thread has moved.

    Args:
        events: Takes the reports.
        script: The training script, whose line is named.
        seconds: How long the main thread has to stand before that is reported.
        groups: Knows which of torchrun's variables the script has changed.
    """

    def __init__(self, events: Events, script: str, seconds: float, groups: Groups) -> None:
        super().__init__(daemon=True, name="hang watch")
        self._events, self._script, self._seconds, self._groups = events, script, seconds, groups
        self.over = False  # set when the script has ended, and only its threads still run

    def run(self) -> None:
        """Watches to the end; ends the process itself only where the group's timeout is near."""
        with contextlib.suppress(OSError):  # a full disk takes no events; the group's own timeout still holds
            self._watch(threading.main_thread().ident)

    def _watch(self, main: int) -> None:
        place, sent, since, timeout = None, 0, time.monotonic(), math.inf
        told: dict = {}  # of this standstill
        while True:
            time.sleep(max(0.02, min(1.0, self._seconds / 10, EARLIER / 3 * timeout)))
            found = self._find_places(main), _count_collectives(), _read_clock(main)
            moved, place = found != place, found
            if not moved:  # a large tensor on a slow network takes minutes
                moved, sent = (total := _count_bytes()) - sent > SENT, total
            if moved:
                if told:
                    self._events.write("moves")
                since, told = time.monotonic(), {}
                continue
            stood, timeout = time.monotonic() - since, _find_timeout()
            if not self.over and stood > timeout - min(EARLIEST, EARLIER * timeout) and waits(main):
                break
            if stood > self._seconds and (facts := self._describe(main))["inside"] != told.get("inside"):
                told = facts  # again, if another thread of the rank has ended its work, or died
                limit = None if math.isinf(timeout) else timeout
                self._events.write("still", seconds=stood, timeout=limit, **facts)
        facts = {"traceback": (text := self._write_stack(main)), **self._describe(main)}
        self._events.write("hang", seconds=stood, timeout=timeout, **facts)
        words = f"this rank has waited for {stood:.0f} s, and its group gives up after {timeout:g} s:\n{text}"
        print(words, file=sys.stderr, flush=True)
        time.sleep(8)
        os._exit(HANG_EXIT)

    def _find_places(self, main: int) -> list[list[tuple[int, int]]]:
        return [_find_place(one.ident) for one in list_threads()] if self.over else [_find_place(main)]

    def _describe(self, main: int) -> dict:
        """The facts that the launcher needs about a thread that stands."""
        if self.over:
            threads = list_threads()
            frames = [sys._current_frames().get(one.ident) for one in threads]
            idle = all(frame and is_idle(frame) for frame in frames)
            return {"thread": threads[0].name if threads else "", "idle": idle, "inside": False, "where": ""}
        frame = sys._current_frames()[main]
        codes = [one.f_code for one, _ in traceback.walk_stack(frame)]
        meeting = any(one.co_name == "init_process_group" for one in codes)
        facts = {"inside": waits(main), "meeting": meeting, "where": name_place(frame, self._script)}
        if facts["inside"] and (working := find_working_thread()):
            where = f"{name_place(working[1], self._script)}, in its thread {working[0]!r}"
            return facts | {"inside": False, "where": where}
        facts["forward"] = any(one.co_filename.endswith(FORWARD) and one.co_name == "forward" for one in codes)
        facts["traceback"] = self._write_stack(main)
        raised = sys._current_exceptions().get(main)  # its `finally` or `except` waits for the others
        raised = raised[1] if isinstance(raised, tuple) else raised  # in Python 3.11 with its type and traceback
        if raised is not None:
            facts["raised"] = "".join(traceback.format_exception_only(raised)).strip()[:300]
        return facts | ({"changes": self._groups.list_changes()} if meeting else {})

    def _write_stack(self, thread: int) -> str:
        stack = traceback.extract_stack(sys._current_frames()[thread])
        own = [number for number, frame in enumerate(stack) if frame.filename == self._script] or [0]
        return "".join(traceback.format_list(stack[own[0] :])).replace(self._script, shorten_path(self._script))


def list_threads() -> list[threading.Thread]:
    """The threads for which Python waits at its end."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]


def is_idle(frame: FrameType, poll: float = 0.0) -> bool:
    """True if a thread waits for another thread, and not for longer than ``poll`` if it would then go on."""
    # Thread.run() is the innermost frame of a thread whose function is written in C.
    if Path(frame.f_code.co_filename).name not in IDLE or frame.f_code.co_name == "run":
        return calls_lock(frame)
    own = [one for one, _ in traceback.walk_stack(frame) if Path(one.f_code.co_filename).name in IDLE]
    return all((one.f_locals.get("timeout") or 0) <= poll for one in own)


def find_working_thread() -> tuple[str, FrameType] | None:
    """The name and the frame of a thread of the script that works, sleeps or waits for a program.

    It may do what the other ranks wait for.
    """
    frames = sys._current_frames()
    for one in threading.enumerate():
        frame = frames.get(one.ident) if one is not threading.main_thread() else None
        if frame and is_of_script(one, frame) and not is_idle(frame, POLL) and not waits(one.ident):
            return one.name, frame
    return None


def is_of_script(thread: threading.Thread, frame: FrameType) -> bool:
    """False for the threads that packages keep, such as tqdm's and wandb's, and for the watch itself."""
    frames = [one for one, _ in traceback.walk_stack(frame)]
    if any(one.f_globals.get("__name__", "").startswith("nodelaunch.node.") for one in frames):
        return False
    files = [one.f_code.co_filename for one in frames]
    packages = [file for file in files if "-packages/" in file or "/torch/" in file]
    if any(file not in packages and not file.startswith((LIBRARY, "<frozen")) for file in files):
        return True
    # No line of the script: Thread(target=subprocess.run), or a thread of the library, for which Python does not wait.
    return not thread.daemon and not packages and not any("/multiprocessing/" in file for file in files)


def waits(thread: int) -> bool:
    """True if a thread that stands waits for other ranks, and does not work, sleep, or wait for a program."""
    frame = sys._current_frames().get(thread)
    file = frame.f_code.co_filename if frame else ""
    if any(CALLING in one.f_code.co_filename for one, _ in traceback.walk_stack(frame)):
        return False
    if any(part in file for part in WAITING) and not any(part in file for part in WORKING):
        return True
    # `work.wait()` of an asynchronous collective, or `loss.item()` behind one on a GPU: a line of the script, in C.
    # What stands in the standard library waits for a thread, a program or a server.
    library = str(Path(file).parent) == LIBRARY or "/multiprocessing/" in file or "/asyncio/" in file
    if library or any(part in file for part in OTHERWISE):
        return False
    return waits_for_work(frame) or (("/torch/" in file or calls_torch(frame)) and has_open_work())


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


def name_place(frame: FrameType, script: str) -> str:
    """The function that the script called in a frame, and the script's line, for a reader of the script."""
    frames = [one for one, _ in traceback.walk_stack(frame)]  # the innermost first
    own = next((n for n, one in enumerate(frames) if one.f_code.co_filename == script), None)
    if any(one.f_code.co_name == "_exit_function" for one in frames):  # of multiprocessing, which waits for its own
        names = ", ".join(process.name for process in sys.modules["multiprocessing"].active_children()) or "a process"
        return f"the script's end, where Python waits for {names} (terminate() and join() it, or daemon=True)"
    if own is None:
        return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"
    line = f"{shorten_path(script)}, line {frames[own].f_lineno}"
    called = f"{frames[own - 1].f_globals.get('__name__', '?')}.{frames[own - 1].f_code.co_qualname}"
    # A function in C has no frame, and one of torch's with a decorator has the decorator's name.
    if own == 0 or "<locals>" in called or called.startswith("torch.distributed") or called.endswith("_call_impl"):
        called = read_call(frames[own])[:60]
    return f"{called} ({line})"


def _find_place(thread: int | None) -> list[tuple[int, int]]:
    frame, place = sys._current_frames().get(thread), []
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return place


def _count_collectives() -> int:
    """The number of the last collective, which also counts the steps of DDP; it is torch's own, and not public."""
    with contextlib.suppress(Exception):
        return sys.modules["torch"].distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    return 0


def _find_timeout() -> float:
    """The seconds after which the process group gives up; infinite where torch does not say, as it is not public."""
    with contextlib.suppress(Exception):
        group = sys.modules["torch"].distributed.distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    return math.inf


def _read_clock(thread: int) -> float:
    """Tenths of CPU seconds of a thread; 0 where that tells nothing, since waiting for a GPU takes them, too."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if not hasattr(time, "pthread_getcpuclockid") or (cuda and cuda.is_initialized()):
        return 0.0
    return round(time.clock_gettime(time.pthread_getcpuclockid(thread)), 1)


def _count_bytes() -> int:
    """Bytes that this process's TCP connections have sent and received; 0 where the system is not Linux."""
    try:
        numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return 0
    return sum(_count_bytes_of(number) for number in numbers)


def _count_bytes_of(descriptor: int) -> int:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as link:
                if link.type == socket.SOCK_STREAM and link.family in (socket.AF_INET, socket.AF_INET6):
                    counts = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES.stop)[TCP_BYTES]
                    return sum(int.from_bytes(counts[at : at + 8], sys.byteorder) for at in (0, 8))
    return 0


# The call that a frame is in, by its source and the frame's variables: a function in C has no frame of its own.


def read_call(frame: FrameType) -> str:
    """The source text of the call that a frame is in; the first line if it has several."""
    line, last, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or last is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, line).encode()
    return text[start : end if last == line else None].decode(errors="replace").strip()


def find_owner(frame: FrameType) -> Any:
    """The object whose method or function a frame's call is, without running any code; None if it is not known."""
    text = re.sub(r"^(?:float|int|bool|str|print)\((.*)\)$", r"\1", read_call(frame))
    while (flat := re.sub(r"\([^()]*\)", "\0", text)) != text:  # without arguments
        text = flat
    found = re.match(r"[\w.]+", text)
    following = text[found.end() :] if found else "."
    if re.match(r"\0*[.\[]|\0\0", following):  # the result of another call, or an element
        return None
    names = found[0].split(".")
    first, *others = names[:-1] if following[:1] in ("\0", "(") and len(names) > 1 else names
    places = (frame.f_locals, frame.f_globals, frame.f_builtins)
    value = next((place[first] for place in places if first in place), None)
    for name in others:
        value = inspect.getattr_static(value, name, None)
    return None if isinstance(value, property) else value


def waits_for_work(frame: FrameType) -> bool:
    """True if a frame is in the ``wait()`` of one of torch's objects; a rank's os.wait() does not count."""
    text, owner = read_call(frame), find_owner(frame)
    if owner is None:
        return bool(HANDLE.search(text))
    return ".wait(" in text and type(owner).__module__.startswith("torch")


def calls_torch(frame: FrameType) -> bool:
    """True if a frame is in a call of torch, or of one of its tensors; what is only an argument does not count."""
    owner = find_owner(frame)
    if owner is None:
        return bool(TENSOR.search(read_call(frame)))
    owner = owner.__self__ if isinstance(owner, BuiltinFunctionType) else owner  # a module or a class
    kind = owner if isinstance(owner, type) else type(owner)
    names = [owner.__name__] if isinstance(owner, ModuleType) else [str(one.__module__) for one in kind.__mro__]
    return any(re.match(r"torch\b", name) for name in names)


def calls_lock(frame: FrameType) -> bool:
    """True if a frame waits for a lock or a SimpleQueue of Python's own, which another thread has to serve."""
    return type(find_owner(frame)).__module__ in ("_thread", "_queue") and "timeout=" not in read_call(frame)
