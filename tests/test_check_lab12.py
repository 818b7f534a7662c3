"""Each check of lab 12 refuses typical wrong answers with the hint that fits, accepts right ones, and leaves nothing.

What learners' scripts do runs in forks of a process that has Lightning; one run of each script is a real job, and so is
one that hangs.
"""

import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from harness.answers import refuse, refuse_edited, write_script
from harness.quick_ranks import keep_warm, run_job

from course import check, frameworks
from course.check import NotYetError, OpenError
from course.exercises.lab12 import callback
from lab_common import LabError
from nodelaunch import TorchrunJob

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a script of the lab with some of its text replaced; nothing may be added beside it."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield partial(write_script, folder)
    assert len(list(folder.iterdir())) == 1


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
def test_a_script_with_gaps_or_without_lightning_is_not_run(
    write, count_runs, monkeypatch, tmp_path, number, name, gaps
):
    with pytest.raises(OpenError, match=rf"{name} has {gaps} place"):
        check.exercise(number, write(name, stub=True))
    monkeypatch.setattr(frameworks, "find_folder", lambda name: tmp_path / name)
    with pytest.raises(LabError, match="Lightning's environment is not here"):
        check.exercise(number, write(name))
    assert not count_runs


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("max_epochs=args.epochs, ", "", "1,000 epochs"),
        ("devices=args.devices, ", "", "devices=args.devices"),
    ],
)
def test_missing_and_mixed_settings_are_seen_without_a_run(write, count_runs, old, new, hint):
    assert hint in refuse("12.1", write("train_lightning.py", (old, new)))
    assert not count_runs


# 12.1

BUILD = "self.model = models.build(net, num_classes=num_classes)"
LOSS = "return F.cross_entropy(self.model(images), labels)"
LOG_LOSS = 'self.log("loss", F.cross_entropy(logits, labels), sync_dist=True)'
LOG_HITS = 'self.log("accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)'
SGD = "return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)"
TRAINER = "trainer = L.Trainer(max_epochs=args.epochs, devices=args.devices, num_nodes=args.nodes, **QUIET)"
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

WRONG_SCRIPTS = {
    "no self.model": ([(BUILD, BUILD.removeprefix("self."))], "place 1: self.model = …"),
    "returns nothing": ([(LOSS, LOSS.removeprefix("return "))], "place 2: return F.cross_entropy"),
    "backward": (
        [(LOSS, LOSS.replace("return ", "loss = ") + "; loss.backward(); return loss")],
        "Lightning calls zero_grad, backward and step",
    ),
    "each rank for itself": (
        [BY_HAND, (LOSS, OWN_STEP.replace("self.manual_backward(loss)", "loss.backward()"))],
        "place 2",
    ),
    "sum": ([(LOSS, LOSS.replace("labels)", 'labels, reduction="sum")'))], "the mean over a batch"),
    "no sync_dist": ([(LOG_HITS, LOG_HITS.replace(", sync_dist=True", ""))], "this is rank 0's own number"),
    "logs hits": ([(LOG_HITS, LOG_HITS.replace(".mean()", ".sum()"))], "the batch's mean accuracy"),
    "logs the largest": ([(LOG_LOSS, LOG_LOSS.replace("sync", 'reduce_fx="max", sync'))], "and no other option"),
    "no optimizer": ([(SGD, SGD.removeprefix("return "))], "place 4: return torch.optim.SGD"),
    "no momentum": ([(SGD, SGD.replace(", momentum=0.9", ""))], "momentum=0.9"),
    "Adam": ([(SGD, "return torch.optim.Adam(self.parameters(), self.lr)")], "torch.optim.SGD"),
    "no nodes": ([(TRAINER, TRAINER.replace(", num_nodes=args.nodes", ""))], "else each process trains alone"),
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


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", [OTHER_STYLE, [BY_HAND, (LOSS, OWN_STEP)]], ids=["another style", "by hand"])
def test_right_scripts_are_accepted(write, capsys, changes):
    check.exercise("12.1", write("train_lightning.py", *changes))
    assert capsys.readouterr().out == PROVED


# 12.3

LOG = 'pl_module.log("slowest", seconds, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)'
IMPORT = ("import lightning as L", "import lightning as L\nimport torch\nimport torch.distributed as dist")
START = "    def on_train_batch_start"
KEPT = """self.most = max(self.most, seconds)

    def on_train_epoch_end(self, trainer, pl_module):
        most = torch.tensor(self.most)
        """


def keep(end, start="on_train_epoch_start(self, trainer, pl_module)"):
    """A callback that has the maximum of its own steps, and reduces it at the epoch's end."""
    return [IMPORT, (START, f"    def {start}:\n        self.most = 0.0\n\n{START}"), (LOG, KEPT + end)]


WRONG_CALLBACKS = {
    "no sync_dist": ([(LOG, LOG.replace(", sync_dist=True", ""))], "this is rank 0's own"),
    "mean": ([(LOG, LOG.replace(', reduce_fx="max"', ""))], "which is what Lightning logs by itself"),
    "sum": ([(LOG, LOG.replace('"max"', '"sum"'))], "the largest of all steps and ranks"),
    "last step": ([(LOG, LOG.replace("on_step=False, on_epoch=True, ", ""))], "of the last step alone"),
    "not logged": ([(LOG, 'trainer.progress_bar_metrics["slowest"] = seconds')], 'pl_module.log("slowest", …)'),
    "milliseconds": ([(LOG, LOG.replace("seconds", "1000 * seconds"))], "the seconds from on_train_batch_start"),
    "on rank 0 alone": (
        keep(
            "dist.reduce(most, 0, dist.ReduceOp.MAX)\n        if trainer.is_global_zero:\n"
            '            pl_module.log("slowest", most)'
        ),
        "on every rank",
    ),
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


RIGHT_CALLBACKS = {
    "lab": [],
    "all_reduce": keep('dist.all_reduce(most, dist.ReduceOp.MAX)\n        pl_module.log("slowest", most)'),
    "logged at the end": keep('pl_module.log("slowest", self.most, reduce_fx=max, sync_dist=True)'),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", RIGHT_CALLBACKS.values(), ids=RIGHT_CALLBACKS)
def test_right_callbacks_are_accepted(write, capsys, changes):
    check.exercise("12.3", write("slowest_rank.py", *changes))
    assert capsys.readouterr().out == (
        "Your callback runs on two ranks ...\n"
        "✔ 12.3 A callback: on two ranks, and in both epochs, it is the longest step of all ranks, and every rank has "
        "it\n"
    )


# 12.2 and 12.4: edits of the lab's solutions

OWN = "for batch in ranks[0] for _, hit in batch]"
STEPS = "-(-batches // accumulate) * epochs"
WRONG_NUMBERS = [
    ("12.2", OWN, OWN.replace("[0]", "[0][-1:]"), "all pairs of ranks[0]"),
    (
        "12.2",
        "for batch in ranks[0] for _, hit in batch]",
        "for hit in dict(sum(ranks[0], [])).values()]",
        "comes twice",
    ),
    ("12.2", "(own, every, once))", "(once, every, own))", "only rank 0's own pairs"),
    ("12.2", "(own, every, once))", "(own, every))", "return three numbers"),
    ("12.2", "dict(pairs)", "dict(pairs[:-1])", "a dictionary of hits by image"),
    ("12.2", "sum(hits) / len(hits)", "sum(hits)", "all pairs of ranks[0]"),
    ("12.4", STEPS, "-(-batches // accumulate)", "times epochs"),
    ("12.4", STEPS, "epochs * batches * accumulate", "its steps, each rounded up"),
    (
        "12.4",
        "-(-batches // accumulate) * epochs",
        "epochs * images / ranks / batch_size / accumulate",
        "a whole number",
    ),
    ("12.4", STEPS, "epochs * -(-images // batch_size)", "its share of the images"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), WRONG_NUMBERS)
def test_wrong_numbers_are_refused(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def read_with_loops(ranks):
    """Sums as Lightning has them, and a set of images; fractions; what it is given is emptied."""
    sums, seen = [[0, 0] for _ in range(3)], set()
    for rank, batches in enumerate(ranks):
        for batch in batches:
            mean, size = Fraction(sum(hit for _, hit in batch), len(batch)), len(batch)
            for total in sums[rank > 0 : 2]:
                total[0] += mean * size
                total[1] += size
            for image, hit in batch:
                if image not in seen:
                    seen.add(image)
                    sums[2][0] += hit
                    sums[2][1] += 1
            batch.clear()
        batches.clear()
    return [Fraction(hits) / count for hits, count in sums]


def count_with_torch(images, batch_size, ranks, accumulate, epochs):
    """By what torch's own sampler and loader have."""
    sampler = torch.utils.data.DistributedSampler(range(images), ranks, 0)
    batches = len(torch.utils.data.DataLoader(range(images), batch_size, sampler=sampler))
    return np.int64(sum(len(range(0, batches, accumulate)) for _ in range(epochs)))


@pytest.mark.parametrize(
    ("number", "answer", "tick"),
    [
        (
            "12.2",
            read_with_loops,
            "What is logged: 11 cases of 1 to 4 ranks, with images that come twice and batches of",
        ),
        ("12.4", count_with_torch, "Steps: 13 trainings on 1 to 8 ranks, with what is left over at each place\n"),
    ],
)
def test_right_numbers_are_accepted(number, answer, tick, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} {tick}")
