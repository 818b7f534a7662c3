"""Python scripts in forks of a process that has torch already: for tests of what ranks do, of whoever starts them.

Importing torch takes more of a core than all else that a small job does. ``python -IS warm.py SOCKET SCRIPT …`` runs a
script as ``python SCRIPT …`` does, in a fork of the process that :func:`serve` keeps. It is no part of the job by its
environment, which a fork has from there: where a test looks for what is left of a job, the job takes a Python of its
own.

:func:`write_python` writes a Python that does so for torchrun and its workers alone. torchrun, its rendezvous and its
end are real; in the tree of processes, and by their environment, those stand for it and its workers that wait for the
forks, pass signals on and end with them. :func:`use_python` gives it to the nodes that a process makes on this machine,
and :func:`write_profile` to those of a notebook.
"""

import array
import contextlib
import json
import os
import select
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
# The last word of the command before torchrun's options, or before the script of a worker.
AGENT, WORKER = "nodelaunch.node.agent", "nodelaunch.node.worker"
PYTHON = """\
#!/bin/sh
# A rank that is killed takes its own process with it: torchrun hears of a fork's end later than the other ranks do.
case "$*" in
*crash_once.py*) ;;
# torchrun starts its workers by PYTHON_EXEC.
*{agent}*|*{worker}*) export PYTHON_EXEC="$0"; exec {warm} "$@" ;;
esac
exec {python} "$@"
"""


def write_python(path: Path, command: Sequence[str]) -> None:
    """Writes a program that a node of this machine can have for its Python; ``command`` runs a script in a fork."""
    words = {"agent": AGENT, "worker": WORKER, "warm": shlex.join(command), "python": shlex.quote(sys.executable)}
    path.write_text(PYTHON.format(**words))
    path.chmod(0o755)


def start_server(folder: str) -> tuple:
    """Starts a warm process, with a socket in this folder, whose name is short: a socket has no room for a long one.

    Returns:
        The command that runs a script in a fork of it; and its Popen, which ends when its standard input is closed.
    """
    import subprocess

    command = [sys.executable, "-IS", __file__, f"{folder}/s"]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, *command[2:]], start_new_session=True, env=environment, **pipes)
    if server.stdout.readline() != b"warm\n":
        raise RuntimeError("the warm process did not start")
    return command, server


def use_python(path: str, set_item: Callable[[dict, str, object], None] = dict.__setitem__) -> None:
    """Makes a program the Python of all nodes that this process makes on this machine from now on."""
    from nodelaunch.backends.local import LocalNode

    set_item(LocalNode.__init__.__kwdefaults__, "python", path)


def write_profile(folder: Path, python: Path) -> None:
    """Writes a folder for IPYTHONDIR: with it a notebook's nodes on this machine run by that Python."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    call = f"__import__('runpy').run_path({__file__!r})['use_python']({str(python)!r})\n"
    (startup / "warm.py").write_text(call)


def run(path: str, argv: list[str]) -> int:
    """Has a script run; returns its exit status, negative for a signal. Signals to end are passed on."""
    if {AGENT, WORKER} & set(argv[:3]) and sys.platform.startswith("linux"):
        import ctypes

        # As a worker asks for it: torchrun may be killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        task = json.dumps([argv, dict(os.environ), str(Path.cwd())]).encode()
        streams = array.array("i", [0, 1, 2]).tobytes()
        server.sendmsg([len(task).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(task)
        answer = server.makefile("rb").read()  # comes when the script has ended
    return int(answer or b"1")


def serve(path: str) -> None:
    """Runs scripts until the standard input ends, which is to say: until whoever started this process has."""
    import gc

    import torch
    import torch.distributed.run
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401 - so that no script imports it

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports for a second, too
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("warm", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            client, _ = listener.accept()
            if not os.fork():
                listener.close()
                _attend(client)
            client.close()


def _reap(*_: object) -> None:
    """Waits for the forks that have ended, so that their CPU time counts for the tests that they ran for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(client: socket.socket) -> None:
    """Runs one script in its own fork, says how it ended, and ends it when the client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2])
    argv, env, folder = json.loads(client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    pid = os.fork()
    if not pid:
        client.close()
        _run_script(list(streams), argv, env, folder)
    for stream in streams:
        os.close(stream)
    child = os.pidfd_open(pid)
    while child not in select.select([child, client], [], [])[0]:
        with contextlib.suppress(ConnectionError):
            os.kill(pid, (client.recv(1) or bytes([signal.SIGKILL]))[0])
    with contextlib.suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _run_script(streams: list[int], argv: list[str], env: dict[str, str], folder: str) -> None:
    import runpy
    import threading
    import traceback

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, max(streams) + 1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    while argv[0] in ("-u", "-P"):
        argv = argv[1:]
    module = argv[1] if argv[0] == "-m" else ""
    if module == WORKER:
        argv, module = [str(Path(__file__).with_name("warm_worker.py")), *argv[2:]], ""
    sys.argv = argv[1:] if module else argv
    first = [] if module else [str(Path(argv[0]).parent)]
    sys.path[:0] = [*first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - it is this process's own
    code = 0
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Runs the script that follows the socket's path on the command line; without one, serves."""
    if len(sys.argv) == 2:
        serve(sys.argv[1])
        return
    if (status := run(sys.argv[1], sys.argv[2:])) < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
