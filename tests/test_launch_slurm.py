"""Slurm nodes: the script is readable and safe, the queue is put into words, jobs run as elsewhere, nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import PLAIN, PYTHON, TROUBLE, Heard, assert_gone, check_error, list_processes, run_badly, wait_for

from lab_common import LabError
from nodelaunch import JobError, TorchrunJob, local_nodes
from nodelaunch.backends import slurm as slurm_backend
from nodelaunch.backends.sbatch import write_sbatch
from nodelaunch.backends.slurm import (
    SlurmLink,
    describe_queue,
    slurm_nodes,
    start,
    submit,
)
from nodelaunch.script import place_nodes
from nodelaunch.spec import JobSpec, Launch

HOSTILE = [
    "two words",
    "it's",
    '"q"',
    "; touch injected",
    "$(touch injected)",
    "`touch injected`",
    "a\nb",
    "✔ ü",
    "-x",
    "",
]
SCRIPT = """import os, sys, torch.distributed as dist
import nodelaunch as launch
dist.init_process_group("gloo")
launch.report({"rank": dist.get_rank(), "size": dist.get_world_size(), "args": sys.argv[1:], "value": os.environ["ODD"],
        "node": os.environ["LAB_NODE"], "cwd": os.getcwd(), "interface": os.environ["GLOO_SOCKET_IFNAME"]})
dist.barrier()  # or one rank may be gone while the other still connects
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Planned:
    """A job as it is before it is launched, and its batch script."""

    spec: JobSpec
    launch: Launch

    @property
    def place(self):
        return place_nodes(self.spec, self.launch, "abc", None)[0]

    @property
    def folder(self):
        return Path(self.place.job_folder)

    def change(self, **options):
        return replace(self, spec=replace(self.spec, **options))

    def write(self):
        return write_sbatch(self.spec, self.launch, self.place)


@pytest.fixture
def plan(tmp_path, root):
    """A job of two nodes in folders with hostile names, which passes hostile arguments."""
    base = tmp_path / "it's $(touch injected) ü"
    code = base / "code" / "abc"
    (code / "script").mkdir(parents=True)
    for name in ("lab_common", "nodelaunch"):
        (code / name).symlink_to(root / name)
    (code / "script" / "my train.py").write_text(SCRIPT)
    env = {"ODD": "$HOME 'x'\n#SBATCH --nodes=99", "OMP_NUM_THREADS": 1}
    # torchrun reads whole seconds of the time to join.
    spec = JobSpec("my train.py", HOSTILE, slurm_nodes(2, folder=base), join_timeout=62.5, env=env)
    return Planned(spec, Launch(f"slurm-test-{os.getpid()}", "5ec2e7", base))


def write_trivial(folder, body, *options):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.sbatch"
    requests = "".join(f"#SBATCH {option}\n" for option in ("--nodes=2", "--output=slurm-%j.out", *options))
    path.write_text(f"#!/bin/bash\n{requests}{body}\n")
    return path


def wait_state(job, *states, seconds=30):
    end = time.monotonic() + seconds
    while (state := slurm_backend.look_up(job)["JobState"]) not in states:
        assert time.monotonic() < end, f"{state}, not {states}"
        time.sleep(0.1)


def test_the_script_is_bash_in_which_every_request_has_a_comment(plan, tmp_path):
    text = plan.write()
    done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    requests = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [line for line in requests if not re.fullmatch(r"#SBATCH --\S+ +# .+", line)] == ["#SBATCH --nodes=99'"], (
        "the last is data, within quotes"
    )
    before, _, after = text.partition("\nexport LAB_JOB_ROOT=")
    assert "--nodes=2 " in before and "99" not in before
    assert "#SBATCH --nodes=99" in after, "sbatch reads no requests after the first command"
    assert max(len(line) for line in text.splitlines() if "/" + tmp_path.name not in line) <= 120


def test_the_request_is_written(plan):
    extra = ["--gpus-per-node=h100:2", "--account=course"]
    nodes = slurm_nodes(3, partition="gpu", time_limit="1-02:00:00", extra=extra, interface="ib0")
    text = plan.change(nodes=nodes, port=29511, nproc_per_node=2).write()
    for option in ("nodes=3", "partition=gpu", "time=1-02:00:00", "gpus-per-node=h100:2", "account=course"):
        assert re.search(rf"^#SBATCH --{option} +# ", text, re.MULTILINE)
    for words in ("GLOO_SOCKET_IFNAME=ib0", ":29511", "--nproc-per-node=2", "LAB_WORLD_SIZE=6", "is_host="):
        assert words in text
    assert "--master-addr" not in text
    static = plan.change(rank_order="nodes").write()
    assert "--master-addr" in static and "--rdzv-conf=is_host" not in static


@pytest.mark.parametrize(
    "wish",
    [
        {"partition": "a b"},
        {"partition": "a\n#SBATCH --x"},
        {"partition": ""},
        {"time_limit": "soon"},
        {"time_limit": "1:00\nx"},
        {"extra": ["--gres gpu"]},
        {"extra": ["-p", "x"]},
        {"extra": ["--comment='x'"]},
        {"extra": ["--wrap=$(id)"]},
        {"extra": ["--x=1\nrm"]},
        {"count": 0},
    ],
    ids=str,
)
def test_what_no_quotes_can_protect_is_refused(wish):
    with pytest.raises(LabError) as caught:
        slurm_nodes(wish.pop("count", 2), **wish)
    assert caught.value.fix and "\n" not in caught.value.what


def test_nodes_ask_nothing_and_run_helpers_here(monkeypatch, tmp_path):
    monkeypatch.setenv("LAB_RUNS", str(tmp_path))
    monkeypatch.setattr(slurm_backend, "_ask", None)
    nodes = slurm_nodes(2)
    assert [node.name for node in nodes] == ["slurm0", "slurm1"]
    assert nodes[0].request is nodes[1].request
    assert nodes[0].folder == str(tmp_path / "slurm")
    out, _ = nodes[0].popen([nodes[0].python, "-c", "print(input())"]).communicate(b"x y\n", timeout=30)
    assert out == b"x y\n"


def test_a_machine_without_slurm_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        submit(write_trivial(tmp_path, ""))
    assert_explains(caught.value, "sbatch", "login node", "local_nodes")


def test_what_slurm_refuses_is_explained(slurm, tmp_path):
    path = write_trivial(tmp_path, "true", "--partition=none")
    with pytest.raises(LabError) as caught:
        submit(path)
    assert_explains(caught.value, "partition", str(path), "sinfo")
    assert describe_queue(999999) == "Slurm job 999999: GONE"


def test_a_notebook_inside_a_job_submits_another_one(slurm, tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SECRET_FREE", "kept")
    body = "srun --ntasks-per-node=1 bash -c 'echo $SLURM_NNODES $SECRET_FREE ${LAB_LEASE:-none}'"
    job = submit(write_trivial(tmp_path, body, "--ntasks-per-node=1"))
    wait_state(job, *slurm_backend.OVER)
    assert (tmp_path / f"slurm-{job}.out").read_text() == "2 kept none\n" * 2
    slurm.wait_empty()


def submit_plan(plan, *, say):
    """Starts a job as its launcher does: the script lies in the job's folder already."""
    plan.folder.mkdir(parents=True)
    (plan.folder / "job.sbatch").write_text(plan.change(limit=600).write())
    return list(start(plan.spec, plan.launch, [plan.place], say=say, stop=threading.Event()).values())


def read_all(links):
    """Returns the lines that the links yield until they end, by node."""
    got = {link.node: [] for link in links}
    readers = [threading.Thread(target=lambda link=link: got[link.node].extend(link.lines())) for link in links]
    for reader in readers:
        reader.start()
    return got, readers


@pytest.mark.drill
@pytest.mark.parametrize("order", ["address", "nodes"])
def test_torchrun_runs_on_both_nodes_with_hostile_names_and_arguments(slurm, plan, order, survivors):
    nodes, said = plan.spec.nodes, []
    links = submit_plan(plan.change(rank_order=order), say=said.append)
    assert said[-1].endswith("RUNNING on c[1-2]")
    got, readers = read_all(links)
    end = time.monotonic() + 120
    while any(reader.is_alive() for reader in readers) and time.monotonic() < end:
        links[0].beat()
        time.sleep(0.2)
    assert [link.poll() for link in links] == [0, 0], got
    assert [link.explain() for link in links] == [None, None]
    values = {}
    for node, lines in got.items():
        events = [json.loads(line[1:]) for line in lines if line.startswith(b"\x1e")]
        assert events[-1]["event"] == "ended" and events[-1]["returncode"] == 0
        (values[node],) = (event["value"] for event in events if event["event"] == "result")
    assert sorted(value["rank"] for value in values.values()) == [0, 1]
    for index, node in enumerate(nodes):
        value = values[node.name]
        assert value["args"] == HOSTILE
        assert value["value"] == plan.spec.env["ODD"]
        assert (value["size"], value["node"], value["cwd"]) == (2, str(index), f"{node.folder}/work")
        assert value["interface"] == "lo"
        assert order == "address" or value["rank"] == index
    assert not list(Path(nodes[0].folder).rglob("injected"))
    slurm.wait_empty()
    assert survivors(plan.launch.id) == []


def test_by_hand_the_same_script_needs_no_launcher(slurm, plan, tmp_path):
    folder = plan.folder
    folder.mkdir(parents=True)
    (folder / "job.sbatch").write_text(plan.write())
    by_hand = subprocess.run(["sbatch", "--parsable", "job.sbatch"], cwd=folder, capture_output=True, text=True)
    job = int(by_hand.stdout)
    wait_state(job, *slurm_backend.OVER, seconds=120)
    output = (folder / f"slurm-{job}.out").read_text()
    assert slurm_backend.look_up(job)["JobState"] == "COMPLETED", output
    assert sorted(path.name for path in folder.glob("node*/results/*")) == ["rank0.json", "rank1.json"]
    assert not list(folder.glob("node*.out"))
    slurm.wait_empty()


@pytest.mark.parametrize("order", ["address", "nodes"])
def test_on_two_hosts_each_finds_its_own_address_whatever_its_name_stands_for(hosts, plan, tmp_path, order):
    """The part of each node on two real-looking hosts; only scontrol and torchrun are stood in for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        "#!/bin/sh\n[ $2 = node ] && echo NodeName=$3 NodeAddr=$3 X=1 || printf 'n1\\nn2\\n'\n"
    )
    shown = 'import json, os, sys; print(json.dumps([os.environ["GLOO_SOCKET_IFNAME"], sys.argv[1:]]))'
    (tools / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{shown}' \"$@\"\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    nodes = slurm_nodes(2, folder=plan.spec.nodes[0].folder, python=str(tools / "python"))
    text = plan.change(nodes=nodes, rank_order=order).write()
    # In place of srun: the same command, on each host in turn.
    (tmp_path / "job.sbatch").write_text(
        text.partition("exec srun")[0] + 'bash -c "$(declare -f find_address find_place run_node); run_node"'
    )
    for index, node in enumerate(("n1", "n2")):
        hosts.set_hosts(node, f"127.0.0.1 localhost\n127.0.1.1 {node}\n{hosts.hosts_text}")
        slurm = {"SLURM_NODEID": index, "SLURM_NNODES": 2, "SLURM_JOB_ID": 12345, "SLURM_JOB_NODELIST": "n[1-2]"}
        env = ["env", f"PATH={tools}:{os.environ['PATH']}", *(f"{key}={value}" for key, value in slurm.items())]
        interface, argv = json.loads(hosts.run_on(node, [*env, "bash", str(tmp_path / "job.sbatch")]))
        assert interface == "eth0"
        assert f"--local-addr={hosts.address(node)}" in argv
        assert argv[-len(HOSTILE) :] == HOSTILE
        head = hosts.address("n1")
        if order == "address":
            assert f"--rdzv-endpoint={head}:22345" in argv
            assert f"--rdzv-conf=is_host={int(index == 0)},join_timeout=63,read_timeout=30" in argv
        else:
            assert {f"--master-addr={head}", "--master-port=22345", f"--node-rank={index}"} <= set(argv)


def test_a_job_that_slurm_ends_is_explained(slurm, tmp_path):
    body = "echo Something broke >&2; exit 3"
    job = slurm_backend.SlurmJob(submit(write_trivial(tmp_path, body)), tmp_path)
    link = SlurmLink("slurm0", 0, job)
    wait_state(job.number, "FAILED")
    time.sleep(slurm_backend.LOOK_SECONDS)
    assert link.poll() == 3
    assert_explains(link.explain(), "FAILED", "Something broke", "scontrol show job")
    assert str(tmp_path / f"slurm-{job.number}.out") in str(link.explain())


# The same job object as for any other nodes.

SAME = """
import os, sys
import torch, torch.distributed as dist
import helper
import nodelaunch as launch
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0], dtype=torch.float64)
dist.all_reduce(total)
print("hello from", dist.get_rank())
launch.report({"total": total.item(), "args": sys.argv[1:], "value": os.environ["ODD"], "helper": helper.VALUE,
               "rank": dist.get_rank(), "local_rank": int(os.environ["LOCAL_RANK"]), "node": os.environ["LAB_NODE"],
               "threads": os.environ["OMP_NUM_THREADS"], "scale": os.environ.get("LAB_SCALE")})
dist.destroy_process_group()
"""
# Runs a job and says its id, in a process that can be ended.
LAUNCHER = """
import sys
import nodelaunch as launch
job = launch.TorchrunJob(sys.argv[1], ["loop"], nodes=launch.slurm_nodes(2, extra=sys.argv[2:]), program=["python"])
print("id", job.id, flush=True)
try:
    job.run()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A script that fails as told, and folders of this test's own."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "train.py"
    path.write_text(TROUBLE)
    return path


@pytest.fixture
def launcher(train, root):
    """Starts a launcher in a process and session of its own, as a kernel; it says the job's id first."""
    started = []
    train.write_text(PLAIN)

    def run(*extra):
        process = subprocess.Popen(
            [sys.executable, "-uc", LAUNCHER, str(train), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        started.append(process)
        job_id = process.stdout.readline().removeprefix("id ").strip()
        assert job_id
        return process, job_id

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_line(process, part):
    for line in process.stdout:
        if part in line:
            return line
    raise AssertionError(f"{part!r} was not printed")


@pytest.mark.drill
def test_the_same_job_has_the_same_result_as_on_this_machine(slurm, train, tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_SCALE", "small")
    train.write_text(SAME)
    (tmp_path / "helper.py").write_text("VALUE = 42")
    heard, results = Heard(), {}
    for where, nodes in {"here": local_nodes(2), "slurm": slurm_nodes(2)}.items():
        options = {"nproc_per_node": 2, "env": {"ODD": "$HOME 'x'"}, "files": [tmp_path / "helper.py"]}
        job = TorchrunJob(train, HOSTILE, nodes=nodes, **options)
        job_id = job.id
        results[where] = job.run(show=heard if where == "slurm" else False, force=where == "here")
        assert results[where].ok and results[where].failure is None
        assert job._prepare().id != job_id
    # The two nodes of this Slurm have one address, so that either may have the first ranks.
    same = [[{**value, "node": None} for value in results[where].results] for where in ("here", "slurm")]
    assert same[0] == same[1]
    assert [value["total"] for value in results["slurm"].results] == [10.0] * 4
    assert results["slurm"].results[0]["args"] == HOSTILE
    ranks = results["slurm"].ranks
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.local_rank for rank in ranks] == [0, 1, 0, 1]
    assert [rank.node for rank in ranks] == [f"slurm{value['node']}" for value in results["slurm"].results]
    assert {rank.node for rank in ranks} == {"slurm0", "slurm1"}
    assert len({rank.pid for rank in ranks}) == 4
    assert {f"[rank {rank}] hello from {rank}" for rank in range(4)} <= set(heard.lines)
    shown = [line for line in heard.lines if line.startswith("Slurm job ")]
    assert shown and shown[-1].endswith("RUNNING on c[1-2]")
    assert "preflight: 2 node(s) ready" in heard.lines
    assert (results["slurm"].folder / "output.log").stat().st_size > 0
    slurm.wait_empty()
    assert not list(list_processes(job_id))


@pytest.mark.drill
def test_write_leaves_the_one_script_that_runs(slurm, train):
    job = TorchrunJob(train, ["ok"], nodes=slurm_nodes(2))
    (path,) = job.write()
    assert path == job.folder / "job.sbatch"
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert "#SBATCH --nodes=2 " in path.read_text()
    assert slurm.list_jobs() == [], "nothing was asked of Slurm"


@pytest.mark.drill
@pytest.mark.parametrize(
    ("mode", "kind", "words", "seconds"),
    [
        ("raise", "exception", ["ValueError: bad luck in batch 7", "train.py"], 15),
        ("kill", "signal", ["killed by signal 9", "memory"], 15),
    ],
)
def test_the_rank_that_failed_first_is_named(slurm, train, mode, kind, words, seconds):
    error = run_badly(TorchrunJob(train, [mode], nodes=slurm_nodes(2)), Heard(), seconds=seconds)
    failure = error.result.failure
    assert (failure.kind, failure.rank) == (kind, 1)
    (rank,) = [rank for rank in error.result.ranks if rank.rank == 1]
    assert failure.node == rank.node and failure.node in error.what
    for word in words:
        assert word in str(error)
    slurm.wait_empty()


@pytest.mark.drill
def test_a_job_is_stopped_from_another_thread(slurm, train):
    job = TorchrunJob(train, ["loop"], nodes=slurm_nodes(2))
    job_id, begun = job.id, []

    def stop(line):
        begun.append(time.monotonic())
        job.stop()

    with pytest.raises(JobError) as caught:
        job.run(show=Heard({"[rank 0] connected": stop}))
    assert time.monotonic() - begun[0] < 10
    assert caught.value.result.failure.kind == "stopped"
    check_error(caught.value)
    assert_gone(job_id, 5)
    slurm.wait_empty(10)


@pytest.mark.drill
def test_a_job_is_stopped_while_it_waits_in_the_queue(slurm, train):
    job = TorchrunJob(train, ["ok"], nodes=slurm_nodes(2, extra=["--begin=now+600"]))
    begun = []

    def stop(line):
        begun.append(time.monotonic())
        job.stop()

    result = job.run(check=False, show=Heard({"PENDING (BeginTime)": stop}))
    assert time.monotonic() - begun[0] < 10
    assert result.failure.kind == "stopped"
    slurm.wait_empty(10)


@pytest.mark.drill
@pytest.mark.parametrize("moment", ["waiting", "running"])
def test_an_interrupted_cell_leaves_no_process_and_an_empty_queue(slurm, launcher, moment):
    process, job_id = launcher(*(["--begin=now+600"] if moment == "waiting" else []))
    wait_line(process, "PENDING (BeginTime)" if moment == "waiting" else "[rank 1] connected")
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    wait_line(process, "interrupted")
    assert time.monotonic() - begun < 5, "the prompt is back"
    assert process.wait(10) == 0
    assert_gone(job_id, 10)
    slurm.wait_empty(10)


@pytest.mark.drill
def test_a_launcher_that_is_killed_leaves_nothing(slurm, launcher):
    process, job_id = launcher()
    wait_line(process, "[rank 1] connected")
    wait_for(lambda: len(list(list_processes(job_id))) >= 6)
    os.killpg(process.pid, signal.SIGKILL)
    assert_gone(job_id, 10)
    slurm.wait_empty(10)


@pytest.mark.drill
def test_what_slurm_does_not_have_is_red_before_anything_is_handed_over(slurm, train):
    for nodes, words in (
        (slurm_nodes(2, partition="gpu"), ["0 node(s) in service", "partitions: none"]),
        (slurm_nodes(3), ["2 node(s) in service", "3 asked for", "partitions: lab"]),
    ):
        job = TorchrunJob(train, ["ok"], nodes=nodes)
        found = job.preflight()
        assert [verdict.state for verdict in found.verdicts] == ["red"] and found.seconds < 10
        for word in words:
            assert word in found.reds[0].found
        with pytest.raises(LabError) as caught:
            job.run(show=False)
        assert_explains(caught.value, *words, "sinfo")
        assert not isinstance(caught.value, JobError)
    assert slurm.list_jobs() == []


@pytest.mark.drill
def test_a_busy_cluster_is_a_note_and_the_job_shows_its_place_in_the_queue(slurm, train, tmp_path):
    train.write_text("import time; time.sleep(3)\n" + PLAIN)  # its state is asked for every other second only
    other = submit(write_trivial(tmp_path / "other", "sleep 600", "--ntasks-per-node=2", "--exclusive"))
    wait_state(other, "RUNNING")
    job = TorchrunJob(train, ["ok"], nodes=slurm_nodes(2), **PYTHON)
    (verdict,) = job.preflight().verdicts
    assert (verdict.state, "0 of them idle" in verdict.found) == ("note", True)
    heard = Heard({"PENDING (Resources)": lambda line: subprocess.run(["scancel", str(other)])})
    assert job.run(show=heard).ok
    states = [line for line in heard.lines if line.startswith("Slurm job ")]
    assert "PENDING" in states[0] and any(line.endswith("RUNNING on c[1-2]") for line in states)
    assert len(states) == len(set(states)), "each state is said once"
    slurm.wait_empty()


@pytest.mark.drill
def test_code_that_was_changed_in_the_shared_folder_is_red_and_nothing_is_handed_over(slurm, train):
    nodes = slurm_nodes(2)
    train.write_text(PLAIN)
    job = TorchrunJob(train, ["ok"], nodes=nodes, **PYTHON)
    assert job.run(show=False).ok
    (folder,) = Path(nodes[0].folder, "code").iterdir()
    (folder / "lab_common" / "text.py").write_text("")
    with pytest.raises(LabError) as caught:
        job.run(show=False)
    assert_explains(caught.value, "is not what its name says", f"rm -r -- {folder}")
    assert slurm.list_jobs() == []
    slurm.wait_empty()


@pytest.mark.drill
def test_a_part_of_the_nodes_that_were_asked_for_is_a_job_of_its_own(slurm, train):
    """As in lab 5, which runs on the first of its two nodes what it then runs on both."""
    train.write_text("import os; import nodelaunch as launch; launch.report(os.environ['WORLD_SIZE'])")
    job = TorchrunJob(train, nodes=slurm_nodes(2)[:1], **PYTHON)
    assert "#SBATCH --nodes=1 " in job.write()[0].read_text()
    assert job.run(show=False).results == ("1",)
    slurm.wait_empty()
