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
from harness.notebook_rules import count_minutes, find_faults
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def code(source: str, printed: str = "", tags: tuple[str, ...] = ()):
    outputs = [new_output("stream", name="stdout", text=printed)] if printed else []
    return new_code_cell(source, outputs=outputs, execution_count=1, metadata={"tags": list(tags)} if tags else {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_structure(path):
    faults = find_faults(path)
    assert not faults, "\n".join(["", *faults])


# That nbval compares at all, under the project's own settings.

COMPARED = {
    "printed": code("print('accuracy 61.5 %')", "accuracy 61.5 %\n"),
    "a time": code("print('took 1.25 s, 120 images/s')", "took 9.5 s, 7 images/s\n"),
    "ignored": code("print('here')", "there\n", tags=("nbval-ignore-output",)),
    "settings": code(
        "from os import environ, listdir\n"
        "print(environ['OMP_NUM_THREADS'], environ['LAB_SCALE'], len(listdir(environ['LAB_DATA'])))",
        f"{os.environ['OMP_NUM_THREADS']} small 0\n",
    ),
}
ALTERED = {
    "printed": code("print('accuracy 61.5 %')", "accuracy 61.4 %\n"),
    "nothing": code("x = 1", "something\n"),
    "count in a time": code("print('took 1.25 s, epoch 3')", "took 1.25 s, epoch 4\n"),
    "stray error": code("1 / 0"),
}


def run_nbval(folder: Path, cells) -> list[str]:
    """Runs nbval as the project does, and returns the outcome of each cell."""
    shutil.copy(ROOT / "conftest.py", folder)
    nbformat.write(new_notebook(cells=list(cells), metadata=KERNEL), folder / "lab.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", "lab.ipynb"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={ROOT / 'tests' / 'sanitize.cfg'}"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = re.findall(r"^(PASSED|FAILED|ERROR) lab\.ipynb::Cell (\d+)", child.stdout, flags=re.MULTILINE)
    assert len(found) == len(cells), child.stdout
    return [outcome for outcome, _ in sorted(found, key=lambda pair: int(pair[1]))]


def test_nbval_passes_what_is_the_same_and_fails_what_was_altered(tmp_path):
    outcomes = run_nbval(tmp_path, [*COMPARED.values(), *ALTERED.values()])
    assert outcomes == ["PASSED"] * len(COMPARED) + ["FAILED"] * len(ALTERED)


# How much memory a lab takes. The test of each notebook measures it again (conftest.py).


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_memory_of_a_lab_is_stored(path):
    peak = read_stored_peak(nbformat.read(path, as_version=4))
    # Ray's own processes take more than a GiB, and the lab says so.
    assert 0.3 < peak <= LIMIT_GIB + (path.stem in USED)


# How long a lab takes.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_minutes_of_a_lab_are_stored(path):
    lab = nbformat.read(path, as_version=4)
    minutes = count_minutes(lab, path.parent)
    assert abs(lab.metadata["lab"]["minutes"] - minutes) <= 1, "its text has changed: save it again"
