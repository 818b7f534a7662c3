"""The notebooks: what each has to be, that nbval really compares them, and the learner's way through each of them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from harness.engines import USED
from harness.memory import LIMIT_GIB, read_stored_peak
from harness.notebook_rules import LIMITS_OF_LONG_LABS, MOST_MINUTES, choose_limits, count_minutes, find_faults
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


def test_nbval_passes_what_is_the_same_and_fails_what_was_altered(tmp_path):
    outcomes = run_nbval(tmp_path, [*COMPARED.values(), *ALTERED.values()])
    assert outcomes == ["PASSED"] * len(COMPARED) + ["FAILED"] * len(ALTERED)


def test_the_project_s_nbval_settings_are_these(pytestconfig):
    options = pytestconfig.option
    assert options.nbval, "addopts in pyproject.toml lacks --nbval"
    assert options.nbval_current_env, "without --nbval-current-env another Python's kernel may answer"
    assert Path(options.nbval_sanitize_with).resolve() == ROOT / "tests" / "sanitize.cfg"
    assert set(pytestconfig.getini("testpaths")) == {"tests", "notebooks"}


# That `make notebooks` saves what it ran, and nothing in the place of an edit.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A notebook that has nothing beside it, one of a course, one that is edited meanwhile, and what saving them said.

    The data set is drawn for each command; so one runs all three.
    """
    paths = [
        tmp_path_factory.mktemp("alone") / "lab.ipynb",
        tmp_path_factory.mktemp("course") / "07_lab.ipynb",
        tmp_path_factory.mktemp("edited") / "edited.ipynb",
    ]
    sources = ("print('é')", "block = b'x' * 300_000_000", "open('edited.ipynb', 'a').write(' ')")
    for path, source in zip(paths, sources, strict=True):
        nbformat.write(notebook(code(source, count=None)), path)
    paths[0].chmod(0o640)
    before = paths[2].read_bytes()
    command = [sys.executable, ROOT / "tests" / "harness" / "run_notebooks.py", "--save", *paths]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 1, child.stderr
    return paths, child, before


def test_a_notebook_that_ran_is_saved_with_its_outputs(saved):
    path = saved[0][0]
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == "é\n"
    assert path.read_bytes().endswith(b"}\n") and path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_notebook_that_was_edited_while_it_ran_is_left_as_it_is(saved):
    (_, _, path), child, before = saved
    assert "edited.ipynb was changed while it ran, and was not saved.\n" in child.stderr
    assert path.read_bytes() == before + b" "
    assert list(path.parent.iterdir()) == [path]


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


def test_a_saved_notebook_has_the_memory_and_the_minutes_that_it_took(saved):
    (_, path, _), child, _ = saved
    found = nbformat.read(path, as_version=4)
    peak, seconds = read_stored_peak(found), found.metadata["lab"]["seconds"]
    assert 0.3 <= peak < 0.6 and f"  {peak:.1f} GiB of memory at most, {seconds} s\n" in child.stdout
    assert found.metadata["lab"]["minutes"] == count_minutes(found, path.parent) in (1, 2)
