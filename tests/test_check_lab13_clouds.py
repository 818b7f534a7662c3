"""Exercises 13.3 and 13.4 refuse typical wrong answers with the hint that fits, and accept several right ones.

The script whose process is killed again and again is run as well, for less than a second.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from course import check
from course.check import NotYetError, OpenError
from course.exercises.lab13 import cloud_files
from course.exercises.lab13.costs import plan_run

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return f"{refused.value.what} | {refused.value.yours} | {refused.value.hint}"


# 13.4


def plan(
    work, nodes, efficiency, price, checkpoint, restart, mtbf, interval=None, *, mean=None, young=None, ideal=None,
    each=None, cost=None,
):  # fmt: skip
    """The formula, with parts of it replaced."""
    m = mean(mtbf, nodes) if mean else mtbf / nodes
    tau = interval or (young(checkpoint, restart, m) if young else math.sqrt(2 * checkpoint * m))
    w = ideal(work, nodes, efficiency, price) if ideal else work / (nodes * efficiency)
    per = each(tau, checkpoint, restart, m) if each else m * math.exp(restart / m) * math.expm1((tau + checkpoint) / m)
    hours = w / tau * per
    return tau, hours, cost(hours, nodes, price, efficiency, work) if cost else hours * nodes * price


def change(**parts):
    return lambda *case: plan(*case, **parts)


def first_order(work, nodes, efficiency, price, checkpoint, restart, mtbf, interval=None):
    m = mtbf / nodes
    tau = interval or math.sqrt(2 * checkpoint * m)
    hours = work / (nodes * efficiency) * (1 + checkpoint / tau + (tau / 2 + restart) / m)
    return tau, hours, hours * nodes * price


def hours_without_nodes(*case):
    tau, _, _ = plan_run(*case)
    work, nodes, efficiency, price, checkpoint, restart, mtbf, _ = case
    hours = plan_run(work, nodes, efficiency, price, checkpoint, restart, mtbf * nodes, tau)[1]
    return tau, hours, hours * nodes * price


WRONG_PLANS = [
    ("three numbers", lambda *case: None),
    ("in this order", lambda *case: plan_run(*case)[::-1]),
    ("price comes last", lambda *case: (plan_run(*case)[0], *plan_run(*case)[:0:-1])),
    ("there is a 2 below", change(young=lambda c, r, m: math.sqrt(c * m))),
    ("the 2 belongs below", change(young=lambda c, r, m: 2 * math.sqrt(c * m))),
    ("square root", change(young=lambda c, r, m: 2 * c * m)),
    ("restart does not belong", change(young=lambda c, r, m: math.sqrt(2 * (c + r) * m))),
    ("do not subtract", change(young=lambda c, r, m: math.sqrt(2 * c * m) - c)),
    ("with C the checkpoint's hours", change(young=lambda c, r, m: 1.0)),
    ("its M is mtbf / nodes", change(mean=lambda mtbf, nodes: mtbf)),
    ("divided by nodes", change(mean=lambda mtbf, nodes: mtbf * nodes)),
    ("M is mtbf / nodes, in the hours", hours_without_nodes),
    ("taken as it is", lambda *case: plan_run(*case[:7])),
    ("use the one that is given", lambda *case: (plan_run(*case)[0], *plan_run(*case[:7])[1:])),
    ("divide the work by the efficiency", change(ideal=lambda w, n, e, p: w * e / n)),
    ("nodes share the work", change(ideal=lambda w, n, e, p: w / e)),
    ("without a failure and without", change(each=lambda tau, c, r, m: tau)),
    ("failures are not", change(each=lambda tau, c, r, m: tau + c)),
    ("restart is missing", change(each=lambda tau, c, r, m: m * math.expm1((tau + c) / m))),
    ("can also hit a checkpoint", change(each=lambda tau, c, r, m: m * math.exp(r / m) * math.expm1(tau / m))),
    ("subtract 1", change(each=lambda tau, c, r, m: m * math.exp(r / m) * math.exp((tau + c) / m))),
    ("multiply by M", change(each=lambda tau, c, r, m: math.exp(r / m) * math.expm1((tau + c) / m))),
    ("first-order form", first_order),
    ("W / interval", change(each=lambda tau, c, r, m: 3 * tau)),
    ("no number is 0", change(each=lambda tau, c, r, m: tau // 0)),
    ("multiply by the price and", change(cost=lambda hours, n, p, e, w: hours)),
    ("each node is paid for", change(cost=lambda hours, n, p, e, w: hours * p)),
    ("price of a node", change(cost=lambda hours, n, p, e, w: hours * n)),
    ("use it once", change(cost=lambda hours, n, p, e, w: hours * n * p / e)),
    ("no power is large", change(each=lambda tau, c, r, m: math.exp(1000 * m))),
    ("begin with the hours", change(cost=lambda hours, n, p, e, w: w * p)),
    ("cost = hours", change(cost=lambda hours, n, p, e, w: hours * n * p + 1)),
]


@pytest.mark.parametrize(("hint", "answer"), WRONG_PLANS)
def test_a_wrong_plan_gets_the_hint_that_fits(hint, answer):
    assert hint in refuse("13.4", answer)


def powers(work, nodes, efficiency, price, checkpoint, restart, mtbf, interval=None):
    if interval is None:
        interval = (2 * checkpoint * mtbf / nodes) ** 0.5
    rate = nodes / mtbf
    hours = work / nodes / efficiency / interval / rate
    hours *= np.e ** (rate * restart) * (np.exp(rate * (interval + checkpoint)) - 1)
    return [interval, hours, nodes * price * hours]


@pytest.mark.parametrize("answer", [plan, powers, lambda *case: np.array(plan_run(*case))])
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

ADDED_JOB = """\
    numNodes: 2
    numProcPerNode: 4
    command: [torchrun, train_preempted.py, --epochs=90, --checkpoint=/shared/run.pt]
    resourcesPerNode:
      limits: {nvidia.com/gpu: 4, memory: 32Gi}
"""
ADDED_TASK = """\
  memory: 32+
  use_spot: true
  job_recovery: {max_restarts_on_errors: 3}
  any_of: [{infra: aws/us-east-1}, {infra: gcp/us-central1}]
num_nodes: 2
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SKYPILOT_NODE_RANK \\
    --master-addr=$head train_preempted.py --epochs=90 --checkpoint=/shared/run.pt
"""
COMMAND = "command: [torchrun, train_preempted.py, --epochs=90, --checkpoint=/shared/run.pt]"
SCRIPT = "train_preempted.py --epochs=90 --checkpoint=/shared/run.pt"
RUN = ADDED_TASK[ADDED_TASK.index("  head=") :]
HEAD, SPOT, NODE = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)', "use_spot: true", "--node-rank=$SKYPILOT_NODE_RANK"
GPUS = "limits: {nvidia.com/gpu: 4, memory: 32Gi}"
PLACES = "any_of: [{infra: aws/us-east-1}, {infra: gcp/us-central1}]"


def write(*changes):
    """An answer with some of the solution's text replaced; each is in one of the two files."""
    job, task = ADDED_JOB, ADDED_TASK
    for old, new in changes:
        assert job.count(old) + task.count(old) == 1, old
        job, task = job.replace(old, new), task.replace(old, new)
    return lambda trainjob, sky: (trainjob + job, sky + task)


def command(*words):
    return write((COMMAND, f"command: {json.dumps(words)}"))


def run(*lines):
    return write((RUN, "".join(f"  {line}\n" for line in lines)))


T = f"torchrun --nnodes=2 --nproc-per-node=4 {NODE} --master-addr=$head"
MEET = "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$head:29500"
WRONG_FILES = [
    ("both texts", lambda trainjob, sky: None),
    ("indent by spaces", write(("    numNodes: 2", "\tnumNodes: 2"))),
    ("would replace the first", lambda trainjob, sky: (trainjob + "  trainer:\n" + ADDED_JOB, sky + ADDED_TASK)),
    ("as they are", lambda trainjob, sky: (trainjob.replace("v1alpha1", "v1") + ADDED_JOB, sky + ADDED_TASK)),
    # The TrainJob
    ("the runtime's number", write(("    numNodes: 2\n", ""))),
    ("counts nodes", write(("numNodes: 2", "numNodes: 8"))),
    ("no quotes", write(("numNodes: 2", 'numNodes: "2"'))),
    ("misspelt", write(("numNodes: 2", "nodes: 2"))),
    ("is suspended", lambda trainjob, sky: (trainjob + ADDED_JOB + "  suspend: true\n", sky + ADDED_TASK)),
    ("all nodes together", write(("numProcPerNode: 4", "numProcPerNode: 8"))),
    ("for each GPU", write(("numProcPerNode: 4", "numProcPerNode: 1"))),
    ("a list of words", write((COMMAND, f"command: torchrun {SCRIPT}"))),
    ("an item of its own", command(f"torchrun {SCRIPT}")),
    ("does not know what to start", write((f"    {COMMAND}\n", ""))),
    ("knows of no other", command("python", *SCRIPT.split())),
    ("first word is the program", command("train_preempted.py", *SCRIPT.split()[1:])),
    ("trains alone", command("torchrun", "--standalone", *SCRIPT.split())),
    ("a number of its own", command("torchrun", "--node-rank=0", *SCRIPT.split())),
    ("no shell reads", command("torchrun", "--master-addr=$PET_MASTER_ADDR", *SCRIPT.split())),
    ("come before it", command("torchrun", SCRIPT.split()[0], "--nnodes=2", *SCRIPT.split()[1:])),
    ("without a checkpoint", command("torchrun", *SCRIPT.split()[:2])),
    ("own disk is lost", command("torchrun", *SCRIPT.split()[:2], "--checkpoint=run.pt")),
    ("same arguments", command("torchrun", SCRIPT.split()[0], "--epochs=9", "--checkpoint=/shared/run.pt")),
    ("comes the script", command("torchrun", "train_single.py", *SCRIPT.split()[1:])),
    ("leave it out", write((GPUS, f'{GPUS}\n    env: [{{name: PET_NNODES, value: "2"}}]'))),
    ("GPU for each process", write(("nvidia.com/gpu: 4, ", ""))),
    ("and not for the job", write(("nvidia.com/gpu: 4", "nvidia.com/gpu: 8"))),
    ("among the limits", write((GPUS, "requests: {nvidia.com/gpu: 4, memory: 32Gi}"))),
    ("for each of 4 processes", write((", memory: 32Gi", ""))),
    ("1 GiB as 1Gi", write(("32Gi", "32GB"))),
    ("so much each", write(("32Gi", "8Gi"))),
    ("G is 10^9", write(("32Gi", "32G"))),
    ("a thousandth", write(("32Gi", "32m"))),
    ("counts bytes", write(("32Gi", "32"))),
    ("below the request", write((GPUS, GPUS.replace("32Gi", "16Gi") + "\n      requests: {memory: 32Gi}"))),
    ("one node", write(("num_nodes: 2\n", ""))),
    ("every place", write((f"  {SPOT}\n", ""))),
    ("at least so many", write(("  memory: 32+\n", ""))),
    ("exactly so much", write(("memory: 32+", "memory: 32"))),
    ("without a unit", write(("memory: 32+", "memory: 32Gi"))),
    ("always replaced", write(("  job_recovery: {max_restarts_on_errors: 3}\n", ""))),
    ("leave the strategy out", write(("{max_restarts_on_errors: 3}", "{strategy: RETRY, max_restarts_on_errors: 3}"))),
    ("any_of, below", write((f"  {PLACES}\n", ""))),
    ("place of its own", write(("gcp/us-central1", "aws/us-east-1"))),
    ("its schema refuses it", write(("aws/us-east-1", "amazon/us-east-1"))),
    ("one of the two", write((PLACES, f"{PLACES}\n  {PLACES.replace('any_of', 'ordered')}"))),
    ("below it the lines", write((f"run: |\n{RUN}", ""))),
    ("starts the processes", run("echo hello")),
    ("knows of one node", run(HEAD, f"{T.replace('--nnodes=2 ', '')} {SCRIPT}")),
    ("waits for itself", run(f"torchrun --nnodes=2 --nproc-per-node=4 {NODE} {SCRIPT}")),
    ("a line for each node", run(f"{T.replace('$head', chr(34) + '$SKYPILOT_NODE_IPS' + chr(34))} {SCRIPT}")),
    ("and not tail", run(HEAD.replace("head -n1", "tail -n1"), f"{T} {SCRIPT}")),
    ("the first line of", run(f"{T} {SCRIPT}")),
    ("at the end of a line", run(HEAD, T, SCRIPT)),
    ("as its help has them", run(HEAD, f"{T} --gpus=4 {SCRIPT}")),
    ("the first node's address", run(f"torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d {SCRIPT}")),
    ("starts with Python", run(HEAD, f"{T} -m {SCRIPT}")),
    ("the same --rdzv-id on", run(HEAD, f"{MEET.replace('29500', '29500 --rdzv-id=$RANDOM')} {SCRIPT}")),
    ("the same --master-port on", run(HEAD, f"{T} --master-port=$((29500+SKYPILOT_NODE_RANK)) {SCRIPT}")),
    ("the same --rdzv-endpoint on", run(HEAD, f"{MEET.replace('29500', '$RANDOM')} {SCRIPT}")),
    ("write c10d", run(HEAD, f"{MEET.replace('c10d', 'c10')} {SCRIPT}")),
    ("has no files of yours", run("set -e", "source ~/venv/bin/activate", HEAD, f"{T} {SCRIPT}")),
    ("exactly two", run(HEAD, f"{T.replace('nnodes=2', 'nnodes=1:2')} {SCRIPT}")),
]


@pytest.mark.parametrize(("hint", "answer"), WRONG_FILES)
def test_wrong_files_get_the_hint_that_fits(hint, answer):
    assert hint in refuse("13.3", answer)


def test_a_command_that_waits_is_ended(monkeypatch):
    monkeypatch.setattr(cloud_files, "SECONDS", 0.3)
    assert "start torchrun at once" in refuse("13.3", run("while true; do :; done"))


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
RIGHT_FILES = [
    write(),
    lambda trainjob, sky: [trainjob + LONG, sky + OTHER],
    write(("    numProcPerNode: 4\n", "")),
    command("torchrun", "--nnodes=2", "--node-rank=$(PET_NODE_RANK)", *SCRIPT.split()),
    write((COMMAND, f"command: [torchrun]\n    args: {json.dumps(SCRIPT.split())}")),
    run("set -euo pipefail", "source .venv/bin/activate || true", "pip install x", HEAD, f"{T} {SCRIPT}"),
    run(f"{T.replace('$head', '${SKYPILOT_NODE_IPS%%$' + chr(39) + chr(92) + 'n' + chr(39) + '*}')} {SCRIPT}"),
    run("head=`echo \"$SKYPILOT_NODE_IPS\" | awk 'NR==1'`", f"uv pip install x && {T} {SCRIPT}"),
    run(HEAD, f"{MEET} {SCRIPT}"),
    run(HEAD, f"cd scripts && uv run {T} {SCRIPT}"),
    command("bash", "-lc", f"torchrun scripts/{SCRIPT}"),
]


@pytest.mark.parametrize("answer", RIGHT_FILES)
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


def test_a_stub_is_no_answer():
    def write_files(trainjob, task):
        raise NotImplementedError

    with pytest.raises(OpenError, match="still to be written"):
        check.exercise("13.3", write_files)


def test_the_schemas_are_those_of_both_projects_and_small(root):
    folder = root / "data" / "schemas"
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE", "README.md", "kubeflow_trainjob.json", "skypilot_resources.json", "skypilot_task.json"
    }  # fmt: skip
    assert all(path.stat().st_size < 40_000 for path in folder.iterdir())
    for name in ("kubeflow_trainjob", "skypilot_task", "skypilot_resources"):
        validator = cloud_files._find_validator(name)
        validator.check_schema(validator.schema)
    trainer = cloud_files._find_validator("kubeflow_trainjob").schema["properties"]["spec"]["properties"]["trainer"]
    assert {"numNodes", "numProcPerNode", "command", "resourcesPerNode"} < set(trainer["properties"])


# The script that is killed


def interrupt(root, *options):
    command = [sys.executable, "scripts/train_interrupted.py", *map(str, options)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ended = subprocess.run(command, cwd=root / "notebooks", env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_a_run_that_is_killed_ends_with_the_same_weights(root):
    options = ("--steps", 60, "--every", 0, 7, "--starts", 3, "--mtbf", 0.1, "--rounds", 2, "--limit", 2)
    found = interrupt(root, *options)
    assert [(run["round"], run["every"]) for run in found] == [(0, 0), (0, 7), (1, 0), (1, 7)]
    whole, kills = found[::2], sum(run["kills"] for run in found[1::2])
    assert all((run["kills"], run["attempts"], run["saves"], run["steps"]) == (0, 3, 3, 60) for run in whole)
    assert kills and kills == sum(run["kills"] for run in found) and len({run["weights"] for run in found}) == 1
    assert not list(Path(root, "notebooks").glob("run.*"))
