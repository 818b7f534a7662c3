"""A job on two nodes of this machine: results, output, scripts by hand, and every way in which it is refused."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import (
    HOSTILE,
    PLAIN,
    PYTHON,
    TROUBLE,
    Heard,
    assert_gone,
    copy_code,
    find_port,
    find_processes,
    run_badly,
)

import nodelaunch as launch
from lab_common import LabError
from nodelaunch import JobError, TorchrunJob, local_nodes

pytestmark = pytest.mark.usefixtures("runs")
REPORT = """
import gc, json, os, sys, helper
import torch, torch.distributed as dist
import nodelaunch as launch
dist.init_process_group("gloo")
order = [None] * dist.get_world_size()
dist.all_gather_object(order, os.environ["LAB_NODE"])
launch.report("an earlier call")
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "LAB_DATA", "COLOUR", "GLOO_SOCKET_IFNAME"]
env = {name: os.environ.get(name) for name in names}
launch.report({"args": sys.argv[1:], "env": env, "helper": helper.VALUE, "cwd": os.getcwd(), "order": order,
               "gc": [gc.isenabled(), gc.get_freeze_count()], "name": __name__, "file": os.path.basename(__file__)})
print("hello from", os.environ["RANK"])
print("a word to stderr", file=sys.stderr)
dist.destroy_process_group()
"""
# Found by Python as it starts: what the training's processes are then told of their versions.
VERSIONS = """
import platform, sys
platform.python_version = lambda: "3.4.5"
if "nodelaunch.node.worker" in sys.orig_argv:
    import torch
    torch.__version__ = "1.2.3"
"""
CUDA = """
import sys, torch
import nodelaunch as launch
launch.report({"initialised": torch.cuda.is_initialized(), "start": "python -m" if "-m" in sys.orig_argv else "fork"})
"""
SHORT = 'import sys; import nodelaunch as launch; launch.report(sys.argv[1:]); print("done")'


def hand_start(path):
    """Runs a node's script as a learner does, with bash in a terminal."""
    return subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process):
    with process:
        try:
            return process.communicate(timeout=60)[0]
        finally:
            process.kill()


def test_two_nodes_with_two_processes_each(write, runs):
    """Ranks go by address, though the meeting point is on the node that stands first in the list."""
    write("lib/helper.py", "VALUE = 42")
    script, heard = write("my script; $(touch canary).py", REPORT), Heard()
    nodes = local_nodes(2)[::-1]
    options = {"nproc_per_node": 2, "env": {"COLOUR": "deep blue"}, "files": [script.parent / "lib/helper.py"]}
    job = TorchrunJob(script, HOSTILE, nodes=nodes, **options)
    job_id, folder = job.id, job.folder
    result = job.run(show=heard)

    assert result.ok and result.failure is None and result.restarts == ()
    assert [value["env"]["RANK"] for value in result.results] == list("0123")
    for rank, value in enumerate(result.results):
        assert value["args"] == HOSTILE
        assert value["name"] == "__main__" and value["file"] == script.name
        assert value["helper"] == 42
        enabled, frozen = value["gc"]
        assert enabled and frozen > 100_000, "torch's objects are left out of the search for garbage, and no others"
        assert value["order"] == ["1", "1", "0", "0"]  # node0, with the lower address, is the second of the list
        assert value["cwd"] == f"{runs}/nodes/node{rank // 2}/work"
        env = value["env"]
        assert (env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank % 2), "4")
        assert (env["COLOUR"], env["GLOO_SOCKET_IFNAME"]) == ("deep blue", "lo")
        assert env["LAB_DATA"] == os.environ["LAB_DATA"]
        assert env["OMP_NUM_THREADS"] == "1"

    found = [(rank.rank, rank.local_rank, rank.node) for rank in result.ranks]
    assert found == [(0, 0, "node0"), (1, 1, "node0"), (2, 0, "node1"), (3, 1, "node1")]
    assert [rank.address for rank in result.ranks[1:3]] == ["127.0.0.1", "127.0.0.2"]
    assert len({rank.pid for rank in result.ranks}) == 4
    who = next(line for line in heard.lines if line.startswith("all nodes joined"))
    for rank in result.ranks:
        assert f"rank {rank.rank} on {rank.node} ({rank.address}, process {rank.pid})" in who
        assert f"[rank {rank.rank}] hello from {rank.rank}" in heard.lines
        assert f"[rank {rank.rank}] a word to stderr" in heard.lines
    assert set(result.lines) <= set(heard.lines)

    assert result.folder == folder == runs / "jobs" / job_id
    assert sorted(path.name for path in folder.iterdir()) == ["node0.sh", "node1.sh", "outcome.txt", "output.log"]
    assert "node1: [rank 2] hello from 2" in (folder / "output.log").read_text()
    assert launch.find_log(job_id) == launch.find_log() == folder / "output.log"
    assert 0 < result.seconds["joined"] < result.seconds["total"]
    assert result.seconds["preflight"] < 5
    assert result.memory.keys() == {0, 1, 2, 3} and min(result.memory.values()) > 2**26
    assert_gone(job_id, 1)
    assert (job.id, job.folder) == (job_id, folder), "the caller still finds what was run"
    assert not [path for path in (*runs.rglob("canary"), *script.parent.glob("canary"))]


def test_the_scripts_by_hand_are_the_same_job(write, runs):
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(2), port=29871)
    paths = job.write()
    assert [path.name for path in paths] == ["node0.sh", "node1.sh"]
    assert all(os.access(path, os.X_OK) for path in paths)
    assert [find_port(path) for path in paths] == [29871, 29871]
    assert not (runs / "nodes").exists(), "the code is copied by run() only, or by whoever starts by hand"
    copy_code(job)
    outputs = [end(process) for process in [hand_start(path) for path in paths]]
    assert "[rank 0] connected" in outputs[0] and "[rank 1] connected" in outputs[1]
    for number in (0, 1):
        folder = runs / "nodes" / f"node{number}" / "jobs" / job.id / f"node{number}"
        assert json.loads((folder / "results" / f"rank{number}.json").read_text()) == {"rank": number}
    assert_gone(job.id, 1)


@pytest.mark.usefixtures("warm_torchrun")
def test_one_node_by_hand_and_the_order_of_the_nodes(write):
    """Static rendezvous: rank 0 is on the first node of the list, whatever its address."""
    started, heard = [], Heard()
    heard.when["start by hand: bash "] = lambda line: started.append(hand_start(line.partition("bash ")[2]))
    nodes = local_nodes(2)[::-1]
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=nodes, rank_order="nodes")
    result = job.run(show=heard, by_hand=["node0"])
    printed = end(started[0])
    assert result.ok and started[0].returncode == 0
    assert result.results[0] == {"rank": 0}
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(0, "node1")]
    assert "[rank 1] connected" in printed
    assert any(line.startswith("on node0, start by hand: bash /") for line in heard.lines)


def edit(line, change):
    """Starts the script by hand after a change to it, as a learner who tries something does."""
    path = Path(line.partition("bash ")[2])
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    return hand_start(path)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            # Drill 9: other arguments, and another version of the training script.
            lambda text, other: text.replace("(ok)", "(ok --lr=0.2)").replace('"$code/script/"train.py', other),
            [
                r"arguments: \['ok'\] on node 0 .*, \['ok', '--lr=0.2'\] on node 1",
                "script: .* on node 0 .*, .* on node 1",
            ],
        ),
        (
            # Drill 8: other numbers of processes.
            lambda text, other: text.replace("--nproc-per-node=1", "--nproc-per-node=2"),
            [r"node 0 .* was told of 2 processes in all, and 3 came", r"node 1 .* was told of 2"],
        ),
        (
            # Drill 8: the script of node 0 on both.
            lambda text, other: text.replace("LAB_NODE=1", "LAB_NODE=0"),
            [r"node 0 .* and node 0 .* both run node0\.sh"],
        ),
        (
            # Drill 10: another torch and another Python.
            lambda text, other: text.replace("export PYTHONPATH=", f"export PYTHONPATH={other.rpartition('/')[0]}:"),
            [r"torch: \S+ on node 0 .*, 1\.2\.3 on node 1", r"Python: 3\.\d+ on node 0 .*, 3\.4 on node 1"],
        ),
    ],
    ids=["arguments and script", "processes", "numbers", "versions"],
)
def test_nodes_that_do_not_run_the_same(write, change, words, request):
    if not words[0].startswith("torch:"):  # which processes learn as they start
        request.getfixturevalue("warm_torchrun")
    started, heard = [], Heard()
    write("other/sitecustomize.py", VERSIONS)
    other = str(write("other/train.py", TROUBLE + "# another version\n"))
    heard.when["start by hand: bash "] = lambda line: started.append(edit(line, lambda text: change(text, other)))
    joined = []
    heard.when["all nodes joined"] = lambda line: joined.append(time.time())
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(2))
    # 5 s after the meeting, and 5 more for torchrun's own end on two cores.
    error = run_badly(job, heard, seconds=20, since=lambda: joined[0], by_hand=["node1"])
    end(started[0])
    assert error.result.failure.kind == "mismatch"
    for word in words:
        assert re.search(word, str(error)), str(error)
    assert "node0" in error.what
    assert "job.run()" in error.fix
    assert not any("connected" in line for line in heard.lines), "nothing was trained"


@pytest.mark.drill
@pytest.mark.usefixtures("warm_torchrun")
@pytest.mark.parametrize("count", [1, 3])
def test_8_a_node_that_expects_another_number_of_nodes(write, count):
    """With too few it must not train alone; with too many it waits in vain, or was there first and is found out."""
    started, begun, heard = [], [], Heard()

    def start(line):
        begun.append(time.time())  # the time to join runs from here
        started.append(edit(line, lambda text: text.replace("--nnodes=2", f"--nnodes={count}")))

    heard.when["start by hand: bash "] = start
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(2), join_timeout=8)
    error = run_badly(job, heard, seconds=8 + 5, since=lambda: begun[0], by_hand=["node1"])
    printed = end(started[0])
    if count == 3 and error.result.failure.kind == "mismatch":  # torchrun goes by what it was told that comes last
        assert re.search(r"number of nodes: 2 on node 0 .*, 3 on node 1", str(error)), str(error)
    else:
        assert (error.result.failure.kind, error.result.failure.node) == ("join", "node1"), str(error)
        assert error.what == "Not all nodes joined in time; missing: node1."
    assert "connected" not in printed and not any("connected" in line for line in heard.lines), "nothing was trained"


def test_no_key_of_the_launcher_stands_in_what_a_job_keeps(write, runs, monkeypatch):
    """The ranks of local nodes have it by their environment, as a program has that one starts by hand."""
    secret = "0123456789abcdef" * 2
    monkeypatch.setenv("WANDB_API_KEY", secret)
    text = "import os\nimport nodelaunch as launch\nlaunch.report(len(os.environ['WANDB_API_KEY']))\n"
    job = TorchrunJob(write("quiet.py", text), nodes=local_nodes(2), needs_group=False)
    assert job.run(show=False).results == (len(secret),) * 2
    kept = [path for path in runs.rglob("*") if path.is_file()]
    assert {"node0.sh", "node1.sh"} <= {path.name for path in kept}
    assert not [path for path in kept if secret.encode() in path.read_bytes()]


WAITING = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"


def test_a_started_job_runs_beside_the_caller_and_is_waited_for_or_stopped(write, tmp_path):
    enough, lines = tmp_path / "enough", []
    script = write("train.py", f"{WAITING}import nodelaunch as launch\nlaunch.report('done')")
    job = TorchrunJob(script, [enough], nodes=local_nodes(1), **PYTHON)
    running = job.start(show=lines.append)
    assert (running.id, running.folder) == (job.id, job.folder)
    with pytest.raises(TimeoutError, match=running.id):
        running.wait(0.2)
    assert find_processes(running.id, "node.supervisor")
    enough.touch()
    assert running.wait().results == ("done",) and running.wait() is running.wait()
    assert "preflight: 1 node(s) ready" in lines
    enough.unlink()
    again = job.start(show=False)
    assert again.id != running.id and again.id == job.id
    ports = {find_port(one.folder / "node0.sh") for one in (running, again)}
    assert len(ports) == 2, "what is left of one launch must not meet the next"
    again.stop()
    assert again.wait(check=False).failure.kind == "stopped"
    with pytest.raises(JobError, match="stopped"):
        again.wait()
    assert_gone(again.id, 2)


@pytest.mark.drill
def test_20_the_kernel_is_never_forked(write, monkeypatch):
    """A fork would copy what the notebook has of CUDA, its threads and its locks, which breaks in the copy."""

    def refuse(*_):
        raise AssertionError("the kernel was forked")

    for name in ("fork", "forkpty"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    (result,) = TorchrunJob(write("train.py", CUDA), nodes=local_nodes(1)).run(show=False).results
    assert result == {"initialised": False, "start": "python -m"}


def test_without_the_launcher_a_report_is_printed(tmp_path, root):
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")} | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, script, "x"], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines() == ['result: ["x"]', "done"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path, nodes: TorchrunJob(path / "a.py", nodes=nodes, files=[path / "b/a.py"]).run(),
            ["a.py", "rename"],
        ),
        (lambda path, nodes: TorchrunJob(path / "a.py", nodes=nodes).run(by_hand=["nowhere"]), ["nowhere"]),
        (lambda path, nodes: TorchrunJob(path / "a.py", nodes=nodes).run(by_hand=["node0", "node1"]), ["job.write()"]),
        (lambda path, nodes: TorchrunJob(path / "a.py", nodes=[nodes[0], nodes[0]]), ["node0", "twice"]),
        # Drill 20: a function of the notebook exists in no file that torchrun could run.
        (lambda path, nodes: TorchrunJob(lambda: None, nodes=nodes), ["function", "%%writefile"]),
        (lambda path, nodes: launch.find_log("no such job"), ["log"]),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(make, words, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    for name in ("a.py", "b/a.py"):
        (tmp_path / name).write_text("print('a')")
    nodes = local_nodes(2)
    monkeypatch.setattr("nodelaunch.backends.direct.PipeLink", None)
    with pytest.raises(LabError) as caught:
        make(tmp_path, nodes)
    assert len(caught.value.what) <= 120 and caught.value.fix
    for word in words:
        assert word in str(caught.value)


def test_the_newest_job_is_told_again(write, capsys, runs):
    """As a kernel that was started anew would: from what lies on the disk alone."""
    with pytest.raises(LabError) as caught:
        launch.last()
    assert_explains(caught.value, "No job has left a log yet")
    nodes = local_nodes(2)
    good = TorchrunJob(write("train.py", PLAIN), ["ok"], nodes=nodes, **PYTHON)
    name = good.id
    good.run(show=False, force=True)
    job = TorchrunJob(write("train.py", PLAIN), ["raise"], nodes=nodes, **PYTHON)
    bad = job.run(show=False, force=True, check=False)
    capsys.readouterr()
    launch.last()
    told = capsys.readouterr().out
    assert told.startswith(f"job {bad.folder.name}, ")
    assert "[rank 1] connected" in told and str(bad.failure) in told and f"log: {bad.folder}" in told
    assert "{" not in told.replace("\x01", ""), "none of what the launcher's programs tell each other"
    for words in ("It ended well.", "It was cut off"):
        launch.last(name)
        told = capsys.readouterr().out
        assert told.startswith(f"job {name}, ") and words in told
        (runs / "jobs" / name / "outcome.txt").unlink(missing_ok=True)
    with pytest.raises(LabError) as caught:
        launch.last("typo")
    assert_explains(caught.value, "Job typo has left no log here", f"ls {runs / 'jobs'}")
