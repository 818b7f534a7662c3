"""Tests of what all checks share: growing hints, stored attempts, progress, the solution beside yours."""

import ast
import contextlib
import importlib
import runpy
import time

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from harness.drawn import assert_explains

from course import check
from course.check import NotYetError, OpenError, attempts
from course.check.hints import SECOND_HINTS
from course.check.solutions import find_solution
from course.notebooks import BEGIN
from course.workspace import STUB
from lab_common import LabError

pytestmark = pytest.mark.usefixtures("runs")
NUMBERS = [number for lab in check.LABS for number in importlib.import_module(f"course.exercises.lab{lab}").EXERCISES]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def wrong(baseline, candidate):
    return None


def right(baseline, candidate):
    import statistics

    if not (baseline.seconds and candidate.seconds):
        return float("nan")
    return statistics.median(baseline.seconds) / statistics.median(candidate.seconds)


def refuse(answer=wrong, number="1.3"):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    return str(refused.value)


def test_every_exercise_of_every_notebook_has_a_second_hint(root):
    texts = [path.read_text() for path in sorted((root / "notebooks").glob("*.ipynb"))]
    assert set(SECOND_HINTS) == set(NUMBERS)
    assert len(texts) == len(check.LABS)
    assert all(any(f'check.exercise(\\"{number}\\"' in text for text in texts) for number in NUMBERS)
    assert all(40 < len(hint) < 250 and not hint.endswith(".") for hint in SECOND_HINTS.values())


def test_the_second_wrong_answer_gets_a_second_hint(capsys):
    first, second = refuse(), refuse()
    assert first.count("\n") == 3 and "more:" not in first
    assert second.startswith(first) and "check.diff('1.3')" in second
    assert SECOND_HINTS["1.3"] in " ".join(second.split())
    assert max(map(len, second.splitlines())) <= 90, "JupyterLab would break a longer line in mid-word"
    check.exercise("1.3", right)
    assert refuse() == first, "after a right answer it begins anew"
    assert refuse(lambda *_: None) != first, "and counts the tries, not the texts"


def list_functions():
    """Returns the exercises whose answer is a function."""
    for number in NUMBERS:
        with contextlib.suppress(LabError):
            if find_solution(number).startswith("def "):
                yield number


def write_answer(number, body, folder):
    """Returns a function with the signature of the solution, as a cell defines it."""
    (function,) = ast.parse(find_solution(number)).body
    function.body, function.returns = ast.parse(body).body, None
    for arg in ast.walk(function.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    path = folder / "cell.py"
    path.write_text(ast.unparse(function))
    return runpy.run_path(str(path), {"time": time})[function.name]


@pytest.mark.parametrize("number", [*list_functions()])
def test_an_untouched_stub_says_so_in_a_line_and_gives_nothing_away(number, tmp_path):
    with pytest.raises(OpenError) as caught:
        check.exercise(number, write_answer(number, STUB[1], tmp_path))
    first, *more = caught.value._render_traceback_()
    assert first == f"✎ {number} {check._find(number).title}: still to be written."
    assert [line.partition(":")[0].strip() for line in more] == ["fix"] and len(more[0]) < 88
    assert attempts.read_standings() == {}, "it is no try"


@pytest.mark.parametrize("number", [*list_functions()])
def test_a_slip_of_the_learner_s_own_is_shown_with_its_line_and_is_no_try(number, tmp_path):
    with pytest.raises(OpenError) as caught:
        check.exercise(number, write_answer(number, "import torch\ntorch.no_such", tmp_path))
    assert str(caught.value).splitlines() == [
        f"✘ {number} stopped with an error in your code; this counts as no try.",
        "  where: line 3: torch.no_such",
        "  likely: AttributeError: module 'torch' has no attribute 'no_such'",
    ]
    assert attempts.read_standings() == {}


def test_progress_says_and_draws_where_the_learner_stands(capsys):
    check.exercise("1.3", right)
    refuse(lambda *_: 7, "4.3")
    refuse(lambda *_: 7, "4.3")
    capsys.readouterr()
    with mpl.rc_context({"backend": "agg"}):
        check.progress()
        (ax,) = plt.gcf().axes
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Lab 0: 0 of 3 solved"
    assert lines[1] == "Lab 1: 1 of 4 solved"
    assert lines[4] == "Lab 4: 0 of 3 solved; 4.3 tried 2×"
    assert {text.get_text() for text in ax.texts} >= {"1.3 ✔", "4.3 …"} and len(ax.texts) == len(NUMBERS)


def test_a_page_to_keep_when_all_is_solved(tmp_path):
    for number in NUMBERS[:-1]:
        attempts.note(number, "right")
    check.keep_guess("lab 1: what costs $1", 2.0, 1.5)
    check.progress()
    assert len(plt.get_fignums()) == 1
    attempts.note(NUMBERS[-1], "right")
    check.progress()
    figure = plt.gcf()
    texts = [text.get_text() for text in figure.texts]
    assert f"All {len(NUMBERS)} exercises solved" in texts
    assert r"lab 1: what costs \$1: guessed 2, found 1.5" in texts


def test_a_wrong_answer_after_a_right_one_does_not_unsolve_it(capsys):
    check.exercise("1.3", right)
    refuse()
    check.progress()
    assert "Lab 1: 1 of 4 solved" in capsys.readouterr().out


def test_the_solution_is_shown_once_solved_or_when_asked_for_twice(capsys):
    with pytest.raises(LabError) as caught:
        check.diff("1.3")
    assert_explains(caught.value, "No answer to 1.3 is known", "run the cell")
    refuse()
    assert check.diff("1.3") is None
    assert "ask again" in capsys.readouterr().out
    html = check.diff("1.3").data
    assert "− " in html and "return None" in html, "the learner's"
    assert "+ " in html and "baseline.median" in html, "the solution's"
    assert "SOLUTION" not in html


@pytest.mark.parametrize("number", [number for number in NUMBERS if number[0] != "6"])  # a card brings its own
def test_the_solution_of_every_exercise_is_found(number, root):
    source = find_solution(number)
    assert BEGIN in source and "check.exercise(" not in source
    compile(source, number, "exec")


def test_solutions_that_are_not_here_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("course.check.solutions.checkout", lambda: tmp_path)
    with pytest.raises(LabError) as caught:
        find_solution("1.3")
    assert_explains(caught.value, "solution of 1.3 is not here", str(tmp_path))


def test_a_script_is_read_as_it_was_when_it_was_checked(tmp_path, monkeypatch, capsys):
    exercises = importlib.import_module("course.exercises.lab5").EXERCISES
    monkeypatch.setitem(exercises, "5.1", check.Exercise("title", lambda path: "proven"))
    path = tmp_path / "train_ddp.py"
    path.write_text("print('mine')\n")
    check.exercise("5.1", str(path))
    path.unlink()
    html = check.diff("5.1").data
    assert "print('mine')" in html and "dist.init_process_group" in html


def test_where_nothing_can_be_kept_the_check_answers_all_the_same(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "file"
    folder.write_text("no folder")
    monkeypatch.setenv("LAB_RUNS", str(folder))
    check.exercise("1.3", right)
    assert capsys.readouterr().out.startswith("✔ 1.3")
    assert "more:" not in refuse() + refuse()


def test_guesses_are_summed_up_by_their_ratio(capsys):
    check.keep_guess("first", 4.0, 1.0)
    check.keep_guess("first", 3.0, 1.5)  # the newest counts
    check.keep_guess("second", 1.0, 1.5)
    check.keep_guess("third", 1.0, 8.0)
    check.keep_guess("fourth", 0.1, -0.02)
    with mpl.rc_context({"backend": "agg"}):
        check.calibration()
        (ax,) = plt.gcf().axes
    out = capsys.readouterr().out
    assert "fourth: guessed 0.1, found -0.02" in out
    assert "3 guesses, half of them within a factor of 2.0; 1 too high, 2 too low" in out
    assert [text.get_text() for text in ax.texts] == ["2×", "0.67×", "0.12×"]


def test_a_guess_that_was_not_made_is_not_kept(capsys):
    for noise in ("", "this machine was busy"):
        check.keep_guess("first", None, 1.5, noise=noise)
        assert capsys.readouterr().out == ""
    assert check.read_guesses() == {}
    check.keep_guess("first", 2.0, 1.5)
    check.keep_guess("first", None, 1.4)
    assert check.read_guesses() == {"first": (2.0, 1.5)}  # of a second run without a guess, the first one's counts


def test_no_guesses_draw_nothing(capsys):
    check.keep_guess("first", float("nan"), 1.0)
    check.calibration()
    assert "There is no guess of yours to show here yet." in capsys.readouterr().out
    assert not plt.get_fignums()


# --- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "within"),
    [
        ([1, "a"], [1, "a"], 0),
        ([100.0, 0.001], (100.9, 0.01), 0.01),  # of a number below 1, a part of 1
        (torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e-13), 1e-12),
    ],
)
def test_a_claim_that_holds_is_one_line(capsys, found, expected, within):
    check.claim("they agree", found, expected, within=within)
    assert capsys.readouterr().out == "✔ they agree\n"


@pytest.mark.parametrize(
    ("found", "expected", "within"),
    [
        (3, 4, 0),
        (torch.arange(3), torch.tensor([0, 2, 1]), 0),
        ([100.0, 1.0], [100.0, 1.02], 0.01),  # each by itself: a large one does not hide a small one
        ([1.0], [1.0, 2.0], 0.01),
        ([float("nan")], [float("nan")], 0.01),
    ],
)
def test_a_claim_that_does_not_hold_says_what_was_found_and_that_noise_is_not_the_cause(
    capsys, found, expected, within
):
    with pytest.raises(LabError) as caught:
        check.claim("they agree", found, expected, within=within)
    text = str(caught.value)
    assert text.startswith("✘ This does not hold here: they agree")
    assert f"found {found}, expected {expected}" in text and "a busy machine is not the cause" in text
    assert ("within 0.01" in text) == bool(within)
    assert not capsys.readouterr().out
