"""Copies of code and folders of jobs on a node: received whole, and removed when they are old and no job uses them."""

import os
import threading
import time
from pathlib import Path

import pytest
from harness.forked import drop_root_rights, run_forked

from nodelaunch import local_nodes
from nodelaunch.copying import send
from nodelaunch.node import agent
from nodelaunch.node.cleaning import DAY, HOUR, KINDS, trim
from nodelaunch.node.facts import hash_files
from nodelaunch.spec import make_launch

JOB = "train-0102-030405-abcd"
FILES = {"a.py": b"pass"}
CODE = f"code/{hash_files(FILES)}"


@pytest.fixture
def node(runs):
    """A node of this machine."""
    (found,) = local_nodes(1)
    return found


@pytest.fixture
def folder(node):
    """Its folder."""
    found = Path(node.folder)
    found.mkdir(parents=True)
    return found


def make(path, *, hours=500.0):
    """Makes a folder with a file, last used that many hours ago."""
    path.mkdir(parents=True)
    (path / "file").write_text("x")
    os.utime(path, (time.time() - hours * HOUR,) * 2)
    return path


def make_code(folder, count):
    """Makes that many folders of code, the oldest first."""
    return [make(folder / "code" / f"{index:064x}", hours=500 - index) for index in range(count)]


def list_all(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_launch_keeps_what_is_new_or_in_use(folder, monkeypatch):
    """A running job marks its folders every few minutes, also on another node that shares them."""
    first, used, *others = make_code(folder, KINDS["code"][1] + 4)
    jobs = [make(folder / "jobs" / make_launch(name).id) for name in ("train", "a b", "é", "x" * 80, "--", "v1-2") * 18]
    left = [make(folder / ".receiving-old"), make(folder / ".receiving-new", hours=DAY / HOUR - 1)]
    monkeypatch.setenv("LAB_JOB_FOLDER", str(jobs[0] / "node0"))
    monkeypatch.setattr(agent, "__file__", str(used / "nodelaunch/node/agent.py"))
    agent._wait(0.01)
    young = make(folder / "code" / ("f" * 64), hours=0.9)
    trim(folder)
    assert {*(folder / "code").iterdir()} == {young, used, *others[-(KINDS["code"][1] - 2) :]} and not first.exists()
    assert len([*(folder / "jobs").iterdir()]) == KINDS["jobs"][1] and jobs[0].exists()
    assert [path.exists() for path in left] == [False, True]


def test_nothing_but_old_folders_of_ours_is_removed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("nodelaunch.node.cleaning.KINDS", {k: (names, 0, DAY) for k, (names, _, _) in KINDS.items()})
    for name in (f"work/{JOB}", f"data/{'e' * 64}", "code/mine", f"code/{'e' * 63}", f"jobs/{JOB}-2", "jobs/mine"):
        make(folder / name)
    (make(folder / "jobs" / JOB) / "output.log").touch()  # the launcher's own record
    make(tmp_path / "precious")
    (folder / "code" / ("d" * 64)).symlink_to(tmp_path / "precious")
    os.utime(folder / "jobs" / JOB, (0, 0))
    before = list_all(folder)
    trim(folder)
    assert list_all(folder) == before and (tmp_path / "precious/file").exists()


def test_the_program_that_is_sent_copies_and_removes(node, folder):
    make_code(folder, 25)
    sent = {CODE: FILES, f"jobs/{JOB}": {"node0.sh": b"true"}}
    make(folder / "jobs" / JOB)  # a script that was started by hand has made it already
    assert send(node, node.folder, sent, started=[])
    assert len(list((folder / "code").iterdir())) == 20
    assert list_all(folder / "jobs" / JOB) == {"node0.sh", "file"}
    (folder / CODE / "a.py").write_text("fail")
    assert not send(node, node.folder, sent, started=[]), "code was changed"
    assert (folder / CODE / "a.py").read_text() == "fail", "and is left alone"


def test_copies_at_the_same_time_do_not_disturb_each_other(node, folder):
    """As with nodes that share a folder."""
    make_code(folder, 100)
    told = []

    def copy(number):
        sent = {CODE: FILES, f"jobs/t-0102-030405-{number:04x}": {"node0.sh": b"true"}}
        told.append(send(node, node.folder, sent, started=[]))

    threads = [threading.Thread(target=copy, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [True] * 4
    assert len(list((folder / "code").iterdir())) == 20 and len(list((folder / "jobs").iterdir())) == 4
    assert not list(folder.glob(".receiving-*"))


def test_what_cannot_be_removed_stays_whole_and_ends_no_launch(folder):
    make_code(folder, 25)
    before = list_all(folder)

    def run():
        drop_root_rights()
        (folder / "code").chmod(0o500)
        trim(folder)
        (folder / "code").chmod(0o700)

    run_forked(run)
    assert list_all(folder) == before
