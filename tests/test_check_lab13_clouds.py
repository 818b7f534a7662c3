"""Exercises 13.3 and 13.4 refuse typical wrong answers with the hint that fits, and accept several right ones.

The wrong values of their tables are tried in test_check_tables.py. The script whose process is killed again and again
is run as well, for less than a second.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness.answers import load_answer, refuse_edited

from course import check
from course.exercises.lab13 import cloud_files
from course.exercises.lab13.costs import plan_run

pytestmark = pytest.mark.usefixtures("runs")

RETURN = ("return trainjob, task", "return None")
COMMAND = "command: [torchrun, train_preempted.py, --epochs=90, --checkpoint=/shared/run.pt]"
LIMITS, PLACES = (
    "{limits: {nvidia.com/gpu: 4, memory: 32Gi}}",
    "any_of: [{infra: aws/us-east-1}, {infra: gcp/us-central1}]",
)
NODE, HEAD = "--node-rank=$SKYPILOT_NODE_RANK", '--master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
WRONG = [
    ("13.3", *RETURN, "both texts"),
    ("13.3", "    numNodes: 2", "\tnumNodes: 2", "indent by spaces"),
    ("13.3", "    numNodes: 2", "  trainer:\n    numNodes: 2", "lines that are given"),
    ("13.3", "    numNodes: 2\n", "", "without it there is one node"),
    ("13.3", "numNodes: 2", 'numNodes: "2"', "no quotes"),
    ("13.3", "numNodes: 2", "nodes: 2", "misspelt"),
    ("13.3", LIMITS, f"{LIMITS}\n  suspend: true", "lines that are given"),
    ("13.3", LIMITS, f'{LIMITS}\n    env: [{{name: PET_NNODES, value: "2"}}]', "leave them out"),
    ("13.3", "numProcPerNode: 4", "numProcPerNode: 1", "for each GPU"),
    ("13.3", COMMAND, f"command: {COMMAND.split('[')[1][:-1]}", "a list is [torchrun"),
    ("13.3", COMMAND, 'command: ["torchrun train_preempted.py --epochs=90"]', "an item of its own"),
    ("13.3", f"    {COMMAND}\n", "", "torchrun starts the processes"),
    ("13.3", "[torchrun, ", "[python, ", "torchrun starts the processes"),
    ("13.3", "[torchrun, ", "[torchrun, --standalone, ", "trains alone"),
    ("13.3", "[torchrun, ", "[torchrun, --node-rank=0, ", "a number of its own"),
    ("13.3", "[torchrun, ", "[torchrun, --master-addr=$PET_MASTER_ADDR, ", "no shell reads"),
    ("13.3", "train_preempted.py, ", "train_preempted.py, --nnodes=2, ", "options before it"),
    ("13.3", ", --checkpoint=/shared/run.pt", ", --checkpoint=run.pt", "own disk is lost"),
    ("13.3", "train_preempted.py,", "train_single.py,", "behind torchrun's options"),
    ("13.3", "{limits", "{requests", "among the limits"),
    ("13.3", ", memory: 32Gi", "", "for each of 4 processes"),
    ("13.3", "32Gi", "32GB", "1 GiB as 1Gi"),
    ("13.3", LIMITS, "{limits: {nvidia.com/gpu: 4, memory: 16Gi}, requests: {memory: 32Gi}}", "below the request"),
    ("13.3", "num_nodes: 2\n", "", "without it there is one node"),
    ("13.3", "  use_spot: true\n", "", "every place"),
    ("13.3", "memory: 32+", "memory: 32Gi", "no unit"),
    ("13.3", "  job_recovery: {max_restarts_on_errors: 3}\n", "", "always replaced"),
    ("13.3", f"  {PLACES}\n", "", "any_of, below"),
    ("13.3", "gcp/us-central1", "aws/us-east-1", "place of its own"),
    ("13.3", "aws/us-east-1", "amazon/us-east-1", "look at this field"),
    ("13.3", "run: torchrun", "setup: torchrun", "below it the lines"),
    ("13.3", "run: torchrun", "run: echo torchrun", "torchrun starts the processes"),
    ("13.3", "run: torchrun", "run: source mine && torchrun", "no files of yours"),
    ("13.3", "torchrun --nnodes=2", "torchrun --gpus=4", "as its help has them"),
    ("13.3", f"{NODE}\n", "\n", "a number of its own"),
    ("13.3", HEAD, "--rdzv-backend=c10d", "the first node's address"),
    ("13.3", HEAD, f"{HEAD} --rdzv-endpoint=192.0.2.11:1 --rdzv-backend=c10", "write c10d"),
    ("13.3", HEAD, f"{HEAD} --master-port=$RANDOM", "no number at random"),
    ("13.3", HEAD, f"{HEAD} -m", "a script"),
    ("13.4", "return interval, hours, hours * nodes * price", "pass", "three numbers"),
    ("13.4", "return interval, hours, hours * nodes * price", "return hours * nodes * price, hours, interval", "order"),
    ("13.4", "math.sqrt(2 * checkpoint * mean)", "1.0", "with C the checkpoint's hours"),
    ("13.4", "/ interval * mean", "* mean", "W / interval"),
    ("13.4", "hours = work", "hours = work // 0", "no number is 0"),
    ("13.4", "(restart / mean)", "(1000 * mean)", "no power is large"),
    ("13.4", "hours * nodes * price", "work * price", "is paid for, too"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), WRONG)
def test_typical_mistakes_get_the_hint_that_fits(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def test_a_command_that_waits_is_ended(monkeypatch):
    monkeypatch.setattr(cloud_files, "SECONDS", 0.3)
    assert "torchrun starts" in refuse_edited("13.3", ("run: torchrun", "run: while true; do :; done; torchrun"))


# 13.4


def powers(work, nodes, efficiency, price, checkpoint, restart, mtbf, interval=None):
    if interval is None:
        interval = (2 * checkpoint * mtbf / nodes) ** 0.5
    rate = nodes / mtbf
    hours = work / nodes / efficiency / interval / rate
    hours *= np.e ** (rate * restart) * (np.exp(rate * (interval + checkpoint)) - 1)
    return [interval, hours, nodes * price * hours]


@pytest.mark.parametrize("answer", [powers, lambda *case: np.array(plan_run(*case))])
def test_right_plans_of_other_styles_are_accepted(answer, capsys):
    check.exercise("13.4", answer)
    assert capsys.readouterr().out == (
        "✔ 13.4 What a run costs: 7 runs on 1 to 16 nodes, with Young's interval and with others\n"
    )


def test_young_s_interval_is_close_to_the_best():
    case = (100, 1, 1.0, 1.0, 0.02, 0.1, 25)
    young, hours, _ = plan_run(*case)
    best = min(plan_run(*case, young * 2 ** (power / 20))[1] for power in range(-40, 41))
    assert best <= hours < 1.001 * best
    # Daly's figure 5: M = 15 min, Ts = 500 h, R = 10 min, dump time 5 min; his optimum is 9.1 min.
    times = {tau: plan_run(500, 1, 1, 1, 5 / 60, 10 / 60, 0.25, tau / 60)[1] for tau in (7, 8, 9.1, 10.2, 11.5)}
    assert min(times, key=times.get) == 9.1


# 13.3

LONG = """\
    numNodes: 2
    command:
      - bash
      - -c
      - |
        cd code
        exec python3 -m torch.distributed.run --nnodes $PET_NNODES --nproc_per_node gpu --rdzv-backend=c10d \\
          --rdzv-endpoint=$PET_MASTER_ADDR:29400 --rdzv-id=1 train_preempted.py --checkpoint /shared/run.pt --epochs 90
    resourcesPerNode:
      requests: {memory: 32768Mi, cpu: 8}
      limits: {nvidia.com/gpu: "4", memory: 40Gi}
"""
OTHER = """\
  memory: 32GB+
  ordered:
    - {cloud: AWS, region: us-east-1, use_spot: true}
    - {infra: gcp, use_spot: true}
  job_recovery:
    strategy: failover
    max_restarts_on_errors: 3
run: >
  set -e; mapfile -t ips <<< "$SKYPILOT_NODE_IPS";
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE
  --node_rank ${SKYPILOT_NODE_RANK} --master_addr "${ips[0]}" --master-port 8008
  ./train_preempted.py --epochs 90 --checkpoint /shared/run.pt
num_nodes: 2
"""
RUN_LINES = """run: |
  set -euo pipefail
  source .venv/bin/activate || true
  pip install x
  head=`echo "$SKYPILOT_NODE_IPS" | awk 'NR==1'`
  cd scripts && uv run torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$head:29500 \\\\
    train_preempted.py --epochs=90 --checkpoint=/shared/run.pt
  : torchrun"""
WORDS = COMMAND.partition("[")[2].rstrip("]").replace(",", "")
RIGHT = {
    "the lab's own": load_answer("13.3"),
    "long forms": lambda trainjob, task: [trainjob + LONG, task + OTHER],
    "no number of processes": load_answer("13.3", ("    numProcPerNode: 4\n", "")),
    "arguments apart": load_answer("13.3", ("train_preempted.py, ", "train_preempted.py]\n    args: [")),
    "Kubernetes' own variables": load_answer("13.3", ("[torchrun, ", "[torchrun, --node-rank=$(PET_NODE_RANK), ")),
    "a login shell": load_answer("13.3", (COMMAND, f"command: [bash, -lc, '{WORDS}']")),
    "a script of several lines": load_answer("13.3", ("run: torchrun", RUN_LINES)),
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_right_files_of_other_styles_are_accepted_and_leave_nothing(answer, capsys, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(empty))
    monkeypatch.setenv("PET_NNODES", "7")  # of the learner's own
    before = dict(os.environ)
    check.exercise("13.3", answer)
    assert capsys.readouterr().out == (
        "✔ 13.3 Files for a cluster and a cloud: both are valid and ask for the launcher's job: 2 nodes with 4 "
        "processes each, train_preempted.py with its checkpoint, 32 GiB; on spot machines in two places\n"
    )
    assert os.environ == before and not list(empty.iterdir())


def test_the_schemas_are_those_of_both_projects_and_small(root):
    folder = root / "data" / "schemas"
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE", "README.md", "kubeflow_trainjob.json", "skypilot_resources.json", "skypilot_task.json"
    }  # fmt: skip
    assert all(path.stat().st_size < 40_000 for path in folder.iterdir())
    for name in ("kubeflow_trainjob", "skypilot_task", "skypilot_resources"):
        validator = cloud_files._find_validator(name)
        validator.check_schema(validator.schema)


# The script that is killed


def test_a_run_that_is_killed_ends_with_the_same_weights(root):
    options = ("--steps", 60, "--every", 0, 7, "--starts", 3, "--mtbf", 0.1, "--rounds", 2, "--limit", 2)
    command = [sys.executable, "scripts/train_interrupted.py", *map(str, options)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ended = subprocess.run(command, cwd=root / "notebooks", env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(run["round"], run["every"]) for run in found] == [(0, 0), (0, 7), (1, 0), (1, 7)]
    whole, kills = found[::2], sum(run["kills"] for run in found[1::2])
    assert all((run["kills"], run["attempts"], run["saves"], run["steps"]) == (0, 3, 3, 60) for run in whole)
    assert kills and kills == sum(run["kills"] for run in found) and len({run["weights"] for run in found}) == 1
    assert not list(Path(root, "notebooks").glob("run.*"))
