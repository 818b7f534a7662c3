"""Exercise 14.1: the learner's Horovod script on two ranks, with a stand-in for Horovod, beside DDP.

The script runs in forks of this process, as if with one rank on each of two nodes: the local rank is 0 on both, and
each has its own folder, so that only rank 0 finds the checkpoint. The ranks draw different weights, which reveals who
sends them. Then torch's DDP trains in the same forks, from rank 0's initial weights, with the images that the ranks
used: both have the same weights before each step, bit for bit, since with two ranks the sum of two gradients has only
one order.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import default_collate

from course.check.verdicts import NotYetError, expect
from course.exercises import precautions
from course.exercises.lab14.horovod_stand_in import Average, Compression, Horovod
from course.exercises.ranks import NETWORK
from course.exercises.script_runs import (
    BATCH_SIZE,
    CHECKPOINT,
    EPOCHS,
    IMAGES,
    PRINTED,
    RANKS,
    STEPS,
    VALID,
    expect_images,
    expect_saved_once,
    expect_state,
    find_saved,
)
from course.exercises.scripts import draw_shapes, expect_scripts, read_script
from course.ranks import Outcome, fork_ranks
from lab_common import read_path
from lab_utils import data, models

LR = 0.05
LIMIT, COLLECTIVE = 60.0, 15.0  # seconds: for a run; that an operation waits for the other rank
NODES = tuple(f"node {rank}" for rank in range(RANKS))
BEGUN, RESUMED = "a new run", "a run that goes on from rank 0's checkpoint"
RIGHT = f"{RANKS} processes that end well"
PROVED = (
    "two processes with your script and a stand-in for Horovod: before each step both have the weights that DDP "
    "has, bit for bit, also after a checkpoint that only rank 0 can read; no image twice in an epoch; one checkpoint"
)
BROADCAST = "Place 4: hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
WRAP = "Place 3: optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
SUM = "Place 5: counts = hvd.allreduce(counts, op=hvd.Sum)"
SAME = "every rank has to call the same operations of hvd, in the same order: none of them may stand in `if rank == 0`"
# By what a rank's own error says.
FAILURES = (
    (r"use hvd\.init\(\)", "place 1: hvd.init() comes first: before it nothing else of hvd works"),
    (r"'module'", "Horovod wraps the optimizer, and not the model: model has no .module"),
    (
        r"process group|rendezvous",
        "Horovod does without torch.distributed: hvd.init(), hvd.DistributedOptimizer and hvd.allreduce, and both "
        "numbers for the sampler: DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)",
    ),
    (
        r"Invalid rank",
        "place 2: DistributedSampler(train, hvd.size(), hvd.rank(), ...): how many first, then which one",
    ),
    (r"Mismatched BROADCAST root ranks", "place 4: root_rank is the rank that sends, the same on all ranks: 0"),
    (r"Mismatched|shut down", SAME),
    (r"named_parameters|invalid params", "named_parameters=model.named_parameters(), and model.state_dict() as it is"),
    (r"Gradients were computed more than", f"the loop has to use the wrapped optimizer. {WRAP}, under the same name"),
    (r"zero_grad\(\) was called", "leave the loop as it was: zero_grad(), backward(), step()"),
    (r"horovod.*has no attribute", "the stand-in has what a training script needs of horovod.torch, and no more"),
    (r"NameError|UnboundLocalError", "the lines that follow the gap use this name: assign it in the gap"),
    (r"(?i)cuda|nvidia", "touch CUDA only where torch.cuda.is_available(): this run is on the CPU"),
)

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Rank:
    """A rank's actions in a run, and those of DDP with the same images.

    Attributes:
        images: The indices of each step's images.
        start: The network as it was built.
        weights: Its parameters before each step, and at the end.
        rates: The learning rates of its optimizers.
        wrapped: The op and the compression of its newest DistributedOptimizer; Horovod's defaults without one.
        ddp: The parameters with DDP.
        counts: The mean loss and the accuracy over the valid split after each epoch with DDP.
        printed: The lines that the script printed, with the rank.
    """

    images: list[list[int]]
    start: Weights
    weights: list[Weights]
    rates: set[float]
    wrapped: tuple[int, Any]
    ddp: list[Weights]
    counts: list[tuple[float, float]]
    printed: str = ""


def verify_horovod_script(path: str | Path) -> str:
    """Runs the script, then continues from its checkpoint, and compares both with DDP."""
    # The first optimizer, or DDP, imports hundreds of modules: once here, and not in each rank.
    import torch._dynamo  # noqa: F401

    script = read_path(path).resolve()
    expect_scripts(script)
    tree = read_script(script, path)
    _expect_devices(tree)
    print("Your script runs in two processes, with a stand-in for Horovod ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab14-", ignore_cleanup_errors=True) as folder:
        saved = {node: Path(folder, node, CHECKPOINT) for node in NODES}
        draw_shapes(Path(folder, "data", "packed", "shapes10"), {"train": IMAGES, "valid": VALID, "test": 10})
        begun = _run(script, Path(folder), EPOCHS, BEGUN)
        expect_images([rank.images for rank in begun])
        _expect_weights(begun, BEGUN)
        _expect_counts(begun, BEGUN, 1)
        expect_saved_once(saved, NODES[0])
        expect_state(saved[NODES[0]], begun[0].weights[-1], EPOCHS)
        resumed = _run(script, Path(folder), EPOCHS + 1, RESUMED, before=begun)
        _expect_one_epoch(resumed)
        _expect_weights(resumed, RESUMED, before=len(begun[0].images))
        _expect_counts(resumed, RESUMED, EPOCHS + 1)
        _expect_without_checkpoint(script, Path(folder))
    return PROVED


def _expect_devices(tree: ast.AST) -> None:
    """Expects each process to use the GPU of its local rank, which no run on a CPU can show."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    values = precautions.find_values(tree)
    precautions.expect_no_rank(named, values)
    precautions.expect_local_rank(named, values)
    expect(
        any(name in ("set_device", "set_device_index") for name, _ in named),
        "the current GPU of a process",
        yours="set_device is not called",
        expected="torch.cuda.set_device(device), where there is a GPU",
        hint="calls that name no device take the current one, GPU 0 unless set: all processes would meet there",
    )


def _run(
    script: Path, folder: Path, epochs: int, case: str, *, before: Sequence[_Rank] = (), checkpoint: bool = True
) -> list[_Rank]:
    """Runs the script on two ranks, each in its own folder, and then DDP.

    Args:
        script: The learner's script.
        folder: Folder with the data and the folders of the ranks.
        epochs: Value of ``--epochs``.
        case: The test case, in a few words.
        before: The ranks' actions before the existing checkpoint.
        checkpoint: True to pass ``--checkpoint`` to the script.
    """
    options = ["--data", "shapes10", "--net", "tiny", "--batch-size", BATCH_SIZE, "--epochs", epochs, "--lr", LR]
    options += ["--checkpoint", CHECKPOINT] if checkpoint else []

    def work(rank: int) -> _Rank:
        own = folder / NODES[rank]
        own.mkdir(exist_ok=True)
        os.chdir(own)
        sys.argv = [str(script), *map(str, options)]
        return _work(rank, script, before)

    outcomes = fork_ranks(work, None, RANKS, limit=LIMIT, timeout=COLLECTIVE)
    _expect_end(outcomes, case, script)
    return [
        _Rank(**vars(one.value) | {"printed": re.sub("^", f"[rank {rank}] ", one.printed, flags=re.MULTILINE)})
        for rank, one in enumerate(outcomes)
    ]


def _work(rank: int, script: Path, before: Sequence[_Rank]) -> _Rank:
    """Runs the script in a fork, watched, then DDP with the same images."""
    group, dist.group.WORLD = dist.group.WORLD, None  # Horovod needs none, and so torch.distributed has none
    horovod = Horovod(group, local_rank=0, local_size=1)
    sys.modules.update(horovod.make_modules())
    numbers = {"RANK": rank, "SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):  # horovodrun sets none of them
        os.environ.pop(name, None)
    os.environ |= {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    os.environ |= {"LAB_DATA": str(Path.cwd().parent / "data"), "CUDA_VISIBLE_DEVICES": ""}
    torch.cuda.is_available = lambda: False  # a fork cannot use the kernel's GPU
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(int(number) + rank)
    watch = _Watch()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"SystemExit: {end.code}") from end
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == script]
        error.line_of_answer = f"{script.name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
        raise
    horovod.end()
    dist.group.WORLD = group
    watch.end()
    last = horovod.optimizers[-1] if horovod.optimizers else None
    wrapped = (last.op, last.compression) if last else (Average, Compression.none)
    start = before[rank].start if before else watch.start
    images = [step for one in before[rank : rank + 1] for step in one.images] + watch.images
    ddp, counts = _train_with_ddp(start, images, len(images) - len(watch.images))
    return _Rank(watch.images, watch.start, watch.weights, watch.rates, wrapped, ddp, counts)


class _Watch:
    """Watches the script in this process."""

    def __init__(self) -> None:
        self.images: list[list[int]] = []
        self.weights: list[Weights] = []
        self.start: Weights = {}
        self.rates: set[float] = set()
        self.model: torch.nn.Module | None = None
        split = data.load("shapes10").train
        self.known = {split[index][0].numpy().tobytes(): index for index in range(len(split))}
        self.build = models.build

        def note_model(*arguments: Any, **options: Any) -> torch.nn.Module:
            self.model = self.build(*arguments, **options)
            self.start = {name: one.clone() for name, one in self.model.state_dict().items()}
            return self.model

        models.build = note_model
        register_module_forward_pre_hook(self._note_step)
        register_optimizer_step_pre_hook(self._note_rate)

    def _note_step(self, module: torch.nn.Module, arguments: tuple) -> None:
        if module is self.model and module.training:
            self.images.append([self.known.get(image.numpy().tobytes(), -1) for image in arguments[0]])
            self.weights.append(_copy_weights(module))

    def _note_rate(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.rates |= {group["lr"] for group in optimizer.param_groups}

    def end(self) -> None:
        """Notes the last weights and stops watching."""
        if self.model:
            self.weights.append(_copy_weights(self.model))
        self.model, models.build = None, self.build


def _copy_weights(model: torch.nn.Module) -> Weights:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def _train_with_ddp(
    start: Weights, images: Sequence[Sequence[int]], done: int
) -> tuple[list[Weights], list[tuple[float, float]]]:
    """Returns the weights before each step from ``done`` on and at the end; loss and accuracy after each epoch."""
    dataset, weights, counts = data.load("shapes10"), [], []
    model = models.build("tiny", num_classes=len(dataset.class_names))
    model.load_state_dict(start)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step, chosen in enumerate(images):
        if step >= done:
            weights.append(_copy_weights(model.module))
        optimizer.zero_grad()
        batch, labels = default_collate([dataset.train[index] for index in chosen])
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        if step >= done and (step + 1) % STEPS == 0:
            counts.append(_count(model.module, dataset.valid))
    return [*weights, _copy_weights(model.module)], counts


@torch.no_grad()
def _count(model: torch.nn.Module, split: data.Split) -> tuple[float, float]:
    """Returns mean loss and accuracy over a whole split, with rank 0's statistics of batch norm."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    images, labels = default_collate([split[index] for index in range(len(split))])
    logits = model.eval()(images)
    model.train()
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


def _expect_end(outcomes: Sequence[Outcome], case: str, script: Path) -> None:
    """Expects both ranks to end together."""
    failed = [(rank, one.error, getattr(one.error, "line_of_answer", "")) for rank, one in enumerate(outcomes)]
    # First what a line of the script's own raised, and last what follows from another rank's end.
    failed.sort(key=lambda one: (not one[2], any(word in str(one[1]) for word in NETWORK)))
    for rank, error, place in failed:
        if not error:
            continue
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        hint = next((hint for word, hint in FAILURES if re.search(word, said)), "mend what this line says, and save it")
        if any(word in said for word in NETWORK):
            hint = SAME
        if hint == SAME and case == RESUMED:
            hint += "; and every rank has to know `first`, which rank 0 has read"
        yours = f"{place or script.name}: {said[:120]}"
        raise NotYetError(f"{case}: rank {rank} failed", yours=yours, expected=RIGHT, hint=hint)
    stuck = [str(rank) for rank, one in enumerate(outcomes) if one.value is None]
    if stuck:
        raise NotYetError(case, yours=f"rank {' and '.join(stuck)} did not end", expected=RIGHT, hint=SAME)


def _expect_one_epoch(ranks: Sequence[_Rank]) -> None:
    """Expects a resumed run to have one epoch left, on every rank."""
    for rank, one in enumerate(ranks):
        hint = "every rank has to know `first`, which only rank 0 has read: leave hvd.broadcast_object(first) in"
        words = f"{RESUMED}: how many steps rank {rank} takes"
        expect(len(one.images) == STEPS, words, yours=len(one.images), expected=STEPS, hint=hint)


def _expect_weights(ranks: Sequence[_Rank], case: str, *, before: int = 0) -> None:
    """Expects both ranks to have DDP's weights before each step."""
    for step, both in enumerate(zip(*(one.weights for one in ranks), strict=True)):
        where = f"before step {before + step + 1}" if step < len(ranks[0].images) else "at the end"
        far = _find_difference(*both)
        words = f"{case}: the weights of the two ranks {where}, the largest difference"
        expect(far == 0, words, yours=f"{far:.1e}", expected="0", hint=_explain_ranks(step, case))
        far = _find_difference(both[0], ranks[0].ddp[step])
        words = f"{case}: the weights {where}, the largest difference from DDP's"
        expect(far == 0, words, yours=f"{far:.1e}", expected="0", hint=_explain_ddp(ranks[0], step, case))


def _find_difference(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def _explain_ranks(step: int, case: str) -> str:
    """Returns the hint for ranks whose weights first differ before this step."""
    if step == 0 and case == BEGUN:
        return f"each process draws weights of its own here, and needs those of rank 0. {BROADCAST}"
    if step == 0:
        return f"rank 0 alone loads the checkpoint, and sends it to the others after that. {BROADCAST}"
    if case == BEGUN:
        return f"each rank takes steps with its own gradients: nothing averages them. {WRAP}"
    return (
        "rank 0 goes on with the checkpoint's momentum, the others without. Place 4, after the checkpoint is loaded: "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
    )


def _explain_ddp(rank: _Rank, step: int, case: str) -> str:
    """Returns the hint for weights that are the same on all ranks, but differ from DDP's."""
    if step == 0:
        return "rank 0 sends what it has, and what it has read from the checkpoint, to all others: root_rank=0"
    if rank.rates - {LR}:
        return (
            f"the learning rate is {max(rank.rates - {LR}):g}, in place of args.lr. Examples of Horovod multiply it by "
            "hvd.size(); DDP does not, and --lr says what is wanted"
        )
    op, compression = rank.wrapped
    if op != Average:
        return "DDP takes the mean of the gradients, and so does DistributedOptimizer, unless another op is given"
    if compression is not Compression.none:
        return "compression=hvd.Compression.fp16 rounds the gradients to 16 bits: leave it out"
    if case == RESUMED:
        return (
            "the momentum of the checkpoint is lost: DistributedOptimizer makes a new optimizer, so place 3 stands "
            "before optimizer.load_state_dict"
        )
    return "DistributedOptimizer averages the gradients once: leave the loop as it was"


def _expect_counts(ranks: Sequence[_Rank], case: str, first: int) -> None:
    """Expects only rank 0 to print the loss and the accuracy over all images of the valid split."""
    said = [match.groups() for rank in ranks for match in PRINTED.finditer(rank.printed)]
    others = sorted({rank for rank, *_ in said} - {"0"})
    hint = "leave `if rank == 0:` before print(...) as it was"
    yours = "rank " + ", ".join(["0", *others])
    expect(not others, f"{case}: who prints the loss", yours=yours, expected="rank 0", hint=hint)
    words = "loss {:.4f}, accuracy {:.4f} on {:.0f} images"
    for epoch, (loss, accuracy) in enumerate(ranks[0].counts, first):
        yours = [[float(number) for number in numbers] for _, when, *numbers in said if int(when) == epoch]
        right = len(yours) == 1 and yours[0][2] == VALID
        right = right and abs(yours[0][0] - loss) <= 1.01e-4 and abs(yours[0][1] - accuracy) <= 1.01e-4
        hint = f"the counts of all ranks, added up. {SUM}"
        if yours and yours[0][2] == len(range(0, VALID, RANKS)):
            hint = f"these are the counts of rank 0 alone: allreduce returns the sum, in a new tensor. {SUM}"
        elif yours and yours[0][2] < VALID:
            hint = f"this is the mean of the ranks' counts: allreduce averages, unless op= says otherwise. {SUM}"
        expect(
            right,
            f"{case}: what is said after epoch {epoch}",
            yours=words.format(*yours[0]) if yours else "nothing",
            expected=words.format(loss, accuracy, VALID),
            hint=hint,
        )


def _expect_without_checkpoint(script: Path, folder: Path) -> None:
    """Expects the script to end without a checkpoint as well, and to save nothing then."""
    before = [find_saved(folder / node / CHECKPOINT) for node in NODES]
    _run(script, folder, 1, "the script without --checkpoint", checkpoint=False)
    after = [find_saved(folder / node / CHECKPOINT) for node in NODES]
    hint = "if args.checkpoint and rank == 0: only then is there a name to save to"
    case = "the script without --checkpoint"
    expect(before == after, case, yours="it saves a file", expected="it trains, and saves nothing", hint=hint)
