"""Each check of lab 12 refuses typical wrong answers with the hint that fits, accepts right ones, and leaves nothing.

What learners' scripts do runs in forks of a process that has Lightning; one run of each script is a real job, and so is
one that hangs.
"""

import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.quick_ranks import keep_warm, run_job

from course import check, frameworks
from course.check import NotYetError, OpenError
from course.exercises.lab12 import callback, lightning_script
from course.exercises.lab12.logged import read_logs
from course.exercises.lab12.steps import count_steps
from course.workspace import make_script_stub
from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.result import Failure, JobResult

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    """A function that writes a script of the lab with some of its text replaced; nothing may be added beside it."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = set()

    def write(name, *changes, stub=False):
        source = (root / "notebooks" / "scripts" / name).read_text()
        source = make_script_stub(source) if stub else source
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (folder / name).write_text(source)
        names.add(name)
        return name

    yield write
    assert {path.name for path in folder.iterdir()} == names


@pytest.fixture
def count_runs(monkeypatch):
    """The ids of the jobs that a check ran."""
    ids, run = [], TorchrunJob.run

    def note(job, **options):
        try:
            return run(job, **options)
        finally:
            ids.append(job.id)  # the next run has another

    monkeypatch.setattr(TorchrunJob, "run", note)
    return ids


@pytest.fixture(scope="module")
def warm_lightning(lightning):
    """A command that runs a script in a fork of a process that has Lightning already."""
    with keep_warm(lightning, ("lightning", "torchmetrics", "numpy")) as command:
        yield command


@pytest.fixture
def quick(warm_lightning, monkeypatch):
    """Jobs without nodelaunch's own processes, without torchrun, and with Lightning imported; steps sleep less."""
    sleeps = [[[seconds / 2 for seconds in epoch] for epoch in rank] for rank in callback.SLEEPS]
    monkeypatch.setattr(callback, "SLEEPS", sleeps)
    monkeypatch.setattr(TorchrunJob, "run", lambda job, **_: run_job(job, warm_lightning))


# Before a run


@pytest.mark.parametrize(
    ("number", "name", "gaps"), [("12.1", "train_lightning.py", 5), ("12.3", "slowest_rank.py", 1)]
)
def test_a_script_with_gaps_or_none_is_not_run(write, count_runs, monkeypatch, tmp_path, number, name, gaps):
    with pytest.raises(OpenError, match=rf"{name} has {gaps} place") as caught:
        check.exercise(number, write(name, stub=True))
    lines = (tmp_path / "scripts" / name).read_text().splitlines()
    places = [place for place, line in enumerate(lines, 1) if "YOUR CODE HERE" in line]
    assert caught.value.where == "line " + ", ".join(str(place + 1) for place in places)
    with pytest.raises(LabError, match=r"no script 'nowhere\.py'"):
        check.exercise(number, "nowhere.py")
    with pytest.raises(LabError, match=rf"where: {name}, line \d+: import lightning as as L"):
        check.exercise(number, write(name, ("import lightning as L", "import lightning as as L")))
    monkeypatch.setattr(frameworks, "checkout", lambda: tmp_path)
    with pytest.raises(LabError, match="Lightning's environment is not here"):
        check.exercise(number, write(name))
    assert not count_runs


def test_a_callback_of_another_name_is_named(write, count_runs):
    with pytest.raises(OpenError, match="has no class SlowestRank"):
        check.exercise("12.3", write("slowest_rank.py", ("class SlowestRank", "class Slowest")))
    assert not count_runs


TRAINER = "trainer = L.Trainer(max_epochs=args.epochs, devices=args.devices, num_nodes=args.nodes, **QUIET)"


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("max_epochs=args.epochs, ", "", "1,000 epochs"),
        ("devices=args.devices, ", "", "devices=args.devices"),
        ("args.devices, num_nodes=args.nodes", "args.nodes, num_nodes=args.devices", "num_nodes=args.nodes"),
    ],
)
def test_missing_and_mixed_settings_are_seen_without_a_run(write, count_runs, old, new, hint):
    assert hint in refuse("12.1", write("train_lightning.py", (TRAINER, TRAINER.replace(old, new))))
    assert not count_runs


@pytest.mark.parametrize(
    ("number", "name", "kind", "hint"),
    [
        ("12.1", "train_lightning.py", "hang", "on every rank, and in no `if`"),
        ("12.1", "train_lightning.py", "limit", "max_epochs=args.epochs"),
        ("12.3", "slowest_rank.py", "limit", "on every rank, in each step"),
        ("12.3", "slowest_rank.py", "join", "look at the log"),
    ],
)
def test_jobs_that_do_not_end_get_their_hint(write, monkeypatch, number, name, kind, hint):
    failure = Failure(kind, "It did not end.", fix="look at the log", stacks={0: "line 7", 1: "line 9"})
    result = JobResult(False, (), (), failure, (), {}, {}, Path(), ())
    monkeypatch.setattr(TorchrunJob, "run", lambda job, **_: result)
    for module in (callback, lightning_script):
        monkeypatch.setattr(module, "find_python", lambda name: sys.executable)
    assert hint in refuse(number, write(name))


# 12.1

BUILD = "self.model = models.build(net, num_classes=num_classes)"
LOSS = "return F.cross_entropy(self.model(images), labels)"
LOG_LOSS = 'self.log("loss", F.cross_entropy(logits, labels), sync_dist=True)'
LOG_HITS = 'self.log("accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)'
SGD = "return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)"
SEED = "    L.seed_everything(0)\n"
BY_HAND = (BUILD, f"{BUILD}\n        self.automatic_optimization = False")
OWN_STEP = """optimizer = self.optimizers()
        loss = F.cross_entropy(self.model(images), labels)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()"""
OTHER_STYLE = [
    (BUILD, f"{BUILD.replace('models.build(net,', 'models.build(name=net,')}\n        self.save_hyperparameters()"),
    ("self.lr = lr", 'self.options = {"lr": lr, "momentum": 0.9}'),
    (LOSS, 'return {"loss": torch.nn.CrossEntropyLoss()(self.model(images.to(self.device)), labels)}'),
    (LOG_LOSS, "values = {'loss': F.cross_entropy(logits, labels)}"),
    (
        LOG_HITS,
        "values['accuracy'] = (logits.softmax(1).max(1).indices == labels).sum() / len(labels)\n"
        "        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, prog_bar=True)",
    ),
    (SGD, "return {'optimizer': torch.optim.SGD(self.model.parameters(), **self.options)}"),
    # Without **QUIET it writes a log and a checkpoint of each epoch, into the job's own folder.
    (TRAINER, TRAINER.replace(", **QUIET", "")),
]


def replace(text, old, new):
    assert old in text
    return text, text.replace(old, new)


WRONG_SCRIPTS = {
    "no self.model": ([(BUILD, BUILD.removeprefix("self."))], "place 1: self.model = …"),
    "no self.lr": ([("self.lr = lr", "pass")], "place 1: keep the learning rate"),
    "another network": (
        [(BUILD, f"{BUILD}\n        self.model = torch.nn.Sequential(self.model)")],
        "no other network",
    ),
    "another name": ([(BUILD, BUILD.replace("self.model", "self.net"))], "place 1: keep the network as self.model"),
    "before super": ([("        super().__init__()\n", "")], "super().__init__() comes first"),
    "returns nothing": ([replace(LOSS, "return ", "")], "nothing was trained: return the loss"),
    "returns a float": ([(LOSS, LOSS + ".item()")], "a tensor with its graph"),
    "backward": (
        [(LOSS, LOSS.replace("return ", "loss = ") + "; loss.backward(); return loss")],
        "do not call zero_grad, backward or step",
    ),
    "own step, nothing returned": (
        [(LOSS, OWN_STEP.replace("self.manual_backward(loss)", "loss.backward()"))],
        "training_step returns nothing",
    ),
    "each rank for itself": (
        [BY_HAND, (LOSS, OWN_STEP.replace("self.manual_backward(loss)", "loss.backward()"))],
        "this is rank 0's training alone",
    ),
    "sum": ([replace(LOSS, "labels)", 'labels, reduction="sum")')], 'without reduction="sum"'),
    "softmax": ([replace(LOSS, "(images)", "(images).softmax(1)")], "without a softmax"),
    "another loss": ([replace(LOSS, "labels)", "labels, label_smoothing=0.1)")], "on a batch as it comes"),
    "no sync_dist": ([replace(LOG_HITS, ", sync_dist=True", "")], "this is rank 0's own number"),
    "names": ([replace(LOG_LOSS, '"loss"', '"val_loss"')], "main() prints these two names"),
    "logs hits": ([replace(LOG_HITS, ".mean()", ".sum()")], "a sum over a batch's images: log its mean accuracy"),
    "logs a sum": ([replace(LOG_LOSS, "labels)", 'labels, reduction="sum")')], "log its mean loss"),
    "logs sums": ([replace(LOG_LOSS, "sync", 'reduce_fx="sum", sync')], "leave reduce_fx away"),
    "batches of one": ([replace(LOG_HITS, "sync", "batch_size=1, sync")], "give self.log no batch_size"),
    "logs the largest": ([replace(LOG_LOSS, "sync", 'reduce_fx="max", sync')], "and no other option"),
    "no optimizer": ([replace(SGD, "return ", "")], "place 4: return the optimizer"),
    "no momentum": ([replace(SGD, ", momentum=0.9", "")], "place 4: momentum=0.9"),
    "another lr": ([replace(SGD, "self.lr", "0.1")], "the one that --lr gave"),
    "Adam": ([(SGD, "return torch.optim.Adam(self.parameters(), self.lr)")], "is torch.optim.SGD"),
    "decay": ([replace(SGD, "0.9", "0.9, weight_decay=1e-4")], "leave weight_decay at its default"),
    "one layer": ([replace(SGD, "self.parameters", "self.model[-1].parameters")], "give it all parameters"),
    "one epoch": ([replace(TRAINER, "args.epochs", "1")], "max_epochs=args.epochs"),
    "no nodes": ([replace(TRAINER, ", num_nodes=args.nodes", "")], "else each process trains alone"),
    "no devices at all": (
        [replace(TRAINER, "devices=args.devices", "devices=2 * args.devices")],
        "num_nodes=args.nodes",
    ),
    "a GPU": ([replace(TRAINER, "devices=", 'accelerator="gpu", devices=')], "leave the accelerator to Lightning"),
    "not called trainer": ([replace(TRAINER, "trainer =", "mine =")], "place 5: the lines that follow"),
    "all images": (
        [replace(TRAINER, "devices=", "use_distributed_sampler=False, devices=")],
        "and Lightning shares them",
    ),
    "seeds later": ([(SEED, ""), (TRAINER, f"L.seed_everything(0)\n    {TRAINER}")], "before the network is made"),
    "does not save": ([("trainer.save_checkpoint(args.checkpoint)", "pass")], "leave trainer.save_checkpoint"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("changes", "hint"), WRONG_SCRIPTS.values(), ids=WRONG_SCRIPTS)
def test_wrong_scripts_are_refused(write, changes, hint):
    assert hint in refuse("12.1", write("train_lightning.py", *changes))


PROVED = (
    "Your script runs in one process, then on two local nodes ...\n"
    "✔ 12.1 The LightningModule: in one process, and on two nodes, your script's weights are those of the same "
    "training by hand, and what is logged is the mean over all images of both\n"
)


@pytest.mark.usefixtures("lightning")
def test_the_lab_s_own_script_gets_the_tick(write, capsys, count_runs, survivors):
    """As a learner has it: with torchrun on two nodes."""
    check.exercise("12.1", write("train_lightning.py"))
    assert capsys.readouterr().out == PROVED
    assert len(count_runs) == 2 and not any(map(survivors, count_runs))


RIGHT_SCRIPTS = {
    "another style": OTHER_STYLE,
    "by hand": [BY_HAND, (LOSS, OWN_STEP)],
    "logs in training, too": [(LOSS, f"{LOSS.replace('return', 'loss =')}; self.log('loss', loss); return loss")],
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", RIGHT_SCRIPTS.values(), ids=RIGHT_SCRIPTS)
def test_right_scripts_are_accepted(write, capsys, changes):
    check.exercise("12.1", write("train_lightning.py", *changes))
    assert capsys.readouterr().out == PROVED


# 12.2


def of_pairs(pairs):
    return sum(hit for _, hit in pairs) / len(pairs)


def of_batches(batches):
    return sum(map(of_pairs, batches)) / len(batches)


def flatten(lists):
    return [one for some in lists for one in some]


def join(ranks):
    return flatten(flatten(ranks))


def read_by(*, first=None, synced=None, once=None, give=tuple):
    """The lab's answer, in which any part can be another."""
    parts = [
        first or (lambda ranks: of_pairs(flatten(ranks[0]))),
        synced or (lambda ranks: of_pairs(join(ranks))),
        once or (lambda ranks: of_pairs([*dict(join(ranks)).items()])),
    ]
    return lambda ranks: give([part(ranks) for part in parts])


def read_with_loops(ranks):
    """Right: sums as Lightning has them, and a set of images."""
    sums, seen = [[0.0, 0] for _ in range(3)], set()
    for rank, batches in enumerate(ranks):
        for batch in batches:
            mean, size = torch.tensor([float(hit) for _, hit in batch]).mean(), len(batch)
            for total in sums[rank > 0 : 2]:
                total[0] += mean * size
                total[1] += size
            for image, hit in batch:
                if image not in seen:
                    seen.add(image)
                    sums[2][0] += hit
                    sums[2][1] += 1
    return [hits / count for hits, count in sums]


def read_with_numpy(ranks):
    """Right: an array, by NumPy's own unique."""
    each = [np.array([pair for batch in batches for pair in batch], dtype=float) for batches in ranks]
    every = np.concatenate(each)
    _, places = np.unique(every[:, 0], return_index=True)
    return np.array([each[0][:, 1].mean(), every[:, 1].mean(), every[places, 1].mean()])


def once_on_each_rank(ranks):
    return of_pairs(flatten([*dict(flatten(batches)).items()] for batches in ranks))


def drop_last_of_the_last_rank(ranks):
    pairs = join(ranks)
    return of_pairs(pairs[:-1])


WRONG_READINGS = {
    "mean of batches": (read_by(first=lambda ranks: of_batches(ranks[0])), "Lightning weighs each by its size"),
    "mean of ranks": (
        read_by(synced=lambda ranks: np.mean([of_pairs(flatten(batches)) for batches in ranks])),
        "ranks differ in their images, too",
    ),
    "last batch": (read_by(first=lambda ranks: of_pairs(ranks[0][-1])), "all pairs of ranks[0]"),
    "first rank twice": (
        read_by(synced=lambda ranks: of_pairs(flatten(ranks[0]))),
        "sync_dist=True adds up over the ranks",
    ),
    "all ranks first": (read_by(first=lambda ranks: of_pairs(join(ranks))), "and no other rank's"),
    "sum over ranks": (
        read_by(synced=lambda ranks: sum(of_pairs(flatten(batches)) for batches in ranks)),
        "hits of all ranks / pairs of all ranks",
    ),
    "rank 0 without repeats": (
        read_by(first=lambda ranks: of_pairs([*dict(flatten(ranks[0])).items()])),
        "also an image that comes twice",
    ),
    "repeats": (read_by(once=lambda ranks: of_pairs(join(ranks))), "counts twice in yours"),
    "once on each rank": (read_by(once=once_on_each_rank), "on one rank or on two, counts twice in yours"),
    "without the last": (read_by(once=drop_last_of_the_last_rank), "a dictionary of hits by image"),
    "hits": (read_by(once=lambda ranks: sum(dict(join(ranks)).values())), "divided by the number of images"),
    "whole numbers": (read_by(give=lambda three: [round(one) for one in three]), "with / and not with //"),
    "per cent": (read_by(give=lambda three: [100 * one for one in three]), "no per cent"),
    "other order": (read_by(give=lambda three: three[::-1]), "the order of the three"),
    "two": (read_by(give=lambda three: three[:2]), "return three numbers"),
    "divides by nothing": (read_by(synced=lambda ranks: 1 / 0), "divide by what was counted"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_READINGS.values(), ids=WRONG_READINGS)
def test_wrong_readings_are_refused(answer, hint):
    assert hint in refuse("12.2", answer)


@pytest.mark.parametrize(
    "answer",
    [
        read_by(),
        read_with_loops,
        read_with_numpy,
        read_by(give=torch.tensor),
        read_by(give=lambda three: [Fraction(one) for one in three]),
        read_by(give=lambda three: [torch.tensor(one, dtype=torch.float32) for one in three]),
    ],
)
def test_right_readings_are_accepted(answer, capsys):
    check.exercise("12.2", answer)
    assert capsys.readouterr().out == (
        "✔ 12.2 What is logged: 11 cases of 1 to 4 ranks, with images that come twice and batches of unequal size\n"
    )


def test_an_answer_may_change_what_it_is_given():
    def read_and_clear(ranks):
        found = read_by()(ranks)
        for batches in ranks:
            for batch in batches:
                batch.clear()
            batches.clear()
        return found

    check.exercise("12.2", read_and_clear)


# 12.3

LOG = 'pl_module.log("slowest", seconds, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)'
IMPORT = ("import lightning as L", "import lightning as L\nimport torch\nimport torch.distributed as dist")
START = "    def on_train_batch_start"
CLOCK = "self.began = time.perf_counter()"
KEPT = """self.most = max(self.most, seconds)

    def on_train_epoch_end(self, trainer, pl_module):
        most = torch.tensor(self.most)
        """


def keep(end, start="on_train_epoch_start(self, trainer, pl_module)"):
    """A callback that has the maximum of its own steps, and reduces it at the epoch's end."""
    return [IMPORT, (START, f"    def {start}:\n        self.most = 0.0\n\n{START}"), (LOG, KEPT + end)]


WRONG_CALLBACKS = {
    "no sync_dist": ([replace(LOG, ", sync_dist=True", "")], "this is rank 0's own"),
    "mean": ([replace(LOG, ', reduce_fx="max"', "")], "which is what Lightning logs by itself"),
    "sum": ([replace(LOG, '"max"', '"sum"')], "add up no steps"),
    "min": ([replace(LOG, '"max"', '"min"')], "this is the shortest"),
    "unknown": ([replace(LOG, '"max"', '"maximum"')], 'the reduction is called "max"'),
    "last step": ([replace(LOG, "on_step=False, on_epoch=True, ", "")], "of the last step alone"),
    "not logged": ([(LOG, 'trainer.progress_bar_metrics["slowest"] = seconds')], 'pl_module.log("slowest", …)'),
    "another name": ([replace(LOG, "slowest", "slowest_rank")], "log it as 'slowest'"),
    "milliseconds": ([replace(LOG, "seconds", "1000 * seconds")], "these are milliseconds"),
    "by the trainer": ([replace(LOG, "pl_module", "trainer")], "a callback logs by the module"),
    "once": (
        [(CLOCK, 'self.began = getattr(self, "began", time.perf_counter())')],
        "begin in each on_train_batch_start",
    ),
    "all the time": (
        keep('pl_module.log("slowest", most, reduce_fx="max", sync_dist=True)', "setup(self, *_, stage)"),
        "earlier",
    ),
    "mean of ranks": (keep('pl_module.log("slowest", most, sync_dist=True)'), "mean over the ranks"),
    "sum over ranks": (keep('dist.all_reduce(most)\n        pl_module.log("slowest", most)'), "the sum over the ranks"),
    "on rank 0 alone": (
        keep(
            "dist.reduce(most, 0, dist.ReduceOp.MAX)\n        if trainer.is_global_zero:\n"
            '            pl_module.log("slowest", most)'
        ),
        "log it on every rank",
    ),
    "on rank 0 right": (
        keep('dist.reduce(most, 0, dist.ReduceOp.MAX)\n        pl_module.log("slowest", most)'),
        "this is rank 1's own",
    ),
    "exits": (keep("import os\n        os._exit(0)"), "calls no exit()"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("changes", "hint"), WRONG_CALLBACKS.values(), ids=WRONG_CALLBACKS)
def test_wrong_callbacks_are_refused(write, changes, hint):
    assert hint in refuse("12.3", write("slowest_rank.py", *changes))


@pytest.mark.usefixtures("quick")
def test_the_learner_s_own_line_is_named(write):
    with pytest.raises(NotYetError) as refused:
        check.exercise("12.3", write("slowest_rank.py", (LOG, "seconds / 0")))
    assert re.fullmatch(r"slowest_rank\.py, line \d+: ZeroDivisionError: .*", refused.value.yours)


@pytest.mark.usefixtures("lightning")
def test_a_rank_that_logs_alone_hangs_and_is_ended(write, count_runs, survivors, monkeypatch):
    """For real: with sync_dist, rank 0 waits for rank 1, and both are ended."""
    monkeypatch.setattr(callback, "HANG_SECONDS", 6)
    alone = f"if trainer.is_global_zero:\n            {LOG}"
    assert "on every rank, in each step" in refuse("12.3", write("slowest_rank.py", (LOG, alone)))
    assert len(count_runs) == 1 and not survivors(count_runs[0])


TICK = (
    "Your callback runs on two ranks ...\n"
    "✔ 12.3 A callback: on two ranks, and in both epochs, it is the longest step of all ranks, and every rank has it\n"
)
RIGHT_CALLBACKS = {
    "lab": [],
    "by the callback": [replace(LOG, "pl_module", "self")],
    "a tensor": [IMPORT, replace(LOG, "seconds", "torch.tensor(seconds, dtype=torch.float64)")],
    "also in steps": [replace(LOG, "on_step=False", "on_step=True")],
    "another clock": [
        (CLOCK, CLOCK.replace("self.began", "self.__class__.start").replace("perf_counter", "monotonic")),
        ("time.perf_counter() - self.began", "time.monotonic() - SlowestRank.start"),
    ],
    "all_reduce": keep('dist.all_reduce(most, dist.ReduceOp.MAX)\n        pl_module.log("slowest", most)'),
    "all_gather": keep('pl_module.log("slowest", pl_module.all_gather(most).max())'),
    "strategy": keep('pl_module.log("slowest", trainer.strategy.reduce(most, reduce_op="max"))'),
    "logged at the end": keep('pl_module.log("slowest", self.most, reduce_fx=max, sync_dist=True)'),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", RIGHT_CALLBACKS.values(), ids=RIGHT_CALLBACKS)
def test_right_callbacks_are_accepted(write, capsys, changes):
    check.exercise("12.3", write("slowest_rank.py", *changes))
    assert capsys.readouterr().out == TICK


# 12.4


def count_by(*, share=math.ceil, batches=math.ceil, made=math.ceil, give=int):
    """The lab's answer, in which any rounding can be another."""

    def count(images, batch_size, ranks, accumulate, epochs):
        return give(epochs * made(batches(share(images / ranks) / batch_size) / accumulate))

    return count


def count_with_torch(images, batch_size, ranks, accumulate, epochs):
    """Right: by what torch's own sampler and loader have."""
    sampler = torch.utils.data.DistributedSampler(range(images), ranks, 0)
    batches = len(torch.utils.data.DataLoader(range(images), batch_size, sampler=sampler))
    return np.int64(sum(len(range(0, batches, accumulate)) for _ in range(epochs)))


def count_at_once(images, batch_size, ranks, accumulate, epochs):
    """Right: rounding up three times is rounding up once."""
    return epochs * -(-images // (ranks * batch_size * accumulate))


WRONG_COUNTS = {
    "share rounded down": (count_by(share=math.floor), "round up where you divide by ranks"),
    "last batch dropped": (count_by(batches=math.floor), "round up where you divide by batch_size"),
    "rest not stepped": (count_by(made=math.floor), "an epoch ends with a step"),
    "nothing rounded": (count_by(share=float, batches=float, made=float, give=float), "steps are whole"),
    "one epoch": (lambda *case: count_by()(*case[:4], 1), "times epochs"),
    "global batch": (lambda images, size, ranks, *rest: count_by()(images, size, 1, *rest), "its share of the images"),
    "all ranks": (lambda *case: case[2] * count_by()(*case), "count it once, and not for each rank"),
    "batches": (
        lambda images, size, ranks, some, epochs: count_by()(images, size, ranks, 1, epochs),
        "divide by accumulate",
    ),
    "times accumulate": (
        lambda images, size, ranks, some, epochs: some * count_by()(images, size, ranks, 1, epochs),
        "accumulate makes the steps fewer",
    ),
    "images alone": (
        lambda images, size, ranks, some, epochs: epochs * math.ceil(images / size),
        "each rank has its share of the images",
    ),
    "one more": (lambda *case: count_by()(*case) + 1, "each rounded up"),
    "a text": (count_by(give=str), "return one number"),
    "divides by none": (lambda n, size, *rest: count_by()(n, size, *rest) * (n // size) // (n // size), "never 0"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_wrong_counts_are_refused(answer, hint):
    assert hint in refuse("12.4", answer)


@pytest.mark.parametrize(
    "answer", [count_by(), count_by(give=float), count_by(give=torch.tensor), count_with_torch, count_at_once]
)
def test_right_counts_are_accepted(answer, capsys):
    check.exercise("12.4", answer)
    assert capsys.readouterr().out == (
        "✔ 12.4 Steps: 13 trainings on 1 to 8 ranks, with what is left over at each place\n"
    )


# 12.2 and 12.4: what Lightning itself says

ASK_LIGHTNING = """
import json, sys, warnings
import lightning as L
import torch
import nodelaunch as launch

warnings.simplefilter("ignore")


class Watched(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.pairs = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0][:, None].float()).sum()

    def validation_step(self, batch, batch_idx):
        images, hits = batch
        self.log("alone", hits.float().mean())
        self.log("synced", hits.float().mean(), sync_dist=True)
        self.pairs.append([*zip(images.tolist(), hits.tolist())])

    def configure_optimizers(self):
        self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 0.0)


devices, (evaluated, counted) = int(sys.argv[1]), json.loads(sys.argv[2])
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


def load(hits, size):
    data = torch.utils.data.TensorDataset(torch.arange(len(hits)), torch.tensor([*map(int, hits)]))
    return torch.utils.data.DataLoader(data, size)


found = {"logged": [], "steps": []}
for hits, size in evaluated:
    watched = Watched()
    (logged,) = L.Trainer(devices=devices, **quiet).validate(watched, load(hits, size), verbose=False)
    found["logged"].append([watched.pairs, logged["alone"], logged["synced"]])
for images, size, accumulate, epochs in counted:
    watched = Watched()
    trainer = L.Trainer(devices=devices, max_epochs=epochs, accumulate_grad_batches=accumulate, **quiet)
    trainer.fit(watched, load("0" * images, size))
    found["steps"].append([watched.estimated, trainer.global_step])
launch.report(found)
"""
EVALUATED = [("1011011101", 4), ("1011010", 3), ("10100", 2), ("1", 1)]
COUNTED = [(20, 5, 1, 1), (20, 5, 1, 3), (21, 5, 1, 2), (20, 5, 3, 2), (21, 5, 2, 3), (3, 5, 4, 2), (1, 1, 2, 1)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_logs_and_steps_as_the_checks_say(warm_lightning, tmp_path, ranks):
    script = tmp_path / "ask.py"
    script.write_text(ASK_LIGHTNING)
    nodes, environment = local_nodes(1, folder=tmp_path), {"CUDA_VISIBLE_DEVICES": ""}
    job = TorchrunJob(script, [ranks, json.dumps([EVALUATED, COUNTED])], nodes, nproc_per_node=ranks, env=environment)
    done = run_job(job, warm_lightning)
    assert done.ok, done.lines
    for number, (hits, size) in enumerate(EVALUATED):
        each = [one["logged"][number] for one in done.results]
        alone, synced, once = read_logs([pairs for pairs, *_ in each])
        assert each[0][1:] == [pytest.approx(alone), pytest.approx(synced)], (hits, size)
        assert once == pytest.approx(sum(map(int, hits)) / len(hits))
    for number, (images, size, accumulate, epochs) in enumerate(COUNTED):
        right = count_steps(images, size, ranks, accumulate, epochs)
        assert [one["steps"][number] for one in done.results] == [[right, right]] * ranks, COUNTED[number]
