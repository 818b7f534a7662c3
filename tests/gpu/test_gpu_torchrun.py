"""Jobs of the launcher on a machine with a GPU: the scripts that lab 5 starts, over NCCL, and no GPU for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nodelaunch import TorchrunJob, local_nodes

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).parents[2] / "notebooks" / "scripts"
ASKING = """
import torch
import nodelaunch as launch
launch.report(torch.cuda.is_available())
"""


def run(script, *arguments, processes=1, check=True, **options):
    """A job on this machine; what it came to."""
    job = TorchrunJob(script, arguments, nodes=local_nodes(1), nproc_per_node=processes, limit=90, **options)
    return job.run(show=False, check=check)


def test_lab_5s_script_trains_over_nccl(real_gpu):
    """Watched from outside, as the lab does: its phases, its losses and its device."""
    arguments = ["--timeline", "train_ddp.py", "--data", "shapes10", "--images", 256, "--batch-size", 32]
    (rank,) = run(SCRIPTS / "observed.py", *arguments, files=[SCRIPTS / "train_ddp.py"]).results
    assert rank["device"] == "cuda" and len(rank["losses"]) == 8
    assert {row["phase"] for row in rank["timeline"]} == {"data", "forward", "backward", "step"}
    assert all(row["start"] <= row["end"] for row in rank["timeline"])


def test_lab_5s_steps_and_buckets_are_measured_over_nccl(real_gpu):
    arguments = ["--net", "tiny", "--stems", "cifar", "--batch-sizes", 8, "--repeats", 3]
    (found,) = run(SCRIPTS / "measure_step.py", *arguments).results
    (step,) = found["steps"]
    assert sum(bucket["bytes"] for bucket in step["buckets"]) == pytest.approx(4 * 24_000, rel=0.1)
    assert all(0 < bucket["ready"] <= 2 * step["backward"] for bucket in step["buckets"])
    assert all(bucket["send"] > 0 for bucket in step["buckets"]) and step["busy"] == 0
    for rows in step["timelines"].values():
        assert all(begin <= end for _, begin, end in rows)
    assert step["ddp"]["Timing"]["device"] == "cuda:0"


def test_more_processes_than_gpus_use_the_cpu(real_gpu, tmp_path):
    script = tmp_path / "asking.py"
    script.write_text(ASKING, encoding="utf-8")
    found = run(script, processes=torch.cuda.device_count() + 1)
    assert list(found.results) == [False] * (torch.cuda.device_count() + 1)
