"""The cards of lab 6: what is drawn, what each broken job shows, and which fixes are refused or accepted."""

import itertools
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.quick_ranks import run_job

import nodelaunch as launch
from course import check
from course.check import NotYetError
from course.exercises.lab6 import cards
from course.exercises.lab6.cards.faults import FAULTS, PILES, read_job
from lab_common import LabError

EXERCISES = {"stops": "6.1", "unmatched": "6.2", "wrong": "6.3"}
BY_LETTER = {fault.letter: fault for fault in FAULTS}
MINE = ("def main", "# My change is none.\ndef main")
ALL_REDUCE = "        dist.all_reduce(counts)\n"
EIGHT_BATCHES = "(indices, inputs, targets), _ in zip(loader, range(8))"
LAMBDA = "lambda pixels: torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)"
LOCAL_FUNCTION = (
    ("Pictures(path, lambda pixels", "Pictures(path, convert)  # lambda pixels"),
    ("    dataset = Pictures", "    def convert(pixels):\n        return pixels\n\n    dataset = Pictures"),
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
LOAD = "    points, labels = torch.load("
STEP = "            optimizer.step"
SUM_OF_GRADIENTS = "            for parameter in model.parameters():\n                dist.all_reduce(parameter.grad)\n"
SAVED = "    save(model.module, folder)\n"
SLURM_RANKS = (
    '    rank = int(os.environ.get("SLURM_PROCID", 0))\n    world_size = int(os.environ.get("SLURM_NTASKS", 1))\n'
)
RANK, WORLD_SIZE = 'int(os.environ["RANK"])', 'int(os.environ["WORLD_SIZE"])'
INIT = '    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)\n'
JOINED = '    dist.init_process_group("gloo")\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, runs):
    """A folder for the cards, in place of the notebook's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick(warm_python, monkeypatch):
    """Runs jobs without a launcher: their ranks are forks of one process, and meet in a store as torchrun's do."""
    monkeypatch.setattr(launch.TorchrunJob, "run", lambda job, **_: run_job(job, warm_python, agent_store=True))


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


def refuse(card):
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    return refused.value


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("letter", "edits", "yours"),
    [
        ("B", [("        prepare(folder)\n", "        prepare(folder)\n        dist.barrier()\n")], "rank "),
        ("B", [(LOAD, f"    time.sleep(20 * rank)\n{LOAD}")], "FileNotFoundError"),
        ("C", [MINE], "rank "),
        ("D", [("shuffle=True", "shuffle=True, drop_last=True")], "rank "),
        ("D", [*UNDER_JOIN, (ALL_REDUCE, "")], "["),
        ("D", [("indices, inputs, targets in loader", EIGHT_BATCHES)], "256"),
        ("D", [("POINTS, world_size", "POINTS - 1, world_size")], "rank "),
        ("D", [("range(rank, POINTS", "range(rank + 1, POINTS")], "rank "),
        ("E", [MINE], "["),
        ("F", [MINE], "IndexError"),
        ("F", [("[rank]", "[0]")], "[0, 0]"),
        ("G", [(".mean()", ".sum()")], "apart"),
        ("H", [("self.radius", "self.distance")], "Expected to have finished reduction"),
        ("I", [MINE], "514, 257 of them different"),
        ("J", [MINE], "2"),
        ("J", [(STEP, SUM_OF_GRADIENTS + STEP)], "apart"),
        ("K", [("            if rank == 0:  #", "            if True:  #")], "13104, 13"),
        ("L", [MINE], "FileNotFoundError"),
        ("L", [(SAVED, f"    try:\n    {SAVED}    except FileNotFoundError:\n        pass\n")], "2"),
        ("N", [("(pixels) / 255", "(pixels).double() / 255")], "rank 0"),
        ("O", [*LOCAL_FUNCTION], "local object"),
        ("P", [MINE], ""),
        ("Q", [MINE], "0.7266"),
        ("Q", [(SHARD, "")], "'to_local'"),
        ("R", [MINE], "[0, 1]"),
        (
            "R",
            [(SLURM_RANKS, ""), (INIT, JOINED), ("if rank == 0:\n            with", "if True:\n            with")],
            "0",
        ),
        ("R", [(SLURM_RANKS, ""), (INIT, JOINED), ("batch[rank::world_size]", "batch")], "512 points"),
    ],
)
def test_wrong_mends_get_their_hint(letter, edits, yours):
    card = mend(letter, *edits)
    error = refuse(card)
    assert error.hint == card.fault.mend and yours in error.yours, error


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("letter", "edits", "hint"),
    [
        ("N", [("        worker_init_fn=limit,\n", "")], "stay as they are"),
        ("B", [("257,", "256,")], "stay as they are"),
        ("G", [("parallel(inputs)", "model(inputs)")], "stay as they are"),
    ],
)
def test_other_sizes_and_limits_are_no_mend(letter, edits, hint):
    assert hint in refuse(mend(letter, *edits)).hint


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "sign"),
    [("M", r"line (\d+), in main\n.*line \1, in main"), ("P", "this rank holds 80 parameters"), ("Q", "loss 0.7266")],
)
def test_broken_jobs_show_their_sign(letter, sign, monkeypatch):
    monkeypatch.setattr(cards, "HANG_SECONDS", 4)
    card = draw(letter)
    result = card.start()
    assert bool(result.failure) == (card.pile == "unmatched")
    assert re.search(sign, "\n".join([*result.lines, str(result.failure)]))
    assert not card.path.exists(), "the job is seen when its cause is named"


@pytest.mark.usefixtures("quick")
def test_the_same_order_in_each_epoch_is_refused():
    assert "set_epoch" in refuse(mend("A", MINE)).hint


UNUSED = ("self.layers = ", "self.radius = torch.nn.Linear(2, 1)\n        self.layers = ")
WAIT = '    while not (folder / "points.pt").exists():\n        time.sleep(0.1)\n'
MEAN = SUM_OF_GRADIENTS + "                parameter.grad /= world_size\n"
CLASS = (
    "class Pictures",
    "class Convert:\n    def __call__(self, pixels):\n"
    "        return torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)\n\n\nclass Pictures",
)
STATE_DICT = """\
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
"""
RECEIVE, SEND = "        dist.recv(theirs, 1 - rank)\n", "        dist.send(counts, 1 - rank)\n"
IN_TURN = f"        if rank:\n    {SEND}    {RECEIVE}        else:\n    {RECEIVE}    {SEND}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.letter)
def test_the_right_job_gets_the_tick(fault, capsys):
    card = break_after(fault.letter)
    check.exercise(EXERCISES[card.pile], card)
    assert f"card {card.number}, mended, runs and is right" in capsys.readouterr().out
    cards.draw(card.pile)
    left = len([one for one in FAULTS if one.pile == card.pile])
    assert f"({left - 1} of {left} left in this pile)" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "letter", "edits"),
    [
        (break_after, "B", [("    dist.barrier()\n", WAIT)]),
        (break_after, "C", [(ALL_REDUCE, GATHER)]),
        (mend, "D", UNDER_JOIN),
        (break_after, "F", [("[local_rank]", '[rank % int(os.environ["LOCAL_WORLD_SIZE"])]')]),
        (break_after, "H", [UNUSED, ("to(device))\n    opt", "to(device), find_unused_parameters=True)\n    opt")]),
        (break_after, "J", [("model(inputs", "model.module(inputs"), (STEP, MEAN + STEP)]),
        (mend, "M", [(RECEIVE + SEND, IN_TURN)]),
        (mend, "N", [("BATCH_SIZE = 16", "BATCH_SIZE = 8")]),
        (mend, "O", [(LAMBDA, "Convert()"), CLASS]),
        (mend, "P", [(WEIGHTS, STATE_DICT)]),
        (mend, "R", [(SLURM_RANKS, f"    rank = {RANK}\n    world_size = {WORLD_SIZE}\n")]),
    ],
)  # fmt: skip
def test_other_right_mends_get_the_tick(change, letter, edits, capsys):
    card = change(letter, *edits)
    check.exercise(EXERCISES[card.pile], card)
    assert f"card {card.number}, mended, runs and is right" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_torchrun")
def test_a_check_runs_the_job_as_the_learner_does(capsys):
    """With the launcher, whose ranks that train alone show each line twice."""
    result = draw("R").start()
    assert result.failure is None
    for rank in (0, 1):
        assert sum(line.startswith(f"[rank {rank}] epoch 2: loss") for line in result.lines) == 1
    check.exercise("6.3", break_after("R"))
    assert "mended, runs and is right, with a node for each rank, too" in capsys.readouterr().out


def test_a_job_that_is_as_it_was_drawn_is_no_try():
    card = mend("A")
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "still as it was drawn", "save it")
    assert card.fault.mend not in str(caught.value)


@pytest.mark.parametrize("pile", PILES)
def test_a_mend_without_a_cause_is_refused(pile):
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[pile], cards.draw(pile))
    assert "card.name" in refused.value.hint


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
    compile(text, card.path.name, "exec")
    assert text != read_job(fault.job) and fault.cause not in text
    assert fault.letter not in card.path.stem.upper().replace("CARD", "")


def draw_again(card, capsys):
    """Draws a card again as a new kernel would; returns it and its message."""
    capsys.readouterr()
    again = draw(card.fault.letter)
    return again, capsys.readouterr().out.splitlines()[-1]


def test_the_second_hint_opens_the_job(capsys):
    card = draw("D")
    assert "cards/" not in draw_again(card, capsys)[1]
    card.hint()
    assert card.fault.sign in capsys.readouterr().out and not card.path.exists()
    card.hint()
    assert f"Its job: {card.path}" in capsys.readouterr().out and card.path.read_text() == card.fault.break_job()
    card.path.unlink()
    assert draw_again(card, capsys)[0].path.exists(), "a job that was opened is written anew"


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


def test_a_card_stays_the_same_until_the_next_is_asked_for(capsys):
    first = cards.draw("unmatched")
    assert capsys.readouterr().out == f"Card {first.number} (3 of 3 left in this pile)\n"
    first.note_solved()
    first.path.parent.mkdir()
    first.path.write_text("solved = True\n")
    assert cards.draw("unmatched", seed=0).number == first.number, "a cell that is run again"
    assert "It is solved; the next one: cards.draw('unmatched', 2, seed=0)" in capsys.readouterr().out
    second = cards.draw("unmatched", 2)
    assert second.number != first.number and "(2 of 3 left" in capsys.readouterr().out
    second.note_solved()
    cards.draw("unmatched", 3).note_solved()
    assert cards.draw("unmatched").path.read_text() == "solved = True\n"
    assert "(all solved)" in capsys.readouterr().out


def test_the_cards_of_later_topics_come_after_the_others_of_their_pile():
    stops = [cards.draw("stops", turn, seed=3).fault.topic for turn in range(1, 7)]
    assert stops == ["data parallelism"] * 4 + ["loading"] * 2
    wrong = [cards.draw("wrong", turn, seed=3).fault.topic for turn in range(1, 10)]
    assert wrong == ["data parallelism"] * 6 + ["model parallelism"] * 2 + ["schedulers"]


def test_a_card_that_cannot_be_read_is_named():
    card = mend("A")
    card.path.write_bytes(b"\xff\xfe")
    for use in (card.solve, lambda: check.exercise("6.3", card)):
        with pytest.raises(LabError) as caught:
            use()
        assert_explains(caught.value, str(card.path), "draw the card again")
    assert card.path.read_bytes() == b"\xff\xfe"


def test_what_is_no_card_is_said():
    with pytest.raises(LabError) as caught:
        cards.draw("unmatched", 4)
    assert_explains(caught.value, "no card", "from 1 to 3")
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
    card = mend("G", ('{"gap": max(gaps), "seen": seen}', '{"seen": seen}'))
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "no longer reports", "leave launch.report")


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


def test_a_line_of_a_job_that_is_not_shown_is_quoted(fail, capsys, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda _: None)
    fail(["[rank 0] card-6.py, line 1: another rank is gone", "[rank 0]   File card-6.py, line 999 in main"], FAILURE)
    first = BY_LETTER["C"].break_job().splitlines()[0]
    assert f"card-6.py, line 1 `{first}`: another" in capsys.readouterr().out


def test_diff_sets_the_right_job_beside_the_learner_s(capsys):
    card = draw("A")
    with pytest.raises(NotYetError):  # no cause was named
        check.exercise("6.3", card)
    with pytest.raises(LabError):
        check.diff("6.3")
    with pytest.raises(NotYetError):
        check.exercise("6.3", mend("A", ("257,", "256,")))
    assert check.diff("6.3") is None, "it has to be asked for twice"
    assert "sampler.set_epoch(epoch)" in check.diff("6.3").data
