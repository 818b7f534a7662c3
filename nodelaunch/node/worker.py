"""What runs around a training script on every rank: keeps its error, shows where it hangs, compares the nodes.

``torchrun … -m nodelaunch.node.worker train.py --lr 0.1`` runs ``train.py`` as ``torchrun … train.py --lr 0.1`` does.
The rest is for the launcher, which reads the lines of ``events.jsonl`` and the files of ``results/``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from nodelaunch.node.agreement import MismatchError, check_agreement
from nodelaunch.node.errors import failed_as_consequence, find_full_disk, shorten_gloo
from nodelaunch.node.report import Events, leave, open_output, write_out
from nodelaunch.node.stores import guard_stores

# Left to itself after it said that it hangs; the launcher ends all ranks long before.
HANG_EXIT = 75
# Of the process group's timeout, after which a rank that does not move is said to hang.
SHARE = 0.75
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main() -> None:
    """Runs the training script that stands first among the arguments."""
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))  # as `python script` does; and so do the programs that it starts
    os.environ.pop("PYTHONSAFEPATH", None)
    rank, folder = int(os.environ["RANK"]), Path(os.environ["LAB_JOB_FOLDER"])
    # A project is the current folder; a script without one lies beside its files.
    here = Path.cwd()
    root = here if here in Path(script).parents else Path(script).parents[1]
    _die_with_agent()
    events = Events(folder, rank)
    stacks = folder / "stacks"
    stacks.mkdir(parents=True, exist_ok=True)
    if output := open_output(folder, rank):  # else torchrun shows it
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    with (stacks / f"rank{rank}.txt").open("w") as file:
        # torchrun ends a worker with SIGTERM: where it stood then is what tells which rank waited for which.
        faulthandler.register(signal.SIGTERM, file=file, all_threads=True, chain=True)
        local_rank, processes = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        events.introduce(pid=os.getpid(), local_rank=local_rank, processes=processes)
        try:
            # torch, which is imported in there, makes 270,000 objects; the search for garbage among them, then and at
            # each step of the training, takes time and finds none.
            gc.disable()
            guard_stores()  # also those that the script makes, and that of a job whose workers were started anew
            check_agreement(script)
            gc.freeze()
            gc.enable()
            Watch(events, script, float(os.environ.get("LAB_HANG_TIMEOUT", "60"))).start()
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                events.write("error", kind="exit", message=f"SystemExit: {end.code}", traceback="", location="")
                write_out()  # the interpreter's own end no longer finds the script's files
                raise
        except BaseException as error:
            _add_parameter_name(error)
            facts = _describe(error, script, root)
            events.write("error", **facts)
            print(_say_error(facts), file=sys.stderr, flush=True)
            write_out()
            # Not by the interpreter's own end: Gloo's threads would be torn down in mid-wait, and abort noisily.
            os._exit(1)
    events.write("done")
    threading._shutdown()  # the script's own threads go on to their end, as in any program
    leave(0)


class Watch(threading.Thread):
    """Notices that the main thread has stood at one instruction for too long once the ranks are connected.

    A rank that waits for another in a collective, a copy from a GPU or a full queue does not move by one instruction,
    starts no collective and, but for one that waits for a GPU, takes no time of a core. A loop, however slow, does.

    It comes before the timeout of the process group, which ends the rank without a word of where it stands: after three
    quarters of that at the latest.
    """

    def __init__(self, events: Events, script: str, seconds: float) -> None:
        super().__init__(daemon=True, name="hang watch")
        self._events, self._script, self._seconds = events, script, seconds

    def run(self) -> None:
        """Watches until the main thread has stood still for too long; then says where, and ends the process."""
        main, place, since = threading.main_thread().ident, None, time.monotonic()
        while True:
            time.sleep(min(1.0, self._seconds / 10))
            found = _find_place(main), _count_collectives(), _read_clock(main)
            if found != place or not (_is_connected() or _is_connecting(main)):
                place, since = found, time.monotonic()
            elif time.monotonic() - since > (seconds := min(self._seconds, SHARE * _find_timeout())):
                break
        stack = traceback.extract_stack(sys._current_frames()[main])
        own = [number for number, frame in enumerate(stack) if frame.filename == self._script] or [0]
        text = "".join(traceback.format_list(stack[own[0] :])).replace(self._script, Path(self._script).name)
        self._events.write("hang", seconds=seconds, traceback=text)
        print(f"this rank has not moved for {seconds:g} s:\n{text}", file=sys.stderr, flush=True)
        time.sleep(8)
        os._exit(HANG_EXIT)


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


def _is_connecting(thread: int | None) -> bool:
    """Whether a thread is somewhere in torch.distributed, such as on its way to the other ranks."""
    frames = traceback.walk_stack(sys._current_frames().get(thread))
    return any("/torch/distributed/" in frame.f_code.co_filename for frame, _ in frames)


def _is_connected() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _die_with_agent() -> None:
    """Asks Linux to end this process when torchrun, which started it, is gone, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        # It may have died before the request; whoever adopted this process then is no part of the job.
        identity = f"LAB_JOB_ID={os.environ.get('LAB_JOB_ID')}".encode()
        if identity not in Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0"):
            os._exit(1)


def _trim(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Leaves out the frames of this file and of runpy, which say nothing about the training script."""
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename != script:
        start = start.tb_next
    return start


def _find_own(trace: TracebackType | None, script: str) -> str:
    """The file to mend: the script, or the one beside it that it runs as a script, such as one that it watches."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace) if frame.f_globals.get("__name__") == "__main__"]
    files = [code.co_filename for code in codes if code.co_name == "<module>"]
    return next((file for file in reversed(files) if Path(file).parent == Path(script).parent), script)


def _describe(error: BaseException, script: str, root: Path) -> dict:
    script = _find_own(error.__traceback__, script)
    text = "".join(traceback.format_exception(type(error), error, _trim(error.__traceback__, script)))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    message, line = "".join(traceback.format_exception_only(error)).strip(), frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == script:
        message, line = f"{type(error).__name__}: {error.msg}", error.lineno
    return {
        "kind": "mismatch" if isinstance(error, MismatchError) else "exception",
        "message": message,
        # The copy that runs here lies deep in a folder with a hash for a name; the reader knows the script by its own.
        "traceback": text.replace(script, Path(script).name).replace(f"{root}/", "").rstrip(),
        "location": f"{Path(script).name}, line {line}" if line else "",
        "disk": find_full_disk(error),
        # What our own errors (LabError) know of themselves.
        **{name: str(getattr(error, name)) for name in ("cause", "fix") if getattr(error, name, None)},
    }


def _say_error(facts: dict) -> str:
    """The traceback; or, from a rank that only lost the others, one line, which does not hide the first one's."""
    if not failed_as_consequence(facts["message"]):
        return facts["traceback"]
    said = shorten_gloo(facts["message"])
    return f"{facts['location']}: another rank is gone or does not answer ({said})"


def _add_parameter_name(error: BaseException) -> None:
    """Adds the parameter's name to DDP's message about different shapes, which has its number only."""
    if "appears not to match sizes of the same param" not in str(error):
        return
    number = int(str(error).partition("params[")[2].partition("]")[0] or -1)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = getattr(frame.f_locals.get("self"), "module", None)
        if hasattr(module, "named_parameters"):
            names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            if 0 <= number < len(names):
                error.add_note(f"params[{number}] is {names[number]}")
                return


if __name__ == "__main__":
    main()
