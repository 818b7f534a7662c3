"""The exercises of lab 3: the best value in the summary, the plan of a resumption, the runs of several ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

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
BEST = {"acc1/valid": ("max", 0.75), "acc5/valid": ("max", 0.875), "loss/valid": ("min", 1.25)}


def verify_define_summaries(define_summaries: Callable) -> str:
    """Opens a real run, offline and in a folder that is gone afterwards, logs a curve, and looks at its summary."""
    summary = _summarise(define_summaries)
    for name, (kind, best) in BEST.items():
        yours = summary.get(name)
        values = [row[name] for row in CURVE]
        expect(
            isinstance(yours, Mapping) and yours.get(kind) == best,  # as later cells read it
            f"the summary of {name} after {values}",
            yours=yours,
            expected={kind: best},
            hint=_explain_summary(name, kind, yours, values[-1]),
        )
    yours, last = summary.get("acc1/train"), CURVE[-1]["acc1/train"]
    expect(
        yours == last,
        "the summary of acc1/train, which should stay as it is",
        yours=yours,
        expected=last,
        hint='name the three quantities: a pattern such as "*" takes the training with it, whose best means nothing',
    )
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


def _explain_summary(name: str, kind: str, yours: object, last: float) -> str:
    """The hint that fits a wrong summary of one quantity."""
    if yours is None:
        return "with summary='none' a metric has no summary at all"
    if yours == last:
        return f'by itself the summary keeps the last value: run.define_metric("{name}", summary="{kind}")'
    if isinstance(yours, Mapping) and {"min", "max"} & yours.keys():
        return f"the best {name.partition('/')[0]} is the {'lowest' if kind == 'min' else 'highest'}: summary={kind!r}"
    return f'ask for the one value that counts: run.define_metric("{name}", summary="{kind}")'


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
    for checkpoints, recorded, expected, hint in RESUME_CASES:
        case = f"checkpoints {list(checkpoints)}, recorded up to step {recorded}"
        with refusing(ValueError, TypeError, IndexError, case=case, expected=expected, hint=hint):
            yours = plan_resume(list(checkpoints), recorded)
            pair = tuple(yours) if isinstance(yours, list | tuple) else yours
        expect(pair == expected, case, yours=yours, expected=expected, hint=_explain_plan(pair, expected, hint))
    return f"{len(RESUME_CASES)} interruptions, each continued without a gap and without a doubled step"


def _explain_plan(yours: object, expected: tuple[int, int], hint: str) -> str:
    """The hint that fits a wrong plan."""
    if not isinstance(yours, tuple) or len(yours) != 2:
        return "return two numbers: the checkpoint to load, and the first step to log"
    if yours == expected[::-1]:
        return "the other way round: first the checkpoint, then the step"
    if yours[0] == expected[0] and yours[1] == expected[1] - 1:
        return "the last recorded step is in the record already: log from the one after it"
    if yours[0] == expected[0] + 1:
        return "name the checkpoint itself; the training goes on with the step after it by itself"
    return hint


def verify_plan_rank(plan_rank: Callable) -> str:
    """Asks for the plans of two jobs of four ranks, as one run and as one run per rank."""
    for job in ("job-a", "job-b"):
        plans = [_ask(plan_rank, rank, job, False) for rank in range(4)]
        _expect_one_run(job, plans)
        plans = [_ask(plan_rank, rank, job, True) for rank in range(4)]
        _expect_group(job, plans)
    return "one run from rank 0 alone, or four runs in a group of their own for each job"


def _ask(plan_rank: Callable, rank: int, job: str, every_rank: bool) -> dict | None:
    plan = plan_rank(rank, job, every_rank)
    expect(
        plan is None or isinstance(plan, Mapping),
        f"rank {rank}, every_rank={every_rank}: what the function returns",
        yours=type(plan).__name__,
        expected="a dictionary of arguments, or None",
        hint='return a dictionary such as {"name": job}, which goes to wandb.init, or None for no run',
    )
    return plan


def _expect_one_run(job: str, plans: list[dict | None]) -> None:
    opened = [rank for rank, plan in enumerate(plans) if plan is not None]
    expect(
        opened == [0],
        "every_rank=False: the ranks that open a run",
        yours=opened,
        expected=[0],
        hint="the reduced values are the same on all ranks: rank 0 logs them, the others open no run (None)",
    )
    expect(
        plans[0].get("name") == job,
        "every_rank=False: the run's name",
        yours=plans[0].get("name"),
        expected=job,
        hint="the one run has the job's name, so that it can be found",
    )
    expect(
        plans[0].get("group") is None,
        "every_rank=False: the run's group",
        yours=plans[0].get("group"),
        expected=None,
        hint="a group holds the runs of several ranks: the one run needs none",
    )


def _expect_group(job: str, plans: list[dict | None]) -> None:
    case = "every_rank=True: "
    opened = [rank for rank, plan in enumerate(plans) if plan is not None]
    expect(
        opened == [0, 1, 2, 3],
        f"{case}the ranks that open a run",
        yours=opened,
        expected=[0, 1, 2, 3],
        hint="here every rank watches itself: return a dictionary for each",
    )
    groups = [plan.get("group") for plan in plans]
    expect(
        groups == [job] * 4,
        f"{case}the groups of the four ranks of {job!r}",
        yours=groups,
        expected=[job] * 4,
        hint="the group is what the ranks have in common and other jobs have not: the job's name",
    )
    names = [plan.get("name") for plan in plans]
    expect(
        len(set(names)) == 4 and all(str(rank) in str(name) for rank, name in enumerate(names)),
        f"{case}the names",
        yours=names,
        expected=[f"{job}-rank{rank}" for rank in range(4)],
        hint="a name for each rank, with its number, or nobody can tell the four curves apart",
    )
    ids = [plan["id"] for plan in plans if "id" in plan]
    expect(
        len(set(ids)) == len(ids),
        f"{case}the ids",
        yours=ids,
        expected="none, or one of its own for each rank",
        hint="runs of one id are one run, into which all ranks would write; the SDK makes ids by itself",
    )
    kinds = [plan.get("job_type") for plan in plans]
    expect(
        kinds == ["rank"] * 4,
        f"{case}the job types",
        yours=kinds,
        expected=["rank"] * 4,
        hint='job_type="rank" tells these runs from trainings in the project\'s list',
    )


EXERCISES = {
    "3.1": Exercise("The best, not the last", verify_define_summaries),
    "3.2": Exercise("Going on without gap or double", verify_plan_resume),
    "3.3": Exercise("The runs of several ranks", verify_plan_rank),
}
