"""Lab 12 outside of its notebook: its figure where little is proven, and its script on hosts and on Slurm."""

import sys
from dataclasses import replace

import pytest
import torch

import nodelaunch as launch
from course import frameworks
from lab_utils.timing import Timing

JUMPS = (1, -2, 0, 2, -1, 0), (-2, -1, 0, 0, 1, 2)  # in each round another loop is the slower by chance
LOOPS = {"lab 5": 1.0, "Lightning": 1.2, "Fabric": 1.0, "Accelerate": 1.0}


def make_timing(name, seconds, spread):
    return Timing(name, tuple(seconds + spread * jump for jump in JUMPS[name == "lab 5"]))


@pytest.fixture
def draw(run_cells_of, monkeypatch):
    """Draws the figure of two batch sizes, the second as long as the first; returns its Axes."""
    monkeypatch.setattr(frameworks, "find_python", lambda _: sys.executable)  # the figure does not need it

    def run(spread):
        found = {}
        for case, loops in {"batch of 8": LOOPS, "DDP, batches of 32": {**LOOPS, "DDP": 1.0}}.items():
            found[case] = [make_timing(name, seconds, spread) for name, seconds in loops.items()]
        return run_cells_of("12_lightning", "overhead", found=found, noise="", my_milliseconds=None)["axes"]

    return run


@pytest.mark.parametrize(("spread", "heights"), [(0.01, {0.2}), (0.2, set())], ids=["proven", "nothing proven"])
def test_a_bar_stands_only_where_a_difference_is_proven(draw, spread, heights):
    axes = draw(spread)
    for ax, times in zip(axes, (1e3, 100), strict=True):
        found = {round(bar.get_height() / times, 6) for bar in ax.patches}
        assert {height for height in found if height > 0} == heights
        assert [label.get_text() for label in ax.get_xticklabels()] == ["Lightning", "Fabric", "Accelerate", "DDP"]


@pytest.fixture
def train(root, runs, tmp_path):
    """Trains by the lab's script on nodes, one process on each; returns the weights."""

    def run(name, nodes):
        saved = tmp_path / f"{name}.ckpt"
        sizes = ["--data", "shapes10", "--images", 320, "--batch-size", 32, "--nodes", 2, "--checkpoint", saved]
        more = {"root": root / "notebooks" / "scripts", "env": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}}
        launch.TorchrunJob("train_lightning.py", sizes, nodes=nodes, **more).run(show=False)
        return torch.load(saved)["state_dict"]

    return run


def test_the_weights_are_the_same_on_two_hosts_and_on_slurm(train, lightning, hosts, slurm, tmp_path):
    python = str(lightning)
    here = train("local", [replace(node, python=python) for node in launch.local_nodes(2)])
    by_ssh = launch.ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs", python=python)
    by_slurm = launch.slurm_nodes(2, folder=tmp_path / "slurm", python=python)
    for way, nodes in {"hosts": by_ssh, "slurm": by_slurm}.items():
        there = train(way, nodes)
        assert all(torch.equal(there[name], one) for name, one in here.items()) and there.keys() == here.keys(), way
