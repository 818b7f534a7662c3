"""Exercise 12.1: the learner's Lightning script, run in one process and on two nodes of this machine.

Its checkpoint and output are compared with the same training by hand, computed here, so that the script's style does
not matter. The two nodes have one process each, like two hosts: a Trainer that does not know of them trains alone on
each. Everything runs on the CPU.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import nodelaunch as launch
from course.check.verdicts import NotYetError, expect
from course.exercises.lab12 import by_hand
from course.exercises.lab12.by_hand import LR, MOMENTUM, Means
from course.exercises.scripts import draw_shapes, expect_scripts, read_script
from course.frameworks import find_python
from lab_common import read_path
from lab_utils import data

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
RETURN_LOSS = "return the loss from training_step, as a tensor with its graph: Lightning calls backward() of it"
CALLS = "do not call zero_grad, backward or step in training_step: Lightning does after it; return the loss alone"
SAME_CALLS = "a rank waits for the others: self.log(…, sync_dist=True) on every rank, and in no `if`"
DEVICES = "devices=args.devices, num_nodes=args.nodes: else each process trains alone, as a job of one"
BY_NAME = 'self.log("loss", …) and self.log("accuracy", …) in validation_step: main() prints these two names'
# By what the last line of the rank that failed says.
FAILURES = (
    (r"KeyError: '(loss|accuracy)'", BY_NAME),
    (r"object has no attribute 'model'", "place 1: keep the network as self.model, the name that validation_step uses"),
    (r"object has no attribute '(lr|learning_rate)'", "place 1: keep the learning rate as self.lr, and use that name"),
    (r"cannot assign module before|before super\(\)|__init__\(\) call", "super().__init__() comes first in __init__"),
    (r"backward through the graph a second time|modified by an inplace operation", CALLS),
    (r"does not require grad|must return a Tensor", RETURN_LOSS),
    (
        r"Skipping the `training_step`",
        "training_step returns nothing: return the loss, and Lightning takes the step",
    ),
    (
        r"parameters that require a gradient|empty parameter list",
        "place 1: self.model = …: Lightning finds the parameters of the networks that are attributes",
    ),
    (r"(Unbound|Name)\w*Error.*'trainer'", "place 5: the lines that follow use this name: trainer = L.Trainer(…)"),
    (r"devices|num_nodes|num_processes", DEVICES),
    (r"(?i)gpu backend|No supported gpu|cuda", "leave the accelerator to Lightning: it takes the GPUs where there are"),
)


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
        draw_shapes(Path(folder, "data", "packed", "shapes10"), COUNTS)
        dataset = data.load("shapes10", Path(folder, "data"))
        for ranks in (1, RANKS):
            run = _run(script, Path(folder), python, ranks, dataset)
            _expect_end(run)
            _expect_printed_once(run, ranks)
            state = _load(run)
            _expect_optimizer(state, run)
            _expect_weights(state, run, ranks, dataset, tree)
            _expect_means(run, ranks)
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


def _expect_end(run: _Run) -> None:
    """Expects all processes to end."""
    failure, expected = run.job.failure, "a run that ends well"
    if not failure:
        return
    if failure.kind == "hang":
        stands = "; ".join(f"rank {rank} stood at {place}" for rank, place in sorted(failure.stacks.items()))
        raise NotYetError(f"{run.case}: the ranks hang", yours=stands, expected=expected, hint=SAME_CALLS)
    if failure.kind == "limit":
        hint = SAME_CALLS if len(run.means) > 1 else f"max_epochs=args.epochs: here it has to train {EPOCHS} epochs"
        raise NotYetError(f"{run.case}: it does not end", yours=failure.what, expected=expected, hint=hint)
    last = (failure.message.strip().splitlines() or [failure.what])[0]
    wrong = "mend what this line says, save the file, run the cell again"
    fix = wrong if failure.kind == "exception" else failure.fix
    hint = next((hint for pattern, hint in FAILURES if re.search(pattern, failure.message)), fix)
    case = f"{run.case}: " + (failure.what if failure.rank is None else f"rank {failure.rank} failed first")
    raise NotYetError(case, yours=f"{failure.location or failure.kind}: {last[:160]}", expected=expected, hint=hint)


def _expect_printed_once(run: _Run, ranks: int) -> None:
    """Expects one line from rank 0 after the last epoch, and none from other ranks."""
    said = [match.groups() for line in run.job.lines if (match := PRINTED.search(line))]
    others = sorted({rank for rank, *_ in said} - {"0"})
    expect(
        not others,
        f"{run.case}: who prints the loss",
        yours=f"rank {', '.join(sorted({rank for rank, *_ in said}))}: each is rank 0 of a job of its own",
        expected="rank 0 alone",
        hint=DEVICES,
    )
    epochs = [int(epoch) for _, epoch, *_ in said]
    expect(
        epochs == [EPOCHS],
        f"{run.case}: the epoch after which the loss is printed, with --epochs {EPOCHS}",
        yours=" and ".join(map(str, epochs)) or "nothing is printed",
        expected=EPOCHS,
        hint="place 5: max_epochs=args.epochs; leave the lines below place 5 as they are",
    )


def _load(run: _Run) -> dict:
    """Loads the script's checkpoint."""
    hint = "leave trainer.save_checkpoint(args.checkpoint) at the end of main() as it was"
    try:
        state = torch.load(run.checkpoint, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a learner's own way of saving left there
        line = "none" if not run.checkpoint.exists() else f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotYetError(f"{run.case}: the checkpoint", yours=line[:160], expected="loads", hint=hint) from None
    saved = isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping)
    expect(saved, f"{run.case}: the checkpoint", yours="another one", expected="Lightning's", hint=hint)
    return state


def _expect_optimizer(state: dict, run: _Run) -> None:
    """Expects one optimizer, for all parameters, with the settings of ``train_single.py``."""
    case, expected = f"{run.case}: the optimizer", f"SGD with lr {LR}, momentum {MOMENTUM}, of all parameters"
    optimizers = [one for one in state.get("optimizer_states") or () if "param_groups" in one]
    hint = "place 4: return the optimizer, torch.optim.SGD(self.parameters(), …): without one nothing is trained"
    expect(len(optimizers) == 1, case, yours=f"{len(optimizers)} optimizers", expected=expected, hint=hint)
    groups = optimizers[0]["param_groups"]
    given, wanted = sum(len(group["params"]) for group in groups), len(_list_parameters(run))
    hint = "place 4: give it all parameters, self.parameters()"
    expect(given == wanted, case, yours=f"{given} tensors", expected=f"{wanted} tensors", hint=hint)
    settings = {"lr": LR, "momentum": MOMENTUM, "dampening": 0, "weight_decay": 0, "nesterov": False}
    hints = {
        "betas": "place 4: the optimizer of train_single.py is torch.optim.SGD",
        "lr": "place 4: the learning rate is the one that --lr gave, self.lr",
        "momentum": f"place 4: momentum={MOMENTUM}, as in train_single.py",
    }
    for group in groups:
        name = "betas" if "betas" in group else next((one for one in settings if group.get(one) != settings[one]), "")
        hint = hints.get(name, f"place 4: leave {name} at its default, as train_single.py does")
        expect(not name, case, yours=f"{name} {group.get(name)}", expected=expected, hint=hint)


def _list_parameters(run: _Run) -> list[str]:
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return [name for name in run.expected if not name.endswith(statistics)]


def _expect_weights(state: dict, run: _Run, ranks: int, dataset: data.Dataset, tree: ast.AST) -> None:
    """Expects the weights of the same training by hand."""
    saved = state["state_dict"]
    found = {name.removeprefix("model."): one for name, one in saved.items() if name.startswith("model.")}
    expect(
        found.keys() >= run.expected.keys(),
        f"{run.case}: the weights in the checkpoint",
        yours=", ".join(list(saved)[:2]) + ", …" if saved else "none",
        expected=", ".join(f"model.{name}" for name in list(run.expected)[:2]) + ", …",
        hint="place 1: self.model = models.build(net, num_classes=num_classes), and no other network in its place",
    )
    far = by_hand.measure_difference(found, run.expected)
    if far <= CLOSE:
        return
    train = partial(by_hand.train, dataset, batch_size=BATCH_SIZE, epochs=EPOCHS, ranks=ranks)
    known = [
        (f"nothing was trained: {RETURN_LOSS}", partial(train, epochs=0)),
        ('place 2: the mean over the batch, without reduction="sum"', partial(train, loss=_sum)),
        ("place 2: F.cross_entropy takes logits, without a softmax before it", partial(train, loss=_softmax)),
        (
            "this is rank 0's training alone: return the loss (or call self.manual_backward(loss)), so that gradients "
            "are averaged over the ranks",
            partial(train, mean=False),
        ),
    ]
    names = _list_parameters(run)
    hints = (hint for hint, other in known if _are_close(found, other()[0].state_dict(), names))
    expect(
        False,
        f"{run.case}: the weights after {EPOCHS} epochs, the largest difference from training by hand",
        yours=f"{far:.1e}",
        expected=f"at most {CLOSE:.0e}",
        hint=next(hints, "") or _explain_script(tree),
    )


def _are_close(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: Sequence[str]) -> bool:
    return by_hand.measure_difference(found, {name: other[name] for name in names}) <= CLOSE


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.softmax(1), labels)


def _explain_script(tree: ast.AST) -> str:
    """Returns the hint for a different training that its weights do not identify."""
    used = _list_names(tree)
    if used & {"backward", "step", "zero_grad"}:
        return CALLS
    if "use_distributed_sampler" in used:
        return "all ranks take the same images: leave use_distributed_sampler away, and Lightning shares them"
    return (
        "a step is F.cross_entropy(self.model(images), labels) on a batch as it comes; L.seed_everything(0) stays "
        "before the network is made, and the Trainer has its other settings as they are"
    )


def _list_names(tree: ast.AST) -> set[str]:
    """Returns all names, attributes, argument names and strings of a script."""
    fields = ("attr", "id", "arg", "value")
    return {text for node in ast.walk(tree) for field in fields if isinstance(text := getattr(node, field, None), str)}


def _expect_means(run: _Run, ranks: int) -> None:
    """Expects the printed loss and accuracy to be over all images of the valid split."""
    (yours,) = ([float(one) for one in match.groups()[2:]] for line in run.job.lines if (match := PRINTED.search(line)))
    sizes = [means.sizes for means in run.means]
    for found, name in zip(yours, ("losses", "accuracies"), strict=True):
        columns, own = ([getattr(one, name) for one in means] for means in (run.means, run.own_means))
        right = [_average(columns, sizes), _average(own, sizes)]
        word = {"losses": "loss", "accuracies": "accuracy"}[name]
        expect(
            any(abs(found - one) <= DIGITS for one in right),
            f"{run.case}: the {word} over all {COUNTS['valid']} images of the valid split",
            yours=f"{found:.4f}",
            expected=f"{right[0]:.4f}",
            hint=_explain_mean(found, word, columns, sizes),
        )


def _explain_mean(found: float, word: str, columns: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]) -> str:
    """Returns the hint for a wrong mean over the batches of the ranks."""
    mean, images, ranks = _average(columns, sizes), sum(map(sum, sizes)), len(sizes)
    batches = [len(one) for one in sizes]
    equal = [[1] * count for count in batches]
    sums = [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(columns, sizes, strict=True)]
    of_sums = f"place 3: this is a sum over a batch's images: log its mean {word}"
    of_ranks = "place 3: leave reduce_fx away: Lightning takes the mean over batches and ranks"
    known = (
        (_average(columns[:1], sizes[:1]), "place 3: this is rank 0's own number: self.log(…, sync_dist=True)"),
        (_average(columns, equal), "place 3: give self.log no batch_size: Lightning finds each batch's own"),
        (_average(sums, sizes), of_sums),
        (mean * images, of_sums),
        (mean * ranks, of_ranks),
        (_average(columns, equal) * sum(batches), of_ranks),
    )
    hint = f"place 3: self.log of the batch's mean {word} in validation_step, with sync_dist=True and no other option"
    return next((hint for other, hint in known if abs(found - other) <= DIGITS), hint)


def _average(columns: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]) -> float:
    """Returns the mean of the batches' values on some ranks, weighted by their sizes."""
    pairs = [pair for column, size in zip(columns, sizes, strict=True) for pair in zip(column, size, strict=True)]
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs)


def _expect_settings(tree: ast.AST) -> None:
    """Expects a Trainer with the epochs and the processes of each node; otherwise it uses whatever it finds."""
    used = _list_names(tree)
    case, expected = "the settings of the Trainer", "max_epochs, devices, num_nodes"
    hint = "place 5: max_epochs=args.epochs: without it Lightning trains 1,000 epochs"
    expect(bool(used & {"max_epochs", "max_steps"}), case, yours="no max_epochs", expected=expected, hint=hint)
    tree_names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    hint = f"place 5: {DEVICES}"
    expect(
        bool(tree_names & {"devices", "__dict__"} or "vars" in used),
        case,
        yours="args.devices is not used",
        expected=expected,
        hint=hint,
    )
    # Lightning itself looks at the product of both alone.
    others = {"devices": "args.nodes", "num_nodes": "args.devices"}
    for given in (one for one in ast.walk(tree) if isinstance(one, ast.keyword) and one.arg in others):
        value = ast.unparse(given.value)
        expected = f"{given.arg}=args.{given.arg.removeprefix('num_')}"
        expect(others[given.arg] not in value, case, yours=f"{given.arg}={value}"[:80], expected=expected, hint=hint)
