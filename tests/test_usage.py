"""Watching nodes: what is seen of real load, whose load it is, and that nothing is left behind."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from harness.jobs import wait_for

import nodelaunch as launch
from nodelaunch.node import sampler

BURN = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""
linux = pytest.mark.skipif(not sampler.PROC.joinpath("stat").exists(), reason="only Linux has /proc")


@dataclass
class Node:
    name: str
    python: str = sys.executable
    folder: str = "/nodes/own"
    backend: str = "nodelaunch.backends.direct"

    def popen(self, argv):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        return self.process


def burn(seconds, node, folder=Node.folder, **environment):
    """A process that computes, as one of a job of that node, in this notebook's folder or another."""
    environment |= {"LAB_NODE": node, "LAB_JOB_FOLDER": f"{folder}/jobs/a/node{node}"}
    return subprocess.Popen([sys.executable, "-c", BURN, str(seconds)], env={**os.environ, **environment})


@linux
def test_the_load_of_a_job_is_told_from_other_load_and_node_from_node():
    """Not counted: another notebook's job, whose folder may begin with the same letters, and programs of nobody."""
    with launch.watch([Node("left"), Node("right")], every=0.2) as seen:
        wait_for(lambda: len({sample.node for sample in seen.samples}) == 2, seconds=20)
        ours, other, nobodys = burn(2.0, "0"), burn(2.0, "0", "/nodes/own2"), burn(2.0, "")
        _, status, used = os.wait4(ours.pid, 0)
        ours.returncode = os.waitstatus_to_exitcode(status)
        other.wait()
        nobodys.wait()
    left, right = ([sample for sample in seen.samples if sample.node == name] for name in ("left", "right"))
    # What the kernel counted for the process, which has to share the cores with other tests: summed up, as its share
    # changes meanwhile. What it took after the last sample that saw it is not in there.
    seconds = sum(
        sample.job_busy * sample.cores * (sample.time - before.time) for before, sample in itertools.pairwise(left)
    )
    assert seconds == pytest.approx(used.ru_utime + used.ru_stime, rel=0.3)
    assert {sample.job_busy for sample in right} == {0}
    assert all(0 < sample.memory_bytes < sample.memory_total for sample in left)
    assert [sample.time for sample in left] == sorted(sample.time for sample in left)


def test_a_node_that_cannot_be_watched_disturbs_nothing_and_nothing_runs_on(tmp_path):
    greeter = tmp_path / "python"
    greeter.write_text(f'#!/bin/sh\necho "Welcome to node1"\necho "{{}}"\nexec {sys.executable} "$@"\n')
    greeter.chmod(0o755)
    well = Node("well", str(greeter))
    nodes = [Node("gone", python="/nowhere/python"), Node("broken", python="/bin/false"), well]
    with pytest.raises(RuntimeError, match="the job"), launch.watch(nodes, every=0.1) as seen:
        wait_for(lambda: seen.samples, seconds=20)
        raise RuntimeError("the job")
    assert well.process.returncode is not None
    assert {sample.node for sample in seen.samples} == {"well"}


@linux
def test_the_sampler_ends_when_the_watching_process_is_killed():
    code = """
import time, test_usage
node = test_usage.Node("n")
with test_usage.launch.watch([node], every=0.1):
    print(node.process.pid, flush=True)
    time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        pid = int(child.stdout.readline())
        child.kill()
    wait_for(lambda: not is_alive(pid), seconds=10)


def is_alive(pid):
    try:
        text = sampler.PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@linux
def test_gpus_are_read_from_nvidia_smi_and_a_job_has_those_that_it_may_see(tmp_path, monkeypatch):
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    lines = "0, GPU-aa, 97, 1024, 81920\n1, GPU-bb, 50, 2048, 81920\n2, GPU-cc, [N/A], 1, 2\n"
    smi.write_text(f"#!/bin/sh\necho \"$@\" > {asked}\nwhile true; do printf '{lines}'; sleep 0.1; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = burn(30, "1", CUDA_VISIBLE_DEVICES="GPU-bb")
    try:
        with launch.watch([Node("zero"), Node("one")], every=0.1) as seen:
            wait_for(lambda: {sample.node for sample in seen.samples if sample.gpus} == {"zero", "one"}, seconds=20)
    finally:
        job.kill()
        job.wait()
    last = {sample.node: sample for sample in seen.samples if sample.gpus}
    assert [gpu.index for gpu in last["zero"].gpus] == [0, 1]
    assert last["one"].gpus == (launch.GpuUsage(1, 0.5, 2048 * 2**20, 81920 * 2**20),)
    assert asked.read_text().split() == [
        f"--query-gpu={sampler.GPU_FIELDS}",
        "--format=csv,noheader,nounits",
        "-lms=100",
    ]


def test_a_node_that_slurm_will_choose_has_no_samples_of_this_machine():
    with launch.watch([*launch.slurm_nodes(1), Node("here")], every=0.1) as seen:
        wait_for(lambda: seen.samples, seconds=20)
    assert {sample.node for sample in seen.samples} == {"here"}
