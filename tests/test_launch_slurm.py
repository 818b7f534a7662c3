"""Slurm nodes: the script is readable and safe, the queue is put into words, jobs run as elsewhere, nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from harness.drawn import assert_explains
from harness.jobs import (
    HOSTILE,
    PLAIN,
    PYTHON,
    TROUBLE,
    Heard,
    Launcher,
    assert_gone,
    copy_code,
    list_processes,
    wait_for,
)

from lab_common import LabError
from nodelaunch import JobError, TorchrunJob, local_nodes
from nodelaunch.backends.slurm import SlurmJob, SlurmLink, slurm_nodes, submit

ENV = {"ODD": "$HOME 'x'\n#SBATCH --nodes=99"}
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
               "threads": os.environ["OMP_NUM_THREADS"], "scale": os.environ.get("LAB_SCALE"),
               "interface": os.environ["GLOO_SOCKET_IFNAME"]})
dist.destroy_process_group()
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A script that fails as told, and folders of this test's own."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "my train.py"
    path.write_text(TROUBLE)
    return path


@pytest.fixture
def folder(tmp_path):
    """A shared folder with a hostile name."""
    return tmp_path / "it's $(touch canary) ü"


@pytest.fixture
def start_launcher(train, tmp_path):
    started = []
    train.write_text(PLAIN)

    def start(*extra):
        nodes = f"slurm_nodes(2, extra={list(extra)})"
        started.append(Launcher(tmp_path, train, ["loop"], nodes, program=["python"]))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()


@pytest.mark.parametrize("order", ["address", "nodes"])
def test_the_script_is_bash_in_which_every_request_has_a_comment(train, folder, order):
    extra = ["--gpus-per-node=h100:2", "--account=course"]
    nodes = slurm_nodes(3, partition="gpu", time_limit="1-02:00:00", folder=folder, extra=extra, interface="ib0")
    job = TorchrunJob(train, HOSTILE, nodes, env=ENV, port=29511, nproc_per_node=2, rank_order=order)
    (path,) = job.write()
    assert path == job.folder / "job.sbatch"
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    text = path.read_text()
    requests = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [line for line in requests if not re.fullmatch(r"#SBATCH --\S+ +# .+", line)] == ["#SBATCH --nodes=99'"], (
        "the last is data, within quotes"
    )
    before, _, after = text.partition("\nexport LAB_JOB_ROOT=")
    assert "#SBATCH --nodes=99" in after and "nodes=99" not in before, "after a command sbatch reads no requests"
    for option in ("nodes=3", "partition=gpu", "time=1-02:00:00", "gpus-per-node=h100:2", "account=course"):
        assert re.search(rf"^#SBATCH --{option} +# ", before, re.MULTILINE)
    for words in ("GLOO_SOCKET_IFNAME=ib0", "29511", "--nproc-per-node=2", "LAB_WORLD_SIZE=6"):
        assert words in after
    assert ("--master-addr" in after, "--rdzv-conf=is_host" in after) == (order == "nodes", order == "address")
    # As in lab 5, which runs on the first of its nodes what it then runs on all.
    assert "#SBATCH --nodes=1 " in TorchrunJob(train, nodes=nodes[:1]).write()[0].read_text()


@pytest.mark.parametrize(
    "wish",
    [{"partition": "a\n#SBATCH --x"}, {"time_limit": "1 h"}, {"extra": ["--wrap=$(id)"]}],
)
def test_what_no_quotes_can_protect_is_refused(wish):
    with pytest.raises(LabError) as caught:
        slurm_nodes(2, **wish)
    assert_explains(caught.value, "is not one option of sbatch", "extra=[")
    assert "\n" not in caught.value.what


def test_a_machine_without_slurm_is_explained(train, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        TorchrunJob(train, ["ok"], nodes=slurm_nodes(2)).run(show=False)
    assert_explains(caught.value, "sbatch", "login node", "local_nodes")


def test_a_controller_that_is_away_for_a_moment_leaves_the_job_s_state_unknown(monkeypatch, tmp_path):
    def ask(*args, **options):
        raise subprocess.TimeoutExpired(args, 60)

    monkeypatch.setattr(subprocess, "run", ask)
    job = SlurmJob(12, tmp_path)
    assert job.describe() == "Slurm job 12: UNKNOWN" and not job.is_over


@pytest.mark.parametrize("order", ["address", "nodes"])
def test_on_two_hosts_each_finds_its_own_address_whatever_its_name_stands_for(hosts, train, folder, tmp_path, order):
    """The part of each node on two real-looking hosts; only scontrol and torchrun are stood in for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(
        "#!/bin/sh\n[ $2 = node ] && echo NodeName=$3 NodeAddr=$3 X=1 || printf 'n1\\nn2\\n'\n"
    )
    names = '[os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]'
    shown = f"import json, os, sys; print(json.dumps({names} + sys.argv[1:]))"
    (tools / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{shown}' \"$@\"\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    nodes = slurm_nodes(2, folder=folder, python=str(tools / "python"))
    # torchrun reads whole seconds of the time to join.
    (path,) = TorchrunJob(train, HOSTILE, nodes, rank_order=order, join_timeout=62.5).write()
    # In place of srun: the same command, on each host in turn.
    (tmp_path / "job.sbatch").write_text(
        path.read_text().partition("exec srun")[0]
        + 'bash -c "$(declare -f find_address find_place run_node); run_node"'
    )
    for index, node in enumerate(("n1", "n2")):
        hosts.set_hosts(node, f"127.0.0.1 localhost\n127.0.1.1 {node}\n{hosts.hosts_text}")
        slurm = {"SLURM_NODEID": index, "SLURM_NNODES": 2, "SLURM_JOB_ID": 12345, "SLURM_JOB_NODELIST": "n[1-2]"}
        env = ["env", f"PATH={tools}:{os.environ['PATH']}", *(f"{key}={value}" for key, value in slurm.items())]
        gloo, nccl, *argv = json.loads(hosts.run_on(node, [*env, "bash", str(tmp_path / "job.sbatch")]))
        assert (gloo, nccl) == ("eth0", "=eth0"), "to NCCL eth1 is also the beginning of eth10"
        assert f"--local-addr={hosts.address(node)}" in argv
        assert argv[-len(HOSTILE) :] == HOSTILE
        head = hosts.address("n1")
        if order == "address":
            assert f"--rdzv-endpoint={head}:22345" in argv
            assert f"--rdzv-conf=is_host={int(index == 0)},join_timeout=63,read_timeout=30" in argv
        else:
            assert {f"--master-addr={head}", "--master-port=22345", f"--node-rank={index}"} <= set(argv)


@pytest.mark.drill
def test_the_same_job_has_the_same_result_as_on_this_machine(slurm, train, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_SCALE", "small")
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"):
        monkeypatch.setenv(name, "1")  # as in a notebook that runs in a job of Slurm
    train.write_text(SAME)
    (tmp_path / "helper.py").write_text("VALUE = 42")
    heard, results = Heard(), {}
    for where, nodes in {"here": local_nodes(2), "slurm": slurm_nodes(2, folder=folder)}.items():
        job = TorchrunJob(train, HOSTILE, nodes, nproc_per_node=2, env=ENV, files=[tmp_path / "helper.py"])
        job_id = job.id
        results[where] = job.run(show=heard if where == "slurm" else False, force=where == "here")
        assert results[where].ok and results[where].failure is None
        assert job._renew_launch().id != job_id
    # The two nodes of this Slurm have one address, so that either may have the first ranks.
    same = [[{**value, "node": None} for value in results[where].results] for where in ("here", "slurm")]
    assert same[0] == same[1]
    assert [value["total"] for value in results["slurm"].results] == [10.0] * 4
    assert results["slurm"].results[0]["args"] == HOSTILE
    assert results["slurm"].results[0]["value"] == ENV["ODD"]
    assert not list(tmp_path.rglob("canary"))
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
    wait_for(lambda: not slurm.list_jobs(), 20)
    assert not list(list_processes(job_id))


def test_by_hand_the_same_script_needs_no_launcher(slurm, train, folder):
    job = TorchrunJob(train, ["ok"], slurm_nodes(2, folder=folder), rank_order="nodes")
    job.write()
    assert slurm.list_jobs() == [], "nothing was asked of Slurm"
    copy_code(job)
    there = folder / "jobs" / job.id
    done = subprocess.run(["sbatch", "--parsable", "job.sbatch"], cwd=there, capture_output=True, text=True)
    by_hand = SlurmJob(int(done.stdout), there)
    wait_for(lambda: by_hand.is_over)
    assert by_hand.facts["JobState"] == "COMPLETED", (there / f"slurm-{by_hand.number}.out").read_text()
    assert sorted(str(path.relative_to(there)) for path in there.glob("node*/results/*")) == [
        "node0/results/rank0.json",
        "node1/results/rank1.json",
    ]
    assert not list(there.glob("node*.out"))
    wait_for(lambda: not slurm.list_jobs(), 20)


def test_a_job_that_slurm_ends_is_explained(slurm, tmp_path):
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n#SBATCH --output=slurm-%j.out\necho Something broke >&2\nexit 3\n")
    job = submit(tmp_path)
    wait_for(lambda: job.facts["JobState"] == "FAILED", 30)
    link = SlurmLink(0, job)
    assert link.poll() == 1
    assert_explains(link.explain(), "FAILED", "Something broke", "scontrol show job", f"slurm-{job.number}.out")


@pytest.mark.drill
@pytest.mark.parametrize("moment", ["waiting", "running"])
def test_an_interrupted_cell_leaves_no_process_and_an_empty_queue(slurm, start_launcher, moment):
    launcher = start_launcher(*(["--begin=now+600"] if moment == "waiting" else []))
    launcher.wait_for("PENDING (BeginTime)" if moment == "waiting" else "[rank 1] connected")
    begun = time.monotonic()
    os.killpg(launcher.process.pid, signal.SIGINT)
    launcher.process.wait(10)
    assert time.monotonic() - begun < 5, "the prompt is back"
    assert launcher.output.read_text().rstrip().endswith("KeyboardInterrupt")
    assert_gone(launcher.job_id, 10)
    wait_for(lambda: not slurm.list_jobs(), 10)


@pytest.mark.drill
def test_a_launcher_that_is_killed_leaves_nothing(slurm, start_launcher):
    launcher = start_launcher()
    launcher.wait_for("[rank 1] connected")
    wait_for(lambda: len(list(list_processes(launcher.job_id))) >= 6)
    os.killpg(launcher.process.pid, signal.SIGKILL)
    assert_gone(launcher.job_id, 10)
    wait_for(lambda: not slurm.list_jobs(), 10)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("count", "options"), [(2, {"partition": "gpu"}), (3, {}), (2, {"time_limit": "soon"})], ids=str
)
def test_what_slurm_does_not_take_is_red_before_anything_is_handed_over(slurm, train, count, options):
    job = TorchrunJob(train, ["ok"], nodes=slurm_nodes(count, **options))
    found = job.preflight()
    assert [verdict.state for verdict in found.verdicts] == ["red"] and found.seconds < 10
    assert found.verdicts[0].found, "Slurm's own words"
    with pytest.raises(LabError) as caught:
        job.run(show=False)
    assert_explains(caught.value, "queue", "sinfo")
    assert not isinstance(caught.value, JobError) and slurm.list_jobs() == []


@pytest.mark.drill
def test_on_a_busy_cluster_the_job_shows_its_place_in_the_queue(slurm, train):
    train.write_text("import time; time.sleep(3)\n" + PLAIN)  # its state is asked for every other second only
    other = slurm.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    wait_for(lambda: slurm.run("squeue", "--noheader", "--format=%T").strip() == "RUNNING", 30)
    job = TorchrunJob(train, ["ok"], nodes=slurm_nodes(2), **PYTHON)
    (verdict,) = job.preflight().verdicts
    assert verdict.state == "ok" and "to start at" in verdict.found, verdict
    heard = Heard({"PENDING (Resources)": lambda line: slurm.run("scancel", other.strip())})
    assert job.run(show=heard).ok
    states = [line for line in heard.lines if line.startswith("Slurm job ")]
    assert "PENDING" in states[0] and any(line.endswith("RUNNING on c[1-2]") for line in states)
    assert len(states) == len(set(states)), "each state is said once"
    wait_for(lambda: not slurm.list_jobs(), 20)
