"""A stand-in for macOS: removes what Python and the file system have on Linux only."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import ModuleType

import pytest

# What CPython has on Linux and not on macOS, as the pages of its library say under "Availability", as far as a program
# like ours may come to use it.
ONLY_LINUX: dict[ModuleType, str] = {
    os: "sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise fdatasync pipe2 eventfd memfd_create "
    "copy_file_range splice getrandom pidfd_open setns unshare O_PATH O_TMPFILE O_DIRECT O_NOATIME getresuid",
    socket: "TCP_INFO TCP_USER_TIMEOUT TCP_QUICKACK TCP_CORK AF_NETLINK AF_VSOCK SO_PEERCRED SO_BINDTODEVICE "
    "SOCK_CLOEXEC SOCK_NONBLOCK",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGPOLL sigtimedwait sigwaitinfo pidfd_send_signal",
    time: "pthread_getcpuclockid CLOCK_BOOTTIME",
}
FOLDERS = ("/proc", "/sys", "/dev/shm")
OPENERS = {os: ("stat", "lstat", "open", "listdir", "scandir", "readlink", "statvfs"), io: ("open",)}


def leave_linux(patch: pytest.MonkeyPatch) -> None:
    """Pretends that this is macOS, and hides Linux-only features from this process.

    Modules imported later see this, too: first import third-party modules that look at ``sys.platform``.
    """
    patch.setattr(sys, "platform", "darwin")
    for module, names in ONLY_LINUX.items():
        for name in names.split():
            patch.delattr(module, name, raising=False)
    hide_folders(patch)


def hide_folders(patch: pytest.MonkeyPatch) -> None:
    """Makes ``os``, ``io.open`` and thus ``pathlib`` find nothing in the folders of Linux's kernel."""
    for module, names in OPENERS.items():
        for name in names:
            patch.setattr(module, name, _hide(getattr(module, name)))


def _hide(function: Callable) -> Callable:
    def call(path: object = ".", *arguments: object, **options: object) -> object:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *arguments, **options)

    return call
