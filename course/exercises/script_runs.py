"""The run of a learner's script: how it ended, which images it took, and which checkpoint it left."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import nodelaunch as launch
from course.check.judge import judge
from course.check.verdicts import NotYetError, expect

# Shares of 63 images, and 3 full batches: a sampler that does not drop the last image gives 64, and so a fourth batch.
RANKS, IMAGES, VALID, BATCH_SIZE, EPOCHS = 2, 127, 21, 16, 2
STEPS = IMAGES // (RANKS * BATCH_SIZE)  # of an epoch
CHECKPOINT = "saved-here.pt"  # not the name that the script itself has as an example
# What the script prints at the end of an epoch.
PRINTED = re.compile(r"\[rank (\d+)\] epoch (\d+): loss (\S+), accuracy (\S+) on (\d+) images")


def expect_end(job: launch.JobResult, case: str, hints: Mapping[str, str], *, waits: str, own: str = "") -> None:
    """Expects a job of the learner's to end well.

    Args:
        job: The result.
        case: What was tried.
        hints: For a pattern in the message of the rank that failed, a hint.
        waits: The hint for a job that does not end.
        own: The learner's file, if another one is launched, which calls it.
    """
    failure, expected = job.failure, "a run that ends well"
    if not failure:
        return
    if failure.kind in ("hang", "limit"):
        stands = "; ".join(f"rank {rank} stood at {place}" for rank, place in sorted(failure.stacks.items()))
        yours = stands or failure.what
        raise NotYetError(f"{case}: it does not end", yours=yours, expected=expected, hint=f"a rank waits: {waits}")
    last = (failure.message.strip().splitlines() or [failure.what])[0]
    fix = "mend what this line says, save the file, run the cell again" if failure.kind == "exception" else failure.fix
    hint = next((hint for pattern, hint in hints.items() if re.search(pattern, failure.message)), fix)
    # The launcher names a line of the script that it ran; a file which that one calls stands in the traceback.
    lines = re.findall(rf'{own}", line (\d+)', failure.traceback) if own else []
    where = f"{own}, line {lines[-1]}" if lines else failure.location or failure.kind
    who = failure.what if failure.rank is None else f"rank {failure.rank} failed first"
    raise NotYetError(f"{case}: {who}", yours=f"{where}: {last[:160]}", expected=expected, hint=hint)


def expect_gradients(states: Sequence[Mapping], alone: Sequence[Mapping[str, torch.Tensor]], step: str) -> None:
    """All ranks have the same weights, bit for bit, and the mean of the gradients.

    Args:
        states: Of each rank the weights, and the gradients that its optimizer's step took, by parameter.
        alone: The gradients of each rank's own images; none after the last step.
        step: Its name.
    """
    weights, *others = (state["weights"] for state in states)
    hint = "each rank trains a model of its own: the forward pass has to run through DDP(model)"
    for other in others:
        judge(other, right=weights, case=f"the weights of the two ranks at {step}", hint=hint, within=0.0)
    if not alone:
        return
    total = {name: sum(one[name] for one in alone) for name in alone[0]}
    mean, twice = ({name: one / by for name, one in total.items()} for by in (RANKS, RANKS**2))
    for rank, state in enumerate(states):
        wrong = {
            "these are of this rank's own images: the forward pass has to run through DDP(model)": alone[rank],
            "this is the sum: DDP averages, once is enough": total,
            "DDP has divided by the ranks already": twice,
        }
        hint = "leave it to DDP to average the gradients, once: backward(), then optimizer.step()"
        judge(state["gradients"], right=mean, case=f"gradients of rank {rank} at {step}", wrong=wrong, hint=hint)


def expect_images(taken: Sequence[list[list[int]]]) -> None:
    """Full batches, no image twice in an epoch by both ranks together, and another order each time."""
    orders = [[index for step in steps for index in step] for steps in taken]
    _expect_batches(taken, orders)
    half = STEPS * BATCH_SIZE  # what a rank takes in an epoch
    for epoch in range(EPOCHS):
        own = slice(epoch * half, (epoch + 1) * half)
        different, images = len({index for order in orders for index in order[own]}), RANKS * half
        expect(
            different == images,
            f"how many different images both ranks took in epoch {epoch + 1}",
            yours=different,
            expected=images,
            hint="a DistributedSampler divides the images: give it to the DataLoader as sampler=, one seed for all",
        )
    order = orders[0]
    case, shuffled = "the order of the images", order[:half] != sorted(order[:half])
    hint = "DistributedSampler shuffles, unless it is told shuffle=False"
    expect(shuffled, case, yours="that of the data set", expected="shuffled", hint=hint)
    hint, expected = "sampler.set_epoch(epoch) before each epoch chooses its order", "another one in each epoch"
    expect(order[:half] != order[half:], case, yours="the same in both epochs", expected=expected, hint=hint)


def _expect_batches(taken: Sequence[list[list[int]]], orders: Sequence[list[int]]) -> None:
    """Every rank takes full batches, as many as its share of the images has, and not the share of another."""
    sizes, share = [len(step) for step in taken[0]], EPOCHS * -(-IMAGES // RANKS)
    hint = "DataLoader(train, args.batch_size, sampler=sampler, drop_last=True): args.batch_size is of each process"
    if len(orders[0]) > share:
        hint = "both ranks went through all images: give the sampler to the DataLoader, as sampler=sampler"
    elif sizes == [*[BATCH_SIZE] * STEPS, IMAGES // RANKS % BATCH_SIZE] * EPOCHS:
        hint = "drop_last=True for the DataLoader: without it the last batch of an epoch is not a full one"
    elif sizes == [BATCH_SIZE] * (share // BATCH_SIZE):
        hint = "drop_last=True for the DistributedSampler: without it one image comes twice, to make the shares equal"
    full = [len(step) for steps in taken for step in steps] == [BATCH_SIZE] * (RANKS * EPOCHS * STEPS)
    case = f"the batches that a rank takes in {EPOCHS} epochs of {IMAGES} images"
    yours = f"{len(sizes)} batches, of {' and '.join(map(str, sorted(set(sizes), reverse=True))) or 'no'} images"
    expect(full, case, yours=yours, expected=f"{EPOCHS * STEPS} batches, of {BATCH_SIZE} images", hint=hint)
    hint = "both ranks got the same share: rank is the number in the whole job; LOCAL_RANK is 0 on each node"
    same, yours = orders[0] == orders[1], "the same ones, in the same order"
    expect(not same, "the images of the two ranks", yours=yours, expected="different ones", hint=hint)


def expect_saved_once(paths: Mapping[str, Path], first: str) -> None:
    """The node of rank 0 has the checkpoint, and no other node has one, under any name.

    Args:
        paths: What each node would save, by its name.
        first: The node of rank 0.
    """
    found = {name: files for name, path in paths.items() if (files := find_saved(path))}
    hint = "exactly one process saves, the one that loads later: if rank == 0"
    if len(found) > 1:
        hint = "every process saved: rank 0 alone may, and LOCAL_RANK is 0 on every node: if rank == 0"
    elif list(found) == [first]:
        hint = "save to args.checkpoint: there the script looks for it when it is started again"
    expect(
        list(found) == [first] and paths[first].name in found[first],
        "which nodes hold a checkpoint, with rank 0 on " + first,
        yours="; ".join(f"{name}: {', '.join(files)}" for name, files in found.items()) or "none",
        expected=f"{first} alone: {paths[first].name}",
        hint=hint,
    )


def find_saved(path: Path) -> list[str]:
    """The names of what ``torch.save`` wrote into a checkpoint's folder, and the checkpoint's own if it is there."""
    files = (file for file in path.parent.rglob("*") if file == path or zipfile.is_zipfile(file))
    return sorted(str(file.relative_to(path.parent)) for file in files)


def expect_state(path: Path, weights: Mapping[str, torch.Tensor], epochs: int) -> None:
    """The checkpoint has the weights at the end, under the bare network's names, and what is needed to go on.

    Args:
        path: The checkpoint of rank 0.
        weights: The parameters at the end, by their names in the bare network.
        epochs: How many were trained.
    """
    try:
        state = torch.load(path)
    except Exception as error:  # whatever a learner's own way of saving left there
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "torch.save(state, ...) of a dictionary of state_dict()s"
        raise NotYetError("the checkpoint", yours=line[:160], expected="loads again", hint=hint) from None
    state = state if isinstance(state, Mapping) else {}
    hint = "save state as it was put together, with model and optimizer; model.module's names have no 'module.'"
    names = list(state.get("model", {}))
    missing = set(weights) - set(names)
    yours, expected = (f"{', '.join(list(one)[:2])}, …" for one in (names, weights))
    expect(not missing, "the weights in the checkpoint", yours=yours, expected=expected, hint=hint)
    hint = "save the state as it was put together: the script loads the optimizer's momentum when it goes on"
    case, expected = "the optimizer in the checkpoint", "its state_dict(), as 'optimizer'"
    expect(bool(state.get("optimizer")), case, yours="not there", expected=expected, hint=hint)
    difference = max(float((state["model"][name] - one).abs().max()) for name, one in weights.items())
    expect(
        difference == 0 and state.get("epoch") == epochs,
        "the last checkpoint",
        yours=f"of epoch {state.get('epoch')}, whose weights differ from those at the end by {difference:.1e}",
        expected=f"of epoch {epochs}, with the weights at the end",
        hint="save at the end of each epoch, the last one too",
    )
