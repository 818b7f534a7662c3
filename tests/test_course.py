"""The labs as a course of nbgrader: what is written, and nbgrader itself on it, in its own environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv

import nbformat
import pytest
from harness.drawn import assert_explains
from nbformat.v4 import new_code_cell, new_notebook

from course import check
from course.nbgrader import main, make_source, write_course
from course.notebooks import BEGIN
from course.workspace import GUESS_MARK, replace_guesses
from lab_common import LabError

RIGHT = "### BEGIN SOLUTION\nx = 1\n### END SOLUTION"


def test_every_exercise_becomes_an_answer_and_a_check(root):
    numbers = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        source = make_source(notebook, name=path.name)
        # Nothing is lost but the lines between the parts and the example guesses.
        texts = [
            "\n".join(line for cell in book.cells for line in replace_guesses(cell.source).splitlines() if line.strip())
            for book in (notebook, source)
        ]
        assert texts[0] == texts[1]
        assert not any(GUESS_MARK in cell.source for cell in source.cells)
        roles = [cell.metadata.nbgrader for cell in source.cells if "nbgrader" in cell.metadata]
        checks = [role.grade_id.removeprefix("check-") for role in roles if role.grade]
        answers = [role.grade_id.removeprefix("answer-") for role in roles if role.solution]
        assert set(checks) - set(answers) <= {"5-1", "12-1", "12-3", "13-2", "14-1"}, "whose answers are scripts"
        assert all(
            (BEGIN in cell.source) == ("nbgrader" in cell.metadata and cell.metadata.nbgrader.solution)
            for cell in source.cells
            if cell.cell_type == "code"
        )
        numbers += checks
    assert len(numbers) == len(set(numbers)) == 57


def test_a_solution_without_a_check_is_refused():
    with pytest.raises(LabError) as caught:
        make_source(new_notebook(cells=[new_code_cell(RIGHT, id="lonely")]), name="x.ipynb")
    assert_explains(caught.value, "x.ipynb, cell lonely", "check.exercise")


def test_the_course_has_all_labs_and_its_scripts_no_solutions(root, tmp_path, capsys):
    assert main([str(tmp_path / "course")]) == 0
    assert "lab0, lab1, lab2, lab3, lab4, lab5, lab6, lab7, lab8, lab9, lab10, lab11" in capsys.readouterr().out
    folder = tmp_path / "course" / "source"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"lab{lab}" for lab in check.LABS)
    scripts = list((folder / "lab5" / "scripts").glob("*.py"))
    assert scripts and not any(BEGIN in path.read_text() for path in scripts)
    assert (folder / "lab5" / "figures" / "lab5_ddp_step.svg").is_file()


def test_a_course_that_is_there_is_left_as_it_is(root, tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(LabError) as caught:
        write_course(root / "notebooks", tmp_path)
    assert_explains(caught.value, str(tmp_path / "source"), "another folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"] and not any((tmp_path / "source").iterdir())


@pytest.fixture(scope="module")
def nbgrader(tmp_path_factory):
    """An environment with nbgrader, to which those of this pack are added; runs its commands."""
    folder = tmp_path_factory.mktemp("nbgrader")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    ours = sysconfig.get_path("purelib")
    pth = f"import site; site.addsitedir({ours!r})\n"
    (folder / where.stdout.strip() / "labs.pth").write_text(pth)
    install = [python, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", "nbgrader==0.9.6"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=400)
    if done.returncode:
        pytest.skip(f"NOT TESTED HERE: nbgrader could not be installed: {done.stderr.strip().splitlines()[-1][:200]}")

    def run(*arguments, cwd, **more):
        env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JUPYTER_PLATFORM_DIRS": "1", **more}
        run = subprocess.run(
            [python, "-m", "nbgrader", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=500
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return run.stderr

    run.python = python
    return run


SCORES = """
import json
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    print(json.dumps({one.student.id: [one.score, one.max_score] for one in book.assignment_submissions("lab0")}))
"""


def test_nbgrader_makes_the_assignment_and_grades_it(nbgrader, root, tmp_path, monkeypatch):
    """One student hands in the solutions, one what was handed out."""
    course = tmp_path / "course"
    write_course(root / "notebooks", course)
    nbgrader("generate_assignment", "lab0", "--create", cwd=course)
    name = "00_start_here.ipynb"
    release = course / "release" / "lab0"
    handed_out = (release / name).read_text()
    assert BEGIN not in handed_out and handed_out.count("NotImplementedError") >= 3
    for student, notebook in {"ada": course / "source" / "lab0" / name, "bob": release / name}.items():
        folder = course / "submitted" / student / "lab0"
        shutil.copytree(release, folder)
        shutil.copyfile(notebook, folder / name)
    more = {"LAB_SCALE": "small", "OMP_NUM_THREADS": "1", "LAB_RUNS": str(tmp_path / "runs")}
    nbgrader("autograde", "lab0", cwd=course, **more)
    scores = subprocess.run([nbgrader.python, "-c", SCORES], cwd=course, capture_output=True, text=True)
    assert json.loads(scores.stdout) == {"ada": [3.0, 3.0], "bob": [0.0, 3.0]}, scores.stderr


@pytest.mark.system
def test_what_comes_before_jupyterlab_goes_on_if_a_check_fails(tmp_path, root):
    command = [sys.executable, "-m", "course.prepare", "--workspace", str(tmp_path / "labs")]
    (program := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one that torch cannot use'\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "LAB_DATA": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "fix: update the NVIDIA driver" in said and said.count("[ok]") == 4, said
    parts = ["[fail] There is a GPU", "The labs may not work properly", "shapes10", "Your copy of the labs"]
    assert sorted(parts, key=said.index) == parts, "the checks stand first"
    assert (tmp_path / "labs" / "START.md").is_file()
