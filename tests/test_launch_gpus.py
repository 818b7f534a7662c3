"""The launcher on machines with GPUs, each of them pretended: which are used, one backend for all, and who waited."""

import ast
import json
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from harness.jobs import TROUBLE, Heard, hear, run_badly

from nodelaunch import TorchrunJob, local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.backends.local import LocalNode
from nodelaunch.failure import describe_restart, diagnose
from nodelaunch.messages import look_up

pytestmark = pytest.mark.usefixtures("runs")
HIDDEN = "export CUDA_VISIBLE_DEVICES=''"
NO_GPU = "not every process has a GPU: all of them will use the CPU and gloo"


@dataclass(frozen=True)
class Near(LocalNode):
    """A node on this machine that sees what ``env`` makes it see."""

    env: dict = field(default_factory=dict)

    def popen(self, argv):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(argv, **pipes, start_new_session=True, env={**os.environ, **self.env})


@dataclass(frozen=True)
class Far(Near):
    """The same, but taken for a machine of its own."""

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
    found, (verdict,), scripts = look(write, make_nodes(Near, machine, machine))
    assert found.ok and found.hide_gpus and (verdict.node, verdict.state) == ("node0, node1", "note")
    shared = "1 × Tesla T4, shared by 2 nodes"
    assert verdict.found == f"{NO_GPU}\n  node0  {shared}\n  node1  {shared}"
    assert verdict.fix == "nodes=local_nodes(1); or run it as it is, on the CPU"
    assert "free" not in verdict.found and all(HIDDEN in script for script in scripts)
    found, (verdict,), scripts = look(write, make_nodes(Near, machine))
    assert (verdict.state, verdict.found, found.hide_gpus) == ("ok", "1 × Tesla T4, free", False)
    assert HIDDEN not in scripts[0]


@pytest.mark.parametrize(
    ("gpus", "count", "processes", "fix"),
    [
        (3, 2, 2, "nproc_per_node=1"),
        (1, 1, 2, "nproc_per_node=1"),
        (2, 3, 2, "nodes=local_nodes(2), nproc_per_node=1"),
    ],
)
def test_what_is_offered_gives_each_process_a_gpu(write, pretend, gpus, count, processes, fix):
    machine = pretend(gpus)
    _, (verdict,), _ = look(write, make_nodes(Near, *[machine] * count), nproc_per_node=processes)
    assert verdict.fix == f"{fix}; or run it as it is, on the CPU"


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


def test_an_older_driver_that_torch_can_use_is_no_trouble(write, pretend):
    nodes = make_nodes(Far, pretend(1, driver="525.60.13", cuda="12.8"), pretend(1, driver="[N/A]"))
    found, _, scripts = look(write, nodes)
    assert not found.hide_gpus and not any("CUDA_VISIBLE" in script for script in scripts)


@pytest.mark.parametrize("gpus", [(1,), (2, 1)])
def test_more_ranks_than_gpus_on_a_host_use_the_cpu_in_truth(write, pretend, gpus):
    """Over ssh, too: LOCAL_RANK 1 would take the missing cuda:1."""
    found, (verdict,), scripts = look(write, make_nodes(Far, *map(pretend, gpus)), nproc_per_node=2)
    assert found.hide_gpus and verdict.found.startswith(NO_GPU)
    assert verdict.fix.startswith("nproc_per_node=1;")
    assert all(HIDDEN in script for script in scripts)
    message = "torch.AcceleratorError: CUDA error: invalid device ordinal"
    assert "fewer GPUs than processes" in look_up(message)[0], "where the preflight was skipped"


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


def test_a_node_whose_driver_does_not_answer_hides_nothing(write, pretend):
    """It may be slow only; the ranks compare what they see."""
    found, (verdict,), scripts = look(write, make_nodes(Far, pretend(1), pretend(1, status=9)))
    assert not found.hide_gpus and (verdict.node, verdict.found) == ("node0", "1 × Tesla T4, free")
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


def hear_exit(state, node, rank, code):
    state.read(node, f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: {57 + rank}) of binary: python\n".encode())


def hear_abort(state, rank=0, *, first="said"):
    """The events of a rank that NCCL's watchdog aborts; torchrun's own event may come first."""
    said = [f"[rank {rank}] {line}\n".encode() for line in [ABORT, *["frame #0: x"] * 70, *STACK.split("\n")]]
    for step in (first, "exit" if first == "said" else "said"):
        if step == "exit":
            hear_exit(state, "ab"[rank], rank, -6)
        else:
            for line in said:
                state.read("ab"[rank], line)


@pytest.mark.parametrize("first", ["said", "exit"])
def test_a_rank_that_the_watchdog_aborts_waited_and_the_silent_one_is_named(state, first):
    state.read("b", b"[rank 1] reading batch 17 ...\n")
    hear_abort(state, first=first)
    hear_exit(state, "b", 1, -15)  # torchrun, or srun, ends the other
    state.read("b", b"torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15\n")
    failure = diagnose(state)
    assert failure.what == "Rank 1 on b was silent while rank 0 on a waited for it."
    assert (failure.kind, failure.rank, failure.node) == ("hang", 1, "b")
    assert "reading batch 17" in failure.cause
    assert "OpType=ALLREDUCE" in failure.consequences[0] and failure.stacks[0] == "train.py, line 7, in <module>"
    assert "rank 0 failed as a consequence: torch.distributed.DistBackendError: Watchdog caught" in str(failure)


def test_a_rank_that_has_something_to_say_is_before_one_that_the_watchdog_aborts(state):
    hear_abort(state)
    facts = {"kind": "exception", "message": "ValueError: bad luck", "traceback": "", "location": ""}
    hear(state, "b", "error", rank=1, **facts)
    assert diagnose(state).what == "Rank 1 on b failed first: ValueError: bad luck"


def test_ranks_that_all_waited_are_not_silent(state):
    hear_abort(state)
    hear(
        state,
        "b",
        "stack",
        rank=1,
        text='Thread 1:\n  File "/x/torch/distributed/distributed_c10d.py", line 3 in barrier',
    )
    assert diagnose(state).what.startswith("The ranks wait for each other")
    hear_abort(state, rank=1)
    assert diagnose(state).what.startswith("The ranks wait for each other")


def test_an_abort_after_a_restart_is_not_taken_for_the_watchdog_s(state):
    hear_abort(state)
    for rank, node in enumerate("ab"):
        who = {"rank": rank, "pid": 67 + rank, "host": node, "local_rank": 0, "node": rank}
        hear(state, node, "worker", **who, processes=1, port="2")
    assert describe_restart(state.restarts[0]).startswith("rank 0 on a: DistBackendError: Watchdog caught")
    state.read("a", b"E1121 failed (exitcode: -6) local_rank: 0 (pid: 67) of binary: python\n")
    assert "Rank 0 on a was killed by signal 6" in diagnose(state).what


# The project's own scripts, and the network's.


def list_starts(path):
    """The calls of init_process_group in a script, as text."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func) == "dist.init_process_group"]


def test_each_script_for_gpus_names_its_gpu(root):
    scripts = [path for path in (root / "notebooks" / "scripts").glob("*.py") if '"nccl' in path.read_text()]
    scripts += [path for path in (root / "notebooks" / "scripts").glob("*.py") if "cuda:nccl" in path.read_text()]
    assert {path.name for path in scripts} >= {
        "train_ddp.py",
        "measure_step.py",
        "compare_parallel.py",
        "train_parallel.py",
    }
    for path in scripts:
        assert all("device_id=" in call for call in list_starts(path)), path


def test_a_job_of_a_notebook_hangs_for_the_launcher_before_its_process_group_gives_up(root):
    pairs = {}
    for notebook in (root / "notebooks").glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            pattern = r'TorchrunJob\(\s*"(scripts/\w+\.py)"[^)]*hang_timeout=(\d+)'
            pairs |= dict(re.findall(pattern, "".join(cell["source"])))
    assert {"scripts/measure_step.py", "scripts/failing.py"} <= {*pairs}
    for script, seconds in pairs.items():
        (call,) = list_starts(root / "notebooks" / script)
        timeout = int(re.search(r"timedelta\(seconds=(\d+)\)", call)[1])
        assert int(seconds) < 0.9 * timeout, f"{script}: the process group gives up after {timeout} s"


def test_the_network_interface_is_named_exactly(write):
    """To NCCL eth1 is also the beginning of eth10; to Gloo "=eth1" is no interface."""
    nodes = [replace(ssh_nodes(["n"], folder="/f", python="/p", interface="eth1")[0], address="10.0.0.1")]
    own = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    for each in (nodes, slurm_nodes(2)):
        (path, *_) = TorchrunJob(write("t.py", ""), nodes=each, port=29500).write()
        text = path.read_text()
        (line,) = re.findall(r"^export GLOO_SOCKET_IFNAME=.*$", text, re.MULTILINE)
        said = subprocess.run(["bash", "-c", f"interface=eth1; {line}; {own}"], capture_output=True, text=True)
        assert said.stdout == "eth1 =eth1\n"
