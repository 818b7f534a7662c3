"""Exercise 12.1: the learner's Lightning script, run in one process and on two nodes of this machine.

Its checkpoint and output are compared with the same training by hand, computed here, so that the script's style does
not matter. The two nodes have one process each, like two hosts: a Trainer that does not know of them trains alone on
each. Everything runs on the CPU.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import nodelaunch as launch
from course.check.verdicts import expect
from course.exercises.lab12 import by_hand
from course.exercises.lab12.by_hand import LR, MOMENTUM, Means
from course.exercises.script_runs import expect_end
from course.exercises.scripts import expect_scripts, read_script
from course.frameworks import find_python
from lab_common import read_path
from lab_utils import data
from lab_utils.data import pack_shapes

# Neither of the valid split's shares, of 42 or 21 images, is full batches only, so that a mean of the batches' means
# is not the mean. The train split leaves images over, too.
COUNTS = {"train": 72, "valid": 42, "test": 10}
BATCH_SIZE, EPOCHS, RANKS = 16, 2, 2
CHECKPOINT = "saved-here.ckpt"  # not the name that the script itself has as an example
# One thread or two differ by some 1e-6; the mistakes that are known by more than 1e-2.
CLOSE = 1e-4
DIGITS = 1.01e-4  # of what is printed with four digits
# Longer than any operation of this run takes on a busy laptop.
HANG_SECONDS, LIMIT = 30, 150
# What the script prints at the end.
PRINTED = re.compile(r"\[rank (\d+)\] epoch (\d+): loss (\S+), accuracy (\S+)")
PROVED = (
    "in one process, and on two nodes, your script's weights are those of the same training by hand, and what is "
    "logged is the mean over all images of both"
)
STEP = (
    "place 2: return F.cross_entropy(self.model(images), labels), the mean over a batch as it comes, of logits, as a "
    "tensor with its graph; Lightning calls zero_grad, backward and step after it"
)
DEVICES = "place 5: devices=args.devices, num_nodes=args.nodes: else each process trains alone, as a job of one"
# By what the last line of the rank that failed says.
FAILURES = {
    r"KeyError: '(loss|accuracy)'": 'self.log("loss", …) and self.log("accuracy", …) in validation_step: main() prints '
    "these two names",
    r"object has no attribute 'model'": "place 1: keep the network as self.model, the name that validation_step uses",
    r"object has no attribute '(lr|learning_rate)'": "place 1: keep the learning rate as self.lr, and use that name",
    r"require a gradient|empty parameter list": "place 1: self.model = …: Lightning finds the parameters of the "
    "networks that are attributes",
    r"backward through the graph|inplace operation|does not require grad|a Tensor|`training_step`": STEP,
    r"devices|num_nodes|num_processes": DEVICES,
}


@dataclass(frozen=True)
class _Run:
    """A run of the script, the file in which rank 0 saves, and the expected result."""

    job: launch.JobResult
    checkpoint: Path
    case: str
    expected: dict[str, torch.Tensor]  # weights and statistics, by their names in the network
    # Of each rank's images, by rank 0's network: DDP gives all ranks its statistics before they evaluate. And by each
    # rank's own: with automatic_optimization = False DDP does not.
    means: tuple[Means, ...]
    own_means: tuple[Means, ...]


def verify_lightning_script(path: str | Path) -> str:
    """Runs the script in one process, then on two nodes, and compares both with training by hand."""
    script = read_path(path).resolve()
    expect_scripts(script)
    tree = read_script(script, path)
    _expect_settings(tree)
    python = find_python("lightning")
    print("Your script runs in one process, then on two local nodes ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab12-", ignore_cleanup_errors=True) as folder:
        pack_shapes(Path(folder, "data", "packed", "shapes10"), COUNTS)
        dataset = data.load("shapes10", Path(folder, "data"))
        for ranks in (1, RANKS):
            run = _run(script, Path(folder), python, ranks, dataset)
            hint = "self.log(…, sync_dist=True) on every rank, and in no `if`; max_epochs=args.epochs"
            expect_end(run.job, run.case, FAILURES, waits=hint)
            yours = _read_printed(run)
            _expect_training(run)
            _expect_means(run, yours)
    return PROVED


def _run(script: Path, folder: Path, python: Path, ranks: int, dataset: data.Dataset) -> _Run:
    arguments = ["--data", "shapes10", "--net", "tiny", "--batch-size", BATCH_SIZE, "--epochs", EPOCHS, "--lr", LR]
    nodes = launch.local_nodes(ranks, folder=folder / f"ranks{ranks}")
    job = launch.TorchrunJob(
        script,
        [*arguments, "--devices", 1, "--nodes", ranks, "--checkpoint", CHECKPOINT],
        nodes=[replace(node, python=str(python)) for node in nodes],
        env={"LAB_DATA": str(folder / "data"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        hang_timeout=HANG_SECONDS,
        join_timeout=60,
        limit=LIMIT,
    )
    # A notebook that is checked again must not fail on a red line that the learner's own script has no part in.
    result = job.run(check=False, show=False, force=True)
    first = result.ranks[0].node if result.ranks else nodes[0].name
    checkpoint = next(Path(node.folder, "work", CHECKPOINT) for node in nodes if node.name == first)
    nets = by_hand.train(dataset, batch_size=BATCH_SIZE, epochs=EPOCHS, ranks=ranks)
    find = partial(by_hand.evaluate, split=dataset.valid, batch_size=BATCH_SIZE, ranks=ranks)
    means = tuple(find(nets[0], rank=rank) for rank in range(ranks))
    own_means = tuple(find(net, rank=rank) for rank, net in enumerate(nets))
    case = "one process" if ranks == 1 else "two nodes of one process each"
    return _Run(result, checkpoint, case, nets[0].state_dict(), means, own_means)


def _read_printed(run: _Run) -> list[float]:
    """Returns loss and accuracy, which rank 0 alone prints, once, after the last epoch."""
    said = [match.groups() for line in run.job.lines if (match := PRINTED.search(line))]
    expect(
        [found[:2] for found in said] == [("0", str(EPOCHS))],
        f"{run.case}: who prints the loss, and after which epoch, with --epochs {EPOCHS}",
        yours="; ".join(f"rank {rank} after epoch {epoch}" for rank, epoch, *_ in said) or "nothing is printed",
        expected=f"rank 0 after epoch {EPOCHS}",
        hint=DEVICES if len(said) > 1 else "place 5: max_epochs=args.epochs; leave the lines below place 5 as they are",
    )
    return [float(number) for number in said[0][2:]]


def _expect_training(run: _Run) -> None:
    """Expects a checkpoint with the optimizer of ``train_single.py``, and the weights of the same training by hand."""
    hint = "leave trainer.save_checkpoint(args.checkpoint) at the end of main() as it was"
    found = run.checkpoint.exists()
    expect(found, f"{run.case}: the checkpoint", yours="none", expected="Lightning's", hint=hint)
    state = torch.load(run.checkpoint, weights_only=True, map_location="cpu")
    settings = {"lr": LR, "momentum": MOMENTUM, "dampening": 0, "weight_decay": 0, "nesterov": False}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    parameters = [name for name in run.expected if not name.endswith(statistics)]
    # Without an optimizer Lightning has one that does nothing, and has no groups.
    groups = [group for one in state["optimizer_states"] for group in one.get("param_groups", ())]
    yours = [{name: group.get(name) for name in settings} | {"tensors": len(group["params"])} for group in groups]
    right = [settings | {"tensors": len(parameters)}]
    hint = "place 4: return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9), as in train_single.py"
    case = f"{run.case}: the optimizer"
    expect(yours == right, case, yours=", ".join(map(str, yours)) or "none", expected=str(right[0]), hint=hint)
    saved = state["state_dict"]
    weights = {name.removeprefix("model."): one for name, one in saved.items() if name.startswith("model.")}
    expect(
        weights.keys() >= run.expected.keys(),
        f"{run.case}: the weights in the checkpoint",
        yours=", ".join(list(saved)[:2]) + ", …" if saved else "none",
        expected=", ".join(f"model.{name}" for name in list(run.expected)[:2]) + ", …",
        hint="place 1: self.model = models.build(net, num_classes=num_classes), and no other network in its place",
    )
    far = max(float((weights[name].double() - one.double()).abs().max()) for name, one in run.expected.items())
    expect(
        far <= CLOSE,
        f"{run.case}: the weights after {EPOCHS} epochs, the largest difference from training by hand",
        yours=f"{far:.1e}",
        expected=f"at most {CLOSE:.0e}",
        hint=f"{STEP}. The rest of the script stays as it was",
    )


def _expect_means(run: _Run, yours: Sequence[float]) -> None:
    """Expects the printed loss and accuracy to be over all images of the valid split."""
    for place, (found, word) in enumerate(zip(yours, ("loss", "accuracy"), strict=True)):
        right = [_average(means, place) for means in (run.means, run.own_means)]
        hint = (
            f"place 3: self.log of the batch's mean {word} in validation_step, with sync_dist=True and no other option"
        )
        if abs(found - _average(run.means[:1], place)) <= DIGITS:
            hint = "place 3: this is rank 0's own number: self.log(…, sync_dist=True)"
        expect(
            any(abs(found - one) <= DIGITS for one in right),
            f"{run.case}: the {word} over all {COUNTS['valid']} images of the valid split",
            yours=f"{found:.4f}",
            expected=f"{right[0]:.4f}",
            hint=hint,
        )


def _average(means: Sequence[Means], place: int) -> float:
    """Returns the mean loss (place 0) or accuracy (1) of all images of some ranks."""
    batches = [batch for rank in means for batch in rank]
    return sum(batch[place] * batch[2] for batch in batches) / sum(batch[2] for batch in batches)


def _expect_settings(tree: ast.AST) -> None:
    """Expects a Trainer with the epochs and the processes of each node; otherwise it uses whatever it finds."""
    text = ast.unparse(tree)
    case, expected = "the settings of the Trainer", "max_epochs, devices, num_nodes"
    hint = "place 5: max_epochs=args.epochs: without it Lightning trains 1,000 epochs"
    expect("max_epochs" in text, case, yours="no max_epochs", expected=expected, hint=hint)
    used = "args.devices" in text or "vars(args)" in text
    expect(used, case, yours="args.devices is not used", expected=expected, hint=DEVICES)
    # Lightning itself looks at the product of both alone.
    swapped = re.findall(r"\bdevices=args\.nodes|num_nodes=args\.devices", text)
    expect(not swapped, case, yours=", ".join(swapped), expected=expected, hint=DEVICES)
