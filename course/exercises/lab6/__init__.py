"""The exercises of lab 6: a card of each pile, whose fixed job is run and compared with what it has to compute."""

from __future__ import annotations

import itertools
import re
from functools import partial

import torch
import torch.nn.functional as F

import nodelaunch as launch
from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect
from course.exercises.lab6.cards import Card, ddp_job, loader_job, logged_job, sharded_job
from course.exercises.lab6.cards.faults import FAULTS, read_job
from lab_common import LabError

CLOSE = 1e-6  # more than float32's rounding, and less than the error of any fault
TRAINED = 1e-4  # how far the weights of two equal trainings may be apart, with other numbers of threads
NEW_ORDERS = next(fault.mend for fault in FAULTS if fault.letter == "A")
# What no mend changes: the sizes of a job, and what it has of the machine.
KEPT = {
    "ddp": ("POINTS, BATCH_SIZE, EPOCHS = 257, 16, 3",),
    "dp": ("POINTS, BATCH_SIZE, REPLICAS = 160, 10, 4", "parallel(inputs)"),
    "loader": (
        "PICTURES, EPOCHS, SIDE = 192, 3, 64",
        "SHARED_MEMORY = 128 * 1024",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (SHARED_MEMORY, SHARED_MEMORY))",
        "worker_init_fn=limit",
        'multiprocessing_context="spawn"',
    ),
    "sharded": ("POINTS, BATCH_SIZE, EPOCHS, UNITS = 256, 16, 3, 32",),
    "logged": ("POINTS, BATCH_SIZE, EPOCHS = 256, 16, 3",),
}
LEARNT = 0.7  # the accuracy that the job about loading reaches within its epochs, and a guess does not
LEARNT_LOSS = 0.65  # what the job with a sharded model reaches; without training its loss is 0.7


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
    text, fault = card.read(), card.fault
    if text == fault.break_job():
        cause, fix = "not mended yet, or not saved", "mend it in the editor, save it, and run this cell again"
        raise LabError("The job is still as it was drawn.", where=card.path, cause=cause, fix=fix)
    for part in KEPT[fault.job]:
        hint = "mend the cause: what it needs, and what the machine has, stay as they are"
        expect(part in text, "a line of the job that stays", yours="changed", expected=part, hint=hint)
    for layout, points in itertools.product(fault.layouts, fault.points):
        result = card.start(layout=layout, text=_make_harder(text, points))
        _expect_end(card, result, f", {points} points" if points != fault.points[0] else "")
        try:
            JUDGES[fault.job](fault.mend, result, points)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            cause, fix = repr(error), "leave launch.report(...) as it was"
            raise LabError("The job no longer reports what it did.", where=card.path, cause=cause, fix=fix) from error
    card.note_solved()
    two_nodes = fault.layouts[0] == (2, 1)
    harder = (
        (len(fault.layouts) > 1, f"with {'both ranks on one node' if two_nodes else 'a node for each rank'}"),
        (len(fault.points) > 1, f"with {' and '.join(map(str, fault.points[1:]))} points"),
    )
    tried = "".join(f", {words}, too" for more, words in harder if more)
    return f"card {card.number}, mended, runs and is right{tried}"


def _make_harder(text: str, points: int) -> str:
    """The job with this number of points, in which each sleep of the learner's ends early, as on a slower disk."""
    if points != ddp_job.POINTS:
        text = re.sub(r"^(POINTS, .* = )\d+", rf"\g<1>{points}", text, flags=re.M)
    return re.sub(r"\bsleep\((?!SECONDS_TO_)", "sleep(0.02 * ", text)


def _expect_end(card: Card, result: launch.JobResult, size: str) -> None:
    """Every process came to its end and reported."""
    failure = result.failure
    if failure:
        last = (failure.message.strip().splitlines() or [failure.what])[0]
        rank = "the job" if failure.rank is None else f"rank {failure.rank}"
        case = f"card {card.number}, with {len(result.results)} processes{size}"
        yours = f"{rank}: {last[:160]}"
        expect(False, case, yours=yours, expected="a job that ends well", hint=card.fault.mend)
    silent = [str(rank) for rank, report in enumerate(result.results) if report is None]
    hint = "leave launch.report(...) at the end of main() as it was, on every rank"
    yours = f"nothing from {', '.join(silent)}"
    expect(not silent, "what is reported", yours=yours, expected="a job that ends well", hint=hint)


def _judge_training(hint: str, result: launch.JobResult, points: int) -> None:
    """Shares without doubles, new orders, one right training, one accuracy, one checkpoint, and a device for each."""
    results, every = result.results, range(ddp_job.EPOCHS)
    for epoch in every:
        handed_out = [index for report in results for index in report["orders"][epoch]]
        batch = len(results) * ddp_job.BATCH_SIZE
        expect(
            len(handed_out) == len(set(handed_out)) and len(handed_out) >= points - batch,
            f"the points of epoch {epoch}, over all ranks",
            yours=f"{len(handed_out)}, {len(set(handed_out))} of them different",
            expected=f"each at most once, and no more than {batch} of {points} left out",
            hint=hint,
        )
    orders = [tuple(order) for order in results[0]["orders"]]
    case = "the different orders of rank 0's points"
    judge(len(set(orders)), right=ddp_job.EPOCHS, case=case, hint=f"{NEW_ORDERS}, and a sampler that shuffles")
    for epoch in every:
        models = len({report["weights"][epoch] for report in results})
        judge(models, right=1, case=f"the different models of the ranks after epoch {epoch}", hint=hint)
    right, trained = _train_alone(results, points), torch.tensor(results[0]["trained"])
    equally_many = len({len(report["orders"][-1]) for report in results}) == 1  # else each has a momentum of its own
    if equally_many and len(trained) == len(right):  # a mend may change the network, where that is its cause
        gap = float((trained - right).abs().max())
        expect(
            gap < TRAINED,
            "the weights at the end, beside those of one process that takes the mean of all ranks' gradients",
            yours=f"{gap:.1e} apart",
            expected=f"less than {TRAINED:.0e} apart",
            hint=hint,
        )
    for epoch in every:
        hits, seen = (sum(report["own"][epoch][place] for report in results) for place in (0, 1))
        case = f"the accuracy after epoch {epoch}, on each rank"
        yours = [report["accuracies"][epoch] for report in results]
        judge(yours, right=[hits / seen] * len(results), case=case, hint=hint, within=CLOSE)
        # Each point once, or once on each rank.
        judge(seen, right=AnyOf((points, len(results) * points)), case=f"{case}: points counted", hint=hint)
    # If one rank did it all: each point once to train, and once to look at the accuracy.
    most, passed = 2 * ddp_job.EPOCHS * points, [report["passed"] for report in results]
    expect(
        max(passed) <= most,
        "the points that went through the network, on each rank",
        yours=", ".join(map(str, passed)),
        expected=f"no more than {most}",
        hint=hint,
    )
    saves = sum("saving model.pt" in line for line in result.lines)
    judge(saves, right=1, case="ranks that save the checkpoint model.pt", hint=hint)
    devices = [int(re.sub(r"\D", "", report["device"])) for report in results]
    processes = len(results) // len({rank.node for rank in result.ranks})
    right = [rank % processes for rank in range(len(results))]
    judge(devices, right=right, case=f"the devices of {len(results)} ranks, {processes} on a node", hint=hint)


def _train_alone(results: tuple, points: int) -> torch.Tensor:
    """The weights of one process that trains on the ranks' points, in their order; flat."""
    inputs = torch.randn(points, 2, generator=torch.Generator().manual_seed(0))
    labels = (inputs.norm(dim=1) > 1.2).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ddp_job.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(ddp_job.EPOCHS):
        shares = [torch.tensor(report["orders"][epoch]).split(ddp_job.BATCH_SIZE) for report in results]
        for batches in itertools.zip_longest(*shares):
            optimizer.zero_grad()
            for batch in filter(lambda batch: batch is not None, batches):
                (F.cross_entropy(model(inputs[batch]), labels[batch]) / len(results)).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _judge_replicas(hint: str, result: launch.JobResult, _: int) -> None:
    """The gradients of one device."""
    gap = result.results[0]["gap"]
    yours, expected = f"{gap:.1e} apart", f"less than {CLOSE:.0e} apart"
    expect(gap < CLOSE, "the gradients beside one device's", yours=yours, expected=expected, hint=hint)


def _judge_pictures(hint: str, result: launch.JobResult, _: int) -> None:
    """Every picture once in each epoch, read by a worker, and learnt."""
    (report,) = result.results
    right = [list(range(loader_job.PICTURES))] * loader_job.EPOCHS
    judge([sorted(epoch) for epoch in report["seen"]], right=right, case="the pictures of each epoch", hint=hint)
    without = "leave the worker: without one the training waits for every batch"
    expect(report["workers"] > 0, "workers", yours=0, expected="1 or more", hint=without)
    accuracy, other = report["accuracy"], "the pictures or labels are no longer those of the file: mend the cause alone"
    expect(accuracy > LEARNT, "the accuracy", yours=f"{accuracy:.2f}", expected=f"more than {LEARNT}", hint=other)


def _judge_shards(hint: str, result: launch.JobResult, _: int) -> None:
    """Sharded weights that were trained, and a checkpoint that has all of them."""
    results = result.results
    shards = [{name: torch.tensor(numbers) for name, numbers in report["own"].items()} for report in results]
    every = sum(parameter.numel() for parameter in sharded_job.Classifier().parameters())
    judge(
        [sum(map(torch.numel, own.values())) for own in shards],
        right=[every // len(results)] * len(results),
        case="the numbers that each rank holds",
        hint="leave the model sharded, and in `own` what this rank holds: with more ranks each has to hold less",
    )
    losses, case = [report["losses"][-1] for report in results], "the loss after the last epoch, on each rank"
    learnt, yours = all(loss < LEARNT_LOSS for loss in losses), ", ".join(f"{loss:.6f}" for loss in losses)
    expect(learnt, case, yours=yours, expected=f"less than {LEARNT_LOSS}", hint=hint)
    apart = "each rank trained a model of its own: fully_shard comes before the training, and joins them"
    judge(losses[1:], right=losses[:1], case=case, hint=apart, within=CLOSE)
    writers = [report["saved"] for report in results if report["saved"]]
    alone = "all ranks gather the weights, and one of them saves: else they all write into the same file at once"
    judge(len(writers), right=1, case="ranks that saved the checkpoint", hint=alone)
    right = {name: torch.cat([own[name] for own in shards]) for name in shards[0]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        begin = sharded_job.Classifier().state_dict()
    for name, weight in right.items():
        moved = float((weight - begin[name]).abs().max())
        case = f"how far the training moved {name}"
        expect(not moved <= CLOSE, case, yours=f"{moved:.1e}", expected=f"more than {CLOSE}", hint=hint)
        saved = torch.tensor(writers[0].get(name, []))
        judge(saved, right=weight, case=f"{name} in the checkpoint, from all ranks", hint=hint, within=CLOSE)


def _judge_logged(hint: str, result: launch.JobResult, _: int) -> None:
    """The ranks know of each other: they divide the points, train one model, and write one log."""
    results, size = result.results, len(result.results)
    ranks = sorted((report["rank"], report["world_size"]) for report in results)
    right = [(rank, size) for rank in range(size)]
    judge(ranks, right=right, case="rank and world size, as each takes itself", hint=hint)
    for epoch in range(logged_job.EPOCHS):
        points = sorted(point for report in results for point in report["trained"][epoch])
        case = f"the points of epoch {epoch}, over all ranks"
        judge(points, right=list(range(logged_job.POINTS)), case=case, hint=hint, show=lambda one: f"{len(one)} points")
    weights = [report["weights"] for report in results]
    case = "the weights of the ranks, which are one model if the group has all ranks"
    judge(weights, right=[weights[0]] * size, case=case, hint=hint, within=CLOSE)
    lines = max((report["log"] for report in results), key=len)
    numbers, right = [line.partition(",")[0] for line in lines], [str(epoch) for epoch in range(logged_job.EPOCHS)]
    judge(numbers, right=right, case="the epochs of the lines of metrics.csv", hint=hint)


def _find_right(answer: str) -> str:
    """The job that the answer came from, without its fault; its first line names it."""
    right = (text for text in map(read_job, JUDGES) if text.splitlines()[0] == answer.split("\n")[0])
    return next(right, answer)


JUDGES = {
    "ddp": _judge_training,
    "dp": _judge_replicas,
    "loader": _judge_pictures,
    "sharded": _judge_shards,
    "logged": _judge_logged,
}
EXERCISES = {
    "6.1": Exercise("A job that stops", partial(verify_card, pile="stops"), _find_right),
    "6.2": Exercise("Calls that do not match", partial(verify_card, pile="unmatched"), _find_right),
    "6.3": Exercise("Numbers that are wrong", partial(verify_card, pile="wrong"), _find_right),
}
