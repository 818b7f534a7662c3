"""Hostile and half-written reports, records and notebooks: each is named and left out, and the page is still there."""

import json
import random
import time

import pytest
from harness.fuzzing import choose_seeds, make_odd_file, mutate_bytes, mutate_json
from harness.html_reader import read

from course import check
from course.report import make_report
from course.report.__main__ import main
from course.report.comparison import read_report
from course.report.figures import show_figures
from lab_utils import timing
from lab_utils.timing import Timing

pytestmark = pytest.mark.usefixtures("runs")
SECONDS = 20  # for any case, on a busy machine
OPEN = '<script type="application/json" id="report">'
DATA = {
    "team": "Team Good",
    "when": "2026-01-02T03:04+00:00",
    "machine": "2 cores",
    "torch": "2.11.0",
    "solved": {"0.1": True, "1.1": True, "1.2": False, "4.3": True},
    "guesses": {"lab 1: AMP's speed-up": [2.0, 1.6], "lab 4: DP's speed-up": [1.5, float("nan")]},
}


def make_page(data: object = DATA) -> bytes:
    """A report as another team hands it in; a text stands for itself."""
    text = data if isinstance(data, str) else json.dumps(data).replace("<", "\\u003c")
    return f"<!doctype html>\n<html><body>\n{OPEN}{text}</script>\n</body></html>".encode("utf-8", "surrogatepass")


@pytest.fixture
def compare(tmp_path, capsys):
    """Sets a report beside two good ones; returns the page and whether it was left out."""

    def run(bad, name="bad.html"):
        good = [tmp_path / "good-1.html", tmp_path / "good-2.html"]
        for number, path in enumerate(good, start=1):
            path.write_bytes(make_page(DATA | {"team": f"Team Good {number}"}))
        output, begun = tmp_path / "all.html", time.monotonic()
        status = main(["--output", str(output), "compare", str(good[0]), str(bad), str(good[1])])
        assert time.monotonic() - begun < SECONDS
        page, said = output.read_text(encoding="utf-8"), capsys.readouterr()
        assert len(page) < 1_000_000, "one team cannot make the page of all teams large"
        assert not {tag for tag, _ in read(page)} & {"script", "iframe", "svg", "img", "a", "link", "object"}
        assert all(f'<tr><th scope="row">Team Good {number}' in page for number in (1, 2))
        assert page.count("1.6 (2)") >= 2 and "nan (1.5)" in page
        assert all(character.isprintable() or character == "\n" for character in page + said.out + said.err)
        assert "written:" in said.out and "Traceback" not in said.err
        left_out = "Left out" in page
        assert status == left_out
        assert not left_out or (name in page.split("Left out")[1] and name in said.err), said.err
        return page, left_out

    return run


# --- reports of other teams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", choose_seeds(800, 30))
def test_a_damaged_report_is_shown_or_named(seed, compare, tmp_path):
    bad, dice = tmp_path / "bad.html", random.Random(seed)
    bad.write_bytes(make_page(mutate_json(DATA, dice)) if seed % 2 else mutate_bytes(make_page(), dice))
    compare(bad)


def change(**fields) -> bytes:
    return make_page(DATA | fields)


WRONG = {
    "empty": b"",
    "a list": make_page([]),
    "no solved": make_page({key: value for key, value in DATA.items() if key != "solved"}),
    "solved in words": change(solved={"1.1": "yes"}),
    "a giant whole number": change(guesses={"q": [10**400, 1]}),
    "deep": make_page("[" * 10_000 + "]" * 10_000),
    "100,000 questions": change(guesses={f"question {number}": [1, 2] for number in range(100_000)}),
    "not UTF-8": make_page().replace(b"Good", b"\xff\xfe"),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_report_is_named(content, compare, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_bytes(content)
    _, left_out = compare(bad)
    assert left_out


@pytest.mark.parametrize("kind", ["a link to nothing", "a pipe", "3 GB"])
def test_what_is_no_plain_file_of_a_report_s_size_is_named(kind, compare, tmp_path):
    make_odd_file(tmp_path / "bad.html", kind, make_page())
    assert compare(tmp_path / "bad.html")[1]


@pytest.mark.parametrize(
    ("team", "shown"),
    [
        ("x" * 1_000_000, "xxxx…</th>"),
        ("\u202eTeam\x1b[2J\x00\nRed", "Team\ufffd[2J\ufffd Red"),
        ("Ａ\u3000チーム\xa0é 🦊", "Ａ チーム é 🦊"),
        ("</th><script>x()</script>", "&lt;/th&gt;&lt;script&gt;"),
        ("", "(no name)"),
    ],
    ids=["1 MB", "control characters", "another script", "HTML", "empty"],
)
def test_the_name_of_a_team_is_shown_clean_and_bounded(team, shown, compare, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_bytes(change(team=team))
    page, left_out = compare(bad)
    assert not left_out and shown in page


def test_two_teams_of_the_same_name_are_told_apart(compare, tmp_path):
    folder = tmp_path / "red"
    folder.mkdir()
    (folder / "report.html").write_bytes(change(team="Team Good 1", machine="another machine"))
    page, left_out = compare(folder / "report.html")
    assert not left_out and "another machine" in page
    first, second = (f"Team Good 1 ({path})" for path in (tmp_path / "good-1.html", folder / "report.html"))
    assert f'<th scope="col">{first}</th>' in page and f'<th scope="col">{second}</th>' in page


def test_where_no_report_is_left_the_page_names_each(tmp_path, capsys):
    paths = [tmp_path / f"bad-{number}.html" for number in range(20)]
    for path in paths[1:]:
        path.write_bytes(b"")
    output = tmp_path / "all.html"
    assert main(["--output", str(output), "compare", *map(str, paths)]) == 1
    page, said = output.read_text(), capsys.readouterr().err
    read(page)
    assert all(path.name in page and path.name in said for path in paths)
    assert said.splitlines()[0] == "20 of 20 reports were left out." and "fix:" in said


def test_a_comparison_never_takes_the_place_of_a_report(tmp_path, monkeypatch, capsys):
    mine = tmp_path / "runs" / "report.html"
    mine.parent.mkdir()
    mine.write_bytes(make_page())
    assert main(["compare", str(mine)]) == 0
    assert mine.read_bytes() == make_page() and "comparison.html" in capsys.readouterr().out
    assert main(["--output", str(mine), "compare", str(mine)]) == 1
    assert mine.read_bytes() == make_page() and "--output" in capsys.readouterr().err


# --- a learner's own records -----------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path):
    """A learner's folder with one lab, one figure in it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "01_mixed_precision.ipynb").write_text(json.dumps(NOTEBOOK))
    return folder


def make_record(**fields):
    record = dict.fromkeys(("lab", "kind", "machine", "torch", "when"), "text") | {"settings": {}, "result": 1}
    return json.dumps(record | fields).encode()


LINES = [
    b"\xff\xfe",
    b"[1, 2]",
    b"[" * 100_000,
    make_record(kind=[]),
    make_record(settings="x"),
    make_record(result={"Timing": {"seconds": [1.0]}}),
    make_record(kind="exercise", result=["1.2", "wrong"]),
    make_record(kind="guess", result=["q", "1", "2"]),
]


def test_lines_that_are_no_records_are_named_and_skipped(runs, workspace, tmp_path):
    check.keep_guess("kept question", 2.0, 1.6)
    timing.Records("lab1").add("set-ups", {"cases": [Timing("kept DP", (0.125,), images=16).as_record()]})
    for path in (files := [runs / "checks.jsonl", runs / "lab1.jsonl"]):
        path.write_bytes(b"\n".join([*LINES, path.read_bytes(), *LINES, b""]))
    before = [path.read_bytes() for path in files]
    with pytest.warns(timing.UnreadableWarning, match="unreadable lines of checks.jsonl"):
        check.progress()
    with pytest.warns(timing.UnreadableWarning, match="unreadable lines of lab1.jsonl"):
        page = make_report(workspace, team="mine")
    assert "kept question" in page and "kept DP" in page
    (tmp_path / "handed-in.html").write_text(page, encoding="utf-8")
    assert read_report(tmp_path / "handed-in.html").team == "mine"
    assert [path.read_bytes() for path in files] == before


# --- notebooks -------------------------------------------------------------------------------------------------------


PICTURE = "iVBORw0KGgoAAAANSUhEUg=="
OUTPUT = {"output_type": "display_data", "data": {"image/png": PICTURE, "text/plain": ["<Figure>"]}, "metadata": {}}
CODE = {
    "cell_type": "code",
    "id": "kept-figure",
    "source": ["plot()"],
    "outputs": [OUTPUT],
    "metadata": {},
    "execution_count": 1,
}
NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {},
    "cells": [
        {"cell_type": "markdown", "id": "a", "source": ["# Lab\n", "\n", "## Kept heading"], "metadata": {}},
        CODE,
    ],
}


def show(path):
    page = "\n".join(show_figures([path, path.parent / "01_mixed_precision.ipynb"]))
    assert "Kept heading" in page
    assert not {tag for tag, _ in read(page)} - {"figure", "img", "figcaption", "p"}
    assert all(character.isprintable() or character == "\n" for character in page)
    return page


def change_cell(**fields):
    return json.dumps(NOTEBOOK | {"cells": [CODE | fields]}).encode()


def change_heading(text):
    heading = {"cell_type": "markdown", "id": "a", "source": f"## {text}", "metadata": {}}
    return json.dumps(NOTEBOOK | {"cells": [heading, CODE]}).encode()


def change_picture(picture):
    return change_cell(outputs=[OUTPUT | {"data": {"image/png": picture, "image/svg+xml": "<svg onload=x()></svg>"}}])


OLD = {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": []}]}
# Content, and what the page says of it.
NOTEBOOKS = [
    (json.dumps(OLD).encode(), "it is no notebook of nbformat 4"),
    (b"", "could not be read"),
    (b"[" * 100_000, "nested too deeply"),
    (change_picture("<svg/onload=x()>"), ""),
    (change_heading('"><script>x()</script>'), "&lt;script&gt;"),
    (change_picture(PICTURE[:-2] + "A" * 20_000_002), "left out: too large."),
]


@pytest.mark.parametrize(("content", "words"), NOTEBOOKS, ids=range(len(NOTEBOOKS)))
def test_an_odd_notebook_is_read_or_named(content, words, workspace):
    (workspace / "01_odd.ipynb").write_bytes(content)
    assert words in show(workspace / "01_odd.ipynb")
    page = make_report(workspace, team="mine")
    assert words in page and "Kept heading" in page
    assert [tag for tag, _ in read(page)].count("script") == 1
