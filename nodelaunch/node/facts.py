"""Facts about a node, found out on that node: names, versions, interfaces, GPUs, disk, code and data.

Part of the probe (:mod:`nodelaunch.node.probe`), so it runs on Python 3.9. torch's version is read from its files,
since importing it takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import sys
import threading
import time
from pathlib import Path

from lab_common.nvidia import find_smi, query_smi

SKIPPED = ("__pycache__", ".ipynb_checkpoints")


def collect(tasks, seconds):
    """Runs all tasks at once; returns the results that came in time, and {"error": words} for a task that failed."""
    found = {}

    def run(name, task):
        try:
            found[name] = task()
        except Exception as error:  # the others go on
            found[name] = {"error": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in tasks.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def find_facts(request):
    """All facts that need no other node."""
    tasks = {"system": find_system, "versions": find_versions, "interfaces": find_interfaces, "gpus": find_gpus}
    tasks["own"] = lambda: resolve(socket.gethostname())
    for name, find in (("disk", find_disk), ("code", find_code), ("data", find_data)):
        tasks[name] = functools.partial(find, request)
    return collect(tasks, request["seconds"])


def find_system():
    """The host's name; ``machine`` is the same for processes that reach each other by the loopback interface."""
    host = socket.gethostname()
    boot, net = read("/proc/sys/kernel/random/boot_id").strip(), link("/proc/self/ns/net")
    ssh = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]  # the address that ssh came in by
    return {"host": host, "machine": f"{boot} {net}" if boot and net else host, "ssh": ssh}


def resolve(name):
    """The IPv4 addresses that a host name stands for on this node."""
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def find_versions():
    """Versions of Python, torch, CUDA and NCCL; None for what is not installed."""
    found = {"python": platform.python_version(), "program": sys.executable, "torch": None, "cuda": None, "nccl": None}
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        text = read(Path(spec.origin).parent / "version.py")
        for key, name in (("torch", "__version__"), ("cuda", "cuda")):
            match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            found[key] = match.group(1) if match else None
    for number in (13, 12, 14, 11):
        try:
            found["nccl"] = found["nccl"] or importlib.metadata.version(f"nvidia-nccl-cu{number}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Entry(ctypes.Structure):
    """An entry of getifaddrs(3); Linux and macOS begin it alike."""


Entry._fields_ = [
    *(("next", ctypes.POINTER(Entry)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint)),
    *((name, ctypes.c_void_p) for name in ("address", "mask", "peer", "data")),
]


def find_interfaces():
    """IPv4 addresses per interface, in the system's order, which Gloo's choice follows; [] for one that is down."""
    entry, found = ctypes.POINTER(Entry)(), {}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getifaddrs(ctypes.byref(entry)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    while entry:
        item = entry.contents
        addresses = found.setdefault(item.name.decode(errors="replace"), [])
        if item.address and item.flags & 1:  # IFF_UP
            raw = ctypes.string_at(item.address, 8)
            family = int.from_bytes(raw[:2], sys.byteorder) if sys.platform.startswith("linux") else raw[1]
            addresses += [socket.inet_ntoa(raw[4:])] if family == socket.AF_INET else []
        entry = item.next
    return found


def find_gpus():
    """GPUs with their memory in MiB and their driver, and the processes that hold some, by nvidia-smi."""
    if not find_smi():
        return {"gpus": [], "apps": []}
    tasks = {name: functools.partial(query_smi, query, seconds=2.5) for name, query in QUERIES.items()}
    both = collect(tasks, 3.0)
    if isinstance(both.get("gpus"), dict):
        return both["gpus"]
    return {"gpus": both["gpus"], "apps": both["apps"], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


QUERIES = {
    "gpus": "gpu=index,name,memory.used,memory.total,driver_version",
    "apps": "compute-apps=pid,process_name,used_memory",
}


def find_disk(request):
    """The room in the folder, or in the nearest one above it that exists, and in shared memory."""
    folder = Path(request["folder"])
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = os.statvfs(str(there))
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "folder": str(there),
        "free": usage.f_bavail * usage.f_frsize,
        "files": usage.f_favail if usage.f_files else None,  # some file systems do not count them
        "writable": there.is_dir() and os.access(str(there), os.W_OK | os.X_OK),
        "shm": shm and shm.f_blocks * shm.f_frsize,
    }


def hash_tree(folder):
    """SHA-256 over the names and contents of a folder's files, without those that Python and Jupyter make."""
    paths = {path.relative_to(folder): path for path in Path(folder).rglob("*") if path.is_file()}
    kept = {name.as_posix(): path for name, path in paths.items() if not set(SKIPPED) & set(name.parts)}
    return hash_files({name: path.read_bytes() for name, path in kept.items()})


def hash_files(contents):
    """The same for files that are not in a folder yet, by their path in it."""
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{hashlib.sha256(contents[name]).hexdigest()} {json.dumps(name)}\n".encode())
    return whole.hexdigest()


def find_code(request):
    """The hash of the copied code; None if it was not copied yet."""
    folder = Path(request["folder"], "code", request["code"])
    return {"folder": str(folder), "hash": hash_tree(folder) if request["code"] and folder.is_dir() else None}


def find_data(request):
    """The folder of a job's data on this node, and its identity."""
    root = Path(request["data"]).expanduser()
    path = root / request["data_file"]
    # A node of this machine uses the launcher's own folder, which may have another name.
    own = Path(request["pack"], path.name)
    used = own if request["pack"] and own.is_file() else path
    return {"folder": str(root), "path": str(used), **identify_data(used)}


def identify_data(path):
    """The hash of a data folder's identity file, and the files it lists that are missing; see nodelaunch.DataFolder."""
    found = {"hash": None, "missing": []}
    if path.is_file():
        raw = path.read_bytes()
        try:
            manifest = json.loads(raw.decode())
            found["missing"] = [name for name in manifest["sha256"] if not (path.parent / name).is_file()]
            raw = json.dumps([manifest["classes"], manifest["sha256"]], sort_keys=True).encode()
        except (ValueError, KeyError, TypeError):
            pass  # not JSON with these two fields: its bytes count
        found["hash"] = hashlib.sha256(raw).hexdigest()
    return found


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
