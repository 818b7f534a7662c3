"""Bounds of a job: output without end, and supervisors that are stopped or killed."""

import json
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from harness.jobs import (
    PLAIN,
    PYTHON,
    TROUBLE,
    Launcher,
    assert_gone,
    copy_code,
    find_processes,
    kill,
    make_running,
    run_badly,
    wait_for,
    when_connected,
)

import nodelaunch as launch
from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.node.errors import StopReason
from nodelaunch.node.output import BURST, Lines
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")
MIB = 2**20

# One rank prints as fast as it can: lines for three seconds, or one line of 450 MB. The other says one line.
FLOOD = """
import os, sys, time
import nodelaunch as launch
if os.environ["RANK"] == "1":
    print("first words", flush=True)
    block = b"y" * 99 + (b"\\n" if sys.argv[1] == "lines" else b"y")
    end, sent = time.monotonic() + 3, 0
    while (sent < 450e6 if sys.argv[1] == "line" else time.monotonic() < end):
        sent += os.write(1, block * 5000)
    print("\\nlast words", flush=True)
else:
    print("calm", flush=True)
launch.report(7)
"""
# Runs it in a process of its own, whose memory tells what the launcher took.
MEASURE = """
import json, resource, sys, time
from nodelaunch import TorchrunJob, local_nodes
job = TorchrunJob(sys.argv[1], [sys.argv[2]], nodes=local_nodes(2), program=["python"])
job.preflight()
def peak():  # Linux: KiB, and of this process alone, where ru_maxrss begins with that of its parent
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024
before, start = peak(), time.monotonic()
result = job.run(show=False)
facts = {"seconds": time.monotonic() - start, "memory": peak() - before, "results": result.results}
lines = [line if len(line) < 200 else line[:200] for line in result.lines if line.startswith("[rank 1]")]
said = [line for line in lines if "yyyy" not in line]
print(json.dumps({**facts, "count": len(lines), "said": said, "calm": [l for l in result.lines if "calm" in l]}))
"""


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["lines", "line"])
def test_a_rank_that_prints_without_end_costs_little(kind, write, runs):
    script = write("flood.py", FLOOD)
    command = [sys.executable, "-c", MEASURE, str(script), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    facts = json.loads(done.stdout)
    assert facts["results"] == [7, 7] and facts["calm"] == ["[rank 0] calm"]
    assert facts["said"][0] == "[rank 1] first words" and facts["said"][-1] == "[rank 1] last words", facts["said"]
    assert any(re.search(r"[\d.]+ MiB are left out here", line) for line in facts["said"]), facts["said"]
    assert facts["memory"] < 64, "MiB of the launcher"
    written = sum(path.stat().st_size for path in runs.rglob("*") if path.is_file()) / MIB
    assert written < 4 * BURST / MIB, f"{written} MiB: what was passed on, in the logs of the node and of the launcher"
    assert facts["seconds"] < 60, "three of them printing, on a machine that does other things, too"


@pytest.mark.parametrize("size", [1, 777])
def test_a_bar_of_progress_is_not_cut(size):
    def split(text):
        lines = Lines(longest=1000)
        found = [line for at in range(0, len(text), size) for line in lines.feed(text[at : at + size])]
        return found + lines.end()

    bar = b"".join(b"\r%5d it" % number for number in range(5000))
    (line,) = split(bar)
    assert line.endswith(b" 4999 it\n") and len(line) <= 1001


def test_a_result_that_is_too_long_is_refused():
    with pytest.raises(LabError) as caught:
        launch.report("x" * (9 * MIB))
    assert "too long" in caught.value.what and caught.value.fix


# Supervisors that are stopped or killed.

FAMILY = """
import os, subprocess, sys, time
if "torchrun" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
for words in (["sleep", "300"], [sys.executable, "-c", "import time; time.sleep(300)"]):
    subprocess.Popen(words, start_new_session=True)
subprocess.Popen("sleep 300 & sleep 300", shell=True)
print("connected", flush=True)
time.sleep(300)
"""


class SilentLink:
    """A supervisor that was stopped: nothing is heard of it, and it does not end."""

    def __init__(self):
        self.let_go = threading.Event()

    def lines(self):
        self.let_go.wait(60)
        yield from ()

    def beat(self):
        pass

    def stop(self):
        pass

    def kill(self):
        self.let_go.set()

    def poll(self):
        return -9 if self.let_go.is_set() else None


def test_42_the_launchers_own_clock_ends_a_job_whose_supervisors_are_silent(tmp_path):
    link, start = SilentLink(), time.monotonic()
    state = JobState(["a"], ["127.0.0.1"])
    running = make_running({"a": link}, state, tmp_path, limit=1)
    running.follow()
    assert time.monotonic() - start < 1 + 2 + 5 + 2
    assert state.reason == StopReason.LIMIT and link.let_go.is_set()
    failure = running.wait(check=False).failure
    assert failure.kind == "limit" and failure.what == "The job ran into its time limit of 1 s."
    assert "supervisor on a was stopped" in failure.cause


@pytest.mark.drill
@pytest.mark.parametrize("nodes", [[1], [0, 1]])
def test_42_a_stopped_supervisor_does_not_keep_a_job_beyond_its_limit(nodes, write):
    limit = 15
    job = TorchrunJob(write("train.py", PLAIN), ["loop"], nodes=local_nodes(2), limit=limit, **PYTHON)
    job_id, start = job.id, time.time()

    def stop():
        kill([pid for node in nodes for pid in find_processes(job_id, "node.supervisor", node)], signal.SIGSTOP)

    heard, since = when_connected(stop)
    error = run_badly(job, heard, seconds=limit + 2 + 5 + 5, since=lambda: start)
    assert start < since() < start + limit, "it was stopped before the limit"
    assert error.result.failure.kind in ("limit", "lost"), error  # the launcher's clock, or the guard's


@pytest.mark.drill
def test_42_a_stopped_supervisor_is_ended_also_where_the_launcher_is_gone(write, request):
    """The guard on the node: nobody else is left who could. It goes, too."""
    launcher, job_id = start_job(write, "local", request)
    guards = [one for one in psutil.process_iter(["cmdline"]) if f"LAB_JOB_ID={job_id}" in (one.info["cmdline"] or [])]
    assert len(guards) == 2 and all(guard.cmdline()[3].endswith("processes.py") for guard in guards)
    kill(find_processes(job_id, "node.supervisor"), signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    assert_gone(job_id, 15 + 5)
    assert not psutil.wait_procs(guards, timeout=5)[1]


@pytest.mark.drill
@pytest.mark.parametrize(("where", "launcher_too"), [("local", False), ("local", True), ("hosts", True)])
def test_43_supervisors_that_are_killed_leave_no_grandchildren(where, launcher_too, write, request):
    launcher, job_id = start_job(write, where, request, torchrun=not launcher_too)
    wait_for(lambda: len(find_processes(job_id, "sleep")) >= 8)
    kill(find_processes(job_id, "node.supervisor"), signal.SIGKILL)
    if launcher_too:
        launcher.kill()
    assert_gone(job_id, 10)
    launcher.wait(20)


def start_job(write, where, request, *, torchrun=False):
    """Starts a launcher whose ranks have children, in sessions of their own, too; returns it and the job's id."""
    nodes = "local_nodes(2)"
    if where == "hosts":
        config = str(request.getfixturevalue("hosts").ssh_config)
        nodes = f"ssh_nodes(['n1', 'n2'], config={config!r}, folder='/node/labs')"
    words, program = (["torchrun"], []) if torchrun else ([], ["python"])
    script = write("family.py", FAMILY)
    launcher = Launcher(script.parent, script, words, nodes, program=program)
    launcher.wait_for("] connected", count=2)
    return launcher.process, launcher.job_id


@pytest.mark.drill
def test_44_a_node_that_was_started_by_hand_and_never_joins_ends_by_itself(write):
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(3), join_timeout=3)
    job_id = job.id
    script = job.write()[2]
    copy_code(job)
    with subprocess.Popen(["bash", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as node:
        wait_for(lambda: find_processes(job_id, "node.agent"))
        start = time.monotonic()
        # A later job is told of it, and runs all the same.
        later = TorchrunJob(write("later.py", "print('hello')"), nodes=local_nodes(1))
        found = later.preflight()
        assert found.ok and f"job {job_id} still runs here" in str(found)
        assert f"python -m nodelaunch stop {job_id}" in str(found)
        assert later.run(show=False).ok
        _, said = node.communicate(timeout=3 + 10 + 5 + 10)
    assert node.returncode != 0
    print(f"it ended after {time.monotonic() - start:.1f} s")
    assert "the other nodes did not come" in said, said
    assert_gone(job_id, 1)
