"""Faults that a launcher must bear: a full disk, a second interrupt, and what was red before."""

import json
import os
import signal
import socket
import threading
import time
from unittest.mock import Mock

import pytest
from harness.drawn import assert_explains
from harness.jobs import PYTHON, Heard, assert_gone, make_running

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.node.report import MARK
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")


def say(event, **facts):
    return (MARK + json.dumps({"event": event, **facts}) + "\n").encode()


# What the launcher reads and writes.


def make_link(*lines):
    """A supervisor that says some lines and ends."""
    return Mock(node="a", lines=lambda: iter(lines), poll=lambda: 0, explain=lambda: None)


def follow(link, folder):
    state = JobState(["a"], ["10.0.0.1"])
    state.read("a", say("worker", rank=0, pid=57, host="a", local_rank=0, node=0, processes=1))
    running = make_running({"a": link}, state, folder, join_timeout=5)
    running.follow()
    return running.wait(check=False)


END = [say("result", rank=0, value=7), say("ended", returncode=0, reason=None, why="", killed=0, memory={})]


def test_a_full_disk_costs_the_log_and_not_the_job(tmp_path):
    (tmp_path / "output.log").symlink_to("/dev/full")
    result = follow(make_link(b"[rank 0] hi\n", b"[rank 0] ho\n", *END), tmp_path)
    assert result.ok and result.results == (7,)
    assert result.lines == ("[rank 0] hi", "[rank 0] ho")


# Jobs.

CHILD = """
import subprocess, time
subprocess.Popen(["sleep", "77"], start_new_session=True)
print("has a child", flush=True)
time.sleep(60)
"""


@pytest.mark.drill
def test_a_second_interrupt_leaves_nothing_either(write):
    job = TorchrunJob(write("train.py", CHILD), nodes=local_nodes(1), **PYTHON)
    job_id, begun = job.id, []

    def interrupt_twice(line):
        def kick():
            for pause in (0.3, 0.2):
                time.sleep(pause)
                begun.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=kick).start()

    with pytest.raises(KeyboardInterrupt):
        job.run(show=Heard({"has a child": interrupt_twice}), force=True)
        time.sleep(2)  # should the first have been enough
    assert time.monotonic() - begun[0] < 5
    assert_gone(job_id, 10)


def test_what_was_red_is_looked_at_again(write):
    with socket.create_server(("0.0.0.0", 0)) as holder:
        job = TorchrunJob(write("train.py", "print()"), nodes=local_nodes(1), port=holder.getsockname()[1], **PYTHON)
        assert "port" in {verdict.check for verdict in job.preflight().reds}
    assert job.run(show=False).ok


def test_a_script_that_hides_a_module_is_refused(write):
    with pytest.raises(LabError) as caught:
        TorchrunJob(write("torch.py", "print()"), nodes=local_nodes(1), port=29999).write()
    assert_explains(caught.value, "torch.py", "rename it")
