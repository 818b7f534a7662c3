"""The ranks of a check, for all labs: whatever an answer does on them, they end, and what went wrong is named."""

import multiprocessing
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course import check
from course.check import NotYetError, OpenError
from course.exercises import ranks
from lab_common import LabError

pytestmark = pytest.mark.usefixtures("runs")
CASE = {"case": "a check"}


@pytest.fixture
def short(monkeypatch):
    """Bounds that a test can wait for."""
    monkeypatch.setattr(ranks, "COLLECTIVE", 1.0)
    monkeypatch.setattr(ranks, "LIMIT", 3.0)


def loop_forever(rank):
    while True:
        pass


def wait_alone(rank):
    if rank == 0:
        dist.all_reduce(torch.zeros(1))


def send_unequal(rank):
    dist.all_reduce(torch.zeros(10 + 90 * rank))


def give_back(rank):
    return rank


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("work", "hint"),
    [
        (loop_forever, "does not end"),
        (wait_alone, "only one rank calls"),
        (send_unequal, "differ"),
        (give_back, ""),
    ],
)
def test_ranks_are_ended_whatever_they_do(work, hint, tmp_path):
    def noted(rank):
        (tmp_path / str(os.getpid())).touch()
        return work(rank)

    if hint:
        with pytest.raises(NotYetError) as refused:
            ranks.run_on_ranks(noted, work, **CASE)
        assert hint in refused.value.hint
    else:
        assert ranks.run_on_ranks(noted, work, **CASE) == [0, 1]
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))
    assert not dist.is_initialized()


def test_the_ranks_end_with_a_kernel_that_is_killed(tmp_path):
    def work(rank):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    kernel = multiprocessing.get_context("fork").Process(target=ranks.run_on_ranks, args=(work, work), kwargs=CASE)
    kernel.start()
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    kernel.kill()
    kernel.join()
    wait_for(lambda: not any(is_running(path.name) for path in tmp_path.iterdir()))


def wait_for(find, seconds=120):
    end = time.monotonic() + seconds
    while not find():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid):
    """Returns True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_errors_of_the_answer_are_named_with_their_line():
    def stop_with_an_error(net, optimizer, number, every):
        return net.no_such_thing

    with pytest.raises(OpenError) as stopped:
        check.exercise("9.4", stop_with_an_error)
    assert "net.no_such_thing" in stopped.value.where and "AttributeError" in stopped.value.cause


def test_what_the_ranks_print_is_shown(capsys):
    ranks.run_on_ranks(lambda rank: print("step", rank), print, **CASE, count=3)
    assert capsys.readouterr().out == "[rank 0] step 0\n[rank 1] step 1\n[rank 2] step 2\n"


def test_an_open_process_group_is_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LabError, match="A process group is open here"):
            ranks.run_on_ranks(give_back, give_back, **CASE)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def late(monkeypatch):
    """Each rank comes to the group so much later than the one before; a collective waits half a second."""
    start, seconds = dist.init_process_group, []

    def start_late(*args, rank, **kwargs):
        time.sleep(rank * sum(seconds))
        return start(*args, rank=rank, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", start_late)
    monkeypatch.setattr(ranks, "COLLECTIVE", 0.5)
    return seconds


def test_ranks_that_are_slow_to_start_are_waited_for(late):
    late.append(1)
    assert ranks.run_on_ranks(lambda rank: dist.barrier(), dist.barrier, **CASE) == [None, None]


def test_ranks_that_do_not_find_each_other_are_no_fault_of_the_answer(late, monkeypatch):
    late.append(10)
    monkeypatch.setattr("course.ranks.START", 0.5)
    with pytest.raises(LabError, match="did not find each other"):
        ranks.run_on_ranks(give_back, give_back, **CASE)
