"""Exercise 12.3: a callback that logs how long the slowest rank took for a step.

It runs in a fit on two ranks in which known steps sleep. ``timed_fit.py`` puts a callback before the learner's and one
after it, and notes when Lightning calls them: the seconds that the learner's callback can measure are between the two,
even on a busy machine.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import nodelaunch as launch
from course.check.verdicts import NotYetError, OpenError, expect
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
LOG = f'pl_module.log("{NAME}", …)'
SAME_CALLS = "a rank waits for the others: log with sync_dist=True on every rank, in each step, and in no `if`"
FAILURES = (
    (r"has no attribute 'log'", f"a callback logs by the module: {LOG}"),
    (r"reduce_fx|reduce_op", 'the reduction is called "max"'),
    (r"on_step|on_epoch", "on_train_batch_end can log for the step or for the epoch: on_step=False, on_epoch=True"),
)


@dataclass(frozen=True)
class _Epoch:
    """The ranks' measurements and logs of an epoch, all by rank.

    Attributes:
        bounds: The least and the most seconds of each step.
        logged: The content of ``trainer.callback_metrics`` after it.
    """

    bounds: tuple[tuple[tuple[float, float], ...], ...]
    logged: tuple[dict[str, float], ...]

    def bound(self, choose: Callable[[Sequence[Sequence[float]]], float]) -> tuple[float, float]:
        """Returns the bounds of a function of the seconds, by rank and step."""
        return tuple(choose([[step[place] for step in rank] for rank in self.bounds]) for place in (0, 1))


def verify_callback(path: str | Path) -> str:
    """Fits a network on two ranks with the callback, and compares its logs with the durations of the steps."""
    script, driver = read_path(path).resolve(), Path(__file__).with_name("timed_fit.py")
    expect_scripts(script)
    tree = read_script(script, path)
    if not any(isinstance(node, ast.ClassDef) and node.name == "SlowestRank" for node in tree.body):
        fix = "call the class SlowestRank, as it was"
        raise OpenError(f"✎ {path} has no class SlowestRank.", where=script, fix=fix)
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
        _expect_end(result)
    epochs = _read(result.results)
    for number in range(len(epochs)):
        _expect_slowest(epochs[: number + 1])
    return PROVED


def _read(results: Sequence[dict | None]) -> list[_Epoch]:
    steps, found = len(SLEEPS[0][0]), []
    hint = "let Lightning come to the end of the fit: the callback calls no exit()"
    expect(None not in results, "what the ranks report", yours="nothing", expected="a report of each", hint=hint)
    for epoch in range(len(SLEEPS[0])):
        own = slice(epoch * steps, (epoch + 1) * steps)
        bounds = tuple(tuple((row["least"], row["most"]) for row in result["steps"][own]) for result in results)
        found.append(_Epoch(bounds, tuple(result["logged"][epoch] for result in results)))
    return found


def _expect_end(job: launch.JobResult) -> None:
    """Expects the fit to end on both ranks."""
    failure, expected = job.failure, "a fit that ends well"
    if not failure:
        return
    if failure.kind in ("hang", "limit"):
        raise NotYetError("the fit does not end", yours=failure.what, expected=expected, hint=SAME_CALLS)
    last = (failure.message.strip().splitlines() or [failure.what])[0]
    wrong = "mend what this line says, save the file, run the cell again"
    fix = wrong if failure.kind == "exception" else failure.fix
    hint = next((hint for pattern, hint in FAILURES if re.search(pattern, failure.message)), fix)
    case = failure.what if failure.rank is None else f"rank {failure.rank} failed first"
    # The launcher names a line of the script that it ran, which is ours; theirs stands in the traceback.
    lines = re.findall(rf'{SCRIPT}", line (\d+)', failure.traceback)
    where = f"{SCRIPT}, line {lines[-1]}" if lines else failure.location or failure.kind
    raise NotYetError(case, yours=f"{where}: {last[:160]}", expected=expected, hint=hint)


def _expect_slowest(epochs: Sequence[_Epoch]) -> None:
    """Expects the last epoch to have, on every rank, the longest step of all ranks."""
    epoch, number = epochs[-1], len(epochs)
    least, most = epoch.bound(lambda seconds: max(map(max, seconds)))
    for rank, logged in enumerate(epoch.logged):
        hint = f"{LOG} in on_train_batch_end, for the epoch: on_step=False, on_epoch=True"
        if logged:
            hint = f"log it as {NAME!r}, and for the epoch alone: on_step=False, on_epoch=True"
        elif rank:
            hint = "log it on every rank: a callback such as EarlyStopping reads it on each"
        expect(
            NAME in logged,
            f'epoch {number}, rank {rank}: trainer.callback_metrics["{NAME}"]',
            yours=f"only {', '.join(logged)}"[:100] if logged else "nothing is logged",
            expected="seconds",
            hint=hint,
        )
        yours = logged[NAME]
        expect(
            least - CLOSE <= yours <= most + CLOSE,
            f"epoch {number}, rank {rank}: the longest step of both ranks, in seconds",
            yours=f"{yours:.3f}",
            expected=f"{least:.3f}" if most - least < CLOSE else f"{least:.3f} to {most:.3f}",
            hint=_explain(yours, rank, epochs),
        )


def _explain(yours: float, rank: int, epochs: Sequence[_Epoch]) -> str:
    """Returns the hint for a wrong number."""
    epoch = epochs[-1]

    def is_like(*choices: Callable[[Sequence[Sequence[float]]], float], of: Sequence[_Epoch] = (epoch,)) -> bool:
        bounds = [one.bound(choose) for one in of for choose in choices]
        return any(least - CLOSE <= yours <= most + CLOSE for least, most in bounds)

    if is_like(lambda seconds: max(seconds[rank])):
        return f'this is rank {rank}\'s own: the largest of all ranks needs sync_dist=True, beside reduce_fx="max"'
    if is_like(lambda seconds: _mean([*map(_mean, seconds)]), lambda seconds: _mean(seconds[rank])):
        return 'this is the mean over the steps, which is what Lightning logs by itself: reduce_fx="max"'
    if is_like(lambda seconds: _mean([*map(max, seconds)])):
        return 'this is the mean over the ranks: reduce_fx="max" (or the same reduction by hand) holds for ranks, too'
    if is_like(lambda seconds: max(map(_mean, seconds))):
        return "this is the mean over the slowest rank's steps: take their maximum"
    if is_like(lambda seconds: sum(map(max, seconds))):
        return "this is the sum over the ranks: take their maximum"
    if is_like(*(lambda seconds, choose=choose: choose([one[-1] for one in seconds]) for choose in (_mean, max, min))):
        return "this is of the last step alone: log for the epoch, on_step=False, on_epoch=True"
    if is_like(lambda seconds: min(map(min, seconds)), lambda seconds: min(map(max, seconds))):
        return 'this is the shortest: reduce_fx="max"'
    if is_like(lambda seconds: 1000 * max(map(max, seconds)), lambda seconds: 1000 * max(seconds[rank])):
        return "these are milliseconds: log seconds"
    if is_like(lambda seconds: max(map(max, seconds)), of=epochs[:-1]):
        return "this is an earlier epoch's: begin each epoch anew, as Lightning does with on_epoch=True"
    if yours > epoch.bound(lambda seconds: max(map(max, seconds)))[1]:
        return (
            "this is longer than any step: subtract self.began, begin in each on_train_batch_start, and add up no steps"
        )
    return "the seconds from on_train_batch_start to on_train_batch_end, and of them the largest of all steps and ranks"


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)
