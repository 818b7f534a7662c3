"""Paced connections, and the kernel's count of their bytes."""

import socket
import sys
import threading
import time

import pytest

from course.exercises.ranks import run_on_ranks
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
def test_bytes_are_counted_once_every_rank_has_come():
    """Else what one of them still has to get would be counted later."""
    begin = time.monotonic()

    def work(rank):
        if rank:
            time.sleep(0.4)
        return links.count_settled() > 0 and time.monotonic() - begin

    assert min(run_on_ranks(work, work, case="a count")) >= 0.4


@linux
def test_a_paced_connection_is_as_fast_as_it_may_be(pair):
    assert links.pace(10e6) >= 2
    for _ in range(12):  # Linux does not pace the first ten segments
        send(*pair, 1000)
    assert 0.18 < send(*pair, 2_000_000) < 1.0  # 0.2 s; more on a busy machine
    assert links.pace(None) >= 2
    assert send(*pair, 2_000_000) < 0.15


@linux
def test_sockets_stay_as_they_are_and_others_are_left_out(pair):
    sender, receiver = pair
    sender.settimeout(7)
    with socket.socketpair()[0], socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        count = links.pace(1e9)
    assert sender.gettimeout() == 7 and receiver.gettimeout() is None
    sender.send(b"x")
    assert receiver.recv(1) == b"x"
    sender.close()
    assert links.pace(None) < count, "a closed connection is none"


@pytest.mark.parametrize("rate", [0, -1, 999, True, "1e6", float("nan"), float("inf"), 2**64])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(LabError, match="The rate is"):
        links.pace(rate)


def test_other_systems_are_refused_in_words(monkeypatch):
    monkeypatch.setattr("lab_utils.links.sys.platform", "darwin")
    for call in (lambda: links.pace(1e6), links.count_sent):
        with pytest.raises(LabError, match="cannot be paced or counted here") as refused:
            call()
        assert "darwin" in refused.value.cause


@linux
def test_a_kernel_that_does_not_count_is_refused(pair, monkeypatch):
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *arguments: bytes([1] * min(104, arguments[-1])))
    with pytest.raises(LabError, match="cannot be paced or counted here"):
        links.count_sent()
