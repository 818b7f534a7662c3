"""Processes on a node: those of a job, by the id in their environment, and the owner of a port.

Part of the probe (:mod:`nodelaunch.node.probe`), so it runs on Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
from pathlib import Path

from nodelaunch.node.facts import link, read
from nodelaunch.node.guard import list_processes, read_environment

GRACE = 2.0


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
