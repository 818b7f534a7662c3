"""Live ranks for the cells of a notebook: ``%%px`` runs a cell on every rank of a process group.

``engines.start(4)`` starts four ipyparallel engines on this machine and joins them to one Gloo process group. A cell
that begins with ``%%px`` then runs on all of them, with the names ``torch``, ``dist``, ``rank`` and ``world_size``.

The kernel starts a supervisor, ``python -m lab_utils.engines``, which starts the controller and the engines, and holds
its standard input: that ends when the kernel does, however it ends, and the supervisor then ends them all. They ask
Linux to end with the supervisor, too. (Linux ends a process when the *thread* that started it ends. The supervisor has
one.)

All of ipyparallel's sockets are files in a folder that only this user can enter, and the ranks meet in a file there:
what ipyparallel sends to its subscribers is neither signed nor secret. Gloo's own sockets listen on the loopback.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

from lab_common import LabError, checkout

if TYPE_CHECKING:
    from ipyparallel import Client, DirectView

MOST = 16
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
# Of a start, on a machine that does other things, too. It mostly takes 10 to 20 seconds there.
PATIENCE = 120.0
GRACE = 5.0


@dataclass(frozen=True, eq=False)
class Engines:
    """Ranks that are live.

    Attributes:
        view: All of them, in the order of their ranks; ``view["x"]`` fetches the ``x`` of each as a list.
        pids: Their process ids, by rank.
        timeout: Seconds that a collective waits for the other ranks.
        client: The connection to them.
        supervisor: The process that started them and ends them.
        folder: Where their sockets and ``log.txt`` are.
    """

    view: DirectView
    pids: tuple[int, ...]
    timeout: float
    client: Client
    supervisor: subprocess.Popen
    folder: Path

    def __repr__(self) -> str:
        return f"{len(self.pids)} live ranks"


_live: list[Engines] = []


def start(n: int = 4, *, threads: int = 1, timeout: float = 20.0) -> Engines:
    """Starts ``n`` ranks on this machine, makes ``%%px`` reach them, and stops those that were started before.

    That takes 10 to 20 seconds on a busy machine. They end with this process.

    Args:
        n: How many ranks, 1 to 16.
        threads: Threads that torch uses in each of them.
        timeout: Seconds that a collective waits for the other ranks before it raises an error: that of the Gloo process
            group.

    Raises:
        LabError: ``n`` is out of its range, or the ranks did not start.
    """
    if n not in range(1, MOST + 1):
        raise LabError(f"n is {n!r}.", where="engines.start", fix=f"give a whole number from 1 to {MOST}")
    stop()
    deadline = time.monotonic() + PATIENCE
    # For this user alone (mode 0700), and in /tmp: the path of a socket has room for 104 bytes on macOS, 108 on Linux.
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))
    supervisor = _start_supervisor(folder, n, threads)
    try:
        pids = _read_pids(supervisor, deadline, folder)
        client = _connect(folder, pids, deadline)
        view = client[:]
        view.block = True
        made = Engines(view, pids, float(timeout), client, supervisor, folder)
        _live.append(made)
        _join_group(made, deadline)
    except BaseException:  # an interrupt as well
        stop() if _live else _end(supervisor, folder)
        raise
    from IPython import get_ipython

    if shell := get_ipython():  # None if a program started the ranks
        view.activate()
        # So a cell prints the same each time: in the order of the ranks, when all have ended, and without a bar.
        magics = shell.magics_manager.registry["ParallelMagics"]
        magics.stream_output, magics.progress_after_seconds, magics.verbose = False, -1, False
    return made


def stop() -> None:
    """Ends the ranks that :func:`start` started; does nothing if there are none."""
    while _live:
        made = _live.pop()
        # Without the ranks first: a client that loses its controller waits for nothing.
        _end(made.supervisor, made.folder)
        with contextlib.suppress(Exception):
            made.client.close()


atexit.register(stop)


def share(*functions: Callable) -> None:
    """Gives functions of the notebook to all ranks, by their names, with what they use of the notebook's own names.

    Raises:
        LabError: No ranks are live, or a function uses something that cannot be sent.
    """
    if not _live:
        raise LabError("No ranks are live.", where="engines.share", fix="run the cell engines.start() first")
    view, known = _live[-1].view, {}
    for function in functions:
        _collect(function.__name__, function, known)
    for name, value in known.items():
        try:
            if isinstance(value, ModuleType):
                view.execute(f"import sys, {value.__name__}\n{name} = sys.modules[{value.__name__!r}]")
            else:
                view.push({name: value})
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            fix = "define in the function what it uses, or hand it over as an argument"
            raise LabError(
                f"{name} cannot be sent to the ranks.", where="engines.share", cause=str(error)[:200], fix=fix
            ) from error


def _collect(called: str, function: Callable, known: dict[str, object]) -> None:
    """Adds to ``known`` a function, under the name that it is called by, and all that it names of the notebook's."""
    known[called] = function
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
        for name in {*code.co_names} & function.__globals__.keys() - known.keys():
            value = function.__globals__[name]
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                _collect(name, value, known)
            else:
                known[name] = value


def _signal(pids: tuple[int, ...], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _start_supervisor(folder: Path, n: int, threads: int) -> subprocess.Popen:
    environment = dict(os.environ)
    path = [str(checkout()), *filter(None, [environment.get("PYTHONPATH")])]
    # Gloo otherwise looks up this machine's name, which may be an address that others reach.
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    environment |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": interface}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "IPYTHONDIR": str(folder / "ipython")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lab_utils.engines", str(folder), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # an interrupt of the terminal is the kernel's alone
        )


def _read_pids(supervisor: subprocess.Popen, deadline: float, folder: Path) -> tuple[int, ...]:
    """Returns the process ids of the ranks, once they have started."""
    while select.select([supervisor.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = supervisor.stdout.readline()
        if not line:
            break
        with contextlib.suppress(ValueError):
            return tuple(json.loads(line))
    raise _explain(folder)


def _explain(folder: Path) -> LabError:
    log = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
    cause = log[-1][:300] if log else "the machine is very busy, or short of memory"
    return LabError("The ranks did not start.", where="engines.start", cause=cause, fix="run the cell again")


def _connect(folder: Path, pids: tuple[int, ...], deadline: float) -> Client:
    import ipyparallel

    class OwnClient(ipyparallel.Client):
        """A client whose engines run on this machine, without a process beside each that passes signals on."""

        def send_signal(self, sig: int | str, targets: object = None, block: bool | None = None) -> None:
            _signal(pids, getattr(signal, sig) if isinstance(sig, str) else sig)

    file = folder / "security" / "ipcontroller-client.json"
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(TimeoutError, OSError, ipyparallel.error.TimeoutError):
        client = OwnClient(str(file), timeout=max(1.0, deadline - time.monotonic()))
        client.wait_for_engines(len(pids), timeout=max(1.0, deadline - time.monotonic()), interactive=False)
        return client
    raise _explain(folder)


def _join_group(made: Engines, deadline: float) -> None:
    lines = [
        "import os, datetime, torch",
        "import torch.distributed as dist",
        "rank, world_size = ({rank}, {n})",
        "torch.manual_seed(0)",
        "dist.init_process_group('gloo', init_method='file://{store}', rank=rank, world_size=world_size,",
        "                        timeout=datetime.timedelta(seconds={timeout}))",
    ]
    words = {"n": len(made.pids), "store": made.folder / "store", "timeout": made.timeout}
    calls = [
        made.client[rank].execute("\n".join(lines).format(rank=rank, **words), block=False)
        for rank in range(len(made.pids))
    ]
    for call in calls:
        call.get(timeout=max(1.0, deadline - time.monotonic()))


def _end(supervisor: subprocess.Popen, folder: Path) -> None:
    supervisor.stdin.close()
    try:
        supervisor.wait(GRACE)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    supervisor.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)


def supervise(folder: Path, n: int) -> None:
    """Starts the controller and ``n`` engines, writes the engines' process ids, and ends them at the end of stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork has all that is imported here: four ranks start in the time of one. macOS does not allow that.
    context = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else "spawn")
    parent, said = os.getpid(), os.dup(1)
    os.dup2(2, 1)  # whatever is printed goes to the log
    controller = context.Process(target=run_controller, args=[folder, parent])
    controller.start()
    import ipyparallel.engine.app  # noqa: F401 - for the forks
    import torch
    import torch.distributed

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ranks = [context.Process(target=run_engine, args=[folder, rank, parent]) for rank in range(n)]
    for rank in ranks:
        rank.start()
    os.write(said, json.dumps([rank.pid for rank in ranks]).encode() + b"\n")
    while os.read(0, 4096):
        pass
    for process in [controller, *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what they started
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def run_controller(folder: Path, parent: int) -> None:
    """The controller of ipyparallel, whose sockets are files in ``folder``."""
    _die_with(parent)
    from ipyparallel.controller.app import IPController

    class FileController(IPController):
        """A controller that names the files of its sockets as its engines and clients do (9.2 does not)."""

        def construct_url(self, kind: str, channel: str, index: object = None) -> str:
            base, _, port = super().construct_url(kind, channel, index).rpartition("-")
            return f"{base}:{port}"

    FileController.launch_instance(
        argv=[
            f"--profile-dir={folder}",
            "--IPController.transport=ipc",
            f"--IPController.engine_ip={folder}/s",
            f"--IPController.client_ip={folder}/s",
            f"--IPController.monitor_ip={folder}/s",
            "--IPController.use_threads=True",
            "--HeartMonitor.period=1000",
            "--log-level=ERROR",
        ]
    )


def run_engine(folder: Path, rank: int, parent: int) -> None:
    """An engine of ipyparallel with the number ``rank``."""
    _die_with(parent)
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(
        argv=[
            f"--profile-dir={folder}",
            f"--IPEngine.id={rank}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",  # or it listens on a port
            "--IPEngine.wait_for_url_file=60",
            "--IPEngine.timeout=60",
            "--log-level=ERROR",
        ]
    )


def _die_with(parent: int) -> None:
    os.setsid()
    if sys.platform.startswith("linux"):
        die_with_parent = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        die_with_parent()
        os.register_at_fork(after_in_child=die_with_parent)  # the controller has a process that watches the heartbeats
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the supervisor's ends with the kernel, and is for it alone


if __name__ == "__main__":
    supervise(Path(sys.argv[1]), int(sys.argv[2]))
