"""Runs a learner's script as ``python script.py …`` does, while the kernel lets it use its own lap's files alone.

This file runs on the nodes, by itself: it takes nothing but the standard library. Linux's Landlock (from 5.13 on) keeps
the promise: a process gives up rights, which neither it nor what it starts can take back. So weights from before and
images of other splits stay closed, whatever the script does. Where there is no Landlock, the record says so.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

# Numbers of system calls, the same on all processors, and of prctl's PR_SET_NO_NEW_PRIVS.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, VERSION, NO_NEW_PRIVS = 1, 1, 38
# Rights: to read a file; to write, remove and make what a folder holds; to cut a file short, from version 3 on. To move
# or link a file into another folder is refused wherever nobody allows it.
READ, WRITE, TRUNCATE = 1 << 2, 1 << 1 | sum(1 << bit for bit in range(4, 13)), 1 << 14
# Where programs, their settings and devices lie.
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/dev", "/run")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TMPDIR")


def find_version() -> int:
    """Returns the version of Landlock's interface that this kernel has; 0 where it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))


def seal(readable: list[str], writable: list[str]) -> None:
    """Gives up reading and writing files outside of these folders, in this thread and all that it starts.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(*arguments: object) -> int:
        if (found := libc.syscall(*arguments)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"Landlock: {os.strerror(number)}")
        return found

    write = WRITE | (TRUNCATE if find_version() >= 3 else 0)
    handled = ctypes.c_uint64(READ | write)
    rules = call(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    for right, folders in ((READ, readable), (write, writable)):
        for folder in filter(os.path.exists, folders):
            beneath = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = right.to_bytes(8, sys.byteorder) + beneath.to_bytes(4, sys.byteorder)
            call(ADD_RULE, rules, PATH_BENEATH, rule, 0)
            os.close(beneath)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def refuse_network(event: str, arguments: tuple) -> None:
    """An audit hook: a Python socket may reach this machine and the first node alone; torch's own sockets are free."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
        if host not in ("localhost", "::1", os.environ.get("MASTER_ADDR")) and not host.startswith("127."):
            raise PermissionError(f"a lap has no network beside its nodes: {host}")


def describe() -> dict[str, object]:
    """What the judge writes down of a node: the seal, the processor, cores, GPUs, and versions."""
    cpu, gpus = "", []
    if (listed := Path("/proc/cpuinfo")).exists():
        lines = listed.read_text(errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        gpus = done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    can_ask = hasattr(os, "sched_getaffinity")
    return {
        "landlock": find_version(),
        "cpu": cpu or "an unnamed processor",
        "cores": len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1,
        "gpus": gpus,
        "versions": {"python": sys.version.split()[0], "torch": metadata.version("torch")},
    }


def main() -> None:
    """Runs the script that is named first, with the other arguments; ``--describe`` describes the node instead."""
    if sys.argv[1] == "--describe":
        print(json.dumps(describe()))
        return
    here = Path(__file__).resolve().parent
    script, sys.argv = here / sys.argv[1], sys.argv[1:]
    # An empty folder for what libraries write, such as compiled kernels: those of an earlier lap are not found.
    scratch = tempfile.mkdtemp(prefix="lap-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ.update(dict.fromkeys(CACHES, scratch))
    tempfile.tempdir = scratch
    lap = Path(os.environ["LAB_DATA"]).resolve().parent
    if find_version():
        own = [str(lap), scratch, os.environ["LAB_JOB_FOLDER"]]
        # What it logs, it may write below LAB_RUNS and into its working folder, where earlier laps may have been.
        seal(
            [*own, str(here.parent), sys.prefix, sys.base_prefix, *SYSTEM],
            [*own, "/dev", "/proc", os.environ["LAB_RUNS"], "."],
        )
    sys.addaudithook(refuse_network)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
