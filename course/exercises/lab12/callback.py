"""Exercise 12.3: a callback that logs how long the slowest rank took for a step.

It runs in a fit on two ranks in which known steps sleep. ``timed_fit.py`` puts a callback before the learner's and one
after it, and notes when Lightning calls them: the seconds that the learner's callback can measure are between the two,
even on a busy machine.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import nodelaunch as launch
from course.check.verdicts import expect
from course.exercises.script_runs import expect_end
from course.exercises.scripts import expect_scripts, read_script
from course.frameworks import find_python
from lab_common import read_path

RANKS = 2
# Seconds that each step sleeps, by rank and epoch. In epoch 1 rank 1 is the slowest, in epoch 2 rank 0, and neither
# the first nor the last step is; what is left of epoch 1 would show.
SLEEPS = (
    ((0.1, 0.05, 0.3, 0.08), (0.05, 0.25, 0.07, 0.12)),
    ((0.06, 0.7, 0.1, 0.07), (0.08, 0.05, 0.15, 0.1)),
)
CLOSE = 2e-3  # float32, and clocks other than perf_counter
HANG_SECONDS, LIMIT = 30, 120
NAME, SCRIPT = "slowest", "slowest_rank.py"
PROVED = "on two ranks, and in both epochs, it is the longest step of all ranks, and every rank has it"
LOG = f'pl_module.log("{NAME}", …) in on_train_batch_end, on every rank, for the epoch: on_step=False, on_epoch=True'
WAITS = "log with sync_dist=True on every rank, in each step, and in no `if`"

Seconds = Sequence[Sequence[float]]  # by rank and step


def verify_callback(path: str | Path) -> str:
    """Fits a network on two ranks with the callback, and compares its logs with the durations of the steps."""
    script, driver = read_path(path).resolve(), Path(__file__).with_name("timed_fit.py")
    expect_scripts(script)
    read_script(script, path)
    python = find_python("lightning")
    print("Your callback runs on two ranks ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab12-", ignore_cleanup_errors=True) as folder:
        ours = Path(folder, driver.name)
        shutil.copy(driver, ours)
        theirs = Path(folder, SCRIPT)
        shutil.copy(script, theirs)
        (node,) = launch.local_nodes(1, folder=Path(folder, "nodes"))
        job = launch.TorchrunJob(
            ours,
            [theirs.name, json.dumps(SLEEPS)],
            nodes=[replace(node, python=str(python))],
            nproc_per_node=RANKS,
            files=[theirs],
            env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            hang_timeout=HANG_SECONDS,
            join_timeout=60,
            limit=LIMIT,
        )
        result = job.run(check=False, show=False, force=True)
        expect_end(result, "two ranks", {}, waits=WAITS, own=SCRIPT)
    hint = "let Lightning come to the end of the fit: the callback calls no exit()"
    ended = None not in result.results
    expect(ended, "what the ranks report", yours="nothing", expected="a report of each", hint=hint)
    for epoch in range(len(SLEEPS[0])):
        for rank in range(RANKS):
            _expect_slowest(result.results, epoch, rank)
    return PROVED


def _expect_slowest(results: Sequence[dict], epoch: int, rank: int) -> None:
    """Expects a rank to have logged the longest step of all ranks in an epoch."""
    steps = len(SLEEPS[0][epoch])
    own = slice(epoch * steps, (epoch + 1) * steps)
    logged = results[rank]["logged"][epoch]
    expect(
        NAME in logged,
        f'epoch {epoch + 1}, rank {rank}: trainer.callback_metrics["{NAME}"]',
        yours=f"only {', '.join(logged)}"[:100] if logged else "nothing is logged",
        expected="seconds",
        hint=LOG,
    )

    def find_bounds(choose: Callable[[Seconds], float]) -> tuple[float, float]:
        """Returns the least and the most that a function of the seconds can be."""
        return tuple(
            choose([[step[bound] for step in result["steps"][own]] for result in results])
            for bound in ("least", "most")
        )

    wrong = {
        f'this is rank {rank}\'s own: the largest of all ranks needs sync_dist=True, beside reduce_fx="max"': (
            lambda seconds: max(seconds[rank])
        ),
        'this is the mean over the steps, which is what Lightning logs by itself: reduce_fx="max"': (
            lambda seconds: sum(map(sum, seconds)) / RANKS / steps
        ),
        "this is of the last step alone: log for the epoch, on_step=False, on_epoch=True": (
            lambda seconds: max(one[-1] for one in seconds)
        ),
    }
    yours, (least, most) = logged[NAME], find_bounds(lambda seconds: max(map(max, seconds)))
    hints = (
        hint
        for hint, choose in wrong.items()
        for low, high in [find_bounds(choose)]
        if low - CLOSE <= yours <= high + CLOSE
    )
    general = (
        "the seconds from on_train_batch_start to on_train_batch_end, and of them the largest of all steps and ranks"
    )
    expect(
        least - CLOSE <= yours <= most + CLOSE,
        f"epoch {epoch + 1}, rank {rank}: the longest step of both ranks, in seconds",
        yours=f"{yours:.3f}",
        expected=f"{least:.3f}" if most - least < CLOSE else f"{least:.3f} to {most:.3f}",
        hint=next(hints, general),
    )
