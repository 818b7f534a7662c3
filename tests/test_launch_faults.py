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
from dataclasses import replace

import pytest
from harness.drawn import assert_explains
from harness.jobs import PYTHON, Heard, assert_gone, make_running, wait_for

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.backends.local import LocalNode
from nodelaunch.node.supervisor import MARK
from nodelaunch.preflight import check_nodes
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")


def say(event, **facts):
    return (MARK + json.dumps({"event": event, **facts}) + "\n").encode()


# What the launcher reads and writes.


class FakeLink:
    """A supervisor that says some lines and ends."""

    node = "a"

    def __init__(self, *lines):
        self.said, self.stopped, self.killed = lines, False, False

    def lines(self):
        yield from self.said

    def beat(self):
        pass

    def stop(self):
        self.stopped = True

    def kill(self):
        self.killed = True

    def poll(self):
        return 0

    def explain(self):
        return None


def follow(link, folder, show=lambda line: None):
    state = JobState(["a"], ["10.0.0.1"])
    state.read("a", say("worker", rank=0, pid=57, host="a", local_rank=0, node=0, processes=1))
    running = make_running({"a": link}, state, folder, show, join_timeout=5)
    running.follow()
    return state, running.wait(check=False)


END = [say("result", rank=0, value=7), say("ended", returncode=0, reason=None, why="", killed=0, memory={})]


def test_a_line_that_was_torn_ends_nothing(tmp_path):
    state, _ = follow(FakeLink(b"[rank 0] hi\n", b'\x1e{"event": "result", "rank": 0, "val'), tmp_path)
    assert state.nodes["a"].gone and not state.results


def test_a_full_disk_costs_the_log_and_not_the_job(tmp_path):
    said = []
    (tmp_path / "output.log").symlink_to("/dev/full")
    _, result = follow(FakeLink(b"[rank 0] hi\n", b"[rank 0] ho\n", *END), tmp_path, said.append)
    assert result.ok and result.results == (7,)
    assert result.lines == ("[rank 0] hi", "[rank 0] ho")
    assert sum("the log is not complete" in line for line in said) == 1


def test_a_function_that_cannot_show_a_line_ends_the_job_in_order(tmp_path):
    def show(line):
        raise ValueError("no window")

    link = FakeLink(b"[rank 0] hi\n", b"[rank 0] ho\n", *END)
    with pytest.raises(ValueError, match="no window"):
        follow(link, tmp_path, show)
    assert link.stopped and not link.killed
    assert b"[rank 0] ho" in (tmp_path / "output.log").read_bytes(), "the rest is read to its end"


# The supervisor, with nobody to read what it says, and with disks that are full.


class Supervised:
    """A supervisor over a bash command; ``read`` starts to read what it prints."""

    def __init__(self, root, folder, command, *options):
        program = [sys.executable, "-P", "-u", "-m", "nodelaunch.node.supervisor"]
        self.process = subprocess.Popen(
            [*program, f"--job-folder={folder}", *options, "--", "bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root), "LAB_JOB_ID": "supervised"},
            start_new_session=True,
        )
        self.over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        with contextlib.suppress(OSError):  # it has ended by itself
            while not self.over.wait(0.3):
                self.process.stdin.write(b".")
                self.process.stdin.flush()

    def read(self):
        lines = list(self.process.stdout)
        self.process.wait(10)
        return lines

    def close(self):
        self.over.set()
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # of a beat that came too late to be sent
            self.process.stdin.close()
        self.process.stdout.close()


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


def test_what_was_noted_before_a_line_is_heard_before_it(supervise, tmp_path):
    """Else a job that is stopped at the sight of a traceback would seem to have failed after the stop."""
    command = """for n in $(seq 50); do echo '{"event": "error", "rank": 0}' >> job/events.jsonl; echo line $n; done"""
    lines = [line for line in supervise(f"cd {tmp_path}; {command}").read() if b"error" in line or b"line" in line]
    for number, place in enumerate([place for place, line in enumerate(lines) if b"line" in line], start=1):
        assert sum(b"error" in line for line in lines[:place]) >= number


def test_torn_events_and_results_do_not_end_the_supervisor(supervise, tmp_path):
    torn = '{"event": "wor{"event": "done"}'
    (tmp_path / "job" / "results").mkdir(parents=True)
    (tmp_path / "job" / "results" / "rank0.json").write_text("[1, 2")
    (tmp_path / "job" / "results" / "rank1.json").write_text("[1, 2]")
    whole = '{"event": "done", "rank": 1}'
    commands = f"echo '{torn}' >> job/events.jsonl; echo '{whole}' >> job/events.jsonl; sleep 0.5"
    lines = supervise(f"cd {tmp_path}; {commands}").read()
    told = [json.loads(line[1:]) for line in lines]
    assert [event["event"] for event in told] == ["started", "done", "result", "ended"]
    assert told[2]["rank"] == 1 and told[3]["returncode"] == 0


def test_whatever_goes_wrong_in_the_supervisor_nothing_of_the_job_stays(supervise, tmp_path):
    # A folder in place of the file: an error that nobody has foreseen.
    supervised = supervise(f"(setsid sleep 66 &); sleep 0.5; mkdir -p {tmp_path}/job/events.jsonl; sleep 66")
    assert supervised.process.wait(10) == 1
    assert_gone("supervised", 1)


def test_a_full_disk_of_a_node_costs_its_log_and_not_the_job(supervise, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "output.log").symlink_to("/dev/full")
    lines = supervise("seq 9000", folder=folder).read()
    assert sum(line[:1].isdigit() for line in lines) == 9000
    assert json.loads(lines[-1][1:])["returncode"] == 0


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


class StuckNode(LocalNode):
    """A node that does not take what is sent to it."""

    def popen(self, argv):
        return super().popen(["sleep", "50"] if "unpack" in argv[2] else argv)


def test_an_interrupted_copy_gives_the_prompt_back(write):
    (good,) = local_nodes(1)
    stuck = StuckNode(**{name: getattr(good, name) for name in ("name", "folder", "address", "interface")})
    job = TorchrunJob(write("train.py", "print()"), nodes=[stuck])
    begun = []

    def interrupt():
        begun.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(2.5, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        job.run(show=False, force=True)
    assert time.monotonic() - begun[0] < 3


def test_nodes_may_share_one_home(write):
    """As hosts of a cluster do: what each says is still heard as its own."""
    text = "import os; import nodelaunch as launch; launch.report(os.environ['LAB_NODE']); {}"
    first, second = local_nodes(2)
    nodes = [first, replace(second, folder=first.folder)]
    result = TorchrunJob(write("train.py", text.format("pass")), nodes=nodes, **PYTHON).run(show=False, force=True)
    assert result.results == ("0", "1")
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(0, "node0"), (1, "node1")]
    bad = write("bad.py", text.format("assert os.environ['RANK'] == '0'"))
    failure = TorchrunJob(bad, nodes=nodes, **PYTHON).run(show=False, force=True, check=False).failure
    assert (failure.rank, failure.node) == (1, "node1")


def test_a_stop_while_nothing_runs_is_forgotten(write):
    job = TorchrunJob(write("train.py", "print()"), nodes=local_nodes(1), **PYTHON)
    job.stop()
    assert job.run(show=False, force=True).ok
    job.stop()
    assert job.run(show=False, force=True).ok


def test_what_was_red_is_looked_at_again(write):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        job = TorchrunJob(write("train.py", "print()"), nodes=local_nodes(1), port=port, **PYTHON)
        assert "port" in {verdict.check for verdict in job.preflight().reds}
    # Jobs that other tests leave behind for a moment are no matter here.
    wait_for(lambda: job.preflight().ok, 20)
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", job.port))
        holder.listen()
        assert not job.preflight().ok
    assert job.run(show=False).ok


@pytest.mark.parametrize(("seconds", "times"), [(60.0, 1), (0.0, 2)])
def test_a_preflight_counts_for_a_while(write, monkeypatch, seconds, times):
    asked = []

    def count(*args, **kwargs):
        asked.append(args)
        return check_nodes(*args, **kwargs)

    monkeypatch.setattr("nodelaunch.backends.direct.check_nodes", count)
    monkeypatch.setattr("nodelaunch.job.FRESH_SECONDS", seconds)
    job = TorchrunJob(write("train.py", "print()"), nodes=local_nodes(1), **PYTHON)
    job.preflight()
    assert job.run(show=False, force=True).ok
    assert len(asked) == times


def test_settings_may_be_numbers_and_scripts_not_modules_of_python(write):
    job = TorchrunJob(write("train.py", "print()"), nodes=local_nodes(1), env={"SEED": 1}, port=29999)
    assert "export SEED=1" in job.write()[0].read_text()
    for name in ("queue.py", "torch.py"):
        with pytest.raises(LabError) as caught:
            TorchrunJob(write(name, "print()"), nodes=local_nodes(1), port=29999).write()
        assert_explains(caught.value, name, "rename it")
