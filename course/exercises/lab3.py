"""The exercises of lab 3: the best value in the summary, the plan of a resumption, the runs of several ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from course.check.judge import judge
from course.check.verdicts import Exercise, expect, refusing
from lab_common import env_folder
from lab_utils import wandb_runs
from lab_utils.wandb_runs import Connection

# Steps of a training whose best accuracies and lowest loss lie neither at its start nor at its end, nor together.
CURVE = (
    {"acc1/valid": 0.25, "acc5/valid": 0.625, "loss/valid": 2.25, "acc1/train": 0.25},
    {"acc1/valid": 0.5, "acc5/valid": 0.875, "loss/valid": 1.25, "acc1/train": 0.75},
    {"acc1/valid": 0.75, "acc5/valid": 0.75, "loss/valid": 1.5, "acc1/train": 0.875},
    {"acc1/valid": 0.375, "acc5/valid": 0.6875, "loss/valid": 2.0, "acc1/train": 0.5},
)
BEST = {"acc1/valid": "max", "acc5/valid": "max", "loss/valid": "min"}


def verify_define_summaries(define_summaries: Callable) -> str:
    """Opens a real run, offline and in a folder that is gone afterwards, logs a curve, and looks at its summary."""
    summary = _summarise(define_summaries)
    for name, kind in BEST.items():
        yours, values = summary.get(name), [row[name] for row in CURVE]
        found = {"max": max(values), "min": min(values)}
        other = "max" if kind == "min" else "min"
        if isinstance(yours, Mapping) and kind in yours:  # which is what later cells read
            yours = {kind: yours[kind]}
        wrong = {
            f'by itself the summary keeps the last value: run.define_metric("{name}", summary="{kind}")': values[-1],
            f"the best {name.partition('/')[0]} is the {'lowest' if kind == 'min' else 'highest'}: summary={kind!r}": {
                other: found[other]
            },
        }
        case = f"the summary of {name} after {values}"
        hint = f'ask for the one value that counts: run.define_metric("{name}", summary="{kind}")'
        judge(yours, right={kind: found[kind]}, case=case, wrong=wrong, hint=hint)
    hint = 'name the three quantities: a pattern such as "*" takes the training with it, whose best means nothing'
    case = "the summary of acc1/train, which should stay as it is"
    judge(summary.get("acc1/train"), right=CURVE[-1]["acc1/train"], case=case, hint=hint)
    return "highest acc1 and acc5 and lowest loss of the validation, each where it was best"


def _summarise(define_summaries: Callable) -> dict:
    import wandb

    runs = env_folder("LAB_RUNS", "runs")
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs, prefix="check-") as folder:
        if "WANDB_DATA_DIR" not in os.environ:  # outside the lab: the SDK would write into the home folder
            wandb_runs.connect(runs)
        where = Connection(Path(folder), "offline", "a check").options
        run = wandb.init(project="check", reinit="create_new", **where)
        try:
            hint = 'run.define_metric("name", summary="max"): the words are min, max, mean, last, first, none'
            expected = "three calls of run.define_metric"
            with refusing(wandb.errors.Error, TypeError, case="define_summaries(run)", expected=expected, hint=hint):
                define_summaries(run)
            for step, row in enumerate(CURVE, start=1):
                run.log(row, step=step)
        finally:
            run.finish()
        return wandb_runs.read_run(run.dir).summary


# The checkpoints that lie there, the last step in the record, the answer, and what the case is about.
RESUME_CASES = (
    ((10, 20), 27, (20, 28), "log only what is not in the record yet: steps 21 to 27 are, and would come twice"),
    ((10, 20, 30), 27, (20, 28), "from checkpoint 30 steps 28 to 30 would be missing: it is younger than the record"),
    ((10, 20, 30), 30, (30, 31), "a checkpoint of the very step that was recorded last will do"),
    ((8, 24, 16, 5), 20, (16, 21), "files come in any order: take the newest that is not younger than the record"),
    ((10,), 7, (0, 8), "no checkpoint is old enough: train from the start, 0, and log from where the record ends"),
    ((), 4, (0, 5), "there is no checkpoint: train from the start, 0"),
    ((), 0, (0, 1), "nothing was recorded and nothing saved: the first step is 1"),
)


def verify_plan_resume(plan_resume: Callable) -> str:
    """Asks for seven interruptions."""
    for checkpoints, recorded, right, hint in RESUME_CASES:
        case = f"checkpoints {list(checkpoints)}, recorded up to step {recorded}"
        with refusing(ValueError, TypeError, IndexError, case=case, expected=right, hint=hint):
            yours = plan_resume(list(checkpoints), recorded)
        wrong = {
            "two numbers, in this order: the checkpoint to load, and the first step to log": right[::-1],
            "the last recorded step is in the record already: log from the one after it": (right[0], recorded),
            "name the checkpoint itself; training goes on with the step after it": (right[0] + 1, right[1]),
        }
        judge(yours, right=right, case=case, wrong=wrong, hint=hint)
    return f"{len(RESUME_CASES)} interruptions, each continued without a gap and without a doubled step"


def verify_plan_rank(plan_rank: Callable) -> str:
    """Asks for the plans of two jobs of four ranks, as one run and as one run per rank."""
    ranks = range(4)
    for job in ("job-a", "job-b"):
        plans = _ask(plan_rank, job, False)
        case, one = "every_rank=False: name and group of each rank's run", {"name": job, "group": None}
        yours = [plan and {key: plan.get(key) for key in one} for plan in plans]
        hint = "the reduced values are the same on all ranks: rank 0 logs them, the others open no run (None)"
        wrong = {
            "the one run has the job's name, so that it can be found": [one | {"name": None}, None, None, None],
            "a group holds the runs of several ranks: the one run needs none": [one | {"group": job}, None, None, None],
        }
        judge(yours, right=[one, None, None, None], case=case, wrong=wrong, hint=hint)
        plans = [plan or {} for plan in _ask(plan_rank, job, True)]
        names, ids = [plan.get("name") for plan in plans], [plan["id"] for plan in plans if "id" in plan]
        hint = "here every rank watches itself: return a dictionary for each, with what the ranks have in common, the "
        case, right = "every_rank=True: the groups of the four ranks", [job] * 4
        judge([plan.get("group") for plan in plans], right=right, case=case, hint=hint + "job's name, as group")
        apart = len({*names}) == 4 and all(str(rank) in str(names[rank]) for rank in ranks)
        hint = "a name for each rank, with its number, or nobody can tell the four curves apart"
        right = [f"{job}-rank{rank}" for rank in ranks]
        expect(apart, "every_rank=True: the names", yours=names, expected=right, hint=hint)
        hint = "runs of one id are one run, into which all ranks would write; the SDK makes ids by itself"
        expect(len({*ids}) == len(ids), "every_rank=True: the ids", yours=ids, expected="none, or four", hint=hint)
        hint = 'job_type="rank" tells these runs from trainings in the project\'s list'
        kinds = [plan.get("job_type") for plan in plans]
        judge(kinds, right=["rank"] * 4, case="every_rank=True: the job types", hint=hint)
    return "one run from rank 0 alone, or four runs in a group of their own for each job"


def _ask(plan_rank: Callable, job: str, every_rank: bool) -> list[Mapping | None]:
    plans = [plan_rank(rank, job, every_rank) for rank in range(4)]
    hint = 'return a dictionary such as {"name": job}, which goes to wandb.init, or None for no run'
    for rank, plan in enumerate(plans):
        case = f"rank {rank}, every_rank={every_rank}: what the function returns"
        right = plan is None or isinstance(plan, Mapping)
        expect(right, case, yours=type(plan).__name__, expected="a dictionary of arguments, or None", hint=hint)
    return plans


EXERCISES = {
    "3.1": Exercise("The best, not the last", verify_define_summaries),
    "3.2": Exercise("Going on without gap or double", verify_plan_resume),
    "3.3": Exercise("The runs of several ranks", verify_plan_rank),
}
