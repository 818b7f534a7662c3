"""A slower link, and a count of the bytes, for the connections that this process has, without being root.

Linux can pace what a TCP connection sends (``SO_MAX_PACING_RATE``), on the loopback, too. So ranks on one machine can
be given a link of a chosen bandwidth. That is an emulation, *paced by the kernel*: it adds no latency, each connection
has the rate for itself, and no other traffic competes. Linux counts the bytes of each connection as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from lab_common import LabError

SO_MAX_PACING_RATE = 47  # from <asm-generic/socket.h>
UNLIMITED = 2**64 - 1
# Where `struct tcp_info` of <linux/tcp.h> has tcpi_bytes_sent, since Linux 4.19, and behind it tcpi_bytes_retrans.
BYTES_SENT, COUNTERS = 200, "=QQ"
ESTABLISHED = 1
SLOWEST = 1000


def pace(bytes_per_second: float | None) -> int:
    """Bounds how fast each TCP connection that this process has now may send; later ones are free.

    Linux never paces the first ten segments of a connection: send a few small messages before you measure.

    Args:
        bytes_per_second: The rate of each connection and of its TCP headers, at least 1,000; None frees them again.

    Returns:
        The number of connections.

    Raises:
        LabError: The rate is no such number, or this system is not Linux.
    """
    if bytes_per_second is None:
        rate = UNLIMITED
    elif type(bytes_per_second) in (int, float) and SLOWEST <= bytes_per_second < UNLIMITED:
        rate = int(bytes_per_second)
    else:
        fix = "give bytes per second, such as 100e6 / 8 for a link of 100 Mb/s, or None"
        raise LabError(f"The rate is {bytes_per_second!r}.", where="links.pace", fix=fix)
    count = 0
    for connection in _find_connections("links.pace"):
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))
        count += 1
    return count


def count_sent() -> int:
    """Counts the bytes that this process has sent over the TCP connections that it has now, since they were opened.

    They are the kernel's numbers, without TCP's own headers and without what had to be sent again. Whatever a library
    adds to its messages is in them.

    Raises:
        LabError: This system is not Linux, or older than 4.19.
    """
    size, total = BYTES_SENT + struct.calcsize(COUNTERS), 0
    for connection in _find_connections("links.count_sent"):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            raise _miss("links.count_sent")
        sent, again = struct.unpack_from(COUNTERS, info, BYTES_SENT)
        total += sent - again
    return total


def count_settled() -> int:
    """Counts as :func:`count_sent` does, once all ranks have what was sent before; every rank has to call it.

    Else the end of what a rank has sent, such as DDP's weights when it is made, may be counted with what comes next.
    """
    dist.barrier()
    return count_sent()


def _find_connections(where: str) -> Iterator[socket.socket]:
    """Each TCP connection of this process that is established, as a socket that is closed afterwards."""
    if not sys.platform.startswith("linux"):
        raise _miss(where)
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the folder itself
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    state = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    if state == ESTABLISHED:
                        yield found


def _miss(where: str) -> LabError:
    cause = f"it needs Linux 4.19 or newer, and this is {sys.platform}"
    return LabError("Connections cannot be paced or counted here.", where=where, cause=cause, fix="use a Linux machine")
