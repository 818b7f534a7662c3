"""Runs a learner's script like ``python script.py …``, while the kernel lets it use only its own lap's files.

This file runs on the nodes: it uses only the standard library and ``lab_common``. Linux's Landlock (from 5.13 on, if it
is enabled) enforces this: a process gives up rights, which neither it nor its children can regain. So the contents of
the learner's files stay closed. It is not a wall around the script: the script can still use anything in its code, its
arguments or its environment, in the files of the system and of Python, in names and attributes of files, in shared
memory, or from a program beside it. Without Landlock nothing is closed, and the record says so.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import runpy
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lab_common.cores import count_cores
from lab_common.nvidia import query_smi

# Numbers of system calls, the same on x86 and on ARM, and of prctl's PR_SET_NO_NEW_PRIVS.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, VERSION, NO_NEW_PRIVS = 1, 1, 38
# Rights: to read a file; to write, remove and make what a folder holds; to cut a file short, from version 3 on. To move
# or link a file into another folder is refused wherever nobody allows it.
READ, WRITE, TRUNCATE = 1 << 2, 1 << 1 | sum(1 << bit for bit in range(4, 13)), 1 << 14
# Where programs, their settings and devices lie.
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/dev", "/run")
# Before the name of a file of the script: Python imports none whose name has a hyphen, also not before the seal.
HIDDEN = "lap-"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TMPDIR")


def find_version() -> int:
    """Returns the version of this kernel's Landlock interface; 0 if it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))


def seal(readable: list[str], writable: list[str]) -> None:
    """Gives up reading and writing files outside these folders, in this thread and everything that it starts.

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


def is_loopback(host: str) -> bool:
    """Returns True if a host is a loopback address; a name does not count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_network(first: str) -> None:
    """Adds an audit hook: Python's sockets reach only this machine and the first node. A reminder, not a barrier."""

    def hook(event: str, arguments: tuple) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(arguments[1], tuple):
            host = arguments[1][0]
            if type(host) is not str or not (host in ("localhost", first) or is_loopback(host)):
                raise PermissionError(f"a lap has no network beside its nodes: {host}")

    sys.addaudithook(hook)


def describe() -> dict[str, object]:
    """Describes a node for the judge: the seal, the processor, cores, GPUs, and versions."""
    cpu, gpus = "", []
    with suppress(OSError):  # not on macOS
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    with suppress(OSError):  # there is no nvidia-smi
        gpus = [row[0] for row in query_smi("gpu=name")]
    return {
        "landlock": find_version(),
        "cpu": cpu or "an unnamed processor",
        "cores": count_cores(),
        "gpus": gpus,
        "versions": {"python": sys.version.split()[0], "torch": metadata.version("torch")},
    }


def main() -> None:
    """Runs the script of a lap: its name and the lap's id, then its arguments. ``--describe`` describes the node."""
    if sys.argv[1] == "--describe":
        print(json.dumps(describe()))
        return
    lap, name, *arguments = sys.argv[1:]
    here, images = Path(__file__).resolve().parent, str(Path(os.environ["LAB_DATA"]).resolve())
    # An empty folder for what libraries write, such as compiled kernels: those of an earlier lap are not found. The
    # judge knows its name and takes it away.
    scratch = Path(tempfile.gettempdir(), f"lap-{lap}-{os.environ['RANK']}")
    scratch.mkdir(mode=0o700)
    os.environ.update(dict.fromkeys(CACHES, str(scratch)))
    tempfile.tempdir = str(scratch)
    if find_version():
        # Where this run saves, and not what the lap's run on one node saved: the last argument is the judge's.
        own = [str(Path(arguments[-1]).resolve().parent), str(scratch), os.environ["LAB_JOB_FOLDER"]]
        # What it logs, it may write below LAB_RUNS and into its working folder, where earlier laps may have been.
        logs = [os.environ["LAB_RUNS"], "."]
        seal([images, *own, str(here.parent), sys.prefix, sys.base_prefix, *SYSTEM], [*own, "/dev", "/proc", *logs])
    refuse_network(os.environ.get("MASTER_ADDR", "localhost"))
    # Only now they get names under which Python could import them.
    code = scratch / "code"
    code.mkdir()
    for path in here.glob(f"{HIDDEN}*"):
        shutil.copy(path, code / path.name.removeprefix(HIDDEN))
    sys.path[0], sys.argv = str(code), [name, *arguments]
    runpy.run_path(str(code / name), run_name="__main__")


if __name__ == "__main__":
    main()
