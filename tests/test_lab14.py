"""Lab 14 outside of its notebook: its frameworks on two hosts, what it says of them, and what late gradients do."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from subprocess import PIPE, STDOUT

import nbformat
import numpy as np
import pytest
import torch

import nodelaunch as launch
from course.ranks import fork_ranks
from lab_common import LabError

NOTEBOOK = "14_other_frameworks"
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def beside_the_scripts(root, monkeypatch):
    """The notebook imports scripts/ from its own folder."""
    monkeypatch.syspath_prepend(root / "notebooks")


@pytest.fixture
def sources(root):
    """The source of each cell, by id."""
    return {cell.id: cell.source for cell in nbformat.read(root / "notebooks" / f"{NOTEBOOK}.ipynb", 4).cells}


@pytest.fixture
def start(run_cells_of, runs):
    """The start that the lab writes for all frameworks."""
    return run_cells_of(NOTEBOOK, "settings", "start")["START"]


@pytest.fixture
def take_steps(root, start, tmp_path):
    """Takes the lab's ten steps in a framework, on nodes; returns what its script wrote."""

    def run(name, nodes, *options):
        out = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.npz"
        more = {"root": root / "notebooks" / "scripts", "env": CPU, "nodes": nodes}
        if name != "torch":
            more |= {"program": ["python"]}
        launch.TorchrunJob(f"same_{name}.py", [start, out, *options], **more).run(show=False)
        return dict(np.load(out))

    return run


def list_hosts(hosts, python):
    """Both hosts, with a framework's Python, as the lab's nodes on this machine have it."""
    return launch.ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs", python=str(python))


def assert_torch_s(found, torch_found):
    """The losses and weights of torch, in both precisions."""
    assert len(torch_found) == 2 * 9
    for name, one in torch_found.items():
        assert np.abs(one - found[name]).max() <= (1e-6 if name.startswith("float32") else 1e-14), name


def test_jax_takes_torch_s_steps_on_two_hosts(take_steps, hosts, jax):
    assert_torch_s(take_steps("jax", list_hosts(hosts, jax)), take_steps("torch", launch.local_nodes(2)))


def test_tensorflow_takes_torch_s_steps_on_two_hosts(take_steps, hosts, tensorflow, run_cells_of, runs):
    write = run_cells_of(NOTEBOOK, "tf-config")["write_tf_config"]
    addresses = [f"{hosts.address(node)}:12345" for node in ("n1", "n2")]
    there = take_steps("tensorflow", list_hosts(hosts, tensorflow), *(write(addresses, index) for index in range(2)))
    assert_torch_s(there, take_steps("torch", launch.local_nodes(2)))


def test_horovod_takes_torch_s_steps_on_two_hosts(root, start, take_steps, hosts, horovod, tmp_path):
    """By its own launcher, which is told the interface between the hosts and starts what it needs by ssh."""
    folder, out = tmp_path / "bin", tmp_path / "horovod.npz"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {hosts.inner_config} "$@"\n')
    (folder / "ssh").chmod(0o755)
    words = ["--gloo", "-np", "2", "-H", "n1:1,n2:1", "--network-interfaces", "eth0", horovod]
    words += [root / "notebooks" / "scripts" / "same_torch.py", start, out, "--horovod"]
    environment = {**os.environ, **CPU, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [horovod.with_name("horovodrun"), *words]
    with hosts.popen_in_n0(list(map(str, command)), env=environment, stdout=PIPE, stderr=STDOUT, text=True) as run:
        text = run.communicate(timeout=240)[0]
    assert run.returncode == 0, text
    assert_torch_s(dict(np.load(out)), take_steps("torch", launch.local_nodes(2)))


def test_the_lab_s_horovod_script_trains_as_ddp_s_does(root, horovod, tmp_path):
    """By Horovod's own launcher, and again from its checkpoint: the weights of lab 5's script, bit for bit."""
    options = ["--data", "shapes10", "--images", "320", "--batch-size", "32"]
    programs = {
        "horovod": [horovod.with_name("horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2", horovod],
        "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }
    for epochs in ("1", "2"):
        for name, program in programs.items():
            script, saved = root / "notebooks" / "scripts" / f"train_{name}.py", tmp_path / f"{name}.pt"
            command = [*program, script, *options, "--epochs", epochs, "--checkpoint", saved]
            subprocess.run(command, check=True, timeout=300, env={**os.environ, **CPU}, capture_output=True)
        found, right = (torch.load(tmp_path / f"{name}.pt")["model"] for name in programs)
        assert all(torch.equal(found[name], one) for name, one in right.items()), epochs


def test_the_diff_from_horovod_to_torch_is_that_of_the_scripts(root, sources):
    """Each removed line is in the one script, and each added line in the other, up to its arguments."""
    (diff,) = re.findall(r"```diff\n(.*?)```", sources["migrate"], re.DOTALL)
    scripts = {"-": "train_horovod.py", "+": "train_ddp.py"}
    texts = {sign: (root / "notebooks" / "scripts" / name).read_text() for sign, name in scripts.items()}
    lines = [line for line in diff.splitlines() if not line.startswith("+#")]
    calls = ("init(", "local_rank(", "DistributedOptimizer(", "broadcast_parameters(", "broadcast_optimizer_state(")
    assert all(f"hvd.{call}" in diff for call in (*calls, "allreduce(")), "each of Horovod's is there"
    for line in lines:
        assert line[1:].partition("(")[0].replace("rank, size =", "") in texts[line[0]], line


@pytest.mark.parametrize(
    ("exact", "gaps", "holds"),
    [
        (False, (9e-7, 9e-15), True),
        (False, (2e-6, 0.0), False),
        (True, (6e-8, 0.0), False),
    ],
)
def test_a_framework_that_computes_something_else_breaks_the_lab_s_claim(run_cells_of, runs, exact, gaps, holds):
    rows = {dtype: {"gap": gap} for dtype, gap in zip(("float32", "float64"), gaps, strict=True)}
    with contextlib.nullcontext() if holds else pytest.raises(LabError, match="largest difference"):
        run_cells_of(NOTEBOOK, "claims", FOUND={"horovod" if exact else "jax": rows})


def test_a_gradient_of_age_0_is_plain_training_and_an_older_one_is_late(run_cells_of, runs, monkeypatch):
    """By hand: weights after three updates, whose gradients were computed at those of ``age`` updates before."""
    monkeypatch.setattr("lab_utils.engines.share", lambda *functions: None)
    servers = {"serve_in_turn": None, "serve_at_once": None}
    cells = run_cells_of(NOTEBOOK, "worker", "gradient", "train", "late", **servers)
    seen = []
    cells["train_late"].__globals__.update(
        make_worker=lambda seed: lambda weights: seen.append(weights.clone()) or torch.ones_like(weights),
        score=lambda weights: weights,
    )
    first = cells["flatten"](cells["build"]().parameters())
    for age in (0, 1, 2):
        seen.clear()
        last = cells["train_late"](age, 4, 0.5)
        torch.testing.assert_close(last, first - 4 * 0.5)
        for update, weights in enumerate(seen):
            torch.testing.assert_close(weights, first - 0.5 * max(update - age, 0))


@pytest.mark.parametrize("style", ["as in the lab", "an array of ages, and the weights returned"])
def test_the_ranks_train_with_servers_of_any_style(run_cells_of, runs, monkeypatch, style):
    """On forked ranks, two workers and one that has no work: weights, ages, and nobody waits at the end."""
    monkeypatch.setattr("lab_utils.engines.share", lambda *functions: None)
    cells = run_cells_of(NOTEBOOK, "in-turn", "at-once", "worker", "gradient", "train")
    train = cells["train_on_ranks"]
    in_turn, at_once = cells["serve_in_turn"], cells["serve_at_once"]
    if style != "as in the lab":
        in_turn = lambda weights, *words: cells["serve_in_turn"](weights, *words) or weights  # noqa: E731
        at_once = lambda *words: torch.tensor(cells["serve_at_once"](*words))  # noqa: E731

    def take_part(rank):
        return [train(in_turn, [0.0] * 2, 4, 0.05), train(at_once, [0.0] * 2, 8, 0.05, at_once=True)]

    first, *others = (one.value for one in fork_ranks(take_part, None, 4, limit=60))
    assert others == [[None, None]] * 3
    start = cells["flatten"](cells["build"]().parameters())
    workers = [cells["make_worker"](seed) for seed in (1, 2)]
    for _ in range(4):
        start -= 0.05 * sum(find(start) for find in workers) / 2
    torch.testing.assert_close(first[0]["weights"], start)
    assert first[0]["ages"] == [] and len(first[1]["ages"]) == 8 and 0 <= sum(first[1]["ages"]) <= 8
