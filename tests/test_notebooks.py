"""The notebooks: what each has to be, that nbval really compares them, and the learner's way through each of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from harness.engines import USED
from harness.memory import LIMIT_GIB, MARK, MemoryWatch, find_memory_fault, read_stored_peak
from harness.notebook_rules import (
    LIMITS_OF_LONG_LABS,
    MOST_MINUTES,
    choose_limits,
    count_minutes,
    find_anatomy_faults,
    find_code_faults,
    find_faults,
    find_format_faults,
    find_guess_faults,
    find_output_faults,
    find_prose_faults,
    find_run_faults,
    find_size_faults,
)
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
ERROR = new_output("error", ename="ValueError", evalue="no", traceback=["no"])


def say(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)


def code(source: str, *outputs, count: int | None = 1, tags: tuple[str, ...] = (), **metadata):
    metadata |= {"tags": list(tags)} if tags else {}
    return new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)


def notebook(*cells):
    return new_notebook(
        cells=[new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells], metadata=KERNEL
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_structure(path):
    faults = find_faults(path)
    assert not faults, "\n".join(["", *faults])


# Each rule, with what it has to find and what it has to let pass.


def test_faults_of_format_are_found():
    good = notebook(code("1", tags=("nbval-ignore-output",)), code("2", tags=("raises-exception",)))
    assert find_format_faults(good) == []
    for tag in ("nbval-skip", "nbval_ignore_output"):
        assert find_format_faults(notebook(code("1", tags=(tag,)))), tag
    assert find_format_faults(notebook(code("# NBVAL_SKIP\n1")))
    assert find_format_faults(notebook(code("1", execution={"iopub.status.busy": "2026-01-01"})))
    widgets = notebook(code("1"))
    widgets.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    assert find_format_faults(widgets) == ["metadata 'widgets' of the notebook"]
    doubled = notebook(code("1"), code("2"))
    doubled.cells[0]["id"] = doubled.cells[1]["id"] = "same"
    assert find_format_faults(doubled) == ["the id same is not unique"]
    del doubled.cells[0]["id"]
    assert "cells without ids" in find_format_faults(doubled)


def test_faults_are_found_in_the_file(tmp_path):
    doubled = notebook("a", "b")
    doubled.cells[0]["id"] = doubled.cells[1]["id"] = "same"
    (tmp_path / "3_lab.ipynb").write_text(json.dumps(doubled))
    faults = find_faults(tmp_path / "3_lab.ipynb")
    assert {"the id same is not unique", "2 cells; 25 to 45 are right", "no section 'Predict'"} <= set(faults)
    assert "the first heading is not '# Lab 3 · …'" in faults
    (tmp_path / "3_lab.ipynb").write_text(" " * (2**20 + 1))
    assert find_faults(tmp_path / "3_lab.ipynb") == ["1.0 MiB; the limit is 1 MiB"]


def test_faults_of_the_run_are_found():
    assert find_run_faults(notebook(code("1"), "text", code("2", count=2))) == []
    assert find_run_faults(notebook(code("1", count=None)))
    assert find_run_faults(notebook(code("1"), code("2", count=3)))
    assert find_run_faults(notebook(code("1", count=2), code("2", count=1)))
    ignored = [code("1", count=number, tags=("nbval-ignore-output",) if number < 3 else ()) for number in (1, 2, 3)]
    assert find_run_faults(notebook(*ignored)) == ["2 of 3 outputs are not compared; at most half may be"]
    assert find_run_faults(notebook(*ignored, code("4", count=4))) == []


def test_faults_of_outputs_are_found():
    assert find_output_faults(notebook(code("1", say("ok")), code("2", ERROR, tags=("raises-exception",)))) == []
    assert find_output_faults(notebook(code("1", ERROR)))
    assert find_output_faults(notebook(code("1", tags=("raises-exception",))))
    assert find_output_faults(notebook(code("1", say("a warning", "stderr"))))
    assert find_output_faults(notebook(code("1", say("in /home/me/x.py"))))
    assert find_output_faults(notebook(code("1", say(r"in C:\Users\me"))))
    html = new_output("display_data", data={"text/html": "<a href='/home/x'>"})
    assert find_output_faults(notebook(code("1", html)))
    line = new_output("execute_result", data={"text/plain": "[<Line2D at 0x7f1234567890>]"}, execution_count=1)
    assert find_output_faults(notebook(code("1", line)))
    assert find_output_faults(notebook(code("1", line, tags=("nbval-ignore-output",)))) == []


def test_faults_of_code_are_found():
    good = "import os, torch.nn\nfrom lab_utils import data\n%matplotlib inline\n!echo hello"
    assert find_code_faults(notebook(code(good), code("x = 1\n" * 10))) == []
    assert find_code_faults(notebook(code("def f():\n    import sklearn.svm"))) != []
    assert find_code_faults(notebook(code("from lightning import Trainer"))) != []
    assert find_code_faults(notebook(code("open('/home/x')"))) != []
    short = [code("x = 1") for _ in range(3)]
    assert find_code_faults(notebook(*short, code("x = 1\n\n" * 20))) == []
    (fault,) = find_code_faults(notebook(*short, code("x = 1\n" * 21)))
    assert fault.endswith("21 lines of code; the limit is 20")
    assert find_code_faults(notebook(*short, *[code("x = 1\n" * 20) for _ in range(14)])) != []


def test_lines_and_their_number_are_limited():
    line = "x" * 84 + " = 1"
    assert find_code_faults(notebook(code(f"def f():\n    {line[4:]}"))) == []
    (fault,) = find_code_faults(notebook(code(f"y = 2\n{line}2")))
    assert fault.endswith("a line of 89 characters; the limit is 88")
    many = [code("x = 1\n\n" * 15) for _ in range(20)]
    assert find_code_faults(notebook(*many)) == []
    assert find_code_faults(notebook(*many, code("x = 1"))) == ["301 lines of code; the limit is 300"]


def test_faults_of_size_are_found():
    assert find_size_faults(notebook(*["a word " * 30] * 25)) == []
    assert len(find_size_faults(notebook(*["a word " * 30] * 46))) == 2
    assert len(find_size_faults(notebook(*["a word " * 20] * 25))) == 1
    assert find_size_faults(notebook(*["a word " * 45] * 25)) == ["2,250 words; 1,200 to 2,200 are right"]
    assert len(find_size_faults(notebook("```\n" + "a word " * 1000 + "\n```"))) == 2


def test_labs_4_to_6_may_be_long_but_not_wide():
    assert [lab for lab in range(16) if choose_limits(lab) == LIMITS_OF_LONG_LABS] == [4, 5, 6]
    long = notebook(code("x = 1\n" * 55 + f"{'y' * 100} = 1"), *[code("x = 1\n" * 14) for _ in range(30)])
    tall, wide = find_code_faults(long, LIMITS_OF_LONG_LABS)
    assert tall.endswith("56 lines of code; the limit is 55") and "a line of 104 characters" in wide
    assert find_size_faults(notebook(*["a word " * 60] * 25), LIMITS_OF_LONG_LABS) == []


@pytest.mark.parametrize(
    "text",
    [
        "It took 12.3 s here.",
        "about 45 ms per step",
        "2x faster",
        "1.7 times slower",
        "40 % faster",
        "A step takes 3 seconds",
        "1,250 images/s",
        "| a | 3.5 µs |",
        "wait 10 minutes",
        "![](figures/there.svg)",
        "![what it shows is this](figures/missing.svg)",
        '<img src="figures/there.svg">',
        "see /home/me/labs",
        "[a page](http://example.org)",
        "[a page](https://example)",
        "[a page](https://example.org/a b)",
        "[a page]()",
        "[a file](missing.md)",
        "[no scheme](example.org/page)",
    ],
)
def test_faults_of_prose_are_found(tmp_path, text):
    assert len(find_prose_faults(make_prose(tmp_path, text), tmp_path)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "| **It takes** | 30 to 40 minutes |",
        "In the 1990s and at 32×32 pixels, 10 classes, 3 steps, 4 splits",
        "`--timeout 10 s`",
        "a 13,000-fold shorter update, 26 % more calls, 2 times as many images",
        "images/s and ms",
        "![bit layouts of three formats](figures/there.svg)",
        '<img src="figures/there.svg" alt="bit layouts of formats">',
        "[a page](https://example.org/home/tmp/)",
        "[a part](https://docs.example.org/stable/x.html#part), [a file](figures/there.svg), `f[0](x)`",
        "/proc/cpuinfo",
        "whose only work is to sleep\nfor 20 milliseconds",
    ],
)
def test_good_prose_passes(tmp_path, text):
    assert find_prose_faults(make_prose(tmp_path, text), tmp_path) == []


def make_prose(folder: Path, text: str):
    (folder / "figures").mkdir()
    (folder / "figures" / "there.svg").write_text("<svg/>")
    return notebook(text)


ANATOMY = """# Lab 1 · A thing
## Predict
## One change
### Exercise 1.1 · First

> **Your turn: about 3 lines.** Write it.

### Exercise 1.2 · Second

> **Your turn: 1 line.** Write it.

### Why
## What you saw
## If something went wrong
## Further reading"""
SECOND = "### Exercise 1.2 · Second\n\n> **Your turn: 1 line.** Write it.\n"
SCRIPT = "### BEGIN SOLUTION\nprint(2)\n### END SOLUTION\n"
SOLVED = '### BEGIN SOLUTION\n### END SOLUTION\ncheck.exercise("1.{}", f)'


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("# Lab 1 · A thing", "# Lab 2 · A thing"),
        ("# Lab 1 · A thing", "# Lab 1: A thing"),
        ("## Predict", "## Guess"),
        ("### Why", "##### Why"),
        ("### Why", "# Why"),
        ("## What you saw\n", ""),
        ("## Further reading", "```\n## Further reading\n```"),
        (SECOND, ""),
        ("Exercise 1.2 ·", "Exercise 1.3 ·"),
        ("> **Your turn: 1 line.**", "Your turn."),
    ],
)
def test_faults_of_anatomy_are_found(tmp_path, wrong, right):
    cells = [code(SOLVED.format(number)) for number in (1, 2)]
    assert find_anatomy_faults(notebook(ANATOMY, *cells), 1, tmp_path) == []
    assert len(find_anatomy_faults(notebook(ANATOMY.replace(wrong, right), *cells), 1, tmp_path)) == 1
    assert len(find_anatomy_faults(notebook(ANATOMY, cells[0]), 1, tmp_path)) == 2


def test_an_exercise_may_be_a_script_and_then_there_may_be_five(tmp_path):
    def find(count, scripts):
        more = "\n".join(SECOND.replace("1.2", f"1.{number}") for number in range(3, count + 1))
        cells = [code(SOLVED.format(number)) for number in range(scripts + 1, count + 1)]
        named = [code(f'check.exercise("1.{number}", "scripts/work{number}.py")') for number in range(1, scripts + 1)]
        return find_anatomy_faults(notebook(ANATOMY + "\n" + more, *named, *cells), 1, tmp_path)

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "work1.py").write_text(f"{SCRIPT}{SCRIPT}")
    assert find(count=4, scripts=0) == find(count=4, scripts=1) == find(count=5, scripts=1) == []
    assert find(count=5, scripts=0) == ["5 exercises; two to four are right"]
    assert find(count=6, scripts=1) == ["6 exercises; two to five are right"]
    # One script is one solution, though it has two gaps; one that is not there, or has no gap, is none.
    missing = ["4 solutions for 5 exercises"]
    assert find(count=5, scripts=2) == missing
    (tmp_path / "scripts" / "work2.py").write_text("print(1)\n")
    assert find(count=5, scripts=2) == missing
    (tmp_path / "scripts" / "work2.py").write_text(SCRIPT)
    assert find(count=5, scripts=2) == []


def test_a_predict_cell_without_an_example_guess_is_found():
    def find(*sources: str) -> list[str]:
        return find_guess_faults(notebook("# Lab 1\n\n## Predict: how much?\n\nGuess.", *map(code, sources)))

    good = "mine = 1.5  # example guess: old ÷ new"
    assert (
        find(good, "x = 1")
        == find('mine = {\n    "a": 2,  # example guess: a\n    3: -0.5,  # example guess: b\n}')
        == []
    )
    for source in ("mine = None", "mine = 1.5", "print('no guess')"):
        assert len(find(source)) == len(find(source, good)) == 1, source
    for line in ("mine = None  # example guess: a", "mine = 1.5  # example guess", "mine = 1.5 # example guess: a"):
        assert len(find(line)) == len(find(good, line)) == 1, line
    assert find_guess_faults(notebook("## Measure", code("x = 1"))) == []


# That nbval compares at all, under the project's own settings.

COMPARED = {
    "printed": code("print('accuracy 61.5 %')", say("accuracy 61.5 %\n")),
    "result": code("1 + 1", new_output("execute_result", data={"text/plain": "2"}, execution_count=1)),
    "nothing": code("x = 1"),
    "a time": code("print('took 1.25 s, 120 images/s')", say("took 9.5 s, 7 images/s\n")),
    "ignored": code("print('here')", say("there\n"), tags=("nbval-ignore-output",)),
    "an error": code("raise ValueError('no')", ERROR, tags=("raises-exception",)),
    "interpreter": code("import sys\nprint(sys.executable)", say(sys.executable + "\n")),
    "settings": code(
        "from os import environ, listdir\n"
        "print(environ['OMP_NUM_THREADS'], environ['LAB_SCALE'], len(listdir(environ['LAB_DATA'])))",
        say(f"{os.environ['OMP_NUM_THREADS']} small 0\n"),
    ),
}
ALTERED = {
    "printed": code("print('accuracy 61.5 %')", say("accuracy 61.4 %\n")),
    "result": code("1 + 1", new_output("execute_result", data={"text/plain": "3"}, execution_count=1)),
    "nothing": code("x = 1", say("something\n")),
    "output lost": code("print('here')"),
    "count in a time": code("print('took 1.25 s, epoch 3')", say("took 1.25 s, epoch 4\n")),
    "another error": code("raise TypeError('no')", ERROR, tags=("raises-exception",)),
    "no error": code("x = 1", ERROR, tags=("raises-exception",)),
    "stray error": code("1 / 0"),
}


def run_nbval(folder: Path, cells) -> list[str]:
    """Runs nbval as the project does, and returns the outcome of each cell."""
    shutil.copy(ROOT / "conftest.py", folder)
    nbformat.write(notebook(*cells), folder / "lab.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", "lab.ipynb"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={ROOT / 'tests' / 'sanitize.cfg'}"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = re.findall(r"^(PASSED|FAILED|ERROR) lab\.ipynb::Cell (\d+)", child.stdout, flags=re.MULTILINE)
    assert len(found) == len(cells), child.stdout
    return [outcome for outcome, _ in sorted(found, key=lambda pair: int(pair[1]))]


def test_nbval_passes_what_is_the_same(tmp_path):
    outcomes = run_nbval(tmp_path, COMPARED.values())
    assert dict(zip(COMPARED, outcomes, strict=True)) == dict.fromkeys(COMPARED, "PASSED")


def test_nbval_fails_where_a_stored_output_was_altered(tmp_path):
    outcomes = run_nbval(tmp_path, ALTERED.values())
    assert dict(zip(ALTERED, outcomes, strict=True)) == dict.fromkeys(ALTERED, "FAILED")


def test_nbval_never_compares_a_cell_without_a_count_and_the_rule_refuses_it(tmp_path):
    unrun = code("print('anything')", count=None)
    assert run_nbval(tmp_path, [unrun]) == ["PASSED"]
    assert find_run_faults(notebook(unrun))


def test_the_project_s_nbval_settings_are_these(pytestconfig):
    options = pytestconfig.option
    assert options.nbval, "addopts in pyproject.toml lacks --nbval"
    assert options.nbval_current_env, "without --nbval-current-env another Python's kernel may answer"
    assert Path(options.nbval_sanitize_with).resolve() == ROOT / "tests" / "sanitize.cfg"
    assert set(pytestconfig.getini("testpaths")) == {"tests", "notebooks"}


# That `make notebooks` saves what it ran, and nothing in the place of an edit.


def run_and_save(*paths: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tests" / "harness" / "run_notebooks.py", "--save", *paths]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# The data set is drawn for each command; so one runs two notebooks.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A notebook that has nothing beside it, another one, and the command that saved both."""
    path, lab = (
        tmp_path_factory.mktemp("alone") / "lab.ipynb",
        tmp_path_factory.mktemp("course") / "notebooks/07_lab.ipynb",
    )
    nbformat.write(notebook(code("print('é')", count=None)), path)
    path.chmod(0o640)
    lab.parent.mkdir()
    nbformat.write(notebook(code("block = b'x' * 300_000_000", count=None)), lab)
    child = run_and_save(path, lab)
    assert child.returncode == 0, child.stderr
    return path, lab, child


def test_a_notebook_that_ran_is_saved_with_its_outputs(saved):
    path, _, _ = saved
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == "é\n"
    assert path.read_bytes().endswith(b"}\n") and path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_notebook_that_was_edited_while_it_ran_is_left_as_it_is(tmp_path):
    path = tmp_path / "lab.ipynb"
    nbformat.write(notebook(code("open('lab.ipynb', 'a').write(' ')", count=None)), path)
    edited = path.read_bytes() + b" "
    child = run_and_save(path)
    assert child.returncode == 1
    assert "lab.ipynb was changed while it ran, and was not saved.\n" in child.stderr
    assert path.read_bytes() == edited
    assert list(tmp_path.iterdir()) == [path]


# How much memory a lab takes. The test of each notebook measures it again (conftest.py).


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_memory_of_a_lab_is_stored(path):
    peak = read_stored_peak(nbformat.read(path, as_version=4))
    # Ray's own processes take more than a GiB, and the lab says so.
    assert 0.3 < peak <= LIMIT_GIB + (path.stem in USED)


# How long a lab takes.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_minutes_of_a_lab_are_bounded_and_stored(path):
    lab = nbformat.read(path, as_version=4)
    minutes = count_minutes(lab, path.parent)
    if choose_limits(int(path.name[:2])) != LIMITS_OF_LONG_LABS:
        assert minutes <= MOST_MINUTES
    assert abs(lab.metadata["lab"]["minutes"] - minutes) <= 1, "its text has changed: save it again"


def test_minutes_are_reading_running_and_exercises(tmp_path):
    def count(*cells, seconds=0):
        lab = notebook(*cells)
        lab.metadata["lab"] = {"seconds": seconds}
        return count_minutes(lab, tmp_path)

    assert count("word " * 1500) == 10
    assert count("word " * 1500, seconds=120) == 12
    assert count("word " * 1500, seconds=121) == 13, "a minute that has begun counts"
    short, long = ("### BEGIN SOLUTION\n" + "x = 1\n\n" * lines + "### END SOLUTION" for lines in (5, 8))
    assert count(code(short)) == 5 and count(code(long), code(short)) == 12, "half a minute a line over five"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "work.py").write_text(SCRIPT * 7)
    assert count(code('check.exercise("1.1", "scripts/work.py")')) == 5 + 1


def test_a_saved_notebook_has_the_memory_and_the_minutes_that_it_took(saved):
    _, path, child = saved
    found = nbformat.read(path, as_version=4)
    peak, seconds = read_stored_peak(found), found.metadata["lab"]["seconds"]
    assert 0.3 <= peak < 0.6 and f"  {peak:.1f} GiB of memory at most, {seconds} s\n" in child.stdout
    assert found.metadata["lab"]["minutes"] == count_minutes(found, path.parent) in (1, 2)


TAKE = "import time\nblock = b'x' * 200_000_000\ntime.sleep(0.5)"
# A job leaves the kernel's session and tree, as those of the launcher do.
START = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {TAKE!r}],"
START += " start_new_session=True)"


def test_the_watch_counts_a_notebook_and_its_jobs_together_and_nothing_else():
    held = b"x" * 400_000_000  # this process's own, which is not the notebook's
    with MemoryWatch(interval=0.05) as watch:
        subprocess.run([sys.executable, "-c", TAKE], check=True)
        subprocess.run([sys.executable, "-c", TAKE], check=True)
        assert watch.peak_bytes < 300e6, "two that follow each other are never there together"
        subprocess.run([sys.executable, "-c", f"{TAKE}\n{START}"], check=True)
    assert 400e6 < watch.peak_bytes < 300e6 + len(held)
    assert MARK not in os.environ


@pytest.mark.parametrize(
    ("peak", "stored", "words"),
    [(2.4, 2.4, ""), (2.4, 2.1, ""), (2.4, 1.9, "says 1.9 GiB"), (3.0, None, ""), (3.1, None, "the limit is 2.6 GiB")],
)
def test_a_notebook_that_takes_too_much_memory_is_a_fault(peak, stored, words):
    fault = find_memory_fault(peak, stored)
    assert words in fault and bool(words) == bool(fault)


def test_a_notebook_that_takes_more_memory_than_it_says_fails_at_its_last_cell(tmp_path):
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for number, stored in enumerate((0.1, 1.0), start=1):
        lab = notebook(code("block = b'x' * 500_000_000"), code("block = None", count=2))
        lab.metadata["lab"] = {"peak_gib": stored}
        nbformat.write(lab, tmp_path / "notebooks" / f"0{number}_lab.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", "--nbval"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [*command, "--nbval-current-env", "notebooks"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "4 passed" in child.stdout and "1 error" in child.stdout, child.stdout + child.stderr
    assert re.search(r"^ERROR notebooks/01_lab\.ipynb::Cell 1", child.stdout, re.MULTILINE)
    assert "01_lab.ipynb: it took 0.6 GiB of memory, and says 0.1 GiB" in child.stdout
