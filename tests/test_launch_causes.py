"""Causes that peers and networks are blamed for: signals, full disks, silent ranks, code that was edited."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import PYTHON, Heard, run_badly

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("runs")]
FULL = "No space left on device"


# Disks that fill after the preflight: drill 46.

FILL = """
import os, subprocess, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import nodelaunch as launch

def fill(folder):
    with open(Path(folder, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            pass

dist.init_process_group("gloo")
dist.barrier()
mode, folder = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else os.environ["LAB_JOB_FOLDER"])
if os.environ["RANK"] == "1":
    print(f"fault at {time.time()}", flush=True)
    if mode == "save":
        torch.save(torch.zeros(2**20), folder / "checkpoint.pt")
    elif mode == "bash":
        subprocess.run(["bash", "-c", 'head -c 9000000 /dev/zero > "$0"', folder / "x"], check=True)
    fill(folder)
    if mode == "report":
        launch.report("x" * 2**17)
    elif mode == "quiet":
        os._exit(1)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("save", ["write", "checkpoint.pt"]),
        ("bash", [FULL]),
    ],
)
@pytest.mark.usefixtures("warm_torchrun")
def test_46_a_disk_that_a_script_fills_is_named(write, small_disk, mode, words):
    """By torch.save, which leaves the reason out, and by a tool, of which Python knows its status only."""
    job = TorchrunJob(write("train.py", FILL), [mode, small_disk], nodes=local_nodes(2))
    error = run_badly(job, Heard(), seconds=15)
    failure = error.result.failure
    assert (failure.kind, failure.rank, failure.node) == ("exception", 1, "node1"), str(error)
    if mode == "bash":  # it does not say where
        assert "a disk is full: " in failure.cause, str(error)
    else:
        assert f"the disk is full at {small_disk}" in failure.cause, str(error)
    assert "df -h" in failure.fix
    for word in words:
        assert word in str(error), str(error)


LEAN = {"PYTHONDONTWRITEBYTECODE": "1"}  # the package has room on the small disk, and no more than that


def make_nodes(small_disk):
    """Node 1 on the small disk."""
    first, second = local_nodes(2)
    return [first, replace(second, folder=str(small_disk))]


@pytest.mark.parametrize("mode", ["report", "quiet"])
def test_46_a_full_disk_with_the_jobs_own_files_is_named(write, small_disk, mode, request):
    """Then the events of the rank have no room either; what is heard is its output, and that the disk has no room."""
    if mode != "quiet":
        request.getfixturevalue("warm_torchrun")
    nodes = make_nodes(small_disk)
    error = run_badly(
        TorchrunJob(write("train.py", FILL), [mode], nodes=nodes, env=LEAN), Heard(), seconds=15, force=True
    )
    failure = error.result.failure
    assert (failure.rank, failure.node) == (1, "node1"), str(error)
    assert f"the disk is full at {small_disk}" in failure.cause, str(error)
    assert "df -h" in failure.fix


# Code that somebody changed on a node after it was copied there.

SHORT = "import nodelaunch as launch; launch.report(1)"


def edit_code(node, how):
    (folder,) = Path(node.folder, "code").iterdir()
    if how == "changed":
        (folder / "script" / "train.py").write_text("print('mine')")
    elif how == "added":
        (folder / "script" / "torch.py").write_text("")
    else:
        (folder / "nodelaunch" / "node" / "report.py").unlink()
    return folder


def test_code_that_was_edited_after_the_preflight_is_named(write):
    """The preflight still counts, and has not seen it."""
    nodes = local_nodes(2)
    job = TorchrunJob(write("train.py", SHORT), nodes=nodes, **PYTHON)
    for how in ("changed", "added", "removed"):
        assert job.run(show=False, force=True).results == (1, 1)
        folder = edit_code(nodes[1], how)
        with pytest.raises(LabError) as caught:
            job.run(show=False)
        assert_explains(caught.value, "node1", f"{folder} is not what its name says"[:90], f"rm -r -- {folder}")
        shutil.rmtree(folder)


# The variable of a job's id, set in a shell.


def test_to_stop_a_job_from_a_shell_that_seems_to_be_its_own_spares_the_shell(root):
    """Only what stands above the command; all else that carries the id is ended, as it was asked for."""
    env = {**os.environ, "PYTHONPATH": str(root), "LAB_JOB_ID": "of-the-shell"}
    other = subprocess.Popen(["sleep", "60"], env=env)
    try:
        stop = f"{shlex.quote(sys.executable)} -m nodelaunch stop of-the-shell; echo the shell lives"
        done = subprocess.run(["bash", "-c", stop], env=env, capture_output=True, text=True, timeout=300)
        assert "the shell lives" in done.stdout and "1 process(es) of of-the-shell ended" in done.stdout, done
        assert other.wait(5) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()
