"""Exercise 5.1: the learner's DDP script on two nodes of this machine, beside the single-process script.

The two nodes have one process each. So LOCAL_RANK is 0 on both, as on two real hosts, and what confuses it with RANK
shows; and each has a current folder of its own, so that it shows who saved a checkpoint. All is on the CPU and in
float64, where two processes can be compared with one to ten digits, whatever this machine has.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lab_utils
import nodelaunch as launch
from course.check import NotYetError, OpenError, attempts, expect
from course.exercises.lab5.checkpoint import expect_same_state, expect_saved_once
from course.exercises.lab5.precautions import expect_precautions
from lab_common import LabError
from lab_common.files import read_bounded
from lab_utils.data import shapes
from lab_utils.data.sources import SHAPES_FINGERPRINT
from lab_utils.data.write import write_pack

RANKS, IMAGES, BATCH_SIZE, EPOCHS = 2, 96, 16, 2
STEPS_PER_EPOCH = IMAGES // (RANKS * BATCH_SIZE)
CLOSE = 1e-9
# Longer than any operation of this run takes on a busy laptop, and no longer than a learner waits for an answer. The
# process group waits longer, so that it is the launcher that says where each rank stood.
HANG_SECONDS, GROUP_SECONDS = 20, 90
PROVED = (
    "two processes with your script: gradients, weights and losses equal one process's on the union batch; "
    "every image once per epoch"
)
# By what the last line of the rank that failed says.
FAILURES = (
    (
        r"has no attribute '(module|no_sync)'",
        "the model was not wrapped: model = DDP(model), under the same name, makes backward() talk to the others",
    ),
    (
        r"There is no rank|not one full batch",
        "give the batches both numbers of the whole job: rank=rank, world_size=world_size; LOCAL_… count on one node",
    ),
    (
        r"process group has not been initialized|init_process_group",
        "dist.init_process_group(...) comes first: before it there is nobody to ask for a rank",
    ),
    (r"(?i)nccl", "NCCL needs GPUs: take 'nccl' if torch.cuda.is_available() else 'gloo'"),
    (r"(?i)cuda|nvidia", "touch CUDA only where torch.cuda.is_available(): this run is on the CPU"),
    (r"NameError|UnboundLocalError", "the lines that follow the gap use this name: assign it in the gap"),
)


@dataclass(frozen=True)
class _Runs:
    """The learner's job, what the single process reported, and where each saved its checkpoints."""

    job: launch.JobResult
    alone: dict
    saved: dict[str, Path]  # by node
    saved_alone: Path


def verify_ddp_script(path: str | Path) -> str:
    """Runs the script on two nodes and compares it with ``train_single.py`` beside it."""
    script = Path(path).resolve()
    if not script.is_file():
        cause, fix = "a slip in the path, or the script was deleted", "make workspace writes scripts/train_ddp.py again"
        raise LabError(f"There is no script {script.name!r}.", where=script, cause=cause, fix=fix)
    tree = _parse(script)
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    gaps = sorted(node.lineno for node in raises if "NotImplementedError" in ast.dump(node))
    if gaps:
        fix = "put your code where it says YOUR CODE HERE, save the file, then run this cell again"
        what = f"✎ {path} has {len(gaps)} place{'s' if len(gaps) > 1 else ''} left to fill in."
        raise OpenError(what, where=f"line {', '.join(map(str, gaps))}", fix=fix)
    expect_precautions(tree)
    print("Your script runs on two local nodes, and train_single.py beside it ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab5-", ignore_cleanup_errors=True) as folder:
        runs = _run_both(script, Path(folder))
        _expect_end(runs.job)
        _expect_images(runs.job.results)
        _expect_one_model(runs.job.results)
        _expect_losses(runs.job.results[0]["losses"], runs.alone["losses"])
        first = runs.job.ranks[0].node
        expect_saved_once(runs.saved, first)
        expect_same_state(runs.saved[first], runs.saved_alone)
    return PROVED


def _parse(script: Path) -> ast.Module:
    """Reads the script; a SyntaxError is the learner's to see, with its line."""
    try:
        text = read_bounded(script, attempts.SOURCE_BYTES).decode()
        if "\0" in text:
            raise ValueError("it holds zero bytes")
        return ast.parse(text, filename=str(script))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        fix = "save it as plain text in UTF-8, or rename it and run: make workspace"
        raise LabError(f"{script.name} cannot be read.", where=script, cause=cause, fix=fix) from error


def _run_both(script: Path, folder: Path) -> _Runs:
    """Runs the learner's script and the single-process script at the same time."""
    _draw_images(folder / "data" / "packed" / "shapes10")
    shared = ["--data", "shapes10", "--net", "tiny", "--dtype", "float64", "--frozen-bn", "--epochs", EPOCHS]
    shared += ["--every", 2, "--keep-gradients", "--checkpoints", "checkpoints"]
    env = {"LAB_DATA": str(folder / "data"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    job = launch.TorchrunJob(
        script,
        [*shared, "--batch-size", BATCH_SIZE, "--timeout", GROUP_SECONDS],
        nodes=launch.local_nodes(RANKS, folder=folder),
        env=env,
        hang_timeout=HANG_SECONDS,
        join_timeout=60,
        limit=120,
    )
    alone = [*shared, "--batch-size", RANKS * BATCH_SIZE]
    with _run_alone(script.with_name("train_single.py"), alone, folder / "alone", env) as finish:
        # A notebook that is checked again must not fail on a red line that the learner's own script has no part in.
        result = job.run(check=False, show=False, force=True)
        report = finish()
    saved = {node.name: Path(node.folder, "work", "checkpoints") for node in job.nodes}
    return _Runs(result, report, saved, folder / "alone" / "checkpoints")


def _draw_images(pack: Path) -> None:
    """Packs the first pictures of shapes10, so few that two whole epochs are six steps."""
    counts = {"train": IMAGES, "valid": 10, "test": 10}
    source = {"kind": "drawn", "words": "drawn on the spot", "fingerprint": SHAPES_FINGERPRINT}
    with write_pack(pack, counts, class_names=shapes.CLASS_NAMES, source=source) as draft:
        for split, count in counts.items():
            draft.images[split][:], draft.labels[split][:] = shapes.draw_images(split, range(count))


@contextmanager
def _run_alone(script: Path, arguments: list, folder: Path, env: dict[str, str]) -> Iterator:
    """Runs a script without torchrun beside the block, to which it gives a function that returns what was reported."""
    folder.mkdir()
    # The package that is running, wherever it lies.
    path = os.pathsep.join([str(Path(lab_utils.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **env, "LAB_JOB_FOLDER": str(folder), "PYTHONPATH": path.rstrip(os.pathsep)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(script), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def finish() -> dict:
        said, _ = process.communicate(timeout=120)
        if process.returncode:
            last = (said.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            fix = f"delete {script.name} and write it again with: make workspace"
            raise LabError("The single-process script does not run.", where=script, cause=last[:300], fix=fix)
        return json.loads((folder / "results" / f"rank{os.environ.get('RANK', '0')}.json").read_text())

    try:
        yield finish
    finally:
        process.kill()
        process.communicate()


def _expect_end(job: launch.JobResult) -> None:
    """Both processes came to their end and reported."""
    failure, expected = job.failure, f"{RANKS} processes that end well"
    if failure and failure.kind == "hang":
        stands = "; ".join(f"rank {rank} stood at {place}" for rank, place in sorted(failure.stacks.items()))
        hint = (
            "every rank has to reach the same collectives in the same order: none of them may stand in `if rank == 0`"
        )
        raise NotYetError("the two processes wait for each other", yours=stands, expected=expected, hint=hint)
    if failure:
        last = (failure.message.strip().splitlines() or [failure.what])[0]
        hint = next((hint for pattern, hint in FAILURES if re.search(pattern, last)), failure.fix)
        case = failure.what if failure.rank is None else f"rank {failure.rank} failed first"
        raise NotYetError(case, yours=f"{failure.location or failure.kind}: {last[:160]}", expected=expected, hint=hint)
    silent = [rank for rank, result in enumerate(job.results) if result is None]
    expect(
        not silent,
        "what the processes report",
        yours=f"nothing from rank {', '.join(map(str, silent))}",
        expected="a report from every rank",
        hint="leave launch.report(...) at the end of main() as it was, on every rank",
    )


def _expect_images(results: tuple) -> None:
    """Each image once per epoch, over both ranks together."""
    seen, images = results[0]["seen"], results[0]["images"]
    half = IMAGES // RANKS
    hints = {
        (half, half): "only this rank's half is counted: add_up has to all_reduce the counts, in place, before .cpu()",
        (0, 0, IMAGES): "both ranks went through all images: pass rank and world_size to dataset.batches",
        (
            half,
            0,
            half,
        ): "both ranks got the same half: rank is the number in the whole job; LOCAL_RANK is 0 on each node",
    }
    times = " and ".join(f"{count} images {number} times" for number, count in enumerate(seen[0]) if count)
    expect(
        seen == [[0, IMAGES]] * EPOCHS and images == IMAGES * EPOCHS,
        f"how often each of {IMAGES} images came in the first epoch, counted by all ranks",
        yours=f"{times}; {images} in {EPOCHS} epochs",
        expected=f"{IMAGES} images once; {IMAGES * EPOCHS} in {EPOCHS} epochs",
        hint=hints.get(tuple(seen[0]), "add_up has to return the sum over all ranks: dist.all_reduce(counts), once"),
    )


def _expect_one_model(results: tuple) -> None:
    digests = [result["sha256"][:12] for result in results]
    expect(
        len(set(digests)) == 1,
        "the weights of the ranks after training, as SHA-256",
        yours=" and ".join(digests),
        expected="the same on every rank",
        hint="each rank trains a model of its own: the forward pass has to run through DDP(model)",
    )


def _expect_losses(yours: list[float], expected: list[float]) -> None:
    pairs = enumerate(zip(yours, expected, strict=False))
    wrong = [step for step, (one, other) in pairs if not abs(one - other) <= CLOSE]
    step = wrong[0] if wrong else min(len(yours), len(expected))
    hint = (
        "the first step differs already: the same seed on every rank, for the weights and for the order of the images"
    )
    if step >= STEPS_PER_EPOCH:
        hint = "the first epoch is right, and the next is not: batches.set_epoch(epoch, ...) before each epoch"
    elif step:
        hint = "the first step's loss is right, and its update is not: leave it to DDP to average the gradients, once"
    expect(
        not wrong and len(yours) == len(expected),
        f"the loss of step {step + 1}, of {len(expected)}",
        yours=f"{yours[step]:.10f}" if step < len(yours) else f"missing: there are {len(yours)} steps",
        expected=f"{expected[step]:.10f}" if step < len(expected) else f"{len(expected)} steps",
        hint=hint,
    )
