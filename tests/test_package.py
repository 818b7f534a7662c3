"""The package as a whole: its error, who imports whom, and that an import does nothing."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import arrows

import lab_common
from course.check import NotYetError
from lab_common import LabError

# What a torchrun script imports has to do without these; `plots` is for notebooks.
HEAVY = ("IPython", "matplotlib", "pandas", "torchvision", "wandb", "tensorboard")
PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course")
MODULES = {name: path for name, path in arrows.list_modules().items() if name.split(".")[0] in PACKAGES}


def test_all_arrows_point_down_and_none_leads_in_a_circle():
    assert arrows.find_faults() == []


def run_python(code: str, folder: Path) -> dict:
    """Runs code in a fresh interpreter whose last printed line is JSON, and returns that."""
    env = {**os.environ, "LAB_DATA": str(folder / "data"), "LAB_RUNS": str(folder / "runs")}
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    (line,) = child.stdout.splitlines()
    return json.loads(line)


def test_importing_the_packages_imports_nothing_heavy(tmp_path):
    code = f"import json, sys; old = set(sys.modules); import {', '.join(PACKAGES)}"
    loaded = run_python(f"{code}; print(json.dumps(sorted(set(sys.modules) - old)))", tmp_path)
    assert not {name.split(".")[0] for name in loaded} & {"torch", "numpy", *HEAVY}
    assert {name for name in loaded if name.split(".")[0] in PACKAGES} == {*PACKAGES}


def test_importing_the_modules_does_nothing(tmp_path):
    # Every module but the command lines (`__main__`), the figures, which only notebooks draw, and what runs in the
    # Python of a framework.
    left_out = {"course.check.figures", "course.exercises.lab12.timed_fit"}
    modules = [name for name in MODULES if "__main__" not in name and ".plots" not in name and name not in left_out]
    assert {"lab_utils.machine", "lab_utils.data", "course.workspace"} <= set(modules)
    code = f"""
import importlib, json, os, sys, threading
import numpy, torch
def count_threads():
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else threading.active_count()
before = count_threads()
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps(dict(heavy=[name for name in {HEAVY!r} if name in sys.modules], before=before, after=count_threads(),
    cuda=torch.cuda.is_initialized(), seed=torch.initial_seed())))
"""
    found = run_python(code, tmp_path)
    assert found["heavy"] == []
    assert found["after"] == found["before"], "an import started a thread"
    assert not found["cuda"]
    assert list(tmp_path.iterdir()) == [], "an import wrote files"


def test_an_error_says_what_where_cause_fix_and_log():
    error = LabError("The archive is cut off.", where="data/x", cause="a full disk", fix="make lab", log="runs/log")
    assert str(error).splitlines() == [
        "The archive is cut off.",
        "  where: data/x",
        "  likely: a full disk",
        "  fix: make lab",
        "  log: runs/log",
    ]
    assert str(LabError("Only this.")) == "Only this."
    assert (error.what, error.fix) == ("The archive is cut off.", "make lab")


def test_no_error_has_what_a_terminal_obeys():
    said = "\x1b[1mbold\x1b[0m\tand\r\nso on\rover\x1b[2J\u202eleft"
    shown = "bold    and\nso on\ufffdover\ufffd[2J\ufffdleft"
    error = LabError(said, where=Path(said), cause=said, fix=said, log=said)
    assert (error.what, error.cause, error.fix, error.log) == (shown,) * 4
    assert all(
        c.isprintable() or c == "\n" for c in str(error) + str(NotYetError("x", yours=said, expected=1, hint=""))
    )


def test_a_path_that_a_person_typed_has_its_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lab_common.read_path("~/runs") == lab_common.read_folder(Path("~/runs")) == tmp_path / "runs"


def test_what_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    for name, words in {
        "file": "A file",
        "file/below": "A file",
        "link/below": "leads to gone",
        "circle": "link",
    }.items():
        with pytest.raises(LabError, match=words):
            lab_common.read_folder(tmp_path / name)
    assert lab_common.read_folder(tmp_path / "new" / "one") == tmp_path / "new" / "one"


def test_every_error_fits_on_its_first_line_and_names_a_fix():
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LabError":
                assert "fix" in {keyword.arg for keyword in node.keywords}, f"{module}, line {node.lineno}: no fix"
                parts = getattr(node.args[0], "values", [node.args[0]])  # of an f-string, what is between the braces
                said = "".join(part.value for part in parts if isinstance(part, ast.Constant))
                assert len(said) <= 120, f"{module}, line {node.lineno}: {len(said)} characters"


def test_no_command_takes_a_path_as_it_was_typed():
    """A shell leaves ``--into=~/x`` as it stands: ``type=read_path`` knows the home."""
    assert [module for module, path in MODULES.items() if "type=Path" in path.read_text()] == []


def test_ipython_shows_the_message_without_a_traceback(tmp_path):
    code = "from lab_common import LabError\ndef f():\n    raise LabError('What happened.', fix='make lab')\nf()"
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    shown = [line for line in (child.stdout + child.stderr).splitlines() if line.strip()]
    assert shown == ["What happened.", "  fix: make lab"]
