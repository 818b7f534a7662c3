"""Faults that a launcher must bear: full disks, stuck connections, torn lines, and a second interrupt."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
from harness.drawn import assert_explains
from harness.jobs import PYTHON, Heard, assert_gone, make_running

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.node.supervisor import MARK
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")


def say(event, **facts):
    return (MARK + json.dumps({"event": event, **facts}) + "\n").encode()


# What the launcher reads and writes.


def make_link(*lines):
    """A supervisor that says some lines and ends."""
    return Mock(node="a", lines=lambda: iter(lines), poll=lambda: 0, explain=lambda: None)


def follow(link, folder, show=lambda line: None):
    state = JobState(["a"], ["10.0.0.1"])
    state.read("a", say("worker", rank=0, pid=57, host="a", local_rank=0, node=0, processes=1))
    running = make_running({"a": link}, state, folder, show, join_timeout=5)
    running.follow()
    return state, running.wait(check=False)


END = [say("result", rank=0, value=7), say("ended", returncode=0, reason=None, why="", killed=0, memory={})]


def test_a_line_that_was_torn_ends_nothing(tmp_path):
    state, _ = follow(make_link(b"[rank 0] hi\n", b'\x1e{"event": "result", "rank": 0, "val'), tmp_path)
    assert state.nodes["a"].gone and not state.results


def test_a_full_disk_costs_the_log_and_not_the_job(tmp_path):
    said = []
    (tmp_path / "output.log").symlink_to("/dev/full")
    _, result = follow(make_link(b"[rank 0] hi\n", b"[rank 0] ho\n", *END), tmp_path, said.append)
    assert result.ok and result.results == (7,)
    assert result.lines == ("[rank 0] hi", "[rank 0] ho")
    assert sum("the log is not complete" in line for line in said) == 1


def test_a_function_that_cannot_show_a_line_ends_the_job_in_order(tmp_path):
    def show(line):
        raise ValueError("no window")

    link = make_link(b"[rank 0] hi\n", b"[rank 0] ho\n", *END)
    with pytest.raises(ValueError, match="no window"):
        follow(link, tmp_path, show)
    assert link.stop.called and not link.kill.called
    assert b"[rank 0] ho" in (tmp_path / "output.log").read_bytes(), "the rest is read to its end"


# The supervisor, with nobody to read what it says, and with disks that are full.


class Supervised:
    """A supervisor over a bash command; its lease is renewed until ``over`` is set."""

    def __init__(self, root, folder, command, *options):
        program = [sys.executable, "-P", "-u", "-m", "nodelaunch.node.supervisor", f"--job-folder={folder}", *options]
        env = {**os.environ, "PYTHONPATH": str(root), "LAB_JOB_ID": "supervised"}
        pipe, self.over = subprocess.PIPE, threading.Event()
        self.process = subprocess.Popen(
            [*program, "--", "bash", "-c", command], stdin=pipe, stdout=pipe, env=env, start_new_session=True
        )
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        with contextlib.suppress(OSError, ValueError):  # it has ended by itself
            while not self.over.wait(0.3):
                os.write(self.process.stdin.fileno(), b".")

    def read(self):
        lines = list(self.process.stdout)
        self.process.wait(10)
        return lines

    def close(self):
        self.over.set()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def supervise(root, tmp_path):
    made = []

    def run(command, *options, folder=None):
        made.append(Supervised(root, folder or tmp_path / "job", command, *options))
        return made[-1]

    yield run
    for supervised in made:
        supervised.close()
    assert_gone("supervised", 5)


def test_a_connection_that_is_stuck_does_not_stop_the_lease(supervise):
    """Nobody reads: the pipe is full, the supervisor has more to say, and ends in time all the same."""
    supervised = supervise("head -c 300000 /dev/zero | tr '\\0' a; echo; sleep 60", "--lease=2", "--grace=1")
    time.sleep(1)
    supervised.over.set()  # the heart stops
    begun = time.monotonic()
    assert supervised.process.wait(10) == 124
    assert time.monotonic() - begun < 2 + 1 + 2 + 2, "lease, grace, the last words, and two noisy cores"


def test_a_slow_reader_loses_nothing(supervise, tmp_path):
    event = json.dumps({"event": "error", "rank": 0})
    command = f"head -c 300000 /dev/zero | tr '\\0' a; echo; echo '{event}' >> job/events.jsonl; seq 3000"
    supervised = supervise(f"cd {tmp_path}; {command}")
    time.sleep(4)
    lines = supervised.read()
    told = [json.loads(line[1:]) for line in lines if line.startswith(MARK.encode())]
    assert [event["event"] for event in told] == ["started", "error", "ended"]
    assert told[-1]["returncode"] == 0
    plain = [line for line in lines if not line.startswith(MARK.encode())]
    assert len(plain) == 3001 and plain[-1] == b"3000\n" and len(plain[0]) == 300001


def test_whatever_goes_wrong_in_the_supervisor_nothing_of_the_job_stays(supervise, tmp_path):
    # A folder in place of the file: an error that nobody has foreseen.
    supervised = supervise(f"(setsid sleep 66 &); sleep 0.5; mkdir -p {tmp_path}/job/events.jsonl; sleep 66")
    assert supervised.process.wait(10) == 1
    assert_gone("supervised", 1)


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
