"""The checks of lab 3 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

import os
from pathlib import Path

import pytest
import wandb
from harness.answers import load_answer, refuse_edited

from course import check
from lab_utils import wandb_runs

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory):
    """Keeps what the SDK writes beside its runs in a folder of the tests."""
    wandb_runs.connect(tmp_path_factory.mktemp("wandb"))


ACC1 = 'run.define_metric("acc1/valid", summary="max")'
PLAN = "max(old_enough, default=0), recorded + 1"
GROUP = '{"group": job, "job_type": "rank", "name": f"{job}-rank{rank}"}'
ONE = 'return {"name": job} if rank == 0 else None'


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("3.1", ACC1, "pass", "keeps the last value"),
        ("3.1", ACC1, ACC1.replace("max", "min"), "is the highest"),
        ("3.1", 'summary="min"', 'summary="max"', "is the lowest"),
        ("3.1", ACC1, ACC1.replace("max", "last"), "the one value that counts"),
        ("3.1", ACC1, ACC1.replace("max", "highest"), "the words are min, max"),
        ("3.1", ACC1, 'run.define_metric("*", summary="max")', "takes the training with it"),
        ("3.2", " if step <= recorded", "", "younger than the record"),
        ("3.2", "<= recorded", "< recorded", "recorded last will do"),
        ("3.2", "max(old_enough, default=0)", "next(iter([*old_enough][::-1]), 0)", "any order"),
        ("3.2", "max(old_enough, default=0)", "max([*old_enough] or checkpoints, default=0)", "is old enough"),
        ("3.2", "old_enough, default=0", "old_enough", "from the start"),
        ("3.2", "max(old_enough, default=0)", "recorded // 10 * 10", "take the newest"),
        ("3.2", PLAN, "recorded + 1", "would come twice"),
        ("3.3", ONE, 'return {"name": job}', "rank 0 logs them"),
        ("3.3", ONE, "return job", "return a dictionary"),
        ("3.3", '"group": job, ', "", "in common"),
        ("3.3", '{job}-rank{rank}"', 'job"', "a name for each rank"),
        ("3.3", GROUP, f'{GROUP[:-1]}, "id": job}}', "runs of one id are one run"),
        ("3.3", '"job_type": "rank", ', "", "job_type"),
        ("3.3", "if every_rank", "if False", "every rank watches itself"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def resume_by_sorting(checkpoints, recorded):
    old = sorted(step for step in checkpoints if step <= recorded)
    return [old[-1] if old else 0, recorded + 1]


def test_another_right_plan_of_a_resumption_is_accepted(capsys):
    check.exercise("3.2", resume_by_sorting)
    assert capsys.readouterr().out.startswith("✔ 3.2 Going on without gap or double: 7 interruptions")


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        ("3.1", ACC1, ACC1.replace("max", "max,last")),
        ("3.3", '{job}-rank{rank}"', 'rank {rank} of {job}"'),
    ],
)
def test_more_right_answers_are_accepted(number, old, new):
    check.exercise(number, load_answer(number, (old, new)))


def test_the_check_leaves_nothing_behind_and_disturbs_no_open_run(tmp_path):
    runs, answer = Path(os.environ["LAB_RUNS"]), load_answer("3.1")
    check.exercise("3.1", answer)  # what is kept of the tries is there from now on
    before = sorted(runs.iterdir())
    run = wandb.init(project="labs", **wandb_runs.connect(tmp_path).options)
    run.log({"a": 1}, step=1)
    check.exercise("3.1", answer)
    run.log({"a": 2}, step=2)
    run.finish()
    assert wandb_runs.read_run(run.dir).curve("a") == {1: 1, 2: 2}
    assert sorted(runs.iterdir()) == before
