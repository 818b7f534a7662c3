"""The cards of lab 6: what is drawn, what each broken job shows, and which fixes are refused or accepted."""

import copy
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import warm
from harness.drawn import assert_explains
from harness.fuzzing import make_odd_file
from harness.quick_ranks import run_job

import nodelaunch as launch
from course import check
from course.check import NotYetError, attempts
from course.exercises.lab6 import cards
from course.exercises.lab6.cards import sharded_job
from course.exercises.lab6.cards.faults import FAULTS, PILES, TOPICS, read_job
from lab_common import LabError

EXERCISES = {"stops": "6.1", "unmatched": "6.2", "wrong": "6.3"}
BY_LETTER = {fault.letter: fault for fault in FAULTS}
MINE = ("def main", "# My change is none.\ndef main")
ALL_REDUCE = "        dist.all_reduce(counts)\n"
AFTER_THE_LOOP = (
    "        took, used",
    "        dist.all_reduce(mean := loss.detach() / world_size)\n        took, used",
)
IN_THE_LOOP = ("                dist.all_reduce(mean := loss.detach() / world_size)\n", "")
AFTER_THE_INNER_LOOP = (
    "        took, used",
    "            dist.all_reduce(mean := loss.detach() / world_size)  # still under Join\n        took, used",
)
LOCAL_FUNCTION = (
    "    dataset = Pictures",
    "    def convert(pixels):\n"
    "        return torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)\n\n"
    "    dataset = Pictures",
)
UNDER_JOIN = [
    ("import torch.nn.functional as F\n", "import torch.nn.functional as F\nfrom contextlib import ExitStack\n"),
    (
        "        for indices, inputs",
        "        stack = ExitStack()\n        stack.enter_context(model.join())\n        for indices, inputs",
    ),
    ("        took, used", "        stack.close()\n        took, used"),
]
GATHER = (
    "        gathered = [torch.zeros_like(counts) for _ in range(world_size)]\n"
    "        dist.all_gather(gathered, counts)\n"
    "        counts = sum(gathered)\n"
)


SHARD = '    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)\n'
WEIGHTS = "    weights = {name: tensor.to_local() for name, tensor in model.state_dict().items()}\n"
FULL_ON_RANK_0 = WEIGHTS.replace("to_local", "full_tensor").replace("    weights", "        weights")
COPY = ("        gaps.append", "        stage.load_state_dict(alone[rank].state_dict())\n        gaps.append")
COPY_EACH = (
    "        gaps.append",
    "        for mine, right in zip(stage.parameters(), alone[rank].parameters()):\n"
    "            mine.data = right.data.clone()\n        gaps.append",
)
SAVE = "        torch.save(weights, path)\n"
RESHAPE_IN_PLACE = (
    "        received.append",
    "        buffer.data = buffer.data.view(len(targets), CHANNELS, LENGTH)\n        received.append",
)
SEND_CHANNELS_LAST = (".detach(), 1)", ".detach().transpose(1, 2).contiguous(), 1)")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, runs):
    """A folder for the cards, in place of the notebook's own."""
    monkeypatch.chdir(tmp_path)


def draw(letter):
    """Draws cards until the one with this fault appears."""
    pile = BY_LETTER[letter].pile
    drawn = (cards.draw(pile, turn) for turn in itertools.count(1))
    return next(card for card in drawn if card.fault.letter == letter)


def mend(letter, *edits):
    """Returns a card whose cause is named, which opens its job, and whose job the learner has changed."""
    card = draw(letter)
    card.name(letter)
    text = card.path.read_text()
    for old, new in edits:
        assert old in text, "the edit is of the job"
        text = text.replace(old, new)
    card.path.write_text(text)
    return card


def break_after(letter, *edits):
    """Pretends that the learner wrote this into the right job: the solution's text with these edits."""
    card = mend(letter)
    text = read_job(card.fault.job)
    for old, new in edits:
        assert old in text, "the edit is of the job"
        text = text.replace(old, new)
    card.path.write_text(text)
    return card


@pytest.fixture
def quick(monkeypatch):
    """A function that gives the checks a disk that is hardly slower than the job's own."""
    return lambda: monkeypatch.setattr("course.exercises.lab6.SLOW", 0.3)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "edits", "yours"),
    [
        ("B", [MINE], "Unable to find address"),
        (
            "C",
            [("        prepare(folder)\n", "        prepare(folder)\n        dist.barrier()\n")],
            "FileNotFoundError",
        ),
        ("G", [MINE], "IndexError"),
        ("G", [("[rank]", "[0]")], "0, 0"),
        ("D", [MINE], "SIGABRT"),
        ("H", [(".mean()", ".sum()")], "apart"),
        ("I", [MINE], "0"),
        ("J", [("self.radius", "self.distance")], "Expected to have finished reduction"),
        ("K", [MINE], "514, 257 of them different"),
        ("L", [MINE], "2 models"),
        ("M", [("            if rank == 0:  #", "            if True:  #")], "13104, 13"),
        ("M", [("model.module(point.", "model.module.layers(point.")], "13104, 771"),
        ("N", [MINE], "FileNotFoundError"),
        ("E", [("shuffle=True", "shuffle=True, drop_last=True")], "SIGABRT"),
        ("E", [*UNDER_JOIN, (ALL_REDUCE, "")], "of 257 points"),
        (
            "E",
            [("indices, inputs, targets in loader", "(indices, inputs, targets), _ in zip(loader, range(8))")],
            "256, 256 of them",
        ),
        (
            "F",
            [
                (
                    "        accuracies",
                    "        if epoch == EPOCHS - 1:\n            dist.all_reduce(counts)\n        accuracies",
                )
            ],
            "of 257 points",
        ),
        ("P", [IN_THE_LOOP, (ALL_REDUCE, "")], "of 257 points"),
        ("P", [AFTER_THE_INNER_LOOP, IN_THE_LOOP], "SIGABRT"),
        ("Q", [("seed=rank", "seed=rank + 1")], "of them different"),
        ("S", [(", sampler=sampler", "")], "of them different"),
        ("T", [("(pixels) / 255", "(pixels).double() / 255")], "DataLoader worker process 0"),
        ("T", [("num_workers=1", "num_workers=0")], "num_workers"),
        (
            "U",
            [("not in self.enlarged:", "not in self.enlarged and len(self.enlarged) < 999:")],
            "DataLoader worker (pid",
        ),
        (
            "V",
            [LOCAL_FUNCTION, ("Pictures(path, lambda pixels", "Pictures(path, convert)  # lambda pixels")],
            "local object",
        ),
        ("W", [("path, transform, path", "str(path), transform, path")], "BufferedReader"),
        ("X", [(WEIGHTS, ""), (SAVE, FULL_ON_RANK_0 + SAVE)], "rank "),
        ("Y", [("lr=0.1", "lr=10")], "0.7266"),
        ("Y", [(SHARD, "")], "'to_local'"),
        ("Z", [SEND_CHANNELS_LAST], "apart"),
        ("Z", [("LENGTH, CHANNELS)", "CHANNELS, LENGTH)")], "16x32 and 8x2"),
        ("AA", [("BatchNorm1d(CHANNELS)", "BatchNorm1d(CHANNELS, track_running_stats=False)")], "apart"),
        ("AA", [("BatchNorm1d", "SyncBatchNorm")], "SyncBatchNorm"),
    ],
)
def test_wrong_mends_get_their_hint(letter, edits, yours, quick, monkeypatch):
    if letter != "C":  # it needs a disk that is slow indeed
        quick()
    if letter == "X":  # it hangs
        monkeypatch.setattr(cards, "HANG_SECONDS", 4)
    card = mend(letter, *edits)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert refused.value.hint == card.fault.mend
    assert yours in refused.value.yours, refused.value


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("letter", "sign"), [("P", "SIGABRT|EnforceNotMet"), ("R", r"dist\.recv\(theirs")])
def test_ranks_that_do_not_match_abort_or_hang(letter, sign, monkeypatch):
    monkeypatch.setattr(cards, "HANG_SECONDS", 4)
    card = draw(letter)
    result = card.start(PREPARE=0)
    assert result.failure, "the job does not end well"
    assert re.search(sign, "\n".join([*result.lines, str(result.failure)]))
    assert not card.path.exists(), "the job is seen when its cause is named"


# What other mends would report, put in the place of what the right job did: a run costs some ten seconds.


REPORTS = []


@pytest.fixture
def right(tmp_path, warm_ranks):
    """The report of the right job, which runs once for all tests."""
    if not REPORTS:
        path = tmp_path / "card.py"
        path.write_text(read_job("ddp"))
        REPORTS.append(cards.Card(0, "wrong", path, BY_LETTER["A"], named=True).start())
    return REPORTS[0]


@pytest.fixture
def alter(right, monkeypatch):
    """A function that lets a card's job report this, rank by rank, and returns the card."""

    def alter(letter, change):
        results = copy.deepcopy(right.results)
        for rank, report in enumerate(results):
            report.update(change(rank, right.results))
        monkeypatch.setattr(cards.Card, "start", lambda *_, **__: replace(right, results=results))
        return mend(letter, MINE)

    return alter


def leave_out_the_sum(rank, results):
    return {"accuracies": [hits / seen for hits, seen in results[rank]["own"]]}


def repeat_a_point(rank, results):
    return {"orders": [[*order, results[0]["orders"][0][0]] for order in results[rank]["orders"]]}


def tell_the_same_epoch(rank, results):
    return {"orders": [results[rank]["orders"][0]] * 3}


def average_the_averages(rank, results):
    averages = [leave_out_the_sum(number, results)["accuracies"] for number in (0, 1)]
    return {"accuracies": [sum(pair) / 2 for pair in zip(*averages, strict=True)]}


@pytest.mark.parametrize(
    ("letter", "change", "yours"),
    [
        ("D", leave_out_the_sum, "of 257 points"),
        ("E", repeat_a_point, "of them different"),
        ("A", tell_the_same_epoch, "1 different in 3 epochs"),
        ("F", average_the_averages, "of 257 points"),
        ("A", lambda rank, _: {"weights": 3 * [str(rank)]}, "2 models"),
        ("L", lambda rank, results: {"weights": [str(rank), *results[0]["weights"][1:]]}, "2 models"),
        ("L", lambda rank, _: {"gradients": str(rank)}, "2 different ones"),
        ("N", lambda *_: {"saved": False}, "not there"),
    ],
)
def test_wrong_reports_get_their_hint(alter, letter, change, yours):
    card = alter(letter, change)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert refused.value.hint == card.fault.mend
    assert yours in refused.value.yours, refused.value


def test_the_same_order_in_each_epoch_gets_its_own_hint(alter):
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.2", alter("E", tell_the_same_epoch))
    assert "set_epoch" in refused.value.hint


def test_a_sampler_that_does_not_shuffle_gets_its_own_hint(alter):
    card = alter("Q", tell_the_same_epoch)
    card.path.write_text(card.path.read_text().replace("seed=rank", "shuffle=False"))
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", card)
    assert "leave out shuffle=False" in refused.value.hint


def count_all(rank, results):
    return {"own": [[round(257 * accuracy), 257] for accuracy in results[rank]["accuracies"]]}


def round_to_float32(rank, results):
    return {"accuracies": torch.tensor(results[rank]["accuracies"]).tolist()}


@pytest.mark.parametrize(
    "change",
    [count_all, round_to_float32, lambda *_: {}],
    ids=["of all already", "divided as float32", "of each rank"],
)
def test_counts_that_add_up_are_right(alter, change, capsys):
    """As after an early all_reduce, or if each rank looks at all points; and as the job has them."""
    check.exercise("6.3", alter("F", change))
    assert "✔ 6.3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "guarded",
    ["    try:\n        save(model.module, folder)\n    except FileNotFoundError:\n        pass\n",
     "    with suppress(FileNotFoundError):\n        save(model.module, folder)\n"],
)  # fmt: skip
def test_an_error_that_is_caught_is_not_mended(guarded):
    card = mend("N", ("    save(model.module, folder)\n", guarded))
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.1", card)
    assert "caught" in refused.value.yours and "hidden" in refused.value.hint


SUM_OF_GRADIENTS = "            for parameter in model.parameters():\n                dist.all_reduce(parameter.grad)\n"
GRADIENTS_OF_RANK_0 = SUM_OF_GRADIENTS.replace("all_reduce(parameter.grad)", "broadcast(parameter.grad, 0)")
RENAME = '    (folder / "model.tmp").rename(folder / "model.pt")\n'
PORT = 'int(os.environ["MASTER_PORT"])'
LOAD = "    points, labels = torch.load("
KEEPS_NONE = (
    "        if index not in self.enlarged:  # for the next epoch\n"
    "            picture = self.transform(pixels).float()\n"
    "            self.enlarged[index] = F.interpolate(picture[None, None], scale_factor=8)\n"
    "        picture = F.avg_pool2d(self.enlarged[index], 8)[0, 0].byte()\n",
    "        picture = self.transform(pixels)\n",
)
STORE = (
    "    store = dist.TCPStore(address, port, world_size, is_master=rank == 0)\n"
    "    if rank == 0:\n"
    "        prepare(folder)\n"
    '        store.set("prepared", "yes")\n'
    '    store.wait(["prepared"])\n'
)


@pytest.mark.parametrize(
    ("letter", "edits", "yours"),
    [
        ("C", [(LOAD, f"    time.sleep(6)\n{LOAD}")], "time.sleep(6)"),
        ("C", [(LOAD, f"    time.sleep(20 * rank)\n{LOAD}")], "time.sleep(20 * rank)"),
        ("C", [(LOAD, f"    for _ in range(10):\n        time.sleep(rank)\n{LOAD}")], "time.sleep(rank)"),
        ("I", [("seen = parallel.module.seen", "seen = POINTS")], "seen = POINTS"),
        ("I", [("seen = parallel.module.seen", "seen = len(points)")], "seen = len(points)"),
        ("E", [("POINTS, world_size", "POINTS - 1, world_size")], "range(rank, POINTS - 1, world_size)"),
        ("E", [("range(rank, POINTS", "range(rank + 1, POINTS")], "range(rank + 1, POINTS, world_size)"),
        ("G", [("[rank]", "[min(rank, len(gpus or shares) - 1)]")], "min(rank, len(gpus or shares) - 1)]"),
        ("H", [("parallel(inputs)", "model(inputs)")], "F.cross_entropy(scores, wanted)"),
        ("I", [("parallel(inputs)", "model(inputs)"), ("parallel.module", "model")], "F.cross_entropy(model(inputs)"),
        (
            "I",
            [("parallel(inputs)", "parallel.module(inputs)")],
            "F.cross_entropy(parallel.module(inputs)",
        ),
        ("L", [("            optimizer.step", SUM_OF_GRADIENTS + "            optimizer.step")], "(parameter.grad)"),
        (
            "L",
            [("            optimizer.step", GRADIENTS_OF_RANK_0 + "            optimizer.step")],
            "broadcast(parameter.grad, 0)",
        ),
        ("N", [("    save(model", "    time.sleep(rank * 5)\n    save(model")], "time.sleep(rank * 5)"),
        ("N", [(RENAME, f'    if (folder / "model.tmp").exists():\n    {RENAME}')], ".exists():"),
        ("N", [('"model.tmp")\n    time', '"model.pt")\n    time'), (RENAME, "")], "folder / 'model.pt')"),
        ("O", [(PORT, f"{PORT} + 1")], "is_master=rank == 0"),
        ("O", [("rank == 0)", "True)")], "is_master=True"),
        ("O", [("port, world_size, is_master=rank", "port + 1, world_size, rank")], "world_size, rank == 0"),
        ("O", [("port, world_size, is_master=rank == 0", "29577, is_master=not rank")], "is_master=not rank"),
        (
            "O",
            [(STORE, "    if rank == 0:\n        prepare(folder)\n    time.sleep(20 * rank)\n")],
            "time.sleep(20 * rank)",
        ),
        ("U", [("scale_factor=8", "scale_factor=2"), ("], 8)", "], 2)")], "self.enlarged[index] = F"),
        (
            "U",
            [
                ("        self.enlarged = {}\n", ""),
                ("class Pictures", "SEEN = {}\n\n\nclass Pictures"),
                ("self.enlarged[index] = F.interpolate(picture[None, None], scale_factor=8)", "SEEN[index] = picture"),
                ("F.avg_pool2d(self.enlarged[index], 8)[0, 0].byte()", "SEEN[index].byte()"),
                ("self.enlarged", "SEEN"),
            ],
            "SEEN[index] = picture",
        ),
        ("U", [KEEPS_NONE, ("    def __getitem__", "    @functools.cache\n    def __getitem__")], "@functools.cache"),
        (
            "U",
            [KEEPS_NONE, ("    def __getitem__", "    @lru_cache(maxsize=None)\n    def __getitem__")],
            "maxsize=None)",
        ),
        (
            "U",
            [("scale_factor=8", "scale_factor=2"), ("], 8)", "], 2)"), ("self.enlarged", "self.cache")],
            "self.cache[index] = F",
        ),
        (
            "U",
            [("self.enlarged[index] = F.interpolate(", "self.enlarged.setdefault(index, "), (", scale_factor=8", "")],
            "self.enlarged.setdefault(index, picture",
        ),
        (
            "U",
            [
                ("F.interpolate(picture[None, None], scale_factor=8)", "picture.byte()"),
                ("F.avg_pool2d(self.enlarged[index], 8)[0, 0].byte()", "self.enlarged[index]"),
            ],
            "self.enlarged[index] = picture.byte()",
        ),
        ("Z", [COPY], "load_state_dict(alone[rank]"),
        ("Z", [COPY_EACH], "alone[rank].parameters()"),
        ("AA", [COPY], "load_state_dict(alone[rank]"),
    ],
)
def test_a_mend_that_hides_the_fault_is_refused(letter, edits, yours):
    card = mend(letter, *edits)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert yours in refused.value.yours and refused.value.hint == card.fault.mend


@pytest.mark.parametrize(
    "edit",
    [
        ('multiprocessing_context="spawn"', 'multiprocessing_context="fork"'),
        ("        worker_init_fn=limit,\n", ""),
        ("128 * 1024, 64", "128 * 1024, 999"),
        ("    while measure_memory()", "    while False and measure_memory()"),
    ],
)
def test_the_limits_of_a_job_about_loading_stay(edit):
    card = mend("U", edit)
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.1", card)
    assert "the limits of the job" in str(refused.value) and "the machine's" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "yours"),
    [
        ({"workers": 0}, "0"),
        ({"accuracy": 0.5}, "0.50"),
        ({"seen": [[0, *range(191)]] * 3}, "192, 191 of them different"),
        ({"seen": [[*range(192)]] * 2}, "192, 192 of them different"),
    ],
)
def test_wrong_reports_of_a_job_about_loading_get_their_hint(change, yours, monkeypatch):
    report = {"seen": [[*range(192)]] * 3, "accuracy": 0.9, "workers": 1} | change
    result = launch.JobResult(True, (report,), (), None, (), {}, {}, Path("/runs/jobs/card-6"), ())
    monkeypatch.setattr(cards.Card, "start", lambda *_, **__: result)
    card = mend("W", MINE)
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.1", card)
    assert yours in refused.value.yours and refused.value.hint


@pytest.mark.parametrize(
    "edit",
    [
        ("F.cross_entropy(alone(inputs), targets)", "sum(F.cross_entropy(alone(one), two) for one, two in chunks)"),
        ("step_alone(alone, optimizer_alone, chunks)", "step_alone(alone, optimizer_alone, chunks[:1])"),
        ("(one - two).abs()", "(one - one).abs()"),
        ("CHANNELS, LENGTH = 8, 32", "CHANNELS, LENGTH = 8, 1"),
        ("stage, start = copy.deepcopy(alone[rank])", "stage, start = alone[rank]"),
        ("measure_gap(stage, alone[rank])", "measure_gap(stage, stage)"),
    ],
)
def test_what_a_pipeline_is_compared_with_stays(edit):
    card = mend("AA", edit)
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", card)
    assert "the comparison with one piece" in str(refused.value) and "mend the pipeline" in refused.value.hint


@pytest.fixture
def pretend(monkeypatch):
    """A function that lets a card's job report this, rank by rank, and returns the card."""

    def pretend(letter, *reports):
        result = launch.JobResult(True, reports, (), None, (), {}, {}, Path("/runs/jobs/card-6"), ())
        monkeypatch.setattr(cards.Card, "start", lambda *_, **__: result)
        return mend(letter, MINE)

    return pretend


WHOLE = {
    "inner": [[number, number] for number in range(32)],
    "bias": list(range(32)),
    "outer": [[number, -number] for number in range(32)],
}
HALVES = [{name: rows[part] for name, rows in WHOLE.items()} for part in (slice(16), slice(16, 32))]
TRAINED = {"losses": [0.5, 0.4, 0.3]}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "signs", "yours"),
    [
        ("X", ["this rank holds 80 parameters", "checkpoint: 80 parameters"], "shape (16, 2)"),
        ("Y", [f"epoch {epoch}: of all points loss 0.7266" for epoch in range(3)], "0.7266"),
        ("Z", ["epoch 0: sent 1 x (16, 8, 32)", "epoch 0: received 1 x (16, 32, 8)", "by up to 2e-01"], "apart"),
        ("AA", ["epoch 0: sent 1 x (16, 8, 32); weights differ from one piece's by up to 0e+00"], "apart"),
    ],
)
def test_a_model_on_two_ranks_shows_its_fault_and_is_refused(letter, signs, yours, pretend):
    result = draw(letter).start()
    assert result.failure is None
    for sign in signs:
        assert sign in "\n".join(result.lines)
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", pretend(letter, *result.results))
    assert yours in refused.value.yours and refused.value.hint == BY_LETTER[letter].mend


@pytest.mark.parametrize(
    ("changes", "yours", "hint"),
    [
        (
            {"saved": {name: [*half, *half] for name, half in HALVES[0].items()}},
            "other weights, 1.6e+01",
            "full_tensor",
        ),
        ({"saved": WHOLE | {"outer": HALVES[0]["outer"]}}, "shape (16, 2)", "full_tensor"),
        ({"saved": {name: rows for name, rows in WHOLE.items() if name != "bias"}}, "shape (0,)", "full_tensor"),
        ({"saved": WHOLE | {"bias": [float("nan")] * 32}}, "other weights, nan", "full_tensor"),
        ({"own": WHOLE}, "160, 160", "leave the model sharded"),
        ({"losses": [0.7, 0.7, 0.7]}, "0.700000", "full_tensor"),
        ({"losses": [0.7, 0.7, float("nan")]}, "nan", "full_tensor"),
    ],
)
def test_wrong_reports_of_a_sharded_model_get_their_hint(pretend, changes, yours, hint):
    first, second = (TRAINED | {"own": own, "saved": {}} | changes for own in HALVES)
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", pretend("X", {"saved": WHOLE} | first, second | {"saved": {}}))
    assert yours in refused.value.yours and hint in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "yours", "hint"),
    [
        ({"saved": WHOLE}, "2", "one of them saves"),
        ({"losses": [0.5, 0.4, 0.31]}, "0.300000, 0.310000", "a model of its own"),
    ],
)
def test_what_one_rank_alone_reports_is_looked_at(pretend, changes, yours, hint):
    reports = [TRAINED | {"own": HALVES[0], "saved": WHOLE}, TRAINED | {"own": HALVES[1], "saved": {}} | changes]
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", pretend("X", *reports))
    assert yours in str(refused.value.yours) and hint in refused.value.hint


def test_each_weight_of_a_sharded_model_is_trained(pretend):
    torch.manual_seed(0)
    begin = sharded_job.Classifier().state_dict()["bias"].tolist()
    own = [half | {"bias": part} for half, part in zip(HALVES, (begin[:16], begin[16:]), strict=True)]
    reports = [TRAINED | {"own": half, "saved": {}} for half in own]
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", pretend("Y", *reports))
    assert "moved bias" in str(refused.value) and "after fully_shard" in refused.value.hint


RIGHT_STAGE = {"gaps": [0.0, 1e-16, 2e-16], "messages": [1, 2, 4], "moved": 0.1}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "yours", "hint"),
    [
        ({"messages": [1, 1, 1]}, "1, 1, 1", "leave the micro-batches"),
        ({"gaps": [0.0, 0.0, 1e-4]}, "1.0e-04 apart", "GroupNorm"),
        ({"gaps": [0.0, float("nan"), 0.0]}, "nan apart", "GroupNorm"),
        ({"moved": 1e-9}, "1.0e-09", "leave the training"),
    ],
)
def test_wrong_reports_of_a_pipeline_get_their_hint(pretend, rank, change, yours, hint):
    reports = [RIGHT_STAGE, RIGHT_STAGE]
    reports[rank] = RIGHT_STAGE | change
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", pretend("AA", *reports))
    assert yours in refused.value.yours and hint in refused.value.hint


# The cards about schedulers.
FAKE_TORCHRUN = """\
import json, os, pathlib, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
nodes, processes, task = int(options["nnodes"]), int(options["nproc-per-node"]), int(os.environ["SLURM_PROCID"])
if task and nodes == 1 and "standalone" not in options and options.get("rdzv-id") == os.environ["SLURM_JOB_ID"]:
    sys.exit("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError")
folder = pathlib.Path(os.environ["LAB_JOB_FOLDER"], "results")
folder.mkdir(parents=True)
for local_rank in range(processes):
    rank, size = local_rank + (task * processes if nodes > 1 else 0), nodes * processes
    report = {"rank": rank, "world_size": size, "local_rank": local_rank, "weights": [1.0]}
    report |= {"trained": 3 * [[*range(256)[rank::size]]], "log": ["0,", "1,", "2,"]}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
"""


def run_batch(job, folder):
    """Runs a batch script without the launcher."""
    log = folder / "output.log"
    with log.open("w") as file:
        words, cwd = ["bash", str(job.script), *job.args], Path(job.nodes[0].folder, "work")
        code = subprocess.run(words, cwd=cwd, env=os.environ | job.env, stdout=file, stderr=file).returncode
    lines = tuple(f"[rank 0] {line}" for line in log.read_text().splitlines())
    failure = launch.Failure("exit", f"Rank 0 on node0 failed first: exit status {code}", 0, "node0")
    return launch.JobResult(not code, (None,), (), failure if code else None, (), {}, {}, folder, lines)


@pytest.fixture
def quick_slurm(warm_python, tmp_path, monkeypatch):
    """Runs jobs without a launcher; torchrun, which one card is about, only reports what its ranks would."""
    path, python = tmp_path / "fake.py", tmp_path / "python"
    path.write_text(FAKE_TORCHRUN)
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && shift 2 && exec {sys.executable} -IS {path} "$@"\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(cards, "PYTHON", str(python))

    def run(job, **_):
        batch = [*job.program] == ["bash"]
        return run_batch(job, tmp_path) if batch else run_job(job, warm_python, agent_store=True)

    monkeypatch.setattr(launch.TorchrunJob, "run", run)


NAME, BEGIN = 'f"checkpoint-{job}-{start}.pt"', 'begin = state["epochs"]'
MENDED_NAME = (NAME, 'f"checkpoint-{job}.pt"')
LOAD_MODEL = '        model.load_state_dict(state["model"])\n'
PATH = f"    path = folder / {NAME}\n"
ANEW = "0, 1; none; 0; 0, 1, 2, 3, 4, 5"


def load_from(start):
    """Loads a checkpoint that another start has saved."""
    old = f"    old = folder / {NAME.replace('{start}', start)}\n"
    return [(PATH, PATH + old), ("if path.", "if old."), ("load(path)", "load(old)")]


SLURM_RANKS = (
    '    rank = int(os.environ.get("SLURM_PROCID", 0))\n    world_size = int(os.environ.get("SLURM_NTASKS", 1))\n'
)
RANK, WORLD_SIZE = 'int(os.environ["RANK"])', 'int(os.environ["WORLD_SIZE"])'
INIT = '    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)\n'
JOINED = '    dist.init_process_group("gloo")\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n'
TASKS, NNODES, ENDPOINT = "--ntasks-per-node=2", '--nnodes="$SLURM_NNODES"', '"$head:$port"'
RUN = f"srun --label torchrun {NNODES}"


def in_bash(before, after=""):
    """Makes srun start a bash that does more than start torchrun."""
    start = [(RUN, f"srun bash -c '{before} torchrun --nnodes=1"), ("train.py .", f"train.py . {after}'")]
    return [*start, (ENDPOINT, "localhost:29999"), ('"$SLURM_JOB_ID"\\n', "$SLURM_JOB_ID\\n")]


@pytest.mark.usefixtures("quick_slurm")
@pytest.mark.parametrize(
    ("letter", "edits", "yours", "hint"),
    [
        ("AB", load_from("{start - 1}"), "0, 1; none; 0; 1, 2, 3, 4, 5", ""),  # the start before has saved nothing
        ("AB", load_from("0"), "0, 1; none; 2; 2, 3, 4, 5", ""),
        ("AB", [("{start}", "{os.getpid()}")], ANEW, ""),
        ("AB", [MENDED_NAME, ("optimizer.state_dict()", "model.state_dict()")], "KeyError", ""),
        ("AB", [MENDED_NAME, (BEGIN, BEGIN + " - 1")], "0, 1; none; 1; 1, 2, 3, 4, 5", ""),
        ("AB", [MENDED_NAME, (LOAD_MODEL, "")], "apart", "all of the checkpoint"),
        ("AC", [(ENDPOINT, '"$head:0"'), ('--rdzv-id="$SLURM_JOB_ID"', "--rdzv-id=$RANDOM")], "2", ""),
        ("AC", [("--nproc-per-node=2", "--nproc-per-node=1")], "task 1: Exited with exit code 1", ""),
        ("AC", [(TASKS, "--ntasks-per-node=1"), ("--nproc-per-node=2", "--nproc-per-node=1")], "1", ""),
        ("AC", [(TASKS, "--ntasks=two")], "sbatch would not take", "look at the lines"),
        ("AC", [("#SBATCH --cpus", "set -e\n#SBATCH --ntasks=1\n#SBATCH --cpus")], "task 1: Exited", ""),
        ("AC", [(TASKS, "--ntasks-per-node=99")], "starts 1 to 4", ""),
        ("AC", [("srun --label torchrun", "srun --label torch-run")], "torch-run", ""),
        ("AC", [(RUN, RUN.removeprefix("srun --label "))], "torchrun --nnodes=", ""),
        ("AD", [MINE], "0 of 1, 0 of 1", ""),
        ("AD", [(INIT, INIT + f"    rank = {RANK}\n")], "0 of 1, 1 of 1", ""),
        ("AD", [(INIT, INIT + f"    rank, world_size = {RANK}, {WORLD_SIZE}\n")], "apart", ""),
        ("AD", [(SLURM_RANKS + "    limit", f"    rank, world_size = {RANK}, 2\n    limit")], ", 2)", ""),
        ("AD", [(SLURM_RANKS, f"    rank = {RANK}\n    world_size = 1\n")], "rank ", ""),
        ("AD", [(SLURM_RANKS, ""), (INIT, JOINED), ("if rank == 0:\n            with", "if True:\n            with")],
         "6, for the epochs", ""),
        ("AD", [(SLURM_RANKS, ""), (INIT, JOINED), ("batch[rank::world_size]", "batch")], "512, 256 of them", ""),
    ],
)  # fmt: skip
def test_wrong_mends_about_schedulers_get_their_hint(letter, edits, yours, hint):
    card = mend(letter, *edits)
    with pytest.raises(LabError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    error = refused.value
    assert yours in (str(error.yours) if isinstance(error, NotYetError) else str(error)), error
    assert hint in str(error) if hint else error.hint == card.fault.mend


@pytest.mark.usefixtures("quick_slurm")
@pytest.mark.parametrize(
    ("letter", "edits"),
    [
        ("AB", [(NAME, '"checkpoint.pt"')]),
        ("AB", [("{start}", "last")]),
        ("AB", [(PATH, PATH + "    old = max(folder.glob('*.pt'), key=os.path.getmtime, default=path)\n"),
                ("if path.", "if old."), ("load(path)", "load(old)")]),
        ("AB", [MENDED_NAME, ("if path.exists():", "if start and path.exists():")]),
        ("AC", [(TASKS, "--ntasks-per-node=1")]),
        ("AC", [(f"#SBATCH {TASKS}\n", "")]),
        ("AC", [(TASKS, "--ntasks=1")]),
        ("AC", [(TASKS, "-n 1")]),
        ("AC", [("srun --label", "srun --label --ntasks=1")]),
        ("AC", [("srun --label", "srun -l -n1")]),
        ("AC", [(TASKS, "--ntasks-per-node=1"), ("--cpus-per-task=1", "--cpus-per-task=2")]),
        ("AD", [(SLURM_RANKS, ""), (INIT, JOINED)]),
        ("AD", [(SLURM_RANKS, f"    rank = {RANK}\n    world_size = {WORLD_SIZE}\n")]),
        ("AD", [("SLURM_PROCID", "RANK"), ("SLURM_NTASKS", "WORLD_SIZE")]),
    ],
)  # fmt: skip
def test_right_mends_about_schedulers_get_the_tick(letter, edits, capsys):
    card = mend(letter, *edits)
    check.exercise(EXERCISES[card.pile], card)
    assert f"card {card.number}, mended, runs and is right" in capsys.readouterr().out


@pytest.fixture
def warm_slurm(warm_python, warm_torchrun, tmp_path, monkeypatch):
    """Runs jobs as the learner does, except that torch is already imported: for tests of the cards' output."""
    python = tmp_path / "slurm-python"
    # torchrun starts its ranks by PYTHON_EXEC.
    python.write_text(f'#!/bin/sh\nexport PYTHON_EXEC="$0"\nexec {shlex.join(warm_python)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(cards, "PYTHON", str(python))
    monkeypatch.setattr(cards, "ALONE", [*warm_python, str(Path(warm.__file__).with_name("warm_worker.py"))])


def test_a_job_that_starts_again_shows_that_it_begins_anew(warm_slurm, capsys):
    result = draw("AB").run()
    assert result.failure is None and [report["trained"] for report in result.results] == [[0, 1], [*range(6)]]
    said = capsys.readouterr().out
    for sign in (
        "[rank 0] start 0: preempted before epoch 2\n\nthe job is started again: SLURM_RESTART_COUNT=1\n",
        "start 0: epoch 0, loss 0.483355, saved in checkpoint-4711-0.pt",
        "start 1: epoch 0, loss 0.483355, saved in checkpoint-4711-1.pt",
    ):
        assert sign in said


@pytest.mark.usefixtures("warm_torchrun")
def test_ranks_that_train_alone_show_each_line_twice():
    result = draw("AD").start()
    assert result.failure is None
    for rank in (0, 1):
        assert sum(line.startswith(f"[rank {rank}] epoch 2: loss") for line in result.lines) == 1
    assert any("metrics.csv: 6 lines for 3 epochs" in line for line in result.lines)


def test_two_torchruns_on_a_node_show_that_one_has_no_ranks(warm_slurm, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    card = draw("AC")
    # On a machine so busy that one has ended before the other begins, both would train.
    result = next((one for one in (card.run() for _ in range(3)) if one.failure), None)
    said, tasks = capsys.readouterr().out, re.findall(r"^\[rank 0\] (\d): epoch 2: loss", "\n".join(result.lines), re.M)
    assert len(tasks) == 1, "one of the two has trained"
    (failed,) = {"0", "1"} - set(tasks)
    assert f"\n{failed}: Traceback (most recent call last)" in said and "[rank 0]" not in said
    assert result.failure.message == f"srun: error: localhost: task {failed}: Exited with exit code 1"
    assert "The batch script failed, exit status 1" in str(shown[0]) and "rank 0" not in str(shown[0])
    card.name("AC")
    card.solve()
    check.exercise("6.1", card)


@pytest.mark.parametrize("edit", [("if len(trained) == allowed", "if False"), ('"PREEMPT_AFTER", ', '"NO", ')])
def test_when_a_job_is_preempted_is_not_its_own_to_say(edit):
    with pytest.raises(NotYetError) as refused:
        check.exercise("6.3", mend("AB", edit))
    assert "its interruptions" in str(refused.value) and "leave the epochs" in refused.value.hint


def test_a_job_that_is_as_it_was_drawn_is_no_try():
    card = mend("A")
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "still as it was drawn", "save it")
    assert card.fault.mend not in str(caught.value)


SIZES = [
    ("C", ("257,", "256,")),
    ("E", ("16, 3", "20, 3")),
    ("H", ("10, 4", "10, 5")),
    ("T", ("192, 16", "96, 16")),
    ("Y", ("16, 3, 32", "16, 99, 32")),
    ("AA", ("(1, 2, 4)", "(1, 1, 1)")),
    ("AB", ("16, 6", "16, 2")),
    ("AC", ("--nodes=1", "--nodes=2")),
    ("AD", ("16, 3", "16, 1")),
]


@pytest.mark.parametrize(("letter", "size"), SIZES)
def test_other_sizes_are_no_mend(letter, size):
    card = mend(letter, size)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert "sizes" in str(refused.value)


@pytest.mark.parametrize("pile", PILES)
def test_a_mend_without_a_cause_is_refused(pile):
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[pile], cards.draw(pile))
    assert "card.name" in refused.value.hint


UNUSED = ("self.layers = ", "self.radius = torch.nn.Linear(2, 1)\n        self.layers = ")
LOOK = "        # Each rank looks at its part of all points.\n"
WAIT = '    while not (folder / "points.pt").exists():\n        time.sleep(0.1)\n'
WEIGHTED = (
    "        chunks = list(zip(parallel(inputs).chunk(REPLICAS), targets.chunk(REPLICAS), strict=True))\n"
    "        loss = sum(F.cross_entropy(one, two) * len(two) for one, two in chunks) / len(inputs)\n"
)


WEIGHTED_IN_FLOAT32 = (
    "        chunks = zip(parallel(inputs).chunk(REPLICAS), targets.chunk(REPLICAS), strict=True)\n"
    "        weights = torch.tensor([len(part) / len(targets) for part in targets.chunk(REPLICAS)])\n"
    "        loss = (torch.stack([F.cross_entropy(one, two) for one, two in chunks]) * weights).sum()\n"
)
STEP_WITH_MEAN = (
    "            optimizer.step",
    SUM_OF_GRADIENTS + "                parameter.grad /= world_size\n            optimizer.step",
)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "edits"),
    [
        ("C", [("    dist.barrier()\n", WAIT)]),
        ("C", [("    dist.barrier()\n", "    time.sleep(1)\n    dist.barrier()\n")]),
        ("G", [("[local_rank]", '[int(os.environ["LOCAL_RANK"])]')]),
        ("G", [("[local_rank]", '[rank % int(os.environ["LOCAL_WORLD_SIZE"])]')]),
        ("D", [(ALL_REDUCE, GATHER)]),
        ("H", [("        loss = F.cross_entropy(parallel(inputs), targets)\n", WEIGHTED)]),
        ("H", [("        loss = F.cross_entropy(parallel(inputs), targets)\n", WEIGHTED_IN_FLOAT32)]),
        ("L", [("model(inputs", "model.module(inputs"), STEP_WITH_MEAN]),
        ("I", [("        seen += len(inputs)\n", "        seen += len(targets)\n")]),
        ("J", [UNUSED, ("to(device))\n    opt", "to(device), find_unused_parameters=True)\n    opt")]),
        ("M", [(LOOK, LOOK + "        if rank == 0:\n            model.module(points.to(device))\n")]),
        (
            "N",
            [("    if rank == 0:\n        save", "    dist.barrier()\n    if rank == world_size - 1:\n        save")],
        ),
    ],
)
def test_other_right_mends_get_the_tick(letter, edits, capsys, quick):
    if letter != "C":
        quick()
    card = break_after(letter, *edits)
    check.exercise(EXERCISES[card.pile], card)
    said = capsys.readouterr().out
    assert f"card {card.number}, mended, runs and is right" in said
    left = len([fault for fault in FAULTS if fault.pile == card.pile]) - 1
    assert f"({left} of {left + 1} left in this pile)" in draw_and_read(card.pile, capsys)


def draw_and_read(pile, capsys):
    cards.draw(pile)
    return capsys.readouterr().out


FREE_PORT = (
    "    with socket.socket() as free:\n"
    '        free.bind(("", 0))\n'
    "        port = [free.getsockname()[1]]\n"
    "    dist.broadcast_object_list(port, src=0)\n"
    "    store = dist"
)
CLASS = (
    "class Pictures",
    "class Convert:\n    def __call__(self, pixels):\n"
    "        return torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)\n\n\nclass Pictures",
)
SEEK = ("        self.file.seek(", '        self.file = self.file or open(self.path, "rb")\n        self.file.seek(')
RECEIVE, SEND = "        dist.recv(theirs, 1 - rank)\n", "        dist.send(counts, 1 - rank)\n"
STATE_DICT = """\
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
"""
ALL_GATHER = """\
    weights = {}
    for name, tensor in model.state_dict().items():
        parts = [torch.empty_like(tensor.to_local()) for _ in range(world_size)]
        dist.all_gather(parts, tensor.to_local())
        weights[name] = torch.cat(parts)
"""
GRADIENT_CHANNELS_LAST = [
    ("gradient = torch.empty_like(output)", "gradient = torch.empty_like(output.transpose(1, 2).contiguous())"),
    ("output.backward(gradient)", "output.backward(gradient.transpose(1, 2))"),
]
WHOLE_BATCH = [
    (
        "    for inputs, _ in chunks:\n        outputs.append(stage(inputs))\n"
        "        dist.send(outputs[-1].detach(), 1)\n",
        "    outputs = stage(torch.cat([inputs for inputs, _ in chunks])).chunk(len(chunks))\n"
        "    for output in outputs:\n        dist.send(output.detach(), 1)\n    gradients = []\n",
    ),
    (
        "        output.backward(gradient)\n",
        "        gradients.append(gradient)\n    torch.autograd.backward(outputs, gradients)\n",
    ),
]
INDENTED = "        if{} rank:\n    {}    {}"


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "edits"),
    [
        ("E", UNDER_JOIN),
        ("P", [IN_THE_LOOP, AFTER_THE_LOOP]),
        ("P", [("range(rank, POINTS,", "range(rank, POINTS // 16 * 16,")]),
        ("O", [("rank == 0)", "False)  # not is_master=rank == 0")]),
        ("O", [("is_master=rank == 0", "False")]),
        ("O", [(", is_master=rank == 0", "")]),
        (
            "O",
            [
                ("import os\n", "import os\nimport socket\n"),
                ("    store = dist", FREE_PORT),
                ("(address, port,", "(address, port[0],"),
            ],
        ),
        ("S", [("shuffle=True", "shuffle=False")]),
        ("T", [("192, 16", "192, 8")]),
        ("U", [("[0, 0].byte()", "[0, 0].byte()\n        self.enlarged.clear()")]),
        ("U", [KEEPS_NONE, ("return index,", "row = []\n        row.append(index)\n        return row[0],")]),
        (
            "U",
            [
                KEEPS_NONE,
                ("class Pictures", "SEEN = {}\n\n\nclass Pictures"),
                ("return index,", "if len(SEEN) < 8:\n            SEEN[index] = picture\n        return index,"),
            ],
        ),
        ("V", [("lambda pixels: torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)", "Convert()"), CLASS]),
        ("W", [(', path.open("rb")', ", None"), SEEK]),
        ("R", [(RECEIVE + SEND, INDENTED.format("", SEND, RECEIVE) + INDENTED.format(" not", RECEIVE, SEND))]),
        ("X", [(WEIGHTS, STATE_DICT)]),
        ("X", [("tensor.to_local()", "tensor.full_tensor()"), ("if rank == 0:", "if rank == world_size - 1:")]),
        ("X", [(WEIGHTS, ALL_GATHER)]),
        ("Y", [(SHARD, SHARD + '    optimizer.param_groups[0]["params"] = list(model.parameters())\n')]),
        ("Y", [(SHARD, SHARD + "    optimizer = torch.optim.Adam(model.parameters())\n")]),
        ("Y", [(SHARD, SHARD + "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n")]),
        ("Z", [("stage(buffer.transpose(1, 2))", "stage(buffer.view(-1, CHANNELS, LENGTH))")]),
        ("Z", [SEND_CHANNELS_LAST, *GRADIENT_CHANNELS_LAST]),
        ("Z", [("stage(buffer.transpose(1, 2))", "stage(buffer)"), RESHAPE_IN_PLACE]),
        ("AA", [("torch.nn.BatchNorm1d(CHANNELS)", "torch.nn.LayerNorm([CHANNELS, LENGTH])")]),
        ("AA", WHOLE_BATCH),
        ("AA", [("torch.nn.BatchNorm1d", "torch.nn.GroupNorm"), ("Norm(CH", "Norm(2, CH")]),
    ],
)
def test_other_right_changes_get_the_tick(letter, edits, capsys, quick):
    quick()
    card = mend(letter, *edits)
    check.exercise(EXERCISES[card.pile], card)
    assert f"card {card.number}, mended, runs and is right" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.letter)
def test_each_other_cause_is_refused_with_the_sign(fault):
    card = draw(fault.letter)
    for letter in sorted(set(BY_LETTER) - {fault.letter}):
        with pytest.raises(NotYetError) as refused:
            card.name(letter)
        assert refused.value.hint == fault.sign and BY_LETTER[letter].cause in refused.value.yours
    assert not card.named
    card.name(fault.letter)
    assert card.named


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.letter)
def test_a_card_does_not_give_its_fault_away(fault):
    card = draw(fault.letter)
    assert not card.path.exists() and fault.cause not in repr(card)
    card.name(fault.letter)
    text = card.path.read_text()
    if card.path.suffix == ".py":
        compile(text, card.path.name, "exec")
    else:
        subprocess.run(["bash", "-n", card.path], check=True)
    assert text != read_job(fault.job) and fault.cause not in text
    assert fault.letter not in card.path.stem.upper().replace("CARD", "")


def draw_again(card, capsys):
    """Draws a card again as a new kernel would; returns it and its message."""
    capsys.readouterr()
    again = draw(card.fault.letter)
    return again, capsys.readouterr().out.splitlines()[-1]


def test_a_hint_costs_a_point_and_the_job_another(capsys):
    card = draw("D")
    assert card.count_points() == 3 and "cards/" not in draw_again(card, capsys)[1]
    card.hint()
    said = capsys.readouterr().out
    assert card.fault.sign in said and "2 of 3 points left" in said and not card.path.exists()
    card.hint()
    said = capsys.readouterr().out
    assert f"Its job: {card.path}" in said and "1 of 3" in said and card.path.read_text() == card.fault.break_job()
    card.path.unlink()
    assert draw_again(card, capsys)[0].path.exists(), "a job that was opened is written anew"
    card.hint()
    assert "1 of 3" in capsys.readouterr().out, "there is no more to be said"
    card.name("D")
    assert "; 1 of 3 points\n" in capsys.readouterr().out
    card.hint()
    assert card.count_points() == 1, "the cause is named"


def test_who_has_had_the_hint_with_a_wrong_letter_sees_the_job():
    card = draw("J")
    with pytest.raises(NotYetError):
        card.name("L")
    card.hint()
    assert card.path.exists() and card.count_points() == 1


def test_a_wrong_letter_costs_a_point_once(capsys):
    card = draw("K")
    for letter, left in (("A", 2), ("A", 2), ("Q", 1), ("F", 0), ("L", 0)):
        with pytest.raises(NotYetError, match=f"{left} of 3 points left"):
            card.name(letter)
        assert not card.path.exists()
    card.name("K")
    assert "; 0 of 3 points\n" in capsys.readouterr().out
    with pytest.raises(NotYetError):
        card.name("A")
    draw("L").name("L")
    capsys.readouterr()
    cards.count_points()
    assert capsys.readouterr().out == f"Fault cards: 2 of {len(FAULTS)} named, 3 of 6 points\n"


def test_who_has_the_job_mended_without_a_cause_has_no_point_left(capsys):
    card = draw("O")
    card.solve()
    assert "-     store.wait(" in capsys.readouterr().out and card.path.exists() and card.count_points() == 0
    named = draw("N")
    named.name("N")
    named.hint()
    named.solve()
    assert named.count_points() == 3


def test_a_named_card_stays_named(capsys):
    card = draw("Q")
    card.name("Q")
    card.path.unlink()
    again, said = draw_again(card, capsys)
    assert again.named and again.path.exists() and said.endswith(f": {card.path}")


def test_the_causes_of_the_lab_are_those_of_the_cards(root):
    text = (root / "notebooks" / "06_fault_cards.ipynb").read_text()
    for fault in FAULTS:
        assert f"| **{fault.letter}** | {fault.cause} |" in text
    assert f"for three cards; there are {len(FAULTS)}." in text


def test_what_the_learner_wrote_stays_and_what_solve_wrote_does_not(capsys):
    card = mend("A")
    card.path.write_text(card.path.read_text() + "# mine\n")
    assert draw("A").path.read_text().endswith("# mine\n")
    card.solve()
    kept, said = card.path.with_name(f"{card.path.stem}-yours-1.py"), capsys.readouterr().out
    assert "+         sampler.set_epoch(epoch)" in said and f"Yours is kept: {kept}" in said
    assert kept.read_text().endswith("# mine\n")
    assert card.path.read_text().startswith(read_job("ddp"))
    assert "set_epoch" not in draw("A").path.read_text()
    card.path.write_text(read_job("ddp"))  # as a learner's mend reads who puts the line back
    assert draw("A").path.read_text() == read_job("ddp")


ODD_CARDS = {"no text": b"\xff\xfe", "10 MB": b"#" * 10_000_000, "a folder": None, "a pipe": None}


@pytest.mark.parametrize(("kind", "content"), ODD_CARDS.items(), ids=ODD_CARDS)
def test_a_card_s_file_that_cannot_be_read_stays_and_is_named(kind, content):
    card = draw("A")
    card.name("A")
    card.path.unlink()
    if content is None:
        make_odd_file(card.path, kind)
    else:
        card.path.write_bytes(content)
    before = card.path.lstat()
    assert draw("A").path == card.path
    for use in (card.solve, lambda: check.exercise("6.3", card)):
        with pytest.raises(LabError) as caught:
            use()
        assert_explains(caught.value, str(card.path), "draw the card again")
    assert card.path.lstat() == before and attempts.read_source(card) == ""


def test_a_folder_of_cards_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cards").write_text("mine")
    with pytest.raises(LabError) as caught:
        draw("C").name("C")
    assert_explains(caught.value, "cannot be written", "cards")


def test_a_card_stays_the_same_until_the_next_is_asked_for(capsys):
    first = cards.draw("unmatched")
    assert capsys.readouterr().out == f"Card {first.number} (4 of 4 left in this pile)\n"
    first.note_solved()
    first.path.parent.mkdir()
    first.path.write_text("solved = True\n")
    assert cards.draw("unmatched", seed=0).number == first.number, "a cell that is run again"
    assert "It is solved; the next one: cards.draw('unmatched', 2, seed=0)" in capsys.readouterr().out
    second = cards.draw("unmatched", 2)
    assert second.number != first.number and "(3 of 4 left" in capsys.readouterr().out
    second.note_solved()
    for turn in (3, 4):
        cards.draw("unmatched", turn).note_solved()
    assert cards.draw("unmatched").path.read_text() == "solved = True\n"
    assert "(all solved)" in capsys.readouterr().out


@pytest.mark.parametrize("turn", [0, 5, -1, 1.5, "2", None])
def test_a_card_that_the_pile_does_not_have_is_named(turn):
    with pytest.raises(LabError) as caught:
        cards.draw("unmatched", turn)
    assert_explains(caught.value, "no card", "from 1 to 4")


def test_another_number_is_another_order():
    orders = {tuple(cards.draw(pile, seed=seed).number for pile in PILES) for seed in range(10)}
    assert len(orders) >= 4
    numbers = {draw(letter).number for letter in BY_LETTER}
    assert numbers == set(range(1, len(FAULTS) + 1))


def test_the_cards_of_later_topics_come_after_the_others_of_their_pile():
    stops = [cards.draw("stops", turn, seed=3).fault.topic for turn in range(1, 13)]
    assert stops == ["data parallelism"] * 6 + ["loading"] * 5 + ["schedulers"]
    wrong = [cards.draw("wrong", turn, seed=3).fault.topic for turn in range(1, 15)]
    assert wrong == ["data parallelism"] * 8 + ["model parallelism"] * 4 + ["schedulers"] * 2
    numbers = {topic: {draw(fault.letter).number for fault in FAULTS if fault.topic == topic} for topic in TOPICS[1:]}
    ranges = {"loading": (19, 24), "model parallelism": (24, 28), "schedulers": (28, 31)}
    assert numbers == {topic: set(range(*places)) for topic, places in ranges.items()}


def test_no_card_takes_more_than_two_processes():
    assert all(nodes * processes <= 2 for fault in FAULTS for nodes, processes in fault.layouts)


@pytest.mark.parametrize("seed", range(5))
def test_the_hardest_cards_come_last(seed):
    for pile in PILES:
        drawn = [cards.draw(pile, turn + 1, seed=seed).fault for turn in range(sum(f.pile == pile for f in FAULTS))]
        hard = [fault.hard for fault in drawn if fault.topic == TOPICS[0]]
        assert hard == sorted(hard) and not hard[0]
    assert [fault.letter for fault in FAULTS if fault.hard] == ["P", "Q"]


def test_what_is_no_card_is_said():
    with pytest.raises(LabError) as caught:
        cards.draw("quiet")
    assert_explains(caught.value, "no pile 'quiet'", "stops")
    with pytest.raises(LabError) as caught:
        draw("A").name("BB")
    assert_explains(caught.value, "no cause 'BB'", "A, B, C")
    for answer in (draw("A"), "scripts/train_ddp.py"):
        with pytest.raises(LabError) as caught:
            check.exercise("6.1", answer)
        assert_explains(caught.value, "no card of the right pile", 'cards.draw("stops")')
    card = mend("A")
    card.path.unlink()
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "There is no cards", "draw the card again")


@pytest.mark.usefixtures("warm_ranks")
def test_a_job_that_no_longer_reports_is_told_so():
    card = mend("I", ('{"gap": max(gaps), "seen": seen}', '{"gap": max(gaps)}'))
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "no longer reports", "leave launch.report")


def test_a_card_runs_as_the_notebook_shows_it(capsys):
    result = draw("I").run()
    said = capsys.readouterr().out
    assert result.failure is None and "0 of 160 points seen" in said and "ran to its end" in said
    assert sys.prefix not in said


@pytest.fixture
def fail(monkeypatch):
    """A function that lets a card's job print lines and fail, and runs it."""

    def fail(lines, failure):
        def start(card, *, show):
            for line in lines:
                show(line)
            return launch.JobResult(False, (), (), failure, (), {}, {}, Path("/runs/jobs/card-6"), tuple(lines))

        monkeypatch.setattr(cards.Card, "start", start)
        return draw("C").run()

    return fail


TRACEBACK = 'Traceback (most recent call last):\n  File "{}card-6.py", line 42, in main\nOSError: no {}/points.pt'
ERROR = f"OSError: no {tempfile.gettempdir()}/points.pt"
FAILURE = launch.Failure("exception", f"Rank 1 on node1 failed first: {ERROR}", 1, "node1", ERROR)


def test_a_traceback_that_a_rank_has_printed_is_not_printed_again(fail, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    failure = replace(FAILURE, traceback=TRACEBACK.format("", tempfile.gettempdir()), consequences={0: ERROR})
    # With the path of the node's copy, which the launcher's own text leaves out.
    printed = TRACEBACK.format("/node/code/", tempfile.gettempdir()).splitlines()
    result = fail([f"[rank 1] {line}" for line in printed], failure)
    (card,) = shown
    page, text = card._repr_html_(), str(card)
    assert (capsys.readouterr().out + text).count("Traceback (most") == 1
    assert "Traceback" not in page and "<details" not in page
    for words in ("Rank 1 on node1 failed first: OSError: no …/points.pt", "/runs/jobs/card-6/output.log"):
        assert words in page and words in text
    assert tempfile.gettempdir() not in page + text
    assert result.failure is failure, "the learner's own result has all of it"


MODULES = "Extension modules:"


def test_a_line_number_has_the_line_of_the_job_beside_it(fail, capsys):
    code = f"{tempfile.gettempdir()}/card-8jexqshr/node1/code/{64 * 'c'}"
    dump = f'[rank 1]   File "{code}/script/card-9.py", line 67 in main'
    module = f'[rank 1]   File "{code}/nodelaunch/node/worker.py", line 67 in main'
    lost = "[rank 0] card-9.py, line 68: another rank is gone or does not answer"
    fail([dump, lost, dump.replace("67", "999"), dump.replace(" in", ", in"), module, f"[rank 1] {MODULES} a, b"], None)
    said = capsys.readouterr().out
    job = BY_LETTER["C"].break_job().splitlines()
    assert f"line 67 `{job[66].strip()}` in main" in said and f"line 68 `{job[67].strip()}`: another" in said
    assert '"card-9.py", line 999 in main' in said and '"card-9.py", line 67, in main' in said
    assert '"nodelaunch/node/worker.py", line 67 in main' in said and f"{MODULES} …\n" in said


@pytest.mark.parametrize("line", ["[rank 0] OSError: no /points.pt", f"[rank 1] {ERROR}!"])
def test_a_traceback_that_no_rank_has_printed_is_printed(fail, line, capsys):
    fail([line], replace(FAILURE, traceback=TRACEBACK.format("", tempfile.gettempdir())))
    assert capsys.readouterr().out.count("Traceback (most") == 1


def test_diff_sets_the_right_job_beside_the_learner_s(capsys):
    card = draw("A")
    with pytest.raises(NotYetError):  # no cause was named
        check.exercise("6.3", card)
    with pytest.raises(LabError):
        check.diff("6.3")
    with pytest.raises(NotYetError):
        check.exercise("6.3", mend("A", SIZES[0][1]))
    assert check.diff("6.3") is None, "it has to be asked for twice"
    assert "sampler.set_epoch(epoch)" in check.diff("6.3").data
