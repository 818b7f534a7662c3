"""Values that a job cannot use: other types, unreadable scripts, folders that cannot be written."""

import os
import socket
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from harness.drawn import assert_explains
from harness.forked import drop_root_rights, run_forked

from lab_common import LabError
from nodelaunch import DataFolder, TorchrunJob, local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.__main__ import main
from nodelaunch.backends.ssh import SshNode
from nodelaunch.bundle import TOTAL, collect_files
from nodelaunch.node.facts import hash_tree
from nodelaunch.packages import find_packages

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def script(write):
    return write("train.py", "print('trained')")


def make_job(script, **options):
    return TorchrunJob(script, **{"nodes": local_nodes(1), "port": 29500, **options})


def make_data(**options):
    return DataFolder(**{"path": "digits", "name": "digits", "identity": "index.json", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": "29500 $(touch x)"}, ["port is a whole number", "'29500 $(touch x)'", "of the type str"]),
        ({"port": 80000}, ["port", "80000", "out of that range", "port=29500"]),
        ({"port": True}, ["port", "True"]),
        ({"max_restarts": "1; touch x"}, ["max_restarts", "touch x"]),
        ({"nproc_per_node": 2.0}, ["nproc_per_node", "2.0", "float"]),
        ({"args": "--lr 0.1"}, ["args", "one text is one argument", "fix: args=['--lr', '0.1']"]),
        ({"args": ["a", b"b"]}, ["args", "bytes"]),
        ({"args": ["a\0"]}, ["args", "NUL"]),
        ({"args": ["\ud800"]}, ["args", "half a character"]),
        ({"env": {"A": None}}, ["env['A']", "NoneType"]),
        ({"env": {"A": "\0"}}, ["NUL"]),
        ({"env": {1: "a"}}, ["variable", "1"]),
        ({"env": {"A=$(touch canary)": "x"}}, ["variable"]),
        ({"env": {"job": "x"}}, ["job cannot be set"]),
        ({"env": ["A=1"]}, ["env", "list"]),
        ({"env": {"OMP_NUM_THREADS": "4,2"}}, ["OMP_NUM_THREADS", "4,2"]),
        ({"join_timeout": float("nan")}, ["join_timeout", "nan"]),
        ({"hang_timeout": "60"}, ["hang_timeout", "str"]),
        ({"limit": -1}, ["limit", "-1"]),
        ({"files": "helper.py"}, ["files", "fix: files=['helper.py']"]),
        ({"nodes": "node0"}, ["nodes", "str"]),
        ({"nodes": [None]}, ["nodes is a list of nodes", "[None]"]),
        ({"nodes": local_nodes(1)[0]}, ["nodes is a list of nodes", "fix: nodes=[node]"]),
        ({"nodes": [*local_nodes(1), *slurm_nodes(1)]}, ["not on both"]),
        ({"rank_order": "size"}, ["rank_order is 'address' or 'nodes', not 'size'"]),
        ({"rank_order": "nodes", "max_restarts": 1}, ["Only torchrun restarts", "static rendezvous"]),
        ({"data": "digits"}, ["data is a DataFolder", "'digits'", "of the type str", "DataFolder('/my/digits'"]),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,  # a value may show a folder
)
def test_a_value_of_another_type_is_refused(script, options, words):
    with pytest.raises(LabError) as caught:
        make_job(script, **options)
    assert caught.value.where and caught.value.fix and len(caught.value.what) <= 120
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_was_checked_does_not_change(script, tmp_path, monkeypatch):
    job = make_job(script, args=["a"], env={"A": "1"})
    with pytest.raises(TypeError):
        job.env["A"] = "$(touch x)"
    with pytest.raises(AttributeError):
        job.args.append(b"")
    with pytest.raises(LabError) as caught:
        job.limit = 5
    assert_explains(caught.value, "limit of a job cannot be changed", "TorchrunJob(…, limit=…)")
    with pytest.raises(FrozenInstanceError):
        job.spec.limit = 1.0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "digits").symlink_to("real")
    assert make_data().path == tmp_path / "real", "a link would be copied as one"


def test_numbers_of_numpy_and_paths_are_taken(script, tmp_path):
    path = tmp_path / "a b"
    args = [np.int64(3), np.float32(0.5), np.str_("x"), path, True, 1e-3]
    job = make_job(str(script), port=np.int32(29500), nproc_per_node=np.int64(2), args=args, limit=np.float64(5))
    assert job.args == ("3", "0.5", "x", str(path), "True", "0.001")
    assert (type(job.port), type(job.nproc_per_node), type(job.limit)) == (int, int, float)
    assert len(local_nodes(np.int64(2))) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_data(path=3), ["path is a path", "int"]),
        (lambda: make_data(path="~nobody-has-this-name/x"), ["path", "home"]),
        (lambda: make_data(copy_data="no"), ["copy_data is True or False", "'no'"]),
        (lambda: local_nodes("2"), ["count is a whole number from 1 to 16, not '2'", "local_nodes"]),
        (lambda: local_nodes(2, folder=b"x"), ["folder", "bytes"]),
        (lambda: local_nodes(2, folder="/home/me/a:b"), ["':'", "PYTHONPATH"]),
        (lambda: ssh_nodes([None]), ["names", "NoneType"]),
        (lambda: ssh_nodes(["n1"], python=3), ["python", "int"]),
        (lambda: ssh_nodes(["n1"], folder="a\0b"), ["NUL"]),
        (lambda: ssh_nodes(["n1"], interface=1), ["interface", "int"]),
        (lambda: replace(SshNode(name="n1"), address="10.0.0.1; touch x"), ["address is an IPv4 address"]),
        (lambda: slurm_nodes(0), ["count is a whole number from 1 to 1000, not 0"]),
        (lambda: slurm_nodes(2, extra="--gpus-per-node=1"), ["extra", "fix: extra=['--gpus-per-node=1']"]),
    ],
)
def test_nodes_and_data_of_other_values_are_refused(make, words):
    with pytest.raises(LabError) as caught:
        make()
    assert_explains(caught.value, *words)


@pytest.mark.parametrize("option", ["--port=80000", "--nproc-per-node=-1"])
def test_the_command_line_refuses_what_no_port_and_no_number_is(option, capsys):
    assert main(["preflight", option]) == 1
    said = capsys.readouterr().err
    assert option[2:].split("=")[0].replace("-", "_") in said and "fix:" in said and "Traceback" not in said


def test_a_home_is_known_in_each_path_of_a_job(monkeypatch, script):
    monkeypatch.setenv("HOME", str(script.parent))
    home = script.parent.resolve()
    job = make_job(f"~/{script.name}", files=["~/helper.py"])
    assert (job.spec.script, job.spec.files) == (home / script.name, (home / "helper.py",))
    assert make_job(f"~/{script.name}", root="~").spec.script == make_job(script.name, root="~").spec.script
    assert DataFolder("~/images", name="images", identity="index.json").path == home / "images"


@pytest.mark.parametrize("text", ["4,2", "four", "0", "²"])
def test_a_number_of_threads_that_is_none_is_refused(script, monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(LabError) as caught:
        make_job(script).write()
    assert_explains(caught.value, "not a thread count", "the variable OMP_NUM_THREADS", "export OMP_NUM_THREADS=4")


# Scripts that cannot be read.


def make_unreadable(folder, kind):
    path = folder / "train.py"
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to nowhere":
        path.symlink_to("gone.py")
    elif kind == "circle":
        path.symlink_to("train.py")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif kind == "below a file":
        (folder / "file").touch()
        return folder / "file" / "train.py"
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", ["There is no file 'train.py' to run", "typo"]),
        ("below a file", ["There is no file 'train.py' to run"]),
        ("link to nowhere", ["There is no file", "link"]),
        ("circle", ["leads nowhere"]),
        ("folder", ["'train.py' is no regular file", "folder"]),
        ("FIFO", ["no regular file", "pipe"]),
        ("socket", ["no regular file", "socket"]),
        ("device", ["no regular file", "device"]),
        ("large", ["too large for a job: 3,072 MiB", "data=DataFolder("]),
    ],
)
@pytest.mark.parametrize("where", ["script", "files"])
def test_a_file_that_cannot_be_a_script_is_named_at_once(tmp_path, write, monkeypatch, kind, words, where):
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    path, begun = make_unreadable(tmp_path, kind), time.monotonic()
    with pytest.raises(LabError) as caught:
        if where == "script":
            make_job(path).write()
        else:
            make_job(write("other.py", ""), files=[path]).write()
    assert time.monotonic() - begun < 2
    assert_explains(caught.value, *words)


def test_a_file_at_the_limit_is_taken(tmp_path):
    for size in (TOTAL, TOTAL + 1):
        with (tmp_path / "train.py").open("wb") as file:
            file.truncate(size)
        if size == TOTAL:
            assert len(collect_files(tmp_path / "train.py").files["script/train.py"]) == size
    with pytest.raises(LabError, match="too large"):
        collect_files(tmp_path / "train.py")


def write_without_rights(script, nodes):
    drop_root_rights()
    return [str(path) for path in make_job(script, nodes=nodes).write()]


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
@pytest.mark.parametrize("locked", ["file", "folder"])
def test_a_script_without_the_right_to_read_it_is_named(write, locked):
    path = write("own/train.py", "print()")
    (path if locked == "file" else path.parent).chmod(0)
    try:
        with pytest.raises(LabError) as caught:
            run_forked(write_without_rights, path, local_nodes(1))
    finally:
        path.parent.chmod(0o755)
    assert_explains(caught.value, "'train.py' cannot be read", "Permission denied", "chmod u+r", str(path))


def test_what_editors_leave_in_the_package_is_no_code(tmp_path, script, monkeypatch):
    """A checkpoint of Jupyter has no part in the hash that a node's copy is judged by; a lock is a link to nowhere."""
    package = tmp_path / "mine"
    (package / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("__init__.py", "job.py", ".ipynb_checkpoints/job-checkpoint.py"):
        (package / name).write_text(f"# {name}")
    (package / ".#job.py").symlink_to("me@here.1234:5678")
    monkeypatch.syspath_prepend(tmp_path)
    script.write_text("import mine")
    bundle = collect_files(script)
    own = {name for name in bundle.files if name.split("/")[0] not in ("lab_common", "nodelaunch")}
    assert own == {"mine/__init__.py", "mine/job.py", "script/train.py"}
    for name, content in bundle.files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    assert hash_tree(tmp_path / "copy") == bundle.hash


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import one", {"one"}),
        ("import os, one.inner as x, numpy", {"one"}),
        ("def f():\n    from one.inner import x", {"one"}),
        ("from two import *", {"one", "two"}),  # which imports the other
        ("from . import one", set()),
        ("import three", {"three"}),
        ("import torch\nfrom pathlib import Path\nimport nothing_of_this_name", set()),
        ("important = 'import'\ndef f(:", set()),
        ("from lab_utils import data", {"lab_utils", "lab_common"}),
    ],
)
def test_packages_of_one_s_own_travel_with_a_script(tmp_path, monkeypatch, source, names):
    for name, text in {"one": "", "two": "from one import inner"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "one" / "inner.py").write_text("x = 1")
    (tmp_path / "three.py").write_text("import json")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(find_packages([source.encode()])) == names


def test_a_rank_loads_little_of_ours(script):
    """The launcher's side stays on the launcher's side: what a rank imports is paid for by each rank of each job."""
    script.write_text(
        "import sys\nimport nodelaunch as launch\nlaunch.report(0)\n"
        "launch.report(sorted(n for n in sys.modules if n.split('.')[0] in ('lab_common', 'nodelaunch')))"
    )
    (loaded,) = TorchrunJob(script, nodes=local_nodes(1)).run(show=False, force=True).results
    assert "nodelaunch.node.report" in loaded and len(loaded) <= 12, loaded


# Folders that cannot be written.


def far_node():
    return [replace(ssh_nodes(["far"], folder="/f", python="/p/python", interface="eth0")[0], address="10.0.0.1")]


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
@pytest.mark.parametrize("make_nodes", [far_node, lambda: local_nodes(1)], ids=["elsewhere", "here"])
@pytest.mark.parametrize("trouble", ["is a file", "locked", "full"])
def test_a_folder_of_jobs_that_cannot_be_written_is_named(script, runs, make_nodes, trouble, request, monkeypatch):
    words = ["The folder of the job cannot be written", "export LAB_RUNS"]
    if trouble == "is a file":
        runs.write_text("not a folder")
        words.append("Not a directory")
    elif trouble == "locked":
        runs.mkdir(mode=0o500)
        words.append("Permission denied")
    elif trouble == "full":
        disk = request.getfixturevalue("small_disk")
        fill(disk)
        monkeypatch.setenv("LAB_RUNS", str(disk / "runs"))
        words = [f"The disk is full at {disk}"[:100], "No space left", "export LAB_RUNS"]
    with pytest.raises(LabError) as caught:
        run_forked(write_without_rights, script, make_nodes())
    assert_explains(caught.value, *words)


def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(2**16))
