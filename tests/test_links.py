"""Paced connections, and the kernel's count of their bytes."""

import socket
import sys
import threading
import time

import pytest

from lab_common import LabError
from lab_utils import links

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT TESTED HERE: pacing is Linux's")


@pytest.fixture
def pair():
    """Two connected sockets on the loopback, of which the second reads on until the first is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        yield sender, receiver
        receiver.close()


def send(sender: socket.socket, receiver: socket.socket, size: int) -> float:
    """Sends ``size`` bytes; returns the seconds until the last has arrived."""

    def read():
        left = size
        while left:
            left -= len(receiver.recv(min(left, 2**16)))

    thread, start = threading.Thread(target=read), time.perf_counter()
    thread.start()
    sender.sendall(bytes(size))
    thread.join(60)
    assert not thread.is_alive()
    return time.perf_counter() - start


@linux
def test_the_kernels_count_is_that_of_the_bytes(pair):
    before = links.count_sent()
    send(*pair, 1_000_000)
    assert links.count_sent() - before == 1_000_000
    send(*reversed(pair), 12_345)
    assert links.count_sent() - before == 1_012_345, "both ends are this process's"


@linux
def test_a_paced_connection_is_as_fast_as_it_may_be(pair):
    assert links.pace(10e6) >= 2
    for _ in range(12):  # Linux does not pace the first ten segments
        send(*pair, 1000)
    assert 0.18 < send(*pair, 2_000_000) < 1.0  # 0.2 s; more on a busy machine
    assert links.pace(None) >= 2
    assert send(*pair, 2_000_000) < 0.15


@pytest.mark.parametrize("rate", [0, -1, 999, True, "1e6", float("nan"), float("inf"), 2**64])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(LabError, match="The rate is"):
        links.pace(rate)
