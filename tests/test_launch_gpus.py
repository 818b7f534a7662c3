"""The launcher on machines with GPUs, each of them pretended: which are used, one backend for all, and who waited."""

import os
import re
import shlex
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
from harness.jobs import TROUBLE, Heard, OddNode, run_badly

from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.failure import diagnose

pytestmark = pytest.mark.usefixtures("runs")
HIDDEN = "export CUDA_VISIBLE_DEVICES=''"
NO_GPU = "not every process has a GPU: all of them will use the CPU and gloo"


@dataclass(frozen=True)
class Far(OddNode):
    """A node that is taken for a machine of its own."""

    here: ClassVar[bool] = False


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Makes the environment of a machine with so many GPUs, a driver, and a torch for a version of CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(gpus, *, driver="580.65.06", cuda="13.0", status=0):
        folder = tmp_path / f"machine{len([*tmp_path.glob('machine*')])}"
        (folder / "torch").mkdir(parents=True)
        (folder / "torch" / "__init__.py").touch()
        (folder / "torch" / "version.py").write_text(f"__version__ = '2.14.1'\ncuda = {cuda!r}\n")
        rows = "".join(f"{index}, Tesla T4, 10, 15360, {driver}\n" for index in range(gpus))
        # It says nothing that it is not asked for.
        program = f"case $1 in --query-gpu=*driver_version*) printf %s {shlex.quote(rows)};; esac; exit {status}"
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (folder / "nvidia-smi").chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}

    return make


def make_nodes(kind, *machines):
    """One node on each of the pretended machines."""
    return [kind(**vars(node), env=env) for node, env in zip(local_nodes(len(machines)), machines, strict=True)]


def look(write, nodes, **options):
    """Returns the preflight's verdicts on the GPUs, and the scripts of the nodes after it."""
    job = TorchrunJob(write("train.py", "print(1)"), nodes=nodes, **options)
    found = job.preflight()
    return found, [v for v in found.verdicts if v.check == "GPUs"], [path.read_text() for path in job.write()]


def test_one_gpu_for_two_nodes_is_said_to_be_none_and_what_works_is_offered(write, pretend):
    """Both nodes get CUDA_VISIBLE_DEVICES="", so that a preflight that says "1 × Tesla T4, free" is untrue."""
    machine = pretend(1)
    found, (verdict,), scripts = look(write, make_nodes(OddNode, machine, machine))
    assert found.ok and found.hide_gpus and (verdict.node, verdict.state) == ("node0, node1", "note")
    shared = "1 × Tesla T4, shared by 2 nodes"
    assert verdict.found == f"{NO_GPU}\n  node0  {shared}\n  node1  {shared}"
    assert verdict.fix == "nodes=local_nodes(1); or run it as it is, on the CPU"
    assert "free" not in verdict.found and all(HIDDEN in script for script in scripts)
    found, (verdict,), scripts = look(write, make_nodes(OddNode, machine))
    assert (verdict.state, verdict.found, found.hide_gpus) == ("ok", "1 × Tesla T4, free", False)
    assert HIDDEN not in scripts[0]


@pytest.mark.parametrize(
    ("kind", "gpus", "processes", "fix"),
    [
        (OddNode, (2, 2, 2), 2, "nodes=local_nodes(2), nproc_per_node=1"),
        (Far, (2, 1), 2, "nproc_per_node=1"),  # LOCAL_RANK 1 would take the missing cuda:1
    ],
)
def test_what_is_offered_gives_each_process_a_gpu(write, pretend, kind, gpus, processes, fix):
    machines = [pretend(count) for count in gpus] if kind is Far else [pretend(gpus[0])] * len(gpus)
    found, (verdict,), scripts = look(write, make_nodes(kind, *machines), nproc_per_node=processes)
    assert found.hide_gpus and verdict.found.startswith(NO_GPU)
    assert verdict.fix == f"{fix}; or run it as it is, on the CPU"
    assert all(HIDDEN in script for script in scripts)


@pytest.mark.parametrize(
    ("other", "words", "cause", "fix"),
    [
        ({"gpus": 0}, "no GPU", "same backend", "leave node1 out of nodes="),
        (
            {"gpus": 1, "driver": "535.104.05"},
            "1 × Tesla T4, which torch cannot use",
            "node1: the driver 535.104.05 is too old for the CUDA 13.0 of torch, which needs 580",
            "on node1: install a newer driver there",
        ),
        (
            {"gpus": 1, "cuda": None},
            "1 × Tesla T4, which torch cannot use",
            "node1: torch is a build without CUDA",
            "on node1: install a build of torch with CUDA",
        ),
    ],
    ids=["no GPU", "old driver", "no CUDA"],
)
def test_where_one_host_has_no_gpu_all_hosts_use_the_cpu(write, pretend, other, words, cause, fix):
    """Else a script takes nccl on one and gloo on the other, and both wait."""
    found, (verdict,), scripts = look(write, make_nodes(Far, pretend(1), pretend(**other)))
    assert found.hide_gpus and verdict.state == "note"
    assert verdict.found == f"{NO_GPU}\n  node0  1 × Tesla T4\n  node1  {words}"
    assert cause in verdict.cause and verdict.fix.startswith(fix)
    assert all(HIDDEN in script for script in scripts)


def test_a_job_says_that_its_gpus_are_hidden(write, pretend):
    """Also to a learner who calls no preflight."""
    script = write("show.py", "import os\nimport nodelaunch\nnodelaunch.report(os.environ['CUDA_VISIBLE_DEVICES'])")
    heard, nodes = [], make_nodes(Far, pretend(1), pretend(0))
    result = TorchrunJob(script, nodes=nodes, program=["python"]).run(show=heard.append, force=True)
    assert result.results == ("", "")
    assert [line for line in heard if "not every process has a GPU: all of them use the CPU and gloo" in line]


def test_gpus_that_env_chooses_are_left_alone_and_red_where_the_nodes_differ(write, pretend):
    chosen = {"env": {"CUDA_VISIBLE_DEVICES": "0"}}
    found, (verdict,), scripts = look(write, make_nodes(Far, pretend(1), pretend(0)), **chosen)
    assert not found.ok and not found.hide_gpus and verdict.state == "red"
    assert "wait for each other" in verdict.found and "{'CUDA_VISIBLE_DEVICES': ''}" in verdict.fix
    assert all("export CUDA_VISIBLE_DEVICES=0" in script for script in scripts)
    found, (verdict,), _ = look(write, make_nodes(Far, pretend(1)), nproc_per_node=2, **chosen)
    assert found.ok and not found.hide_gpus
    assert verdict.found == "1 × Tesla T4 for 2 process(es) of a node", "and not: gloo on the CPU will be used"
    found, verdicts, _ = look(write, make_nodes(Far, pretend(1), pretend(0)), env={"CUDA_VISIBLE_DEVICES": ""})
    assert found.ok and {verdict.found for verdict in verdicts} == {"no GPU: gloo on the CPU"}


@pytest.mark.parametrize(
    ("other", "green"),
    [({"status": 9}, "node0"), ({"driver": "525.60.13", "cuda": "12.8"}, "node0, node1")],
    ids=["no answer", "older driver"],
)
def test_a_node_whose_driver_is_unknown_or_old_enough_hides_nothing(write, pretend, other, green):
    """nvidia-smi may be slow only; the ranks compare what they see."""
    found, verdicts, scripts = look(write, make_nodes(Far, pretend(1), pretend(1, **other)))
    assert not found.hide_gpus and {verdict.found for verdict in verdicts} == {"1 × Tesla T4, free"}
    assert ", ".join(verdict.node for verdict in verdicts) == green
    assert not any("CUDA_VISIBLE" in script for script in scripts)


# What the ranks compare.


PRETEND_GPU = """
import os, sys
if "nodelaunch.node.worker" in sys.orig_argv and os.environ["LAB_NODE"] == "1":
    import torch
    torch.cuda.device_count, torch.version.cuda = lambda: 1, None
"""


@pytest.mark.drill
def test_ranks_that_see_different_devices_do_not_begin(write):
    """A job whose nodes nobody asked, as on Slurm, is refused with its fix, and does not wait."""
    path = write("other/sitecustomize.py", PRETEND_GPU).parent
    heard, joined = Heard(), []
    heard.when["all nodes joined"] = lambda line: joined.append(time.time())
    job = TorchrunJob(write("train.py", TROUBLE), ["ok"], nodes=local_nodes(2), env={"PYTHONPATH": path})
    error = run_badly(job, heard, seconds=20, since=lambda: joined[0])
    failure = error.result.failure
    assert failure.kind == "mismatch" and re.search(r"device: CPU on node 0 .*, GPU on node 1", str(error))
    assert "nccl there and gloo here" in failure.cause and "env={'CUDA_VISIBLE_DEVICES': ''}" in failure.fix
    assert not any("connected" in line for line in heard.lines), "nothing was trained"


# Who waited for whom.

ABORT = (
    "[rank0]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60001 milliseconds "
    "before timing out."
)
STACK = f'Current thread 0x1 (most recent call first):\n  File "/n/code/{"a" * 64}/script/train.py", line 7 in <module>'


def hear_abort(state, rank):
    """The events of a rank that NCCL's watchdog aborts."""
    for line in [ABORT, *["frame #0: x"] * 70, *STACK.split("\n")]:
        state.read("ab"[rank], f"[rank {rank}] {line}\n".encode())
    hear_exit(state, rank, -6)


def hear_exit(state, rank, code):
    line = f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: {57 + rank}) of binary: python\n"
    state.read("ab"[rank], line.encode())


def test_a_rank_that_the_watchdog_aborts_waited_and_the_silent_one_is_named(state):
    state.read("b", b"[rank 1] reading batch 17 ...\n")
    hear_abort(state, 0)
    hear_exit(state, 1, -15)  # torchrun, or srun, ends the other
    state.read("b", b"torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15\n")
    failure = diagnose(state)
    assert failure.what == "Rank 1 on b was silent while rank 0 on a waited for it."
    assert (failure.kind, failure.rank, failure.node) == ("hang", 1, "b")
    assert "reading batch 17" in failure.cause
    assert "OpType=ALLREDUCE" in failure.consequences[0] and failure.stacks[0] == "train.py, line 7, in <module>"
    assert "rank 0 failed as a consequence: torch.distributed.DistBackendError: Watchdog caught" in str(failure)
