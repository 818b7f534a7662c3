"""Each check of lab 3 refuses typical wrong answers with the hint that fits and accepts right ones."""

import math
import os
from pathlib import Path

import nbformat
import pytest
import wandb

from course import check
from course.check import NotYetError
from lab_utils import wandb_runs

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory):
    """Keeps what the SDK writes beside its runs in a folder of the tests."""
    wandb_runs.connect(tmp_path_factory.mktemp("wandb"))


def define(**kinds):
    """Makes an answer that defines the named summaries; __ means a slash."""

    def define_summaries(run):
        for name, kind in kinds.items():
            run.define_metric(name.replace("__", "/").replace("ALL", "*"), summary=kind)

    return define_summaries


RIGHT = {"acc1__valid": "max", "acc5__valid": "max", "loss__valid": "min"}


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (define(), "keeps the last value"),
        (define(acc1__valid="max"), 'run.define_metric("acc5/valid", summary="max")'),
        (define(**RIGHT | {"acc1__valid": "min"}), "is the highest"),
        (define(**RIGHT | {"loss__valid": "max"}), "is the lowest"),
        (define(**RIGHT | {"acc1__valid": "last"}), "the one value that counts"),
        (define(**RIGHT | {"acc1__valid": "none"}), "no summary at all"),
        (define(ALL="max", loss__valid="min"), "takes the training with it"),
        (define(**RIGHT | {"acc1__valid": "highest"}), "the words are min, max"),
    ],
)
def test_wrong_summaries_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("3.1", answer)
    assert hint in refused.value.hint
    assert refused.value.expected


@pytest.mark.parametrize(
    "answer", [define(**RIGHT), define(**RIGHT | {"acc1__valid": "max,last"}), define(**RIGHT | {"loss__train": "min"})]
)
def test_right_summaries_get_the_tick(answer, capfd):
    check.exercise("3.1", answer)
    expected = "highest acc1 and acc5 and lowest loss of the validation, each where it was best"
    assert capfd.readouterr() == (f"✔ 3.1 The best, not the last: {expected}\n", "")


def test_the_check_leaves_nothing_behind_and_disturbs_no_open_run(tmp_path):
    runs = Path(os.environ["LAB_RUNS"])
    check.exercise("3.1", define(**RIGHT))  # what is kept of the tries is there from now on
    before = sorted(runs.iterdir())
    run = wandb.init(project="labs", **wandb_runs.connect(tmp_path).options)
    run.log({"a": 1}, step=1)
    check.exercise("3.1", define(**RIGHT))
    run.log({"a": 2}, step=2)
    run.finish()
    assert wandb_runs.read_run(run.dir).curve("a") == {1: 1, 2: 2}
    assert sorted(runs.iterdir()) == before


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda checkpoints, recorded: (max(checkpoints, default=0), recorded + 1), "younger than the record"),
        (lambda checkpoints, recorded: (max(checkpoints, default=0),) * 2, "only what is not in the record"),
        (
            lambda checkpoints, recorded: (max((c for c in checkpoints if c <= recorded), default=0), recorded),
            "in the record already",
        ),
        (
            lambda checkpoints, recorded: (max((c for c in checkpoints if c <= recorded), default=0) + 1, recorded + 1),
            "name the checkpoint itself",
        ),
        (
            lambda checkpoints, recorded: (max((c for c in checkpoints if c < recorded), default=0), recorded + 1),
            "recorded last will do",
        ),
        (
            lambda checkpoints, recorded: (
                next((c for c in reversed(checkpoints) if c <= recorded), 0),
                recorded + 1,
            ),
            "any order",
        ),
        (
            lambda checkpoints, recorded: (
                max([c for c in checkpoints if c <= recorded] or checkpoints, default=0),
                recorded + 1,
            ),
            "no checkpoint is old enough",
        ),
        (lambda checkpoints, recorded: (max(c for c in checkpoints if c <= recorded), recorded + 1), "from the start"),
        (
            lambda checkpoints, recorded: (recorded + 1, max((c for c in checkpoints if c <= recorded), default=0)),
            "other way round",
        ),
        (lambda checkpoints, recorded: (recorded // 10 * 10, recorded + 1), "take the newest"),
        (lambda checkpoints, recorded: recorded + 1, "two numbers"),
    ],
)
def test_wrong_plans_of_a_resumption_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("3.2", answer)
    assert hint in refused.value.hint


def resume_by_sorting(checkpoints, recorded):
    old = sorted(step for step in checkpoints if step <= recorded)
    return [old[-1] if old else 0, recorded + 1]


@pytest.mark.parametrize(
    "answer",
    [
        resume_by_sorting,
        lambda checkpoints, recorded: (max([0, *(c for c in checkpoints if c <= recorded)]), recorded + 1),
    ],
)
def test_right_plans_of_a_resumption_are_accepted(answer, capsys):
    check.exercise("3.2", answer)
    assert capsys.readouterr().out.startswith("✔ 3.2 Going on without gap or double: 7 interruptions")


def plan(one=lambda rank, job: {"name": job} if rank == 0 else None, **changes):
    """An answer that is right but for the changes of what it returns for a rank of a group."""

    def plan_rank(rank, job, every_rank):
        if not every_rank:
            return one(rank, job)
        right = {"group": job, "job_type": "rank", "name": f"{job}-rank{rank}"}
        made = right | {key: change(rank, job) for key, change in changes.items()}
        return {key: value for key, value in made.items() if value is not None}

    return plan_rank


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (plan(one=lambda rank, job: {"name": job}), "rank 0 logs them"),
        (plan(one=lambda rank, job: {} if rank == 0 else None), "has the job's name"),
        (plan(one=lambda rank, job: {"name": job, "group": job} if rank == 0 else None), "needs none"),
        (plan(one=lambda rank, job: job), "return a dictionary"),
        (plan(group=lambda rank, job: None), "in common"),
        (plan(name=lambda rank, job: job), "a name for each rank"),
        (plan(id=lambda rank, job: job), "runs of one id are one run"),
        (plan(job_type=lambda rank, job: None), "job_type"),
        (lambda rank, job, every_rank: {"name": job} if rank == 0 else None, "every rank watches itself"),
    ],
)
def test_wrong_plans_of_ranks_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("3.3", answer)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "answer",
    [plan(), plan(name=lambda rank, job: f"rank {rank} of {job}"), plan(id=lambda rank, job: f"{job}-{rank}")],
)
def test_right_plans_of_ranks_are_accepted(answer, capsys):
    check.exercise("3.3", answer)
    assert capsys.readouterr().out.startswith("✔ 3.3 The runs of several ranks: one run from rank 0 alone")


def test_the_alert_stops_a_lost_training_and_no_resnet_at_its_start(root):
    cells = nbformat.read(root / "notebooks" / "03_wandb.ipynb", as_version=4).cells
    names, alerts = {}, []
    exec(next(cell.source for cell in cells if cell.get("id") == "train"), names)
    run = type("Run", (), {"alert": lambda self, *words: alerts.append(words)})()
    # The first losses of a ResNet-18 at the lab's full scale; with batches of 128 they reached 5.5.
    for loss in (2.394, 2.982, 3.845, 4.269, 4.826, 4.188, 4.06, 3.508, 5.5):
        names["stop_if_lost"](run, loss, 1)
    assert alerts == []
    for loss in (25.0, math.inf, math.nan):  # at rate 30 the small net's second loss is above 25
        with pytest.raises(ArithmeticError):
            names["stop_if_lost"](run, loss, 1)
    assert len(alerts) == 3
