"""The page that a team hands in, and the one that sets teams side by side."""

import re

import nbformat
import pytest
from harness.drawn import assert_explains
from harness.html_reader import read
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import check
from course.check import attempts
from course.report import compare_reports, make_report
from course.report.__main__ import main
from course.report.comparison import PAGE_BYTES
from course.report.figures import FIGURES_BYTES
from lab_common import LabError
from lab_utils import timing
from lab_utils.timing import Timing

pytestmark = pytest.mark.usefixtures("runs")
PICTURE = "iVBORw0KGgoAAAANSUhEUg=="


@pytest.fixture
def workspace(tmp_path):
    """A team's folder with one lab, one figure in it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    cell = new_code_cell("plot()", outputs=[new_output("display_data", data={"image/png": PICTURE})])
    cell.id = "the-figure"
    book = new_notebook(cells=[new_markdown_cell("# Lab 1 · A <b>thing</b>\n\n## What <we> measure"), cell])
    nbformat.write(book, folder / "01_mixed_precision.ipynb")
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Lab 42 · Mine")]), folder / "mine.ipynb")
    return folder


def answer(device, capability):
    """</script><script>alert(1)</script>"""
    return None


def try_some():
    with pytest.raises(check.NotYetError):
        check.exercise("1.3", answer)
    check.keep_guess("lab 1: a <question>", 2.0, 1.6)
    records = timing.Records("lab1")
    timings = [Timing("fp32", (0.2, 0.2), images=32), Timing("bf16", (), images=32)]
    records.add("throughput", [Timing("outdated", (9.0,))], stem="cifar")
    records.add("throughput", {"deep": [timings]}, stem="cifar")
    records.add("set-ups", {"cases": [Timing("DP", (0.125,), images=16).as_record()]})


def test_the_page_has_what_the_team_did_and_needs_no_other_file(workspace):
    try_some()
    page = make_report(workspace, team="Team <3>")
    found = read(page)
    assert "<h1>Distributed Training Labs: Team &lt;3&gt;</h1>" in page
    assert "1.3 The speed-up: open, 1 wrong try" in page and "1.1 The AMP step: open" in page
    assert "a &lt;question&gt;" in page and ">1.25<" in page
    assert ">fp32</td><td>32</td><td>200.00</td>" in page and ">160.0<" in page
    assert ">DP</td><td>16</td><td>125.00</td>" in page
    assert "outdated" not in page, "the newest of a kind counts"
    assert "Of no lab: mine.ipynb" in page and FIGURES_BYTES * len(check.LABS) < PAGE_BYTES
    images = [attributes for tag, attributes in found if tag == "img"]
    assert all(image["src"].startswith("data:image/png;base64,") and len(image["alt"]) > 8 for image in images)
    assert [image["alt"] for image in images][1:] == ["What <we> measure"]
    links = [value for _, attributes in found for key, value in attributes.items() if key in ("href", "src")]
    places = {f"#{attributes['id']}" for _, attributes in found if "id" in attributes}
    assert all(link.startswith("data:") or link in places for link in links) and "#lab1" in links


def test_an_exercise_that_is_no_longer_there_disturbs_neither_the_page_nor_the_progress(workspace, capsys):
    for number in ("5.5", "9.9", ""):
        attempts.note(number, "right", "def normalise(sums):\n    pass\n")
    check.progress()
    assert "Lab 5: 0 of 4 solved" in capsys.readouterr().out
    assert "normalise" not in make_report(workspace, team="x")


def test_an_answer_is_text_and_never_code(workspace):
    try_some()
    page = make_report(workspace, team="</script><script>alert(2)</script>")
    assert [attributes for tag, attributes in read(page) if tag == "script"] == [
        {"type": "application/json", "id": "report"}
    ]
    assert "alert(1)" in page and "<script>alert" not in page


def test_a_team_that_did_nothing_has_a_page_too(workspace):
    page = make_report(workspace, team="new")
    assert "Lab 0: 0 of 3 solved" in page and "Guess" not in page
    read(page)


def test_a_notebook_that_cannot_be_read_is_named(workspace):
    (workspace / "04_data_parallel.ipynb").write_text('{"cells": [')
    page = make_report(workspace, team="broken")
    assert "04_data_parallel.ipynb could not be read" in page and "What &lt;we&gt; measure" in page


def test_a_folder_without_labs_is_refused(tmp_path, capsys):
    with pytest.raises(LabError) as caught:
        make_report(tmp_path, team="x")
    assert_explains(caught.value, str(tmp_path), "make workspace")
    assert main(["--workspace", str(tmp_path)]) == 1
    assert "make workspace" in capsys.readouterr().err


def test_teams_are_set_side_by_side(workspace, tmp_path, capsys):
    paths = [tmp_path / f"{name}.html" for name in ("a", "b")]
    try_some()
    for path, team in zip(paths, ("Team <A>", "Team B"), strict=True):
        assert main(["--workspace", str(workspace), "--team", team, "--output", str(path)]) == 0
        check.keep_guess("lab 1: a <question>", 2.0, 4.0)
    page = compare_reports(paths).page
    read(page)
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", page)
    assert [name for name, _ in rows] == ["Team &lt;A&gt;", "Team B", "lab 1: a &lt;question&gt;"]
    assert re.findall(r"<td>(.*?)</td>", rows[2][1]) == ["1.6 (2)", "4 (2)"]
    assert "0 of 3" in rows[0][1]
    output = tmp_path / "all.html"
    assert main(["--output", str(output), "compare", *map(str, paths)]) == 0
    assert "Team B" in output.read_text() and "written:" in capsys.readouterr().out
    kept = paths[0].read_bytes()
    assert main(["--output", str(paths[0]), "compare", *map(str, paths)]) == 1
    said = capsys.readouterr().err
    assert "it would be overwritten" in said and "--output FILE" in said and paths[0].read_bytes() == kept
