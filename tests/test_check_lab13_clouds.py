"""Exercises 13.3 and 13.4 refuse typical wrong answers with the hint that fits, and accept several right ones.

The wrong values of their tables are tried in test_check_tables.py.
"""

import os
import tempfile

import numpy as np
import pytest
from harness.answers import load_answer, refuse_edited

from course import check
from course.exercises.lab13.costs import plan_run

pytestmark = pytest.mark.usefixtures("runs")

RETURN = ("return trainjob, task", "return None")
COMMAND = "command: [torchrun, train_preempted.py, --epochs=90, --checkpoint=/shared/run.pt]"
PLACES = "any_of: [{infra: aws/us-east-1}, {infra: gcp/us-central1}]"
NODE, HEAD = "--node-rank=$SKYPILOT_NODE_RANK", '--master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
WRONG = [
    ("13.3", *RETURN, "both texts"),
    ("13.3", "    numNodes: 2", "  trainer:\n    numNodes: 2", "lines that are given"),
    ("13.3", "    numNodes: 2\n", "", "without it there is one node"),
    ("13.3", "numProcPerNode: 4", "numProcPerNode: 1", "for each GPU"),
    ("13.3", "[torchrun, ", "[python, ", "torchrun starts the processes"),
    ("13.3", "[torchrun, ", "[torchrun, --standalone, ", "trains alone"),
    ("13.3", "[torchrun, ", "[torchrun, --node-rank=0, ", "a number of its own"),
    ("13.3", "train_preempted.py, ", "train_preempted.py, --nnodes=2, ", "options before it"),
    ("13.3", ", --checkpoint=/shared/run.pt", ", --checkpoint=run.pt", "own disk is lost"),
    ("13.3", "{limits", "{requests", "among the limits"),
    ("13.3", ", memory: 32Gi", "", "for each of 4 processes"),
    ("13.3", "num_nodes: 2\n", "", "without it there is one node"),
    ("13.3", "  use_spot: true\n", "", "every place"),
    ("13.3", "  job_recovery: {max_restarts_on_errors: 3}\n", "", "always replaced"),
    ("13.3", f"  {PLACES}\n", "", "any_of, below"),
    ("13.3", "gcp/us-central1", "aws/us-east-1", "place of its own"),
    ("13.3", f"{NODE}\n", "\n", "a number of its own"),
    ("13.3", HEAD, "--rdzv-backend=c10d", "the first node's address"),
    ("13.4", "return interval, hours, hours * nodes * price", "pass", "three numbers"),
    ("13.4", "return interval, hours, hours * nodes * price", "return hours * nodes * price, hours, interval", "order"),
    ("13.4", "math.sqrt(2 * checkpoint * mean)", "1.0", "with C the checkpoint's hours"),
    ("13.4", "/ interval * mean", "* mean", "W / interval"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), WRONG)
def test_typical_mistakes_get_the_hint_that_fits(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


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
WORDS = COMMAND.partition("[")[2].rstrip("]").replace(",", "")
RIGHT = {
    "the lab's own": load_answer("13.3"),
    "long forms": lambda trainjob, task: [trainjob + LONG, task + OTHER],
    "Kubernetes' own variables": load_answer("13.3", ("[torchrun, ", "[torchrun, --node-rank=$(PET_NODE_RANK), ")),
    "a login shell": load_answer("13.3", (COMMAND, f"command: [bash, -lc, '{WORDS}']")),
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
