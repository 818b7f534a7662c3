"""Causes that peers and networks are blamed for: signals, full disks, silent ranks, code that was edited."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import PLAIN, PYTHON, TROUBLE, Heard, find_processes, run_badly

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("runs")]
FULL = "No space left on device"


@pytest.fixture
def script(write):
    return write("train.py", TROUBLE)


# Signals that somebody else sends.


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("part", ["node.agent", "node.supervisor"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_program_that_a_signal_ends_is_named(script, number, part, node, request):
    program = {"node.agent": "torchrun", "node.supervisor": "The supervisor"}[part]
    options = {}
    if part == "node.supervisor" and node == 0:  # which does not depend on what it supervises
        script.write_text(PLAIN)
        options = PYTHON
    elif part == "node.supervisor" or node == 0:  # on node 1 it is torchrun's own process
        request.getfixturevalue("warm_torchrun")
    job, connected, sent = TorchrunJob(script, ["loop"], nodes=local_nodes(2), **options), [], []

    def send(line):
        connected.append(line)
        if len(connected) == 2:
            (pid,) = find_processes(job.id, part, node)
            sent.append(time.time())
            os.kill(pid, number)

    heard = Heard({"[rank 0] connected": send, "[rank 1] connected": send})
    error = run_badly(job, heard, seconds=10, since=lambda: sent[0])
    what = f"{program} on node{node} was ended by signal {int(number)} ({number.name})."
    assert error.what == what, str(error)
    assert error.result.failure.node == f"node{node}"
    assert "sent it" in error.cause


def test_a_signal_to_a_rank_is_still_the_ranks(script):
    job, connected = TorchrunJob(script, ["loop"], nodes=local_nodes(2)), []

    def send(line):
        connected.append(time.time())
        if len(connected) == 2:
            os.kill(find_processes(job.id, "node.worker", 1)[0], signal.SIGTERM)

    heard = Heard({"[rank 0] connected": send, "[rank 1] connected": send})
    error = run_badly(job, heard, seconds=10, since=lambda: connected[1])
    assert error.what == "Rank 1 on node1 was killed by signal 15 (SIGTERM)"


# Ranks that end before they have said a word.

EARLY = """
import os, sys, time
own = [*sys.orig_argv, "-m", ""]
if own[own.index("-m") + 1] == "nodelaunch.node.{part}" and os.environ["LAB_NODE"] == "1":
    with open({fault!r}, "w") as file:
        file.write(str(time.time()))
    {act}
"""


@pytest.fixture
def end_early(write, tmp_path):
    """Makes a job of which a process of node 1, named by its module, ends by itself; and tells when it did so."""

    def make(part: str, act: str) -> tuple[TorchrunJob, Callable[[], float]]:
        fault = tmp_path / "fault"
        site = write("own/sitecustomize.py", EARLY.format(part=part, act=act, fault=str(fault)))
        path = {"PYTHONPATH": site.parent}
        job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(2), env=path)
        return job, lambda: float(fault.read_text())

    return make


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        ("os.kill(os.getpid(), 9)", "signal", ["Rank 1 on node1 was killed by signal 9 (SIGKILL)", "memory"]),
        ("os.kill(os.getpid(), 11)", "signal", ["Rank 1 on node1 was killed by signal 11 (SIGSEGV)"]),
        ("os._exit(3)", "exit", ["Rank 1 on node1", "exit status 3", "before the script began"]),
    ],
)
def test_a_rank_that_ends_before_its_first_word_is_named(end_early, act, kind, words):
    job, fault = end_early("worker", act)
    error = run_badly(job, Heard(), seconds=10, since=fault)
    failure = error.result.failure
    assert (failure.kind, failure.rank, failure.node) == (kind, 1, "node1"), str(error)
    for word in words:
        assert word in str(error), str(error)


def test_a_torchrun_that_is_killed_as_it_starts_is_named(end_early):
    job, fault = end_early("agent", "os.kill(os.getpid(), 9)")
    error = run_badly(job, Heard(), seconds=10, since=fault)
    assert "torchrun on node1 was ended by signal 9 (SIGKILL)" in error.what


# Disks that fill after the preflight: drill 46.

FILL = """
import os, subprocess, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import nodelaunch as launch

LARGE = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu*"))

def fill(folder):
    with open(Path(folder, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            pass

dist.init_process_group("gloo")
dist.barrier()
mode, folder = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ["LAB_JOB_FOLDER"])
if os.environ["RANK"] == "1":
    print(f"fault at {time.time()}", flush=True)
    if mode == "write":
        file = open(folder / "log.txt", "wb", buffering=0)
        while True:
            file.write(bytes(2**16))
    elif mode == "save":
        torch.save(torch.zeros(2**20), folder / "checkpoint.pt")
    elif mode == "tar":
        subprocess.run(["tar", "-C", LARGE.parent, "-cf", folder / "x.tar", LARGE.name], check=True)
    elif mode == "bash":
        subprocess.run(["bash", "-c", 'head -c 9000000 /dev/zero > "$0"', folder / "x"], check=True)
    elif mode == "cp":
        subprocess.run(["cp", LARGE, folder / "x"], check=True)
    fill(folder)
    if mode == "report":
        launch.report("x" * 2**17)
    elif mode == "quiet":
        os._exit(1)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("write", [FULL]),
        ("save", ["write", "checkpoint.pt"]),
        ("cp", ["/disk/x"]),
        ("bash", [FULL]),
        ("tar", ["/disk/x.tar"]),
    ],
)
def test_46_a_disk_that_a_script_fills_is_named(write, small_disk, mode, words, request):
    """By Python, by torch.save, which leaves the reason out, and by a tool, of which Python knows its status only."""
    if mode != "write":
        request.getfixturevalue("warm_torchrun")
    job = TorchrunJob(write("train.py", FILL), [mode, small_disk], nodes=local_nodes(2))
    error = run_badly(job, Heard(), seconds=15)
    failure = error.result.failure
    assert (failure.kind, failure.rank, failure.node) == ("exception", 1, "node1"), str(error)
    if mode == "bash":  # it does not say where
        assert "a disk is full: " in failure.cause, str(error)
    else:
        assert f"the disk is full at {small_disk}" in failure.cause, str(error)
    assert "df -h" in failure.fix
    for word in words:
        assert word in str(error), str(error)


LEAN = {"PYTHONDONTWRITEBYTECODE": "1"}  # the package has room on the small disk, and no more than that


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match=FULL):
        while True:
            file.write(bytes(2**12))


def make_nodes(small_disk):
    """Node 1 on the small disk."""
    first, second = local_nodes(2)
    return [first, replace(second, folder=str(small_disk))]


@pytest.mark.parametrize("mode", ["report", "quiet", "save"])
def test_46_a_full_disk_with_the_jobs_own_files_is_named(write, small_disk, mode, request):
    """Then the events of the rank have no room either; what is heard is its output, and that the disk has no room."""
    if mode != "quiet":
        request.getfixturevalue("warm_torchrun")
    nodes = make_nodes(small_disk)
    error = run_badly(
        TorchrunJob(write("train.py", FILL), [mode], nodes=nodes, env=LEAN), Heard(), seconds=15, force=True
    )
    failure = error.result.failure
    assert (failure.rank, failure.node) == (1, "node1"), str(error)
    assert f"the disk is full at {small_disk}" in failure.cause, str(error)
    assert "df -h" in failure.fix


def test_46_a_disk_without_room_for_the_code_is_named(write, small_disk):
    first, second = local_nodes(2)
    fill(small_disk)
    job = TorchrunJob(write("train.py", FILL), nodes=[first, replace(second, folder=str(small_disk))])
    with pytest.raises(LabError) as caught:
        job.run(show=False, force=True)
    assert_explains(caught.value, "The disk of node1 is full at", str(small_disk), FULL, "df -h")


# Code that somebody changed on a node after it was copied there.

SHORT = "import nodelaunch as launch; launch.report(1)"


def edit_code(node, job, how):
    (folder,) = Path(node.folder, "code").iterdir()
    if how == "package":
        path = folder / "nodelaunch" / "node" / "report.py"
        path.write_text(path.read_text() + "# mine\n")
    elif how == "script":
        (folder / "script" / "train.py").write_text("print('mine')")
    elif how == "more":
        (folder / "script" / "torch.py").write_text("")
    elif how == "less":
        (folder / "nodelaunch" / "node" / "report.py").unlink()
    return folder


@pytest.mark.parametrize("how", ["package", "script", "more", "less"])
def test_code_that_was_edited_after_the_preflight_is_named(write, how):
    """The preflight still counts, and has not seen it."""
    nodes = local_nodes(2)
    job = TorchrunJob(write("train.py", SHORT), nodes=nodes, **PYTHON)
    assert job.run(show=False, force=True).results == (1, 1)
    assert not [red for red in job.preflight().reds if red.check == "code"]
    folder = edit_code(nodes[1], job, how)
    with pytest.raises(LabError) as caught:
        job.run(show=False)
    assert_explains(caught.value, "node1", f"{folder} is not what its name says"[:90], f"rm -r -- {folder}")


def test_code_that_was_edited_is_named_where_the_job_is_forced(write):
    nodes = local_nodes(1)
    job = TorchrunJob(write("train.py", SHORT), nodes=nodes, **PYTHON)
    assert job.run(show=False, force=True).ok
    folder, heard = edit_code(nodes[0], job, "package"), Heard()
    assert job.run(show=heard, force=True).ok
    assert [line for line in heard.lines if str(folder) in line and "not what its name says" in line]
    assert [line for line in heard.lines if "started anyway" in line and "node0" in line]
    subprocess.run(["rm", "-r", "--", folder], check=True)
    again = Heard()
    assert job.run(show=again, force=True).ok and not [line for line in again.lines if "name says" in line]


# The variable of a job's id, set where the notebook's kernel was started.

KERNEL = """
import os, socket
from nodelaunch import local_nodes
from nodelaunch.preflight import check_nodes
{first}
with socket.create_server(("", 0)) as holder:
    port = holder.getsockname()[1]
    print(check_nodes(local_nodes(2), port=port))
"""


def run_kernel(root, first="", **env):
    command, env = [sys.executable, "-c", KERNEL.format(first=first)], {**os.environ, "PYTHONPATH": str(root), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout


def start_sleeper(job_id):
    return subprocess.Popen(["sleep", "60"], env={**os.environ, "LAB_JOB_ID": job_id})


@pytest.mark.parametrize("first", ["", "del os.environ['LAB_JOB_ID']"], ids=["exported", "taken away"])
def test_a_kernel_is_never_told_to_stop_itself(first, root):
    """LAB_JOB_ID was exported in the shell: the kernel, and all that the shell starts, seem to be a job's leftovers."""
    others = [start_sleeper("of-the-shell"), start_sleeper("left-over")]
    try:
        said = run_kernel(root, first, LAB_JOB_ID="of-the-shell")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "launch stop of-the-shell" not in said and "python -m nodelaunch stop left-over" in said, said


def test_to_stop_a_job_from_a_shell_that_seems_to_be_its_own_spares_the_shell(root):
    """Only what stands above the command; all else that carries the id is ended, as it was asked for."""
    other = start_sleeper("of-the-shell")
    try:
        stop = f"{shlex.quote(sys.executable)} -m nodelaunch stop of-the-shell; echo the shell lives"
        env = {**os.environ, "PYTHONPATH": str(root), "LAB_JOB_ID": "of-the-shell"}
        done = subprocess.run(["bash", "-c", stop], env=env, capture_output=True, text=True, timeout=300)
        assert "the shell lives" in done.stdout and "1 process(es) of of-the-shell ended" in done.stdout, done
        assert other.wait(5) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()
