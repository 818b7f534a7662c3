"""Watching nodes: what is seen of real load, whose load it is, and that nothing is left behind."""

import itertools
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from harness.jobs import wait_for

import nodelaunch as launch
from lab_common import LabError
from nodelaunch import usage
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
    started: list = None

    def popen(self, argv):
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        if self.started is not None:
            self.started.append(process)
        return process


def burn(seconds, **environment):
    """A process that computes; with ``node`` as one of a job of that node, in this notebook's folder or another."""
    if (node := environment.pop("node", None)) is not None:
        folder = environment.pop("folder", Node.folder)
        environment |= {"LAB_JOB_ID": "a", "LAB_NODE": node, "LAB_JOB_FOLDER": f"{folder}/jobs/a/node{node}"}
    return subprocess.Popen([sys.executable, "-c", BURN, str(seconds)], env={**os.environ, **environment})


def mean(samples, field):
    return sum(getattr(sample, field) for sample in samples) / len(samples)


@linux
def test_the_load_of_a_job_is_told_from_other_load_and_node_from_node():
    with launch.watch([Node("left"), Node("right")], every=0.2) as seen:
        while len({sample.node for sample in seen.samples}) < 2:
            time.sleep(0.02)
        start = time.time()
        ours, nobodys = burn(2.0, node="0"), burn(2.0)
        _, status, used = os.wait4(ours.pid, 0)
        end = time.time()
        ours.returncode = os.waitstatus_to_exitcode(status)
        nobodys.wait()
    assert seen.problems == {}
    during = [sample for sample in seen.samples if start + 0.5 < sample.time < end]
    left, right = ([sample for sample in during if sample.node == name] for name in ("left", "right"))
    assert len(left) >= 4 and len(right) >= 4
    core = 1 / left[0].cores
    # What the kernel counted for the process, which has to share the cores with other tests: summed up, as its share
    # changes meanwhile. What it took after the last sample that saw it is not in there.
    seconds = sum(
        sample.job_busy * sample.cores * (sample.time - before.time)
        for before, sample in itertools.pairwise(sample for sample in seen.samples if sample.node == "left")
    )
    assert seconds == pytest.approx(used.ru_utime + used.ru_stime, rel=0.3)
    assert mean(right, "job_busy") == 0
    # What all programs take is the whole machine's on both.
    assert mean(left, "busy") > 1.2 * mean(left, "job_busy") or core == 1
    assert mean(right, "busy") == pytest.approx(mean(left, "busy"), abs=0.25)
    assert all(0 < sample.memory_bytes < sample.memory_total for sample in during)
    assert [sample.time for sample in left] == sorted(sample.time for sample in left)


@linux
def test_the_jobs_of_another_notebook_are_not_counted():
    """They have a node 0, too, whose folder is another one; one that begins with the same letters is another, too."""
    with launch.watch([Node("left")], every=0.1) as seen:
        processes = [burn(1.5, node="0", folder=folder) for folder in ("/nodes/other", "/nodes/own2")]
        for process in processes:
            process.wait()
    assert max(sample.busy for sample in seen.samples) > 0.1, "somebody computed"
    assert {sample.job_busy for sample in seen.samples} == {0}


def test_nothing_runs_on_after_the_block_not_even_after_an_error():
    node = Node("one", started=[])
    with pytest.raises(RuntimeError, match="the job"), launch.watch([node], every=0.1) as seen:
        while not seen.samples:
            time.sleep(0.02)
        raise RuntimeError("the job")
    assert [process.returncode for process in node.started] == [0]


@linux
def test_the_sampler_ends_when_the_watching_process_is_killed():
    code = """
import subprocess, sys, time
import nodelaunch as launch
class Node:
    name, python, folder = 'n', sys.executable, '/nodes/own'
    def popen(self, argv):
        p = subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=-1, start_new_session=True)
        print(p.pid, flush=True)
        return p
with launch.watch([Node()], every=0.1):
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        pid = int(child.stdout.readline())
        child.kill()
    wait_for(lambda: not is_alive(pid), seconds=10)


def is_alive(pid):
    try:
        text = sampler.PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_a_node_that_cannot_be_watched_is_named_and_the_others_go_on(tmp_path):
    class Far:
        name, folder, popen = "far", "/nodes/far", None

        @property
        def python(self):
            raise LabError("n1 does not answer.", where="n1", fix="ssh n1")

    greeter = tmp_path / "python"
    greeter.write_text(f'#!/bin/sh\necho "Welcome to node1"\necho "{{}}"\nexec {sys.executable} "$@"\n')
    greeter.chmod(0o755)
    nodes = [
        Far(),
        Node("gone", python="/nowhere/python"),
        Node("broken", python="/bin/false"),
        Node("well", str(greeter)),
    ]
    with launch.watch(nodes, every=0.1) as seen:
        while not seen.samples:
            time.sleep(0.02)
    assert set(seen.problems) == {"far", "gone", "broken"} and "does not answer" in seen.problems["far"]
    assert {sample.node for sample in seen.samples} == {"well"}


@linux
def test_gpus_are_read_from_nvidia_smi_and_a_job_has_those_that_it_may_see(tmp_path, monkeypatch):
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    lines = "0, GPU-aa, 97, 1024, 81920\n1, GPU-bb, 50, 2048, 81920\n2, GPU-cc, [N/A], 1, 2\n"
    smi.write_text(f"#!/bin/sh\necho \"$@\" > {asked}\nwhile true; do printf '{lines}'; sleep 0.1; done\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = burn(30, node="1", CUDA_VISIBLE_DEVICES="GPU-bb")
    try:
        with launch.watch([Node("zero"), Node("one")], every=0.1) as seen:
            deadline = time.monotonic() + 20
            while {sample.node for sample in seen.samples if sample.gpus} != {"zero", "one"}:
                assert time.monotonic() < deadline, seen
                time.sleep(0.02)
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


def test_without_proc_it_is_the_load_average_and_says_so(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    line = {"time": 1.0, **sampler.read_load(), "gpus": []}
    seen = usage._parse("mac", json.loads(json.dumps(line)))
    assert (seen.busy, seen.job_busy, seen.memory_bytes) == (0.25, None, None)
    assert "load average" in seen.how


def test_an_interval_that_measures_nothing_is_refused():
    with pytest.raises(LabError, match=r"0\.05 s"), launch.watch([], every=0.01):
        pass
