"""The cards of lab 6: what is drawn, what each broken job shows, and which mends are refused and which accepted."""

import copy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.fuzzing import make_odd_file

import nodelaunch as launch
from course import check
from course.check import NotYetError, attempts
from course.exercises.lab6 import cards
from course.exercises.lab6.cards.faults import FAULTS, PILES, read_job
from lab_common import LabError

EXERCISES = {"stops": "6.1", "unmatched": "6.2", "wrong": "6.3"}
BY_LETTER = {fault.letter: fault for fault in FAULTS}
MINE = ("def main", "# My change is none.\ndef main")
ALL_REDUCE = "        dist.all_reduce(counts)\n"
GATHER = (
    "        gathered = [torch.zeros_like(counts) for _ in range(world_size)]\n"
    "        dist.all_gather(gathered, counts)\n"
    "        counts = sum(gathered)\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, runs):
    """A folder for the cards, as the notebook's own."""
    monkeypatch.chdir(tmp_path)


def draw(letter):
    """Draws until the card with this fault comes."""
    pile = BY_LETTER[letter].pile
    drawn = (cards.draw(pile, turn) for turn in range(1, 10))
    return next(card for card in drawn if card.fault.letter == letter)


def mend(letter, *edits):
    """A card whose cause is named, and whose job the learner has changed."""
    card = draw(letter)
    card.name(letter)
    text = card.path.read_text()
    for old, new in edits:
        assert old in text, "the edit is of the job"
        text = text.replace(old, new)
    card.path.write_text(text)
    return card


def break_after(letter, *edits):
    """As if the learner had written this in the right job: its text is the solution's with these edits."""
    card = mend(letter)
    text = read_job(card.fault.job)
    for old, new in edits:
        assert old in text, "the edit is of the job"
        text = text.replace(old, new)
    card.path.write_text(text)
    return card


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "edits", "yours"),
    [
        ("B", [MINE], "Unable to find address"),
        ("C", [("        prepare(folder)\n", "        prepare(folder)\n    time.sleep(6)\n")], "FileNotFoundError"),
        (
            "C",
            [("        prepare(folder)\n", "        prepare(folder)\n        dist.barrier()\n")],
            "FileNotFoundError",
        ),
        ("G", [("[rank]", "[0]")], "0, 0, 0, 0"),
        ("D", [MINE], "SIGABRT"),
        ("H", [(".mean()", ".sum()")], "apart"),
        ("I", [MINE], "0"),
    ],
)
def test_wrong_mends_get_their_hint(letter, edits, yours):
    card = mend(letter, *edits)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert refused.value.hint == card.fault.mend
    assert yours in refused.value.yours, refused.value


# What other mends would report, put in the place of what the right job did: a run costs some ten seconds.


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    path = tmp_path_factory.mktemp("right") / "card.py"
    path.write_text(read_job("ddp"))
    return cards.Card(0, "wrong", path, BY_LETTER["A"], named=True).start()


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


def reduce_to_rank_0(rank, results):
    return leave_out_the_sum(rank, results) if rank else {}


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
        ("D", reduce_to_rank_0, "of 257 points"),
        ("E", repeat_a_point, "of them different"),
        ("A", tell_the_same_epoch, "1 different in 3 epochs"),
        ("F", average_the_averages, "of 257 points"),
        ("A", lambda rank, _: {"weights": str(rank)}, "2 models"),
    ],
)
def test_wrong_reports_get_their_hint(alter, letter, change, yours):
    card = alter(letter, change)
    with pytest.raises(NotYetError) as refused:
        check.exercise(EXERCISES[card.pile], card)
    assert refused.value.hint == card.fault.mend
    assert yours in refused.value.yours, refused.value


def count_all(rank, results):
    return {"own": [[round(257 * accuracy), 257] for accuracy in results[rank]["accuracies"]]}


@pytest.mark.parametrize("change", [count_all, lambda *_: {}], ids=["of all already", "of each rank"])
def test_counts_that_add_up_are_right(alter, change, capsys):
    """As after an all_reduce before they are kept, or where each rank looks at all points; and as the job has them."""
    check.exercise("6.3", alter("F", change))
    assert "✔ 6.3" in capsys.readouterr().out


def test_a_job_that_is_as_it_was_drawn_is_no_try():
    card = mend("A")
    with pytest.raises(LabError) as caught:
        check.exercise("6.3", card)
    assert_explains(caught.value, "still as it was drawn", "save it")
    assert card.fault.mend not in str(caught.value)


SIZES = [("C", ("257,", "256,")), ("E", ("16, 3", "20, 3")), ("H", ("10, 4", "10, 5"))]


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


WAIT = '    while not (folder / "points.pt").exists():\n        time.sleep(0.1)\n'
WEIGHTED = (
    "        chunks = list(zip(parallel(inputs).chunk(REPLICAS), targets.chunk(REPLICAS), strict=True))\n"
    "        loss = sum(F.cross_entropy(one, two) * len(two) for one, two in chunks) / len(inputs)\n"
)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("letter", "edits"),
    [
        ("C", [("    dist.barrier()\n", WAIT)]),
        ("G", [("[local_rank]", '[rank % int(os.environ["LOCAL_WORLD_SIZE"])]')]),
        ("D", [(ALL_REDUCE, GATHER)]),
        ("H", [("        loss = F.cross_entropy(parallel(inputs), targets)\n", WEIGHTED)]),
        ("I", [("        seen += len(inputs)\n", "        seen += len(targets)\n")]),
    ],
)
def test_other_right_mends_get_the_tick(letter, edits, capsys):
    card = break_after(letter, *edits)
    check.exercise(EXERCISES[card.pile], card)
    said = capsys.readouterr().out
    assert f"card {card.number}, mended, runs and is right" in said
    left = len([fault for fault in FAULTS if fault.pile == card.pile]) - 1
    assert f"({left} of {left + 1} left in this pile)" in draw_and_read(card.pile, capsys)


def draw_and_read(pile, capsys):
    cards.draw(pile)
    return capsys.readouterr().out


@pytest.mark.usefixtures("warm_ranks")
def test_batches_that_are_dropped_by_the_loader_are_a_right_mend(capsys):
    check.exercise("6.2", mend("E", ("shuffle=True", "shuffle=True, drop_last=True")))
    assert "✔ 6.2" in capsys.readouterr().out


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
    text = card.path.read_text()
    compile(text, card.path.name, "exec")
    assert text != read_job(fault.job) and fault.cause not in text
    assert fault.letter not in card.path.name.removesuffix(".py").upper().replace("CARD", "")
    assert fault.cause not in repr(card)


def test_the_causes_of_the_lab_are_those_of_the_cards(root):
    text = (root / "notebooks" / "06_fault_cards.ipynb").read_text()
    for fault in FAULTS:
        assert f"| **{fault.letter}** | {fault.cause} |" in text


def test_what_the_learner_wrote_stays_and_what_solve_wrote_does_not(capsys):
    card = draw("A")
    card.path.write_text(card.path.read_text() + "# mine\n")
    assert draw("A").path.read_text().endswith("# mine\n")
    card.solve()
    said = capsys.readouterr().out
    assert "+         sampler.set_epoch(epoch)" in said and "Yours is kept: cards/card-3-yours-1.py" in said
    assert card.path.with_name("card-3-yours-1.py").read_text().endswith("# mine\n")
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
        assert_explains(caught.value, "cards/card-3.py", "draw the card again")
    assert card.path.lstat() == before and attempts.read_source(card) == ""


def test_a_folder_of_cards_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cards").write_text("mine")
    with pytest.raises(LabError) as caught:
        cards.draw("stops")
    assert_explains(caught.value, "cannot be written", "cards")


def test_a_card_stays_the_same_until_the_next_is_asked_for(capsys):
    first = cards.draw("unmatched")
    assert capsys.readouterr().out == f"Card {first.number} (2 of 2 left in this pile): {first.path}\n"
    first.note_solved()
    first.path.write_text("solved = True\n")
    assert cards.draw("unmatched", seed=0).number == first.number, "a cell that is run again"
    assert "It is solved; the next one: cards.draw('unmatched', 2, seed=0)" in capsys.readouterr().out
    second = cards.draw("unmatched", 2)
    assert second.number != first.number and "(1 of 2 left" in capsys.readouterr().out
    second.note_solved()
    assert cards.draw("unmatched").path.read_text() == "solved = True\n"
    assert "(all solved)" in capsys.readouterr().out


@pytest.mark.parametrize("turn", [0, 3, -1, 1.5, "2", None])
def test_a_card_that_the_pile_does_not_have_is_named(turn):
    with pytest.raises(LabError) as caught:
        cards.draw("unmatched", turn)
    assert_explains(caught.value, "no card", "from 1 to 2")


def test_another_number_is_another_order():
    orders = {tuple(cards.draw(pile, seed=seed).number for pile in PILES) for seed in range(10)}
    assert len(orders) >= 4
    numbers = {draw(letter).number for letter in BY_LETTER}
    assert numbers == set(range(1, 10))


def test_what_is_no_card_is_said():
    with pytest.raises(LabError) as caught:
        cards.draw("quiet")
    assert_explains(caught.value, "no pile 'quiet'", "stops")
    with pytest.raises(LabError) as caught:
        draw("A").name("Z")
    assert_explains(caught.value, "no cause 'Z'", "A, B, C")
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


@pytest.mark.parametrize("line", ["[rank 0] OSError: no /points.pt", f"[rank 1] {ERROR}!"])
def test_a_traceback_that_no_rank_has_printed_is_printed(fail, line, capsys):
    fail([line], replace(FAILURE, traceback=TRACEBACK.format("", tempfile.gettempdir())))
    assert capsys.readouterr().out.count("Traceback (most") == 1


def test_diff_sets_the_right_job_beside_the_learner_s(capsys):
    card = draw("A")
    with pytest.raises(NotYetError):  # no cause was named
        check.exercise("6.3", card)
    assert check.diff("6.3") is None, "it has to be asked for twice"
    assert "sampler.set_epoch(epoch)" in check.diff("6.3").data
