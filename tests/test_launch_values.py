"""Values that a job cannot use: other types, unreadable scripts, folders that cannot be written."""

import os

import numpy as np
import pytest
from harness.drawn import assert_explains

from lab_common import LabError
from nodelaunch import DataFolder, TorchrunJob, local_nodes, slurm_nodes

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def script(write):
    return write("train.py", "print('trained')")


def make_job(script, **options):
    return TorchrunJob(script, **{"nodes": local_nodes(1), "port": 29500, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": "29500 $(touch x)"}, ["port is a whole number", "'29500 $(touch x)'", "port=29500"]),
        ({"port": 80000}, ["port is a whole number from 1 to 65535, not 80000"]),
        ({"nproc_per_node": True}, ["nproc_per_node", "True"]),
        ({"args": "--lr 0.1"}, ["args is a list", "fix: args=['--lr', 0.1]"]),
        ({"env": {"A": None}}, ["env['A'] is a text or a number, not None"]),
        ({"env": {"A=$(touch canary)": "x"}}, ["env is a dictionary", "a variable's name has letters"]),
        ({"limit": float("nan")}, ["limit is a number of seconds", "nan"]),
        ({"files": "helper.py"}, ["files is a list of paths, not 'helper.py'"]),
        ({"nodes": []}, ["nodes is a list of nodes, not []", "at least one"]),
        ({"nodes": [*local_nodes(1), *slurm_nodes(1)]}, ["not on both"]),
        ({"rank_order": "size"}, ["rank_order is 'address' or 'nodes', not 'size'"]),
        ({"data": "digits"}, ["data is a DataFolder, not 'digits'", "DataFolder('/my/digits'"]),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,  # a value may show a folder
)
def test_a_value_of_another_type_is_refused(script, options, words):
    with pytest.raises(LabError) as caught:
        make_job(script, **options)
    assert caught.value.where and caught.value.fix and len(caught.value.what) <= 120
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_numbers_of_numpy_and_paths_are_taken(script, tmp_path):
    path = tmp_path / "a b"
    args = [np.int64(3), np.float32(0.5), np.str_("x"), path, True, 1e-3]
    job = make_job(str(script), port=np.int32(29500), nproc_per_node=np.int64(2), args=args, limit=np.float64(5))
    assert job.args == ("3", "0.5", "x", str(path), "True", "0.001")
    assert (type(job.port), type(job.nproc_per_node), type(job.limit)) == (int, int, float)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataFolder("~nobody-has-this-name/x", "x", "index.json"), ["path is a path", "home"]),
        (lambda: local_nodes("2"), ["count is a whole number from 1 to 16, not '2'", "local_nodes"]),
        (lambda: local_nodes(2, folder="/home/me/a:b"), ["':'"]),
        (lambda: slurm_nodes(2, extra="--gpus-per-node=1"), ["extra is a list of", "'--gpus-per-node=1'"]),
    ],
)
def test_nodes_and_data_of_other_values_are_refused(make, words):
    with pytest.raises(LabError) as caught:
        make()
    assert_explains(caught.value, *words)


def test_a_home_is_known_in_each_path_of_a_job(monkeypatch, script):
    monkeypatch.setenv("HOME", str(script.parent))
    home = script.parent.resolve()
    job = make_job(f"~/{script.name}", files=["~/helper.py"])
    assert (job.spec.script, job.spec.files) == (home / script.name, (home / "helper.py",))
    assert make_job(f"~/{script.name}", root="~").spec.script == make_job(script.name, root="~").spec.script
    assert DataFolder("~/images", name="images", identity="index.json").path == home / "images"


def make_large(path):
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, ["There is no file 'train.py' to run", "typo"]),
        (os.mkfifo, ["no regular file", "pipe"]),
        (make_large, ["too large for a job: 3,072 MiB", "data=DataFolder("]),
    ],
    ids=["nothing", "FIFO", "large"],
)
def test_a_file_that_cannot_be_a_script_is_named(tmp_path, write, make, words):
    path = tmp_path / "train.py"
    make(path)
    for options in ({"script": path}, {"script": write("other.py", ""), "files": [path]}):
        with pytest.raises(LabError) as caught:
            make_job(**options).write()
        assert_explains(caught.value, *words)
