"""Measures a notebook's memory: its kernel together with all processes that it starts."""

import contextlib
import math
import os
import re
import threading
import uuid
from collections import Counter
from pathlib import Path

import psutil

# On a CPU, at the small scale. A laptop of 4 GiB runs each lab beside JupyterLab and a browser.
LIMIT_GIB = 2.6
# How much more than its stored peak a notebook may take: other cores, another C library.
TOLERANCE_GIB = 0.4
# Not LAB_...: no test may leave such a variable behind, and a notebook's tests are many.
MARK = "MEMORY_OF_NOTEBOOK"


class MemoryWatch:
    """Samples the memory of all processes started since then, directly or not; works on Linux only.

    Jobs leave the kernel's process tree, so processes are found by a mark that they inherit in their environment. The
    forks of a warm process (tests/harness/warm.py), whose id may be given, have its environment, and count, too.

    Attributes:
        peak_bytes: The most so far: private memory of all processes, plus shared memory such as libraries once.
    """

    def __init__(self, warm: int | None = None, *, interval: float = 0.5) -> None:
        self.peak_bytes = 0
        self._warm = warm and psutil.Process(warm)
        self._mark = uuid.uuid4().hex
        self._interval, self._stopped = interval, threading.Event()
        self._marked: set[str] = set()  # process ids
        self._seen: set[str] = set()
        self._others: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def peak_gib(self) -> float:
        """The peak in GiB, rounded up to a tenth."""
        return math.ceil(10 * self.peak_bytes / 2**30) / 10

    def __enter__(self) -> "MemoryWatch":
        os.environ[MARK] = self._mark
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(MARK, None)
        self._stopped.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.sample()

    def sample(self) -> None:
        """Takes one sample."""
        forks: set[str] = set()
        if self._warm:
            with contextlib.suppress(psutil.Error):  # one ended between two looks
                forks = {str(process.pid) for process in self._warm.children(recursive=True)}
        found = Path("/proc").glob("[0-9]*")
        folders = [folder for folder in found if folder.name in forks or self._is_marked(folder)]
        commands = {folder: _read_command(folder) for folder in folders}
        counts = Counter(commands.values())
        sizes = [read_sizes(folder, forked=counts[command] > 1) for folder, command in commands.items()]
        if sizes:
            together = sum(private for private, _, _ in sizes) + max(shared for _, shared, _ in sizes)
            # The system keeps each process's own peak, which falls between two samples.
            self.peak_bytes = max(self.peak_bytes, together, *(peak for _, _, peak in sizes))

    def _is_marked(self, folder: Path) -> bool:
        """Returns True if a process has the mark; no environment is read more than twice."""
        pid = folder.name
        if pid not in self._marked | self._others:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                found = f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                # At the first look it may be about to become another program, with another environment.
                (self._marked if found else self._others if pid in self._seen else self._seen).add(pid)
        return pid in self._marked


def read_sizes(folder: Path, *, forked: bool = False) -> tuple[int, int, int]:
    """Returns private bytes, shared bytes and peak of a process in /proc; zeros if it has ended.

    A ``forked`` process, such as a worker of a DataLoader, shares seemingly private memory with its parent and its
    forks: only its share counts. The kernel adds that up over all pages, which is slower.
    """
    try:
        text = (folder / "status").read_text()
        text += (folder / "smaps_rollup").read_text() if forked else ""
    except OSError:
        return 0, 0, 0
    kilobytes = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    anonymous, peak = kilobytes.get("RssAnon", 0), kilobytes.get("VmHWM", 0)
    private = kilobytes.get("Pss_Anon", anonymous)
    return 1024 * private, 1024 * (kilobytes.get("VmRSS", 0) - anonymous), 1024 * peak


def _read_command(folder: Path) -> bytes:
    """Returns the command of a process, which its forks share; its number if it has ended."""
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return folder.name.encode()


def find_memory_fault(peak_gib: float, stored_gib: float | None) -> str:
    """Describes what is wrong with a notebook's peak memory; "" if nothing is."""
    # What is stored is within the limit; the same run on another day may be a little above.
    if stored_gib is None and peak_gib > LIMIT_GIB + TOLERANCE_GIB:
        return f"it took {peak_gib:g} GiB of memory; the limit is {LIMIT_GIB:g} GiB"
    if stored_gib is not None and peak_gib > stored_gib + TOLERANCE_GIB:
        return f"it took {peak_gib:g} GiB of memory, and says {stored_gib:g} GiB; run it again with --save"
    return ""


def read_stored_peak(notebook) -> float | None:
    """Returns the peak in GiB that is stored with a notebook's outputs."""
    return notebook.metadata.get("lab", {}).get("peak_gib")
