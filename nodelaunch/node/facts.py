"""Facts about a node, found out on that node: names, versions, interfaces, GPUs, disk and data; hashes of files.

Part of the probe (:mod:`nodelaunch.node.probe`), so it runs on Python 3.9. torch's version is read from its files,
since importing it takes seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

from lab_common.nvidia import find_smi, query_smi
from nodelaunch.node.processes import link, read

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


def find_system():
    """``machine``, the same for processes that reach each other by the loopback interface."""
    boot, net = read("/proc/sys/kernel/random/boot_id").strip(), link("/proc/self/ns/net")
    return {"machine": f"{boot} {net}" if boot and net else socket.gethostname()}


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
    """GPUs with their memory in MiB and their driver, by nvidia-smi, without which there are none."""
    try:
        query = "gpu=index,name,memory.used,memory.total,driver_version"
        rows = query_smi(query, seconds=2.5) if find_smi() else []
    except OSError as error:
        return {"error": str(error)}
    return {"gpus": rows, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


def find_gpu_users():
    """Process id, program and MiB of each process that holds memory of a GPU."""
    return {"rows": query_smi("compute-apps=pid,process_name,used_memory", seconds=2.5) if find_smi() else []}


def find_disk(request):
    """The room in the folder, or in the nearest one above it that exists, and in shared memory."""
    folder = Path(request["folder"])
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(there),
        "free": shutil.disk_usage(there).free,
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "shm": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    }


def hash_tree(folder):
    """SHA-256 over the names and contents of a folder's files, without those that Python and Jupyter make."""
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    kept = {name.as_posix(): path.read_bytes() for name, path in paths.items() if not {*SKIPPED} & {*name.parts}}
    return hash_files(kept)


def hash_files(contents):
    """The same for files that are not in a folder yet, by their path in it."""
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{hashlib.sha256(contents[name]).hexdigest()} {json.dumps(name)}\n".encode())
    return whole.hexdigest()


def find_data(path):
    """The hash of a data folder's identity file, and the files it lists that are missing; see nodelaunch.DataFolder."""
    found = {"path": str(path), "hash": None, "missing": []}
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
