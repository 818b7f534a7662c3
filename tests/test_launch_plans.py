"""Settings of each node: the nodes that LAB_NODES names, their shares of cores and GPUs, and the data set."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from harness.drawn import assert_explains, make_folder, make_pack
from harness.jobs import copy_code

from lab_common import LabError
from lab_utils import data
from nodelaunch import DataFolder, TorchrunJob, choose_nodes, local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.backends.local import LocalNode
from nodelaunch.backends.slurm import SlurmNode
from nodelaunch.backends.ssh import SshNode
from nodelaunch.preflight import Preflight
from nodelaunch.script import list_variables, place_nodes
from nodelaunch.spec import make_launch

LOAD = """
from lab_utils import data
import nodelaunch as launch
dataset = data.load("shapes10")
launch.report([len(dataset.train), int(dataset.train.images[:20].sum()), dataset.train.labels[:20].tolist()])
"""


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """A machine with eight cores and no GPU, on which nothing was set."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "data"))
    names = "OMP_NUM_THREADS CUDA_VISIBLE_DEVICES LAB_SCALE LAB_NODES LAB_SSH_CONFIG LAB_NODES_DATA"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    set_gpus(tmp_path, monkeypatch, count=0)


def set_gpus(folder, monkeypatch, count, status=0):
    """Puts an nvidia-smi of so many GPUs in front of what is installed."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    rows = "".join(f"{index}, NVIDIA H100, 10, 80000\n" for index in range(count))
    program = f"case $1 in --query-gpu*) printf %s {shlex.quote(rows)};; esac; exit {status}"
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tools / "nvidia-smi").chmod(0o755)
    if str(tools) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return path


def far_nodes(*names):
    """Hosts of which everything is known, so that nobody has to ask them."""
    nodes = ssh_nodes(names, folder="/f", python="/p/python", interface="eth0")
    return [replace(node, address=f"10.0.0.{number}") for number, node in enumerate(nodes, start=1)]


def place(script, nodes, **options):
    """The placements of a job, and the variables of each node's processes."""
    spec = TorchrunJob(script, nodes=nodes, port=29555, **options).spec
    places = place_nodes(spec, make_launch("train"), "hash", Preflight())
    return places, [list_variables(spec, each) for each in places]


def threads(*arguments, **options):
    return [each.threads for each in place(*arguments, **options)[0]]


def devices(*arguments, **options):
    return [each.get("CUDA_VISIBLE_DEVICES") for each in place(*arguments, **options)[1]]


# LAB_NODES.


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("", LocalNode, ["node0", "node1"]),
        ("local:3", LocalNode, ["node0", "node1", "node2"]),
        (" me@alice , 10.0.0.2, ", SshNode, ["me@alice", "10.0.0.2"]),
        ("slurm:2 --gpus-per-node=1 --account=course", SlurmNode, ["slurm0", "slurm1"]),
    ],
)
def test_lab_nodes_names_the_nodes(script, monkeypatch, text, kind, names):
    monkeypatch.setenv("LAB_NODES", text)
    nodes = choose_nodes()
    assert [node.name for node in nodes] == names
    assert {type(node) for node in nodes} == {kind}
    if kind is SlurmNode:
        text = TorchrunJob(script, nodes=nodes).write()[0].read_text()
        assert "#SBATCH --gpus-per-node=1 " in text and "#SBATCH --account=course " in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local:2 --gpus-per-node=1", ["count is a whole number", "'2 --gpus-per-node=1'"]),
        ("slurm:1001", ["from 1 to 1000, not 1001", "slurm_nodes"]),
        ("-oProxyCommand=touch canary", ["-oProxyCommand"]),
    ],
)
def test_lab_nodes_that_says_something_else_is_refused(monkeypatch, text, words):
    monkeypatch.setenv("LAB_NODES", text)
    with pytest.raises(LabError) as caught:
        choose_nodes()
    assert caught.value.fix and caught.value.where and len(caught.value.what) <= 120
    for word in words:
        assert word in str(caught.value)


def test_the_hosts_configuration_of_ssh_may_be_another(monkeypatch, tmp_path):
    monkeypatch.setenv("LAB_NODES", "alice,bob")
    monkeypatch.setenv("LAB_NODES_DATA", "/big/data")
    monkeypatch.setenv("LAB_SSH_CONFIG", str(tmp_path / "config"))
    assert {(node.data, node.config) for node in choose_nodes()} == {("/big/data", tmp_path / "config")}


# The share of each node.


@pytest.mark.parametrize(("count", "processes", "share"), [(1, 1, "8"), (2, 2, "2"), (3, 1, "2"), (2, 8, "1")])
def test_the_nodes_of_this_machine_share_its_cores(script, count, processes, share):
    assert threads(script, local_nodes(count), nproc_per_node=processes) == [share] * count


def test_a_number_of_threads_that_was_chosen_holds_on_every_node(script, monkeypatch):
    nodes = [*far_nodes("alice"), *local_nodes(1)]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(script, nodes) == ["3", "3"]
    places, variables = place(script, nodes, env={"OMP_NUM_THREADS": "5"})
    assert [each.threads for each in places] == ["5", "5"]
    assert not any("OMP_NUM_THREADS" in each for each in variables), "said once, where the script has its comment"


@pytest.mark.parametrize(
    ("gpus", "count", "processes", "expected"),
    [
        (0, 2, 1, [None, None]),
        (4, 1, 1, ["0"]),
        (8, 2, 2, ["0,1", "2,3"]),
        # One GPU cannot be two ranks' (NCCL refuses), and half of the nodes on a GPU is no fair comparison.
        (1, 2, 1, ["", ""]),
        (3, 2, 2, ["", ""]),
    ],
)
def test_each_node_of_this_machine_has_gpus_of_its_own(script, tmp_path, monkeypatch, gpus, count, processes, expected):
    set_gpus(tmp_path, monkeypatch, gpus)
    assert devices(script, local_nodes(count), nproc_per_node=processes) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("GPU-aa, GPU-bb", ["GPU-aa", "GPU-bb"]), ("5", ["", ""]), ("", [None, None])],
)
def test_only_gpus_that_are_visible_here_are_shared(script, tmp_path, monkeypatch, visible, expected):
    set_gpus(tmp_path, monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices(script, local_nodes(2)) == expected


# Settings and data.


def test_settings_reach_every_node_and_nothing_else_does(script, monkeypatch):
    monkeypatch.setenv("LAB_SCALE", "full")
    monkeypatch.setenv("SECRET", "of the learner")
    nodes = [*local_nodes(1), *far_nodes("alice"), replace(far_nodes("bob")[0], data="/big")]
    _, (here, there, given) = place(script, nodes)
    assert [each["LAB_SCALE"] for each in (here, there, given)] == ["full"] * 3
    assert here["LAB_DATA"] == os.environ["LAB_DATA"]
    assert [there["LAB_DATA"], given["LAB_DATA"]] == ["/f/data", "/big"]
    assert [here["LAB_RUNS"], there["LAB_RUNS"]] == [f"{local_nodes(1)[0].folder}/runs", "/f/runs"]
    assert set(there) == {"LAB_SCALE", "LAB_DATA", "LAB_RUNS"}
    assert place(script, local_nodes(1), env={"LAB_SCALE": "small"})[1][0]["LAB_SCALE"] == "small"


def name_pack(home: Path, **options) -> DataFolder:
    """The pack that `make_pack` makes there, as a job's data."""
    return DataFolder(
        home / "data" / "packed" / "shapes10", "packed/shapes10", "manifest.json", fix="make digits", **options
    )


def say_data(found):
    return {verdict.node: (verdict.state, verdict.found) for verdict in found.verdicts if verdict.check == "data"}


@pytest.mark.drill
def test_data_are_copied_to_hosts_when_asked_and_only_then(hosts, script, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_pack(tmp_path / "data")
    folder = f"/node/plans-{os.getpid()}"
    nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder=folder)
    script.write_text(LOAD)
    job = TorchrunJob(script, nodes=nodes, data=name_pack(tmp_path), program=["python"])
    red = job.preflight()
    assert not red.ok
    missing = f"{folder}/data/packed/shapes10/manifest.json is missing"
    assert say_data(red) == {"n1": ("red", missing), "n2": ("red", missing)}
    with pytest.raises(LabError) as caught:
        job.run(show=False)
    assert_explains(caught.value, "data", "copy_data=True")
    assert not hosts.run_on("n1", ["ls", f"{folder}/data"], check=False)

    copying = TorchrunJob(script, nodes=nodes, data=name_pack(tmp_path, copy_data=True), program=["python"])
    assert copying.preflight().ok
    results = copying.run(show=False).results
    assert results[0] == results[1]
    assert results[0][0] == 20, "drawn anew on the host, not copied"
    own = {path.name: path.read_bytes() for path in (tmp_path / "data" / "packed" / "shapes10").iterdir()}
    for node in ("n1", "n2"):
        far = hosts.disk(node) / Path(folder).relative_to("/node") / "data" / "packed" / "shapes10"
        assert {path.name: path.read_bytes() for path in far.iterdir()} == own
        assert not list(far.parents[2].glob(".receiving-*"))

    green = job.preflight()
    assert green.ok and {state for state, _ in say_data(green).values()} == {"ok"}
    hosts.run_on("n2", ["rm", f"{folder}/data/packed/shapes10/train-images.npy"])
    assert say_data(job.preflight())["n2"][0] == "red"


@pytest.mark.usefixtures("warm_ranks")
def test_a_pack_of_a_folder_of_images_is_known_here_and_copied_to_where_it_is_looked_for(script, tmp_path):
    """Such a pack has the folder's name in its own; a node without the folder takes it for an imported one."""
    make_folder(tmp_path / "data" / "cinic10")
    dataset = data.load()
    assert dataset.pack.name.startswith("cinic10-folder-")
    needs = {"data": DataFolder(**dataset.for_nodes)}
    copied = {"data": DataFolder(**dataset.for_nodes, copy_data=True)}
    ((state, found),) = set(say_data(TorchrunJob(script, nodes=local_nodes(2), **needs).preflight()).values())
    assert state == "ok" and found.startswith("the same")
    nodes = [replace(node, data=str(tmp_path / "big")) for node in local_nodes(1)]
    assert say_data(TorchrunJob(script, nodes=nodes, **needs).preflight())["node0"][0] == "red"
    job = TorchrunJob(script, nodes=nodes, **copied, env={"OMP_NUM_THREADS": 1})
    assert say_data(job.preflight())["node0"] == ("ok", "not there yet: will be copied")
    script.write_text(LOAD.replace("shapes10", "cinic10"))
    images, labels = dataset.train.images[:20], dataset.train.labels[:20]
    report = [len(dataset.train), int(images.sum()), labels.tolist()]
    assert job.run(show=False, force=True).results[0] == report
    assert (tmp_path / "big" / "packed" / "cinic10" / "manifest.json").exists()


def test_data_that_are_not_here_either_are_named(script, tmp_path):
    nodes = [replace(node, data=str(tmp_path / "big")) for node in local_nodes(1)]
    with pytest.raises(LabError) as caught:
        TorchrunJob(script, nodes=nodes, data=name_pack(tmp_path, copy_data=True)).run(show=False, force=True)
    assert_explains(caught.value, "packed/shapes10", "no manifest.json", "fix: make digits")


def test_data_are_copied_to_slurms_shared_folder(script, tmp_path):
    make_pack(tmp_path / "data")
    nodes = slurm_nodes(2, folder=tmp_path / "shared")
    for copied in (False, True):
        job = TorchrunJob(script, nodes=nodes, data=name_pack(tmp_path, copy_data=copied))
        job.write()
        copy_code(job)
        assert (tmp_path / "shared" / "data" / "packed" / "shapes10" / "manifest.json").exists() == copied
        assert (tmp_path / "shared" / "jobs" / job.id / "job.sbatch").exists()


def test_a_job_says_the_torchrun_command_that_it_stands_for(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    (one,) = local_nodes(1)
    assert TorchrunJob(script, ["--lr", 0.1, "a b"], [one], nproc_per_node=2).command == (
        "torchrun --standalone --nproc-per-node=2 train.py --lr 0.1 'a b'"
    )
    nodes = ssh_nodes(["me@gpu1", "gpu2"])  # whose addresses only the preflight finds
    assert TorchrunJob(script, nodes=nodes).command == (
        "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=gpu1:29500 --nproc-per-node=1 train.py"
    )
    assert TorchrunJob(script, nodes=[one], program=["python"]).command == "python train.py"
