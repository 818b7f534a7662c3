"""The package as a whole: its error, who imports whom, and that an import does nothing."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lab_utils
from lab_utils import LabError

# Who may import whom; an arrow only ever points down this list. All may import from lab_utils itself.
ROOMS = {
    "check": {
        "plots",
        "launch",
        "training",
        "timing",
        "parallel",
        "workspace",
        "models",
        "data",
        "machine",
        "notebooks",
        "files",
        "text",
        "wandb_runs",
    },
    "report": {"check", "timing", "machine", "files", "notebooks", "text"},
    "course": {"workspace", "notebooks"},
    "board": {"text"},
    "wandb_runs": set(),
    "plots": {"timing"},
    "launch": {"machine", "files", "text"},
    "training": {"data", "models", "timing", "files", "text"},
    "timing": {"machine", "files"},
    "models": set(),
    "parallel": set(),
    "data": {"files", "text"},
    "machine": set(),
    "workspace": {"files", "notebooks"},
    "notebooks": {"files"},
    "files": set(),
    "text": set(),
}
# What a torchrun script imports has to do without these; `plots` is for notebooks.
HEAVY = ("IPython", "matplotlib", "pandas", "torchvision", "wandb", "tensorboard")
PACKAGE = Path(lab_utils.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))


def find_room(module: Path) -> str:
    """The room of a module, "" for the package's own file."""
    return module.parts[1].removesuffix(".py").removeprefix("__init__")


def find_imported_rooms(source: str, module: Path) -> set[str]:
    """The rooms that a module imports anywhere, in functions too."""
    package = list(module.parent.parts)
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "lab_utils" and len(part) > 1 and _is_room(part[1])}


def _is_room(name: str) -> bool:
    return name in ROOMS or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_only_point_down(module):
    room = find_room(module)
    imported = find_imported_rooms((PACKAGE.parent / module).read_text(), module) - {room}
    if not room:
        assert not imported, "lab_utils itself imports no room"
    else:
        assert room in ROOMS, f"{room} has no place in the table of rooms"
        assert imported <= ROOMS[room], f"{module} imports {sorted(imported - ROOMS[room])}"


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("from lab_utils import LabError, check", {"check"}),
        ("import lab_utils.data.shapes", {"data"}),
        ("def f():\n    from lab_utils.timing import measure", {"timing"}),
        ("from .. import plots", {"plots"}),
        ("from ..training import x", {"training"}),
        ("from .facts import x\nfrom . import y\nimport torch", {"machine"}),
    ],
)
def test_the_layering_test_sees_every_form_of_import(source, rooms):
    assert find_imported_rooms(source, Path("lab_utils/machine/facts.py")) - {"machine"} == rooms - {"machine"}


# Started by its path on nodes that have nothing else of ours on Python's path, so that it cannot be two files.
LONGER = {"lab_utils/launch/supervisor.py": 360}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_are_small_and_plain(module):
    source = (PACKAGE.parent / module).read_text()
    assert len(source.splitlines()) <= LONGER.get(module.as_posix(), 250)
    for node in ast.walk(ast.parse(source)):
        assert not isinstance(node, ast.Global), f"{module}: global, line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("exec", "eval"), f"{module}: {node.func.id}, line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("sys", "path"), f"{module}: sys.path, line {node.lineno}"


def run_python(code: str, folder: Path) -> dict:
    """Runs code in a fresh interpreter whose last printed line is JSON, and returns that."""
    env = {**os.environ, "LAB_DATA": str(folder / "data"), "LAB_RUNS": str(folder / "runs")}
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=120)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    (line,) = child.stdout.splitlines()
    return json.loads(line)


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = (
        "import json, sys; old = set(sys.modules); import lab_utils; print(json.dumps(sorted(set(sys.modules) - old)))"
    )
    loaded = run_python(code, tmp_path)
    assert "lab_utils" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"torch", "numpy", *HEAVY}
    assert [name for name in loaded if name.startswith("lab_utils.")] == []


def test_importing_the_rooms_does_nothing(tmp_path):
    # Every module but the command lines (`__main__`) and plots, which only notebooks import.
    modules = [".".join(module.with_suffix("").parts) for module in MODULES]
    modules = [name.removesuffix(".__init__") for name in modules if "__main__" not in name and ".plots" not in name]
    assert {"lab_utils.machine", "lab_utils.data", "lab_utils.workspace"} <= set(modules)
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


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_error_fits_on_its_first_line_and_names_a_fix(module):
    for node in ast.walk(ast.parse((PACKAGE.parent / module).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LabError":
            assert "fix" in {keyword.arg for keyword in node.keywords}, f"{module}, line {node.lineno}: no fix"
            parts = getattr(node.args[0], "values", [node.args[0]])  # of an f-string, what stands between the braces
            said = "".join(part.value for part in parts if isinstance(part, ast.Constant))
            assert len(said) <= 120, f"{module}, line {node.lineno}: {len(said)} characters"


def test_ipython_shows_the_message_without_a_traceback(tmp_path):
    code = "from lab_utils import LabError\ndef f():\n    raise LabError('What happened.', fix='make lab')\nf()"
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    shown = [line for line in (child.stdout + child.stderr).splitlines() if line.strip()]
    assert shown == ["What happened.", "  fix: make lab"]


def test_folders_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "elsewhere"))
    assert lab_utils.env_folder("LAB_DATA", "data") == tmp_path / "elsewhere"
    monkeypatch.delenv("LAB_DATA")
    assert lab_utils.env_folder("LAB_DATA", "data") == lab_utils.checkout() / "data"
    assert (lab_utils.checkout() / "pyproject.toml").exists()
