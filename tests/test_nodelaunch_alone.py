"""The launcher by itself: built as its own package, and used with a Python that has nothing else."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from harness import arrows

ROOT = Path(__file__).resolve().parents[1]
OWN = ("lab_common", "nodelaunch")
# Each rank says which launcher it was sent, and what it finds of the job's data.
TRAIN = """
import os, sys
from pathlib import Path
import nodelaunch
from helper import double
index = Path(os.environ["LAB_DATA_FOLDER"], "index.json").read_text()
names = ["RANK", "WORLD_SIZE", "MASTER_ADDR"]
nodelaunch.report([*(os.environ[name] for name in names), double(21), index, sys.argv[1:], nodelaunch.__file__])
"""
LAUNCH = """
import importlib.util, json, sys
from nodelaunch import DataFolder, TorchrunJob, local_nodes
import nodelaunch
job = TorchrunJob(
    "train.py", ["--lr", 0.1], nodes=local_nodes(2), root=".", program=["python"], limit=60,
    data=DataFolder("digits", "digits", "index.json", copy_data=True),
)
found = job.preflight()
result = job.run(show=False)
there = [name for name in ("torch", "lab_utils", "course") if importlib.util.find_spec(name)]
print(json.dumps([nodelaunch.__file__, there, found.ok, str(found), result.results]))
"""


def run(*command, folder: Path, **environment: str) -> str:
    """Runs a command in a folder, without what the tests' own environment says of the labs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAB_", "PYTHON", "PIP_"))}
    child = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**kept, **environment}, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy, since pip leaves a folder of its own beside what it builds; without a network."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*OWN, "packages"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    run(*pip, "--wheel-dir", "wheels", "./packages/nodelaunch", folder=copy)
    (path,) = (copy / "wheels").iterdir()
    return path


def test_the_package_has_all_modules_of_the_launcher_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = arrows.list_modules().values()
    assert names == {path.relative_to(ROOT).as_posix() for path in modules if path.relative_to(ROOT).parts[0] in OWN}


def test_two_nodes_run_a_script_where_nothing_else_is_installed(wheel, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "bare" / "lib" / version / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site]
    run(*pip, wheel, folder=tmp_path)

    project = tmp_path / "my project"
    (project / "digits").mkdir(parents=True)
    (project / "digits" / "index.json").write_text("{}")
    (project / "train.py").write_text(TRAIN)
    (project / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    said = run(python, "-c", LAUNCH, folder=project)
    place, there, ready, preflight, results = json.loads(said.splitlines()[-1])
    assert there == [] and Path(place).is_relative_to(site)
    assert ready and "no torch" in preflight, preflight
    assert [result[:-1] for result in results] == [
        [str(rank), "2", results[0][2], 42, "{}", ["--lr", "0.1"]] for rank in (0, 1)
    ]
    for rank, result in enumerate(results):
        assert Path(result[-1]).is_relative_to(project / "runs" / "nodes" / f"node{rank}" / "code"), "as it was sent"
    assert run(python, "-m", "nodelaunch", "jobs", "--local", "1", folder=project).startswith("node0: ")
