"""Exercise 5.1: the learner's DDP script on two nodes of this machine, watched from outside.

The two nodes have one process each. So LOCAL_RANK is 0 on both, as on two real hosts, and what confuses it with RANK
shows; and each has its own current folder, so that it shows who saved a checkpoint. All is on the CPU and in
float64, where two processes can be compared with one to ten digits, whatever this machine has. ``observed.py`` beside
the script notes which images each process took, and its weights and gradients at each step; what they should be is
computed here, in one process, so that the script's own style does not matter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import nodelaunch as launch
from course.check.verdicts import expect
from course.exercises.precautions import expect_precautions
from course.exercises.script_runs import (
    BATCH_SIZE,
    CHECKPOINT,
    EPOCHS,
    IMAGES,
    PRINTED,
    RANKS,
    STEPS,
    VALID,
    expect_end,
    expect_gradients,
    expect_images,
    expect_saved_once,
    expect_state,
)
from course.exercises.scripts import expect_scripts, read_script
from lab_common import read_path
from lab_utils import data, models
from lab_utils.data import pack_shapes

# Longer than any operation of this run takes on a busy laptop, and no longer than a learner waits for an answer. The
# process group of the script waits longer, so that it is the launcher that says where each rank stood.
HANG_SECONDS = 20
PROVED = (
    "two processes with your script: at each step the gradients equal those of one process on the global batch (in "
    "float64, batch norm with its stored statistics); no image twice in an epoch; one checkpoint"
)
# By what the last line of the rank that failed says.
FAILURES = {
    r"has no attribute '(module|no_sync)'": "the model was not wrapped: model = DDP(model), under the same name, makes "
    "backward() talk to the others",
    r"process group has not been initialized|init_process_group": "dist.init_process_group(...) comes first: before it "
    "there is nobody to ask for a rank",
    r"(?i)nccl|device_ids|cuda|nvidia": "this run is on the CPU: 'nccl', device_ids and CUDA only if "
    "torch.cuda.is_available()",
    r"'NoneType' object has no attribute 'tolist'": "dist.all_reduce works in place, and returns None: assign nothing",
    r"NameError|UnboundLocalError": "the lines that follow the gap use this name: assign it in the gap",
}


@dataclass(frozen=True)
class _Runs:
    """The learner's job, what was kept of each rank's steps, where each node saves, and the data."""

    job: launch.JobResult
    kept: tuple[list[dict], ...]
    saved: dict[str, Path]  # by node
    dataset: data.Dataset


def verify_ddp_script(path: str | Path) -> str:
    """Runs the script on two nodes and judges what it did."""
    script = read_path(path).resolve()
    expect_scripts(script, script.with_name("observed.py"))
    expect_precautions(read_script(script, path))
    print("Your script runs on two local nodes ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab5-", ignore_cleanup_errors=True) as folder:
        runs = _run(script, Path(folder))
        _expect_end(runs.job)
        expect_images([result["images"] for result in runs.job.results])
        _expect_gradients(runs)
        _expect_counts(runs)
        first = runs.job.ranks[0].node
        expect_saved_once(runs.saved, first)
        expect_state(runs.saved[first], runs.kept[0][-1]["weights"], EPOCHS)
        hint = "a run that ends in its second epoch has to find one: save in each epoch, not only in the last"
        saved = STEPS in runs.job.results[0]["saves"]
        expect(saved, "a checkpoint of epoch 1", yours="none", expected="one after each epoch", hint=hint)
    return PROVED


def _run(script: Path, folder: Path) -> _Runs:
    """Runs the learner's script on two nodes, watched."""
    pack, kept = folder / "data" / "packed" / "shapes10", folder / "kept"
    pack_shapes(pack, {"train": IMAGES, "valid": VALID, "test": 10})  # two whole epochs are six steps
    kept.mkdir()
    arguments = ["--data", "shapes10", "--net", "tiny", "--batch-size", BATCH_SIZE, "--epochs", EPOCHS]
    job = launch.TorchrunJob(
        script.with_name("observed.py"),
        ["--exact", "--keep", kept, script.name, *arguments, "--checkpoint", CHECKPOINT],
        nodes=launch.local_nodes(RANKS, folder=folder),
        files=[script],
        env={"LAB_DATA": str(folder / "data"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        hang_timeout=HANG_SECONDS,
        join_timeout=60,
        limit=120,
    )
    # A notebook that is checked again must not fail on a red line that the learner's own script has no part in.
    result = job.run(check=False, show=False, force=True)
    states = tuple(torch.load(path) for path in sorted(kept.iterdir()))
    saved = {node.name: Path(node.folder, "work", CHECKPOINT) for node in job.nodes}
    return _Runs(result, states, saved, data.load("shapes10", folder / "data"))


def _expect_end(job: launch.JobResult) -> None:
    """Both processes came to their end and reported."""
    waits = "every rank has to reach the same collectives in the same order: none of them may stand in `if rank == 0`"
    expect_end(job, f"{RANKS} processes", FAILURES, waits=waits)
    silent = [rank for rank, result in enumerate(job.results) if result is None]
    yours, hint = f"nothing from rank {', '.join(map(str, silent))}", "main() has to come to its end on every rank"
    expect(not silent, "what the processes report", yours=yours, expected="a report from every rank", hint=hint)


def _expect_gradients(runs: _Runs) -> None:
    """At each step all ranks have the same weights, and the gradients of one process on the global batch."""
    shares = [result["images"] for result in runs.job.results]
    for step, states in enumerate(zip(*runs.kept, strict=True)):
        weights, name = states[0]["weights"], f"step {step + 1}" if step < len(shares[0]) else "the end"
        alone = []
        if step < len(shares[0]):
            alone = [_compute_gradients(runs.dataset, weights, share[step]) for share in shares]
        expect_gradients(states, alone, name)


def _make_model(dataset: data.Dataset, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The network with these weights in float64, and batch norm with the statistics that it has at the start."""
    model = models.build("tiny", num_classes=len(dataset.class_names)).double().eval()
    model.load_state_dict(weights, strict=False)
    return model


def _fetch(split: data.Split, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels as the script has them, from bytes on in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        images, labels = zip(*split.__getitems__(chosen), strict=True)
    finally:
        torch.set_default_dtype(before)
    return torch.stack(images), torch.tensor(labels)


def _compute_gradients(
    dataset: data.Dataset, weights: dict[str, torch.Tensor], chosen: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The gradients of the mean loss over some images, in one process."""
    model, (images, labels) = _make_model(dataset, weights), _fetch(dataset.train, chosen)
    F.cross_entropy(model(images), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@torch.no_grad()
def _expect_counts(runs: _Runs) -> None:
    """Rank 0, and no other, says the loss and the accuracy over all images of the valid split."""
    said = [match.groups() for line in runs.job.lines if (match := PRINTED.search(line))]
    ranks, hint = sorted({rank for rank, *_ in said} | {"0"}), "leave `if rank == 0:` before print(...) as it was"
    expect(ranks == ["0"], "who prints the loss of an epoch", yours=f"ranks {ranks}", expected="rank 0", hint=hint)
    for epoch in range(1, EPOCHS + 1):
        model = _make_model(runs.dataset, runs.kept[0][epoch * STEPS]["weights"])
        images, labels = _fetch(runs.dataset.valid, range(VALID))
        logits = model(images)
        wanted = float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean()), VALID
        yours = [[float(number) for number in numbers] for _, when, *numbers in said if int(when) == epoch]
        words = "loss {:.4f}, accuracy {:.4f} on {:.0f} images"
        expect(
            len(yours) == 1 and all(abs(one - right) <= 1.01e-4 for one, right in zip(yours[0], wanted, strict=True)),
            f"what is said after epoch {epoch}",
            yours=words.format(*yours[0]) if yours else "nothing",
            expected=words.format(*wanted),
            hint="the counts of all ranks, added up, not divided: dist.all_reduce(counts), once, on every rank",
        )
