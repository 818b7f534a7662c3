"""Lab 13 on a real Slurm: the batch script trains as the launcher does, and a preempted job goes on where it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.jobs import wait_for
from harness.quick_ranks import keep_warm, run_job
from test_check_lab13 import BATCH

from course import pocket_slurm
from nodelaunch import TorchrunJob, local_nodes

STEP = re.compile(r" step (\d+): loss (\S+)")
# As in the lab: on two nodes, in the partition that gives way.
HEAD = BATCH[BATCH.index("head=") : BATCH.index("srun")]
# Not one for all: other tests may train beside this one.
PORT = "$((20000 + RANDOM % 10000))"
SPOT = rf"""#!/bin/bash
#SBATCH --partition=spot --requeue --open-mode=append --output=spot.out
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1
#SBATCH --mem=1500M --time=00:05:00
{HEAD}echo "start ${{SLURM_RESTART_COUNT:-0}}"
srun torchrun --nnodes=2 --nproc-per-node=1 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{PORT}" \
    scripts/train_preempted.py --data shapes10 --images 320 --batch-size 16 \
    --epochs 2 --pause 0.2 --checkpoint spot.pt && exit
[ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"
"""


@pytest.fixture
def submit(slurm, root, tmp_path, monkeypatch):
    """A function that submits a text in a folder with the lab's scripts, and returns the job's number."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "scripts").symlink_to(root / "notebooks" / "scripts")
    monkeypatch.chdir(tmp_path)

    def submit(text, *options):
        done = subprocess.run(
            ["sbatch", "--parsable", *options], input=text, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    yield submit
    wait_for(lambda: not slurm.list_jobs(), 20)


@pytest.fixture
def cluster(slurm):
    found = pocket_slurm.find(needs=pocket_slurm.PARTITIONS)
    assert found and found.pocket
    return found


@pytest.fixture(scope="module")
def train_alone():
    """A function that runs a script in two ranks on this machine, without torchrun; it returns what they print."""
    with keep_warm(sys.executable, ("torch", "torch._dynamo")) as command:

        def train(script, *arguments):
            job = TorchrunJob(script, arguments, nodes=local_nodes(2), env={"OMP_NUM_THREADS": "1"})
            result = run_job(job, command)
            assert result.failure is None, result.failure
            return "\n".join(result.lines)

        yield train


def are_equal(first, second):
    one, other = (torch.load(file)["model"] for file in (first, second))
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_batch_script_trains_on_two_nodes_as_one_node_does(submit, cluster, train_alone, tmp_path):
    job = submit(BATCH.replace("29500", PORT))
    pocket_slurm.wait(cluster, job, seconds=90)
    output = Path(f"ddp-{job}.out").read_text()
    assert len(re.findall(r"^epoch \d: loss", output, re.MULTILINE)) == 2, output
    own = tmp_path / "own.pt"
    arguments = ["--data", "shapes10", "--images", 640, "--epochs", 2, "--checkpoint", own]
    train_alone(tmp_path / "scripts" / "train_ddp.py", *arguments)
    assert are_equal("ddp.pt", own)


def test_a_preempted_job_goes_on_where_it_was(submit, cluster, slurm, train_alone, tmp_path):
    job, output = submit(SPOT), Path("spot.out")
    wait_for(lambda: output.exists() and " step 4" in output.read_text(), 60)
    urgent = submit("#!/bin/sh\nsleep 1\n", "--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent.out")
    pocket_slurm.wait(cluster, urgent, seconds=30)
    facts = slurm.run("scontrol", "show", "job", job)
    assert re.search(r"JobState=(PENDING|COMPLETING) ", facts) and "Restarts=1" in facts, facts
    pocket_slurm.wait(cluster, job, seconds=90)
    text = output.read_text()
    assert re.findall(r"^start (\d)$", text, re.MULTILINE) == ["0", "1"]
    arguments = ["--data", "shapes10", "--images", 320, "--batch-size", 16, "--epochs", 2]
    own = tmp_path / "own.pt"
    alone = train_alone(tmp_path / "scripts" / "train_preempted.py", *arguments, "--checkpoint", own)
    assert STEP.findall(text) == STEP.findall(alone)
    assert len(STEP.findall(text)) == 20
    assert are_equal("spot.pt", own)
