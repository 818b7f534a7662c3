"""Hostile and half-written reports, records and notebooks: each is named and left out, and the page is still there."""

import base64
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import pytest
from harness.fuzzing import choose_seeds, make_odd_file, mutate_bytes, mutate_json
from harness.html_reader import read

from course import check
from course.nbgrader import write_course
from course.report import make_report
from course.report.__main__ import main
from course.report.comparison import compare_reports, read_report
from course.report.figures import show_figures
from course.workspace import update
from lab_common import LabError
from lab_common.files import read_bounded
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


@pytest.mark.parametrize("seed", choose_seeds(400, 40))
def test_a_report_with_odd_data_is_shown_or_named(seed, compare, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_bytes(make_page(mutate_json(DATA, random.Random(seed))))
    compare(bad)


@pytest.mark.parametrize("seed", choose_seeds(400, 40))
def test_a_damaged_report_is_shown_or_named(seed, compare, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_bytes(mutate_bytes(make_page(), random.Random(seed)))
    compare(bad)


def change(**fields) -> bytes:
    return make_page(DATA | fields)


WRONG = {
    "empty": b"",
    "no data": b"<html></html>",
    "half": make_page()[:-40],
    "a list": make_page([]),
    "no object": make_page("7"),
    "no solved": make_page({key: value for key, value in DATA.items() if key != "solved"}),
    "no team": make_page({key: value for key, value in DATA.items() if key != "team"}),
    "solved in words": change(solved={"1.1": "yes"}),
    "solved as a list": change(solved=["1.1"]),
    "an exercise that is none": change(solved={"<b>": True}),
    "a text as a guess": change(guesses={"q": ["2", "3"]}),
    "a guess alone": change(guesses={"q": [2.0]}),
    "a pair of truths": change(guesses={"q": [True, False]}),
    "a giant whole number": change(guesses={"q": [10**400, 1]}),
    "more digits than Python reads": make_page('{"guesses": {"q": [%s, 1]}}' % ("7" * 5000)),
    "deep": make_page("[" * 10_000 + "]" * 10_000),
    "deeper": make_page('{"a":' * 100_000 + "1" + "}" * 100_000),
    "100,000 questions": change(guesses={f"question {number}": [1, 2] for number in range(100_000)}),
    "1,000 exercises": change(solved={f"{number // 99}.{number % 99}": True for number in range(1000)}),
    "2 MB of a name": change(team="x" * 2 * 10**6),
    "40 MB of data": make_page('"' + "x" * 40_000_000 + '"'),
    "beginnings without an end": OPEN.encode() * 400_000,
    "<script, 30 MB": b"<script" * 4_000_000,
    "UTF-16": make_page().decode().encode("utf-16"),
    "not UTF-8": make_page().replace(b"Good", b"\xff\xfe"),
    "half a character": make_page(json.dumps(DATA).replace("Good", "\ud800")),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_report_is_named(content, compare, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_bytes(content)
    _, left_out = compare(bad)
    assert left_out


ODD_FILES = ("a link to nothing", "a link to a device", "a folder", "a pipe", "a socket", "3 GB")


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_plain_file_of_a_report_s_size_is_named(kind, compare, tmp_path):
    make_odd_file(tmp_path / "bad.html", kind, make_page())
    assert compare(tmp_path / "bad.html")[1]


def test_a_link_to_a_report_is_none_and_neither_is_nothing(compare, tmp_path):
    (tmp_path / "whole.html").write_bytes(make_page())
    (tmp_path / "bad.html").symlink_to("whole.html")
    assert compare(tmp_path / "bad.html")[1]
    assert compare(tmp_path / "nothing", "nothing")[1]


def test_a_device_is_named_and_not_opened(compare, monkeypatch):
    assert compare("/dev/zero", "/dev/zero")[1]
    monkeypatch.setattr("lab_common.files.os.open", pytest.fail)
    with pytest.raises(OSError, match="a device or a socket"):
        read_bounded(Path("/dev/zero"), 10)


def test_a_pipe_that_takes_a_file_s_place_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    make_odd_file(tmp_path / "pipe", "a pipe")
    (tmp_path / "whole").write_text("whole")
    whole = (tmp_path / "whole").stat()
    monkeypatch.setattr(Path, "stat", lambda path, **_: whole)
    with pytest.raises(OSError, match="a pipe"):
        read_bounded(tmp_path / "pipe", 10)


def test_a_file_that_is_longer_than_it_says_is_refused():
    found = Path("/proc/self/maps")
    assert found.stat().st_size == 0
    with pytest.raises(OSError, match="0 is the most"):
        read_bounded(found, 10)


def test_questions_that_one_team_alone_asks_are_bounded(tmp_path):
    paths = [tmp_path / f"{number}.html" for number in range(5)]
    for path in paths:
        own = {f"question {path.stem}.{number}": [1, 2] for number in range(99)}
        path.write_bytes(change(guesses={"common question": [3, 4]} | own))
    comparison = compare_reports(paths)
    assert "common question" in comparison.page and comparison.page.count("<tr>") < 250
    assert "more questions are not shown" in comparison.page and comparison.left_out == ()


ODD_NAME = "\u202eevil\x1b[2J\x07<img src=x onerror=x()>\udcff.html"


def test_the_name_of_a_file_is_shown_clean(compare, tmp_path):
    bad = tmp_path / ODD_NAME
    bad.write_bytes(b"")
    page, left_out = compare(bad, "evil")
    assert left_out and "&lt;img src=x" in page


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


def test_numbers_without_a_size_are_shown(compare, tmp_path):
    bad = tmp_path / "bad.html"
    guesses = {
        "zero": [1, 0],
        "infinite": [float("inf"), 1e308],
        "none": [float("nan"), -0.0],
        "long": [10**300, 1e-308],
    }
    bad.write_bytes(change(guesses=guesses))
    page, left_out = compare(bad)
    assert not left_out
    assert all(shown in page for shown in ("0 (1)", "1e+308 (inf)", "-0 (nan)", "1e-308 (1e+300)"))


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


MEASURED = """
import resource, sys, time
import matplotlib.pyplot
from course.report.__main__ import main
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, begun = peak(), time.monotonic()
status = main(sys.argv[1:])
print(status, peak() - before, time.monotonic() - begun)
"""


def test_hostile_reports_take_little_memory(tmp_path):
    cases = {name: WRONG[name] for name in ("deep", "deeper", "40 MB of data", "beginnings without an end")}
    cases |= {f"{count} lists": make_page("[" + "[]," * count + "[]]") for count in (300_000, 10_000_000)}
    paths = [tmp_path / f"{number}.html" for number in range(len(cases))]
    for path, content in zip(paths, cases.values(), strict=True):
        path.write_bytes(content)
    make_odd_file(tmp_path / "sparse.html", "3 GB", make_page())
    paths = [*paths, tmp_path / "sparse.html"] * 2
    command = [sys.executable, "-c", MEASURED, "--output", str(tmp_path / "all.html"), "compare", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    status, mebibytes, seconds = map(float, done.stdout.splitlines()[-1].split())
    assert status == 1 and mebibytes < 150 and seconds < SECONDS, done.stdout


# --- a learner's own records -----------------------------------------------------------------------------------------


def right(baseline, candidate):
    """The right answer to exercise 1.3."""
    import statistics

    if not (baseline.seconds and candidate.seconds):
        return float("nan")
    return statistics.median(baseline.seconds) / statistics.median(candidate.seconds)


def keep_some(runs):
    """Keeps an answer, a guess and measurements; returns the files with their lines."""
    check.exercise("1.3", right)
    check.keep_guess("kept question", 2.0, 1.6)
    timings = [Timing("fp32", (0.2, 0.3), images=32, warmup=1), Timing("bf16", ())]
    timing.Records("lab1").add("throughput", {"deep": timings}, stem="cifar")
    timing.Records("lab1").add("set-ups", {"cases": [Timing("kept DP", (0.125,), images=16).as_record()]})
    return {path: path.read_bytes().splitlines() for path in (runs / "checks.jsonl", runs / "lab1.jsonl")}


def use_all(workspace):
    """Reads all that the labs and the report read; what was kept is there, and no file has changed."""
    files = [path for path in (workspace.parent / "runs").iterdir() if path.is_file()]
    before = {path: path.read_bytes() for path in files if path.stat().st_size < 2**24}
    begun = time.monotonic()
    with mpl.rc_context({"backend": "agg"}):
        check.progress()
        check.calibration()
        plt.gcf().canvas.draw()
        labels = plt.gca().get_yticklabels()
    plt.close("all")
    assert any("kept question" in label.get_text() for label in labels)
    assert timing.Records("lab1").once("throughput", pytest.fail, stem="cifar")["deep"][0].name == "fp32"
    page = make_report(workspace, team="mine")
    read(page)
    handed_in = workspace.parent / "handed-in.html"
    handed_in.write_text(page, encoding="utf-8")
    assert read_report(handed_in).solved["1.3"] and len(page) < 2_000_000
    assert "kept question" in page and ">fp32</td><td>32</td>" in page and "kept DP" in page
    assert {path: path.read_bytes() for path in before} == before
    assert time.monotonic() - begun < SECONDS
    return page


@pytest.fixture
def workspace(tmp_path):
    """A learner's folder with one lab, one figure in it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "01_mixed_precision.ipynb").write_text(json.dumps(NOTEBOOK))
    return folder


def damage(line, dice):
    """A record of another kind or question, so that it cannot replace what was kept, and then damaged."""
    record = json.loads(line)
    result = record["result"]
    if record["kind"] in ("exercise", "guess"):
        result[0] = {"exercise": "1.2", "guess": "another question"}[record["kind"]]
    else:
        record["kind"] = "another"
    text = json.dumps(mutate_json(record, dice)).encode()
    return text if dice.random() < 0.5 else mutate_bytes(text, dice)


@pytest.mark.filterwarnings("ignore::lab_utils.timing.UnreadableWarning", "ignore:Glyph:UserWarning")
@pytest.mark.parametrize("seed", choose_seeds(100, 8))
def test_damaged_lines_are_skipped_and_the_others_used(seed, runs, workspace):
    dice = random.Random(seed)
    for path, lines in keep_some(runs).items():
        damaged = [damage(dice.choice(lines), dice) for _ in range(11)]
        mixed = [*lines, *damaged[:-1]]
        dice.shuffle(mixed)
        # Without its newline, the last one is torn.
        path.write_bytes(b"\n".join([*mixed, damaged[-1]]))
    use_all(workspace)


def make_record(**fields):
    record = dict.fromkeys(("lab", "kind", "machine", "torch", "when"), "text") | {"settings": {}, "result": 1}
    return json.dumps(record | fields).encode()


ODD_TIMING = Timing("odd", (0.1,), warmup=1).as_record()
LINES = {
    "not UTF-8": b"\xff\xfe",
    "NUL": b"\0" * 10_000,
    "a list": b"[1, 2]",
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "deeper": b"[" * 100_000,
    "half as deep as Python reads": make_record(result=json.loads("[" * 400 + "]" * 400)),
    "deep settings": make_record(settings=json.loads('{"a":' * 400 + "{}" + "}" * 400)),
    "a whole number of 5,000 digits": b"7" * 5000,
    "kind as a list": make_record(kind=[]),
    "settings as a text": make_record(settings="x"),
    "half a character": make_record(machine="\ud800"),
    "a Timing of texts": make_record(result={"Timing": ODD_TIMING | {"seconds": ["0.1", "0.2"]}}),
    "a Timing of giant numbers": make_record(result={"Timing": ODD_TIMING | {"seconds": [10**400] * 2}}),
    "a Timing of truths": make_record(result={"Timing": ODD_TIMING | {"seconds": [True, True]}}),
    "a Timing that took no number": make_record(result={"Timing": ODD_TIMING | {"seconds": [float("nan")]}}),
    "giant images": make_record(result={"Timing": ODD_TIMING | {"images": 10**400}}),
    "a Timing without name": make_record(result={"Timing": {"seconds": [1.0]}}),
    "a Timing as a list": make_record(result={"Timing": []}),
    "a try of two": make_record(kind="exercise", result=["1.2", "wrong"]),
    "a try of lists": make_record(kind="exercise", result=[["1.2"], "wrong", ""]),
    "a try with a number": make_record(kind="exercise", result=["1.2", "wrong", 7]),
    "a guess of texts": make_record(kind="guess", result=["q", "1", "2"]),
    "a guess of one": make_record(kind="guess", result=["q"]),
    "a guess by a list": make_record(kind="guess", result=[["q"], 1, 2]),
    "a giant guess": make_record(kind="guess", result=["q", 10**400, 1]),
    "10 MB": b'"' + b"x" * 10_000_000 + b'"',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_line_that_is_no_record_is_named_and_skipped(line, runs, workspace, capsys):
    kind = json.loads(line).get("kind") if b'"kind": "' in line else None
    for path, lines in keep_some(runs).items():
        path.write_bytes(b"\n".join([line, *lines, line, b""]))
    with pytest.warns(timing.UnreadableWarning, match=f"2 records of kind '{kind}'|2 unreadable lines"):
        page = use_all(workspace)
    unreadable = kind not in ("exercise", "guess")
    assert "Left out" in page and page.count("2 unreadable lines of checks.jsonl") == unreadable
    assert "inf" not in capsys.readouterr().out


ODD_RESULTS = {
    "what only looks like a Timing": {"name": [], "seconds": "soon", "warmup": None},
    "a Timing in no time": [{"Timing": ODD_TIMING | {"seconds": [0, 0, 0], "images": 8}}],
    "ten thousand": [{"Timing": ODD_TIMING}] * 10_000,
    "HTML": [{"Timing": ODD_TIMING | {"name": "</td><script>x()</script>\x1b[2J\u202e"}}],
    "large": [{"Timing": ODD_TIMING | {"name": "x" * 1_000_000}}],
    "not a number": [float("nan"), float("inf"), None, {}],
}


@pytest.mark.parametrize("result", ODD_RESULTS.values(), ids=ODD_RESULTS.keys())
def test_an_odd_result_is_shown_or_passed_over(result, runs, workspace):
    for path, lines in keep_some(runs).items():
        path.write_bytes(b"\n".join([make_record(result=result, machine="<b>"), *lines, b""]))
    page = use_all(workspace)
    assert all(character.isprintable() or character == "\n" for character in page)
    assert [tag for tag, _ in read(page)].count("script") == 1 and "<b>" not in page
    assert page.count(">odd<") < 500 and ("older measurements are not shown" in page) == (len(result) == 10_000)


ODD_GUESSES = {
    "infinite": (float("inf"), 1.0),
    "found nothing": (1.0, 0.0),
    "not a number": (float("nan"), 1.0),
    "too large a ratio": (1e308, 1e-308),
    "too small a ratio": (1e-308, 1e308),
    "tiny": (5e-324, 5e-324),
    "$\\frac{$": (1.0, 2.0),
    "\x1b[2J\u202e" + "x" * 1_500_000: (1.0, 2.0),
}


@pytest.mark.parametrize(("what", "pair"), ODD_GUESSES.items(), ids=range(len(ODD_GUESSES)))
def test_an_odd_guess_is_drawn_or_named(what, pair, runs, workspace, capsys):
    keep_some(runs)
    check.keep_guess(what, *pair)
    use_all(workspace)
    out = capsys.readouterr().out
    assert "2 guesses" in out or f"{what}: guessed" in out
    assert all(character.isprintable() or character == "\n" for character in out)


def test_hundreds_of_questions_are_bounded(runs, workspace):
    lines = [make_record(kind="guess", result=[f"question {number}", 1, 2]) for number in range(500)]
    for path, kept in keep_some(runs).items():
        path.write_bytes(b"\n".join([*lines, *kept, b""]))
    use_all(workspace)


@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_file_of_records_that_is_none_is_named_and_stays(kind, runs, workspace, recwarn):
    runs.mkdir()
    for name in ("checks.jsonl", "lab1.jsonl"):
        make_odd_file(runs / name, kind)
    before = [(path.name, path.lstat().st_mode, path.lstat().st_size) for path in sorted(runs.iterdir())]
    begun = time.monotonic()
    with mpl.rc_context({"backend": "agg"}):
        check.progress()
        check.calibration()
    plt.close("all")
    assert timing.Records("lab1").read() == []
    page = make_report(workspace, team="mine")
    assert time.monotonic() - begun < SECONDS
    assert [(path.name, path.lstat().st_mode, path.lstat().st_size) for path in sorted(runs.iterdir())] == before
    named = ("checks.jsonl" in page) and ("lab1.jsonl" in page)
    assert named or not (runs / "lab1.jsonl").exists(), "a link to nothing is no file yet"


def test_the_end_of_a_large_file_of_records_is_read(runs, workspace):
    for path, lines in keep_some(runs).items():
        with path.open("wb") as file:
            file.truncate(2**30)
            file.seek(2**30)
            file.write(b"\n".join([b"", *lines, b""]))
    with pytest.warns(timing.UnreadableWarning, match="more than 64 MB"):
        page = use_all(workspace)
    assert "lab1.jsonl has more than 64 MB" in page


def test_what_cannot_be_read_is_named_once_in_a_process(runs):
    runs.mkdir()
    (runs / "checks.jsonl").write_text("torn\n")
    code = "from course import check\nfor _ in range(3):\n    check.progress()\n    check.calibration()"
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("unreadable lines of checks.jsonl") == 1


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
    begun = time.monotonic()
    page = "\n".join(show_figures([path, path.parent / "01_mixed_precision.ipynb"]))
    assert time.monotonic() - begun < SECONDS
    assert "Kept heading" in page
    assert not {tag for tag, _ in read(page)} - {"figure", "img", "figcaption", "p"}
    assert all(
        base64.b64decode(value["src"].removeprefix("data:image/png;base64,"), validate=True).startswith(b"\x89PNG")
        for tag, value in read(page)
        if tag == "img"
    )
    assert all(character.isprintable() or character == "\n" for character in page)
    return page


@pytest.mark.parametrize("seed", choose_seeds(400, 40))
def test_a_damaged_notebook_is_read_or_named(seed, workspace):
    dice, path = random.Random(seed), workspace / "01_damaged.ipynb"
    whole = json.dumps(mutate_json(NOTEBOOK, dice)).encode()
    path.write_bytes(whole if dice.random() < 0.5 else mutate_bytes(whole, dice))
    show(path)


def change_cell(**fields):
    return json.dumps(NOTEBOOK | {"cells": [CODE | fields]}).encode()


def change_heading(text):
    heading = {"cell_type": "markdown", "id": "a", "source": f"## {text}", "metadata": {}}
    return json.dumps(NOTEBOOK | {"cells": [heading, CODE]}).encode()


def change_picture(picture):
    return change_cell(outputs=[OUTPUT | {"data": {"image/png": picture, "image/svg+xml": "<svg onload=x()></svg>"}}])


without_id = {key: value for key, value in CODE.items() if key != "id"}
OLD = {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": []}]}
# Content, and what the page says of it.
NOTEBOOKS = {
    "4.4, without ids": (json.dumps(NOTEBOOK | {"nbformat_minor": 4, "cells": [without_id]}).encode(), "01_odd"),
    "nbformat 3": (json.dumps(OLD).encode(), "no notebook of nbformat 4"),
    "empty": (b"", "could not be read"),
    "not JSON": (b"{", "could not be read"),
    "a list": (b"[]", "no notebook of nbformat 4"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "outputs as a text": (change_cell(outputs="text"), ""),
    "data as a list": (change_cell(outputs=[OUTPUT | {"data": []}]), ""),
    "no cells but numbers": (json.dumps(NOTEBOOK | {"cells": [1, None, []]}).encode(), ""),
    "not base 64": (change_picture("<svg/onload=x()>"), "1 of the figures of 01_odd.ipynb left out: no PNG."),
    "a GIF": (change_picture("R0lGODlhAQABAAAAACw="), "1 of the figures of 01_odd.ipynb left out: no PNG."),
    "a number as a picture": (change_picture(7), "left out: no PNG."),
    "SVG as a picture": (change_picture(["<svg>", "<script>"]), "left out: no PNG."),
    "quotes": (change_picture(PICTURE + '" onerror="x()'), "left out: no PNG."),
    "HTML as an id": (change_cell(id='"><script>x()</script>'), "01_odd"),
    "HTML as a heading": (change_heading('"><script>x()</script>'), "&lt;script&gt;"),
    "half a character as a heading": (change_heading("a\ud800\x1b"), "a\ufffd\ufffd"),
    "two cells of one id": (json.dumps(NOTEBOOK | {"cells": [CODE, CODE]}).encode(), "01_odd (2)"),
    "4.5 without ids": (json.dumps(NOTEBOOK | {"cells": [without_id]}).encode(), "01_odd"),
    "20 MB of a picture": (change_picture(PICTURE[:-2] + "A" * 20_000_002), "left out: too large."),
}


@pytest.mark.parametrize(("content", "words"), NOTEBOOKS.values(), ids=NOTEBOOKS.keys())
def test_an_odd_notebook_is_read_or_named(content, words, workspace):
    (workspace / "01_odd.ipynb").write_bytes(content)
    assert words in show(workspace / "01_odd.ipynb")
    page = make_report(workspace, team="mine")
    assert words in page and "Kept heading" in page
    assert [tag for tag, _ in read(page)].count("script") == 1


def test_500_mb_of_outputs_are_named(workspace):
    with (workspace / "01_odd.ipynb").open("wb") as file:
        file.truncate(500 * 2**20)
    assert "01_odd.ipynb could not be read: it has 500.0 MB" in show(workspace / "01_odd.ipynb")


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_notebook_is_named(kind, workspace):
    make_odd_file(workspace / "01_odd.ipynb", kind)
    page = make_report(workspace, team="mine")
    assert "01_odd.ipynb could not be read" in page and "Kept heading" in page


@pytest.mark.parametrize("seed", choose_seeds(200, 15))
def test_a_damaged_lab_is_copied_or_refused(seed, tmp_path):
    labs, copy, dice = tmp_path / "notebooks", tmp_path / "copy", random.Random(seed)
    labs.mkdir()
    exercise = {"source": ["### BEGIN SOLUTION\n", "1\n", "### END SOLUTION\n", 'check.exercise("1.1", f)']}
    whole = json.dumps(mutate_json(NOTEBOOK | {"cells": [*NOTEBOOK["cells"], CODE | exercise]}, dice)).encode()
    (labs / "01_lab.ipynb").write_bytes(whole if dice.random() < 0.5 else mutate_bytes(whole, dice))
    (labs / "02_lab.ipynb").write_text(json.dumps(NOTEBOOK))
    for name in ("figures", "scripts"):
        (labs / name).mkdir()
    for write in (lambda: update(labs, copy), lambda: write_course(labs, tmp_path / "course")):
        try:
            write()
        except LabError as error:
            assert "01_lab.ipynb" in str(error) and error.fix
        else:
            assert nbformat.read(next(tmp_path.glob("co*/**/01_lab.ipynb")), as_version=4)
    # Half of the labs are no labs.
    assert not copy.exists() or len(list(copy.glob("*.ipynb"))) == 2
    if copy.exists():
        assert len(update(labs, copy).current) == 2, "the same again"


@pytest.mark.parametrize(("content", "words"), NOTEBOOKS.values(), ids=NOTEBOOKS.keys())
def test_an_odd_lab_is_copied_or_refused(content, words, tmp_path):
    (tmp_path / "01_lab.ipynb").write_bytes(content)
    try:
        assert update(tmp_path, tmp_path / "copy").written == ("01_lab.ipynb",)
        assert update(tmp_path, tmp_path / "copy").current == ("01_lab.ipynb",)
    except LabError as error:
        assert error.what == "01_lab.ipynb cannot be read." and "git checkout" in error.fix


def test_many_records_of_one_kind_take_their_time_once_each(runs, workspace):
    record = {"lab": "lab1", "kind": "k", "machine": "m", "torch": "t", "when": "2026-01-01", "result": None}
    lines = [json.dumps(record | {"settings": {"a": number}}) for number in range(20_000)]
    runs.mkdir(exist_ok=True)
    (runs / "lab1.jsonl").write_text("\n".join(lines) + "\n")
    begun = time.monotonic()
    make_report(workspace, team="red")
    assert time.monotonic() - begun < 30, "each compared with each would take minutes"
