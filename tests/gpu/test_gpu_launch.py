"""The launcher on a machine with a GPU, without a job: what it finds there, and what NCCL's words mean to it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

import nodelaunch
from nodelaunch import local_nodes
from nodelaunch.node import watch, worker
from nodelaunch.node.facts import find_gpus, find_versions
from nodelaunch.preflight.gpus import find_offers, judge_gpus, must_hide
from nodelaunch.preflight.verdicts import Wanted

pytestmark = pytest.mark.gpu


def test_a_gpu_is_enough_for_one_process_and_not_for_more(gpu, smi):
    """With more processes than GPUs all of them use the CPU, and the preflight says so."""
    (node,) = local_nodes(1)
    facts = {node.name: {"gpus": find_gpus(), "versions": find_versions()}}
    count = len(facts[node.name]["gpus"]["gpus"])
    assert count >= torch.cuda.device_count() >= 1
    for processes, hidden in ((1, False), (count + 1, True)):
        wanted = Wanted(nproc_per_node=processes)
        offers = find_offers({node.name: node}, facts, wanted)
        assert must_hide(offers, wanted) is hidden
        first = judge_gpus(offers, facts, wanted)[0]
        words = "not every process has a GPU: all of them will use the CPU and gloo" if hidden else ""
        assert first.check == "GPUs" and first.state in ("ok", "note") and words in first.found
        assert not hidden or "NCCL needs a GPU for each process" in first.cause


def test_the_sampler_reads_how_busy_the_gpu_is(gpu, smi):
    with nodelaunch.watch(local_nodes(1), every=0.1) as seen:
        end = time.monotonic() + 20
        while not (seen.samples and seen.samples[-1].gpus) and time.monotonic() < end:
            time.sleep(0.02)
    first = seen.samples[-1].gpus[0]
    assert first.index == 0 and 0 <= first.busy <= 1
    assert 0 <= first.memory_bytes <= first.memory_total


def test_a_rank_that_waits_for_its_gpu_does_not_look_busy(gpu):
    """Waiting for a GPU takes CPU time, which must not hide that the rank hangs."""
    torch.zeros(1, device=gpu.device)
    assert watch._read_clock(threading.main_thread().ident) == 0.0


def test_the_device_of_a_rank_is_found_and_cuda_not_started(real_gpu):
    ask = "import torch; from nodelaunch.node.worker import find_device"
    ask += "; print(find_device(), torch.cuda.is_initialized())"
    root = worker.__file__.partition("/nodelaunch/")[0]
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, cwd=root)
    assert said.stdout.split() == ["GPU", "False"], said.stderr
