"""The exercises of lab 6: a card of each pile, whose fixed job is run and examined."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

import nodelaunch as launch
from course.check.verdicts import Exercise, expect
from course.exercises.lab6.cards import (
    Card,
    ddp_job,
    dp_job,
    loader_job,
    logged_job,
    pipeline_job,
    requeued_job,
    sharded_job,
)
from course.exercises.lab6.cards.faults import FAULTS, read_job
from lab_common import LabError

CLOSE = 1e-6  # more than float32's rounding, and less than the error of any fault
# Seconds that a slow disk takes, beyond those that a mend by sleeping allows for.
SLOW = 4
NEW_ORDERS = next(fault.mend for fault in FAULTS if fault.letter == "A")
SHUFFLE = "leave out shuffle=False: a sampler that does not shuffle has one order for all epochs"
# What no mend changes: its name, why, and its parts. What the job about loading has of the machine, what the pipeline
# is compared with, and what Slurm would decide.
KEPT = {
    "loader": (
        "the limits of the job",
        "mend the cause: the limits are the machine's, and the workers are spawned",
        (
            *map(inspect.getsource, (loader_job.limit, loader_job.kill_when_large, loader_job.measure_memory)),
            "worker_init_fn=limit",
            'multiprocessing_context="spawn"',
            next(line for line in read_job("loader").splitlines() if line.startswith("SHARED_MEMORY, ")),
        ),
    ),
    "pipeline": (
        "the comparison with one piece",
        "mend the pipeline: the network in one piece, of this size and on the whole batch, is what it has to equal",
        (
            *map(inspect.getsource, (pipeline_job.step_alone, pipeline_job.measure_gap)),
            "step_alone(alone, optimizer_alone, chunks)",
            "gaps.append(measure_gap(stage, alone[rank]))",
            "stage, start = copy.deepcopy(alone[rank]), copy.deepcopy(alone[rank])",
            next(line for line in read_job("pipeline").splitlines() if line.startswith("CHANNELS, ")),
        ),
    ),
    "requeued": (
        "the training and its interruptions",
        "leave the epochs, and when the node is taken away, as they were: mend how the job goes on",
        (
            inspect.getsource(requeued_job.train_epoch),
            'allowed = int(os.environ.get("PREEMPT_AFTER", EPOCHS))',
            "if len(trained) == allowed:",
            "trained.append(epoch)",
        ),
    ),
}
# What the job about loading reaches within its epochs, and a guess does not.
LEARNT = 0.7
# What the job with a sharded model reaches; without training its loss is 0.7.
LEARNT_LOSS = 0.65
# How far the weights of two trainings may be apart that are the same but for the number of threads.
RESUMED = 1e-4
# What the training of a pipeline changes in the weights, at least.
MOVED = 0.01


def verify_card(card: Card, *, pile: str) -> str:
    """Runs the job as the learner has fixed it, under harder conditions than those that showed the fault."""
    if not isinstance(card, Card) or card.pile != pile:
        fix = f'card = cards.draw("{pile}")'
        cause = "an answer of another exercise"
        raise LabError("This is no card of the right pile.", where="check.exercise", cause=cause, fix=fix)
    expect(
        card.named,
        f"card {card.number}",
        yours="no cause named yet",
        expected="first the cause, then the mend",
        hint="card.name(...) with the letter of the cause",
    )
    if not card.path.exists():
        fix = "draw the card again: it writes the job anew"
        raise LabError(f"There is no {card.path}.", where=card.path, cause="it was deleted or renamed", fix=fix)
    text, job = card.read(), card.fault.job
    _expect_mended_text(card, text)
    slow = {card.fault.slow: SLOW + _find_nap(text, job)} if card.fault.slow else {}
    for layout, points in itertools.product(card.fault.layouts, card.fault.points):
        result = card.start(layout=layout, points=points if job == "ddp" else 0, ends=card.fault.ends, **slow)
        _expect_end(card, result, f", {points} points" if points != card.fault.points[0] else "")
        try:
            if job == "ddp":
                _expect_training(card, result.results, processes=layout[1], points=points)
            else:
                EXPECT[job](card, result.results)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            cause, fix = repr(error), "leave launch.report(...) as it was"
            raise LabError("The job no longer reports what it did.", where=card.path, cause=cause, fix=fix) from error
    card.note_solved()
    two_nodes = card.fault.layouts[0] == (2, 1)
    harder = (
        (card.fault.slow, "on a slow disk"),
        (len(card.fault.layouts) > 1, f"with {'both ranks on one node' if two_nodes else 'a node for each rank'}"),
        (len(card.fault.points) > 1, f"with {card.fault.points[-1]} points"),
        (len(card.fault.ends) > 1, "started more often"),
    )
    tried = "".join(f", {words}, too" for more, words in harder if more)
    return f"card {card.number}, mended, runs and is right{tried}"


def _expect_mended_text(card: Card, text: str) -> None:
    """That the job was changed, and not so that the fault only hides."""
    job = card.fault.job
    if text == card.fault.break_job():
        cause, fix = "not mended yet, or not saved", "mend it in the editor, save it, and run this cell again"
        raise LabError("The job is still as it was drawn.", where=card.path, cause=cause, fix=fix)
    beginnings = ("POINTS, ", "PICTURES, ", "WAVES, ", "#SBATCH --nodes=")
    sizes = next(line for line in read_job(job).splitlines() if line.startswith(beginnings))
    hint = "mend the cause: with other sizes it would be back"
    # Smaller batches are a right mend where a worker sends them.
    given = re.sub(r"^(PICTURES, .* = \d+, )[^,]+", rf"\g<1>{loader_job.BATCH_SIZE}", text, flags=re.M)
    expect(sizes in given, "the sizes of the job", yours="changed", expected=sizes, hint=hint)
    case, hint, parts = KEPT.get(job, ("", "", ()))
    for part in parts:
        expect(part in text, case, yours="changed", expected=part.splitlines()[0], hint=hint)
    hint = "an error that is caught is hidden, and its cause is still there"
    expected = "no error to catch"
    expect(not _catches_errors(text), "how errors are treated", yours="they are caught", expected=expected, hint=hint)
    hidden = _find_hidden(card, text)
    expected = "a mend of the cause, also for other sizes and machines"
    expect(not hidden, "a line of the job", yours=hidden, expected=expected, hint=card.fault.mend)


def _catches_errors(text: str) -> bool:
    with suppress(SyntaxError, ValueError):  # what is no Python is told by the run
        nodes = list(ast.walk(ast.parse(text)))
        return "suppress(" in text or any(isinstance(node, ast.Try) and node.handlers for node in nodes)
    return False


def _find_hidden(card: Card, text: str) -> str:
    """Returns the line with which a fix only hides the fault; comments do not count."""
    with suppress(SyntaxError, ValueError):  # what is no Python is told by the run
        batch = card.fault.job == "batch"
        plain = re.sub(r"^\s*#.*\n?", "", text, flags=re.M) if batch else ast.unparse(ast.parse(text))
        found = card.fault.hides and re.search(f"(?:{card.fault.hides}).*", plain, re.M)
        return found[0].rpartition("\n")[2].strip() if found else ""
    return ""


def _find_nap(text: str, job: str) -> float:
    """Returns the most seconds that a sleep which the learner has added may last: less than the other ranks wait."""
    return 12.0 if text.count("sleep(") > read_job(job).count("sleep(") else 0.0


def _expect_end(card: Card, result: launch.JobResult, size: str) -> None:
    """Every process came to its end and reported."""
    failure = result.failure
    expected = "a job that ends well"
    if failure:
        last = (failure.message.strip().splitlines() or [failure.what])[0]
        rank = "the job" if failure.rank is None else f"rank {failure.rank}"
        disk = ", on a slow disk" if card.fault.slow else ""
        processes = "" if card.fault.topic == "schedulers" else f", with {len(result.results)} processes"
        case = f"card {card.number}{processes}{size}{disk}"
        expect(False, case, yours=f"{rank}: {last[:160]}", expected=expected, hint=card.fault.mend)
    silent = [str(rank) for rank, report in enumerate(result.results) if report is None]
    hint = "leave launch.report(...) at the end of main() as it was, on every rank"
    expect(not silent, "what is reported", yours=f"nothing from {', '.join(silent)}", expected=expected, hint=hint)


def _expect_training(card: Card, results: tuple, *, processes: int, points: int) -> None:
    """Shares without doubles, new orders, one model, one accuracy, and each process on its own device of its node."""
    for epoch in range(ddp_job.EPOCHS):
        handed_out = [index for result in results for index in result["orders"][epoch]]
        batch = len(results) * ddp_job.BATCH_SIZE
        expect(
            len(handed_out) == len(set(handed_out)) and len(handed_out) >= points - batch,
            f"the points of epoch {epoch}, over all ranks",
            yours=f"{len(handed_out)}, {len(set(handed_out))} of them different",
            expected=f"each at most once, and no more than {batch} of {points} left out",
            hint=card.fault.mend,
        )
    orders = [tuple(order) for order in results[0]["orders"]]
    unshuffled = re.search(r"DistributedSampler\([^\n]*shuffle=False", card.read())
    expect(
        len(set(orders)) == ddp_job.EPOCHS,
        "the orders of rank 0's points",
        yours=f"{len(set(orders))} different in {ddp_job.EPOCHS} epochs",
        expected="a new one in every epoch",
        hint=SHUFFLE if unshuffled else NEW_ORDERS,
    )
    _expect_one_result(card, results, points)
    devices = [re.sub(r"\D", "", result["device"]) for result in results]
    expected = [str(rank % processes) for rank in range(len(results))]
    expect(
        devices == expected,
        f"the devices of {len(results)} ranks, {processes} on a node",
        yours=", ".join(devices),
        expected=", ".join(expected),
        hint=card.fault.mend,
    )


def _expect_one_result(card: Card, results: tuple, points: int) -> None:
    """One model, one accuracy, one checkpoint, and no rank with more work than the others."""
    for epoch in range(ddp_job.EPOCHS):
        models = len({result["weights"][epoch] for result in results})
        case = f"the weights after epoch {epoch}"
        expect(models == 1, case, yours=f"{models} models", expected="one model", hint=card.fault.mend)
    # Where a rank had more steps than the others, its last gradients are of a step of its own.
    if len({len(result["orders"][-1]) for result in results}) == 1:
        different = len({result["gradients"] for result in results})
        yours, expected = f"{different} different ones", "the same on all ranks"
        expect(different == 1, "the gradients of the last step", yours=yours, expected=expected, hint=card.fault.mend)
    for epoch in range(ddp_job.EPOCHS):
        hits, seen = (sum(result["own"][epoch][place] for result in results) for place in (0, 1))
        yours = [result["accuracies"][epoch] for result in results]
        expect(
            seen in (points, len(results) * points)  # each point once, or once on each rank
            and all(abs(one - hits / seen) < CLOSE for one in yours),
            f"the accuracy after epoch {epoch}, on each rank",
            yours=f"{', '.join(f'{one:.6f}' for one in yours)} of {seen} points",
            expected=f"{hits / max(seen, 1):.6f} of {points} points, on each rank",
            hint=card.fault.mend,
        )
    # If one rank did it all: each point once to train, and once to look at the accuracy.
    most, passed = 2 * ddp_job.EPOCHS * points, [result["passed"] for result in results]
    expect(
        max(passed) <= most,
        "the points that went through the network, on each rank",
        yours=", ".join(map(str, passed)),
        expected=f"no more than {most}",
        hint=card.fault.mend,
    )
    saved = any(result["saved"] for result in results)
    expect(saved, "the checkpoint model.pt", yours="not there", expected="written once", hint=card.fault.mend)


def _expect_replicas(card: Card, results: tuple) -> None:
    """The gradients of one device, and every point counted."""
    gap, seen = results[0]["gap"], results[0]["seen"]
    expect(
        gap < CLOSE,
        "the gradients beside one device's",
        yours=f"{gap:.1e} apart",
        expected=f"less than {CLOSE:.0e} apart",
        hint=card.fault.mend,
    )
    expect(seen == dp_job.POINTS, "points seen", yours=seen, expected=dp_job.POINTS, hint=card.fault.mend)


def _expect_pictures(card: Card, results: tuple) -> None:
    """Every picture once in each epoch, read by a worker, and learnt."""
    seen, every = results[0]["seen"], list(range(loader_job.PICTURES))
    right = len(seen) == loader_job.EPOCHS and all(sorted(epoch) == every for epoch in seen)
    expect(
        right,
        "the pictures of each epoch",
        yours=", ".join(f"{len(epoch)}, {len(set(epoch))} of them different" for epoch in seen),
        expected=f"each of {len(every)} once",
        hint=card.fault.mend,
    )
    hint = "leave the worker: without one the training waits for every batch"
    expect(results[0]["workers"] > 0, "workers", yours=0, expected="1 or more", hint=hint)
    accuracy = results[0]["accuracy"]
    hint = "the pictures or labels are no longer those of the file: mend the cause alone"
    expect(accuracy > LEARNT, "the accuracy", yours=f"{accuracy:.2f}", expected=f"more than {LEARNT}", hint=hint)


def _expect_shards(card: Card, results: tuple) -> None:
    """Sharded weights that were trained, and a checkpoint that has all of them."""
    shards = [{name: torch.tensor(numbers) for name, numbers in result["own"].items()} for result in results]
    counts = [sum(map(torch.numel, own.values())) for own in shards]
    every = sum(parameter.numel() for parameter in sharded_job.Classifier().parameters())
    expect(
        counts == [every // len(results)] * len(results),
        "the numbers that each rank holds",
        yours=", ".join(map(str, counts)),
        expected=f"{every // len(results)} of {every}",
        hint="leave the model sharded, and in `own` what this rank holds: with more ranks each has to hold less",
    )
    losses = [result["losses"][-1] for result in results]
    case, yours = "the loss after the last epoch, on each rank", ", ".join(f"{loss:.6f}" for loss in losses)
    hint = "each rank trained a model of its own: fully_shard comes before the training, and joins them"
    learnt = all(loss < LEARNT_LOSS for loss in losses)
    expect(learnt, case, yours=yours, expected=f"less than {LEARNT_LOSS}", hint=card.fault.mend)
    expect(max(losses) - min(losses) < CLOSE, case, yours=yours, expected="one model, so one loss", hint=hint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        begin = sharded_job.Classifier().state_dict()
    for name, weight in begin.items():
        moved = float((torch.cat([own[name] for own in shards]) - weight).abs().max())
        case, expected = f"how far the training moved {name}", f"more than {CLOSE}"
        expect(not moved <= CLOSE, case, yours=f"{moved:.1e}", expected=expected, hint=card.fault.mend)
    writers = sum(bool(result["saved"]) for result in results)
    hint = "all ranks gather the weights, and one of them saves: else they all write into the same file at once"
    expect(writers == 1, "ranks that saved the checkpoint", yours=writers, expected=1, hint=hint)
    (saved,) = (result["saved"] for result in results if result["saved"])
    saved = {name: torch.tensor(numbers) for name, numbers in saved.items()}
    for name in shards[0]:
        right, yours = torch.cat([own[name] for own in shards]), saved.get(name, torch.empty(0))
        case = f"{name} in the checkpoint"
        shapes = (f"shape {tuple(tensor.shape)}" for tensor in (yours, right))
        fits, (shape, expected) = yours.shape == right.shape, shapes
        expect(fits, case, yours=shape, expected=f"{expected}, from all ranks", hint=card.fault.mend)
        gap = float((yours - right).abs().max())
        expected = "the shards of all ranks, one after the other"
        expect(gap < CLOSE, case, yours=f"other weights, {gap:.1e} apart", expected=expected, hint=card.fault.mend)


def _expect_stages(card: Card, results: tuple) -> None:
    """The weights of the network in one piece, whatever the number of micro-batches, and trained."""
    every = pipeline_job.MICRO_BATCHES
    for rank, result in enumerate(results):
        hint = "leave the micro-batches: with one, a stage waits while the other computes"
        expect(
            tuple(result["messages"]) == every,
            f"the micro-batches of rank {rank} in each epoch",
            yours=", ".join(map(str, result["messages"])),
            expected=", ".join(map(str, every)),
            hint=hint,
        )
    for epoch, count in enumerate(every):
        gap = max((result["gaps"][epoch] for result in results), key=lambda gap: (gap != gap, gap))
        expect(
            gap < CLOSE,
            f"the weights after epoch {epoch}, with micro-batches: {count}, beside those of one piece",
            yours=f"{gap:.1e} apart",
            expected=f"less than {CLOSE:.0e} apart",
            hint=card.fault.mend,
        )
    moved = min(result["moved"] for result in results)
    case, hint = "how far the training has moved the weights", "leave the training as it was: mend the cause alone"
    expect(moved > MOVED, case, yours=f"{moved:.1e}", expected=f"more than {MOVED}", hint=hint)


def _expect_requeued(card: Card, results: tuple) -> None:
    """Expects each start to continue where the previous one ended, and the final weights of a single start."""
    left, right = list(range(requeued_job.EPOCHS)), []
    for allowed in (*card.fault.ends, len(left)):
        right, left = [*right, left[:allowed]], left[allowed:]
    yours, expected = (
        "; ".join(", ".join(map(str, epochs)) or "none" for epochs in starts)
        for starts in ([result["trained"] for result in results], right)
    )
    case = f"the epochs of {len(right)} starts of one job"
    expect(yours == expected, case, yours=yours, expected=expected, hint=card.fault.mend)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = requeued_job.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(requeued_job.EPOCHS):
        requeued_job.train_epoch(model, optimizer, epoch)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    pairs = zip(results[-1]["weights"], weights.tolist(), strict=True)
    gap = max((abs(one - two) for one, two in pairs), key=lambda gap: (gap != gap, gap))
    expect(
        gap < RESUMED,
        "the weights at the end, beside those of a job that was never interrupted",
        yours=f"{gap:.1e} apart",
        expected=f"less than {RESUMED:.0e} apart",
        hint="each start has to go on with all of the checkpoint: the model, the optimizer and the epoch",
    )


def _expect_batch(card: Card, results: tuple) -> None:
    """One torchrun at most, and its ranks train as one job."""
    (found,) = results
    torchruns, reports, hint = found["torchruns"], found["reports"], card.fault.mend
    expect(torchruns <= 1, "torchruns on the node", yours=torchruns, expected="one, which starts both ranks", hint=hint)
    expect(len(reports) == 2, "ranks that trained", yours=len(reports), expected=2, hint=hint)
    _expect_logged(card, reports)
    local_ranks = sorted(report["local_rank"] for report in reports)
    hint = "each rank takes the device of its LOCAL_RANK, and two ranks on one node need two devices"
    expect(local_ranks == [0, 1], "the local ranks", yours=local_ranks, expected=[0, 1], hint=hint)


def _expect_logged(card: Card, results: Sequence[dict]) -> None:
    """The ranks know of each other: they divide the points, train one model, and write one log."""
    hint, size = card.fault.mend, len(results)
    ranks = sorted((result["rank"], result["world_size"]) for result in results)
    yours, expected = (
        ", ".join(f"{rank} of {count}" for rank, count in one)
        for one in (ranks, [(rank, size) for rank in range(size)])
    )
    expect(yours == expected, "the ranks, as each takes itself", yours=yours, expected=expected, hint=hint)
    for epoch in range(logged_job.EPOCHS):
        points = [point for result in results for point in result["trained"][epoch]]
        expect(
            sorted(points) == list(range(logged_job.POINTS)),
            f"the points of epoch {epoch}, over all ranks",
            yours=f"{len(points)}, {len(set(points))} of them different",
            expected=f"each of {logged_job.POINTS} once",
            hint=hint,
        )
    weights = torch.tensor([result["weights"] for result in results])
    gap = float((weights - weights[0]).abs().max())
    case, yours = "the weights of the ranks", f"{gap:.1e} apart"
    expect(gap < CLOSE, case, yours=yours, expected="one model: the group has to have all ranks", hint=hint)
    lines = max((result["log"] for result in results), key=len)
    case, expected = "the lines of metrics.csv", f"{logged_job.EPOCHS}, one for each epoch"
    numbers = [line.partition(",")[0] for line in lines]
    right = numbers == [str(epoch) for epoch in range(logged_job.EPOCHS)]
    expect(right, case, yours=f"{len(lines)}, for the epochs {', '.join(numbers)}", expected=expected, hint=hint)


def _find_right(answer: str) -> str:
    """The job without a fault, by the first line of what the learner made of it."""
    return next(
        (text for text in map(read_job, ("ddp", *EXPECT)) if text.splitlines()[0] == answer.split("\n")[0]),
        answer,
    )


EXPECT = {
    "dp": _expect_replicas,
    "loader": _expect_pictures,
    "sharded": _expect_shards,
    "pipeline": _expect_stages,
    "requeued": _expect_requeued,
    "logged": _expect_logged,
    "batch": _expect_batch,
}
EXERCISES = {
    "6.1": Exercise("A job that stops", partial(verify_card, pile="stops"), _find_right),
    "6.2": Exercise("Calls that do not match", partial(verify_card, pile="unmatched"), _find_right),
    "6.3": Exercise("Numbers that are wrong", partial(verify_card, pile="wrong"), _find_right),
}
