"""Processes on a node: those of a job, those that end with the one that started them, and the owner of a port.

Started as a program, this file is the guard of a job: ``python processes.py LAB_JOB_ID=… LAB_NODE=…`` gets the
supervisor's heartbeats on its standard input, and ends what is left of the job when they end. (The parent-death signal
ends torchrun and its ranks when the supervisor is killed, but not what a rank has started.) The guard is no part of the
job: it is started by its path, with an empty environment, and imports nothing of ours. Also part of the probe
(:mod:`nodelaunch.node.probe`), so it runs on Python 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
# Seconds of silence after which the supervisor counts as stopped, and its word for a normal end.
SILENCE, QUIT = 15.0, b"q"
GRACE = 2.0  # seconds between SIGTERM and SIGKILL, if a job is stopped by its id


def main(identity: list[str]) -> int:
    """Waits for the supervisor's end; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while select.select([0], [], [], SILENCE)[0]:
        said = os.read(0, 4096)
        if QUIT in said:
            return 0
        if not said:
            break
    if identity:
        carried = dict(word.split("=", 1) for word in identity).items()
        kill_all(lambda: [pid for pid, _, _ in list_processes() if carried <= read_environment(pid).items()])
    return 1


def set_process(option: int, value: int) -> None:
    """Sets an attribute of this process by prctl(2), which only Linux has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a command, in its own session, that Linux kills when this process ends, even by SIGKILL.

    The command's own children do not end with it.
    """
    parent = os.getpid()

    def die_with_me() -> None:
        # Not SIGTERM, which torchrun ignores while it waits, in C, for another node.
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    options.update(stdin=subprocess.DEVNULL, start_new_session=True)
    return subprocess.Popen(command, preexec_fn=die_with_me, **options)


def list_processes() -> list[tuple[int, int, str]]:
    """Process id, parent and state of every process."""
    found = []
    if Path("/proc/self").is_dir():
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                found.append((int(folder.name), int(parent), state))
        return found
    # macOS has no /proc. `ps` lists itself, too.
    lister = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,state="], stdout=subprocess.PIPE, text=True)
    rows = [line.split() for line in lister.communicate()[0].splitlines()]
    return [(int(pid), int(parent), state) for pid, parent, state, *_ in rows if int(pid) != lister.pid]


def read_environment(pid: int | str) -> dict[str, str]:
    """The variables with which a process was started; {} if it has ended, is somebody else's, or there is no /proc."""
    try:
        text = Path("/proc", str(pid), "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kills what is found, until nothing is left."""
    while left := find():
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


# Jobs and ports; the requests and the answers are the probe's.


def find_jobs(request):
    """This user's processes that carry a job's id, or the given one: {"jobs": [{"id", "pid", "command", ...}, ...]}.

    ``supervisor`` is true for the process that ends its job when the launcher is gone. The ancestors of this program,
    such as the launcher, are left out. Without a given id, so is every process with the same id as one of them:
    somebody set the variable there, and it does not mean a job.
    """
    found, above = [], list_ancestors(os.getpid())
    inherited = {job_of(pid) for pid in above}
    for pid, _, _ in list_processes():
        identity = job_of(pid)
        if not identity or pid in above or identity != request.get("id", identity):
            continue
        if identity in inherited and "id" not in request:
            continue
        # A host sees the processes of its containers, which are not this node's.
        if link(f"/proc/{pid}/ns/pid") == link("/proc/self/ns/pid"):
            command = read_command(pid)
            supervisor = " nodelaunch.node.supervisor " in command
            found.append({"id": identity, "pid": pid, "command": command[:80], "supervisor": supervisor})
    return {"jobs": found}


def stop_job(request):
    """Ends the processes of one job: by SIGTERM, and after 2 s by SIGKILL."""
    stopped, start = [], time.monotonic()
    while True:
        left = [process["pid"] for process in find_jobs(request)["jobs"]]
        late = time.monotonic() - start
        if not left or late > 2 * GRACE:
            return {"stopped": stopped, "left": left}
        for pid in left:
            if pid not in stopped or late > GRACE:
                with contextlib.suppress(OSError):  # it ended by itself
                    os.kill(pid, signal.SIGKILL if late > GRACE else signal.SIGTERM)
        stopped += [pid for pid in left if pid not in stopped]
        time.sleep(0.05)


def list_ancestors(pid):
    """The ids of a process, of its parent, and so on up to the first process that can be seen."""
    found, parents = [], {own: parent for own, parent, _ in list_processes()}
    while pid > 0 and pid not in found:
        found.append(pid)
        pid = parents.get(pid, 0)
    return found


def job_of(pid):
    """The id of the job that a process of this user belongs to, or ""."""
    with contextlib.suppress(OSError):  # it has ended
        if Path("/proc", str(pid)).stat().st_uid == os.getuid():
            return read_environment(pid).get("LAB_JOB_ID", "")
    return ""


def read_command(pid):
    """The command line of a process, as far as it can be read."""
    return read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def find_owner(port):
    """The owner of a TCP port: {"pid", "user", "command", "job"}, as far as this user may know."""
    users = {}
    for table in ("tcp", "tcp6"):
        for row in read(f"/proc/net/{table}").splitlines()[1:]:
            cells = row.split()
            if int(cells[1].rpartition(":")[2], 16) == port and cells[3] != "06":  # TIME_WAIT belongs to nobody
                users[f"socket:[{cells[9]}]"] = name_user(int(cells[7]))
    inherited = {job_of(above) for above in list_ancestors(os.getpid())} if users else set()  # see find_jobs
    for pid, _, _ in list_processes():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for socket in users.keys() & {link(path) for path in Path("/proc", str(pid), "fd").iterdir()}:
                job = "" if job_of(pid) in inherited else job_of(pid)
                return {"pid": pid, "user": users[socket], "command": read_command(pid)[:80], "job": job}
    return {"user": next(iter(users.values()), "")}


def name_user(number):
    """A user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def read(path):
    """A small file's text, "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def link(path):
    """The target of a symbolic link, "" if it cannot be read."""
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
