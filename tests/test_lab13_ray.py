"""Lab 13's script for Ray: the same weights as under torchrun, with Ray's two workers on two hosts."""

import os
import re
import secrets
from pathlib import Path

import pytest
import torch

from nodelaunch import TorchrunJob, local_nodes

TRAIN = ["--data", "shapes10", "--images", "320", "--epochs", "1", "--batch-size", "32"]
HEAD = ["--head", "--port=6379", "--include-dashboard=false", "--temp-dir=/node/ray"]


class Cluster:
    """A Ray on the two hosts: a node on each."""

    def __init__(self, hosts, python: Path) -> None:
        self.hosts, self.python, self.address = hosts, python, f"{hosts.address('n1')}:6379"
        self.settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "GLOO_SOCKET_IFNAME": "eth0"}
        self.settings |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LAB_DATA": os.environ["LAB_DATA"]}
        self.token = secrets.token_hex(32)

    def run(self, node: str, program: str, *words: object, token: str = "", check: bool = True) -> str:
        """Runs a program of Ray's environment on a host; returns all that it prints."""
        settings = self.settings | {"RAY_AUTH_TOKEN": token or self.token}
        command = ["env", *(f"{name}={text}" for name, text in settings.items()), self.python.with_name(program)]
        both = ["sh", "-c", 'exec "$@" 2>&1', "sh"]  # what a worker prints comes on the standard error
        # Two nodes of Ray are a score of processes, which import for minutes where other tests have the two cores.
        return self.hosts.run_on(node, [*both, *map(str, [*command, *words])], check=check, timeout=900)

    def start(self, node: str, **options: object) -> str:
        words = ["start", "--num-cpus=1", "--object-store-memory=100000000"]
        words += HEAD if node == "n1" else [f"--address={self.address}"]
        return self.run(node, "ray", *words, f"--node-ip-address={self.hosts.address(node)}", **options)


@pytest.fixture
def cluster(hosts, ray):
    made = Cluster(hosts, ray)
    try:
        yield made
    finally:
        for node in ("n1", "n2"):
            made.run(node, "ray", "stop", "--force")


def read_weights(path: Path) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in torch.load(path)["model"].items()}


@pytest.mark.usefixtures("runs", "warm_torchrun")
def test_two_workers_on_two_hosts_compute_what_two_ranks_of_torchrun_compute(cluster, root, tmp_path):
    scripts = root / "notebooks" / "scripts"
    by_torchrun, by_ray = tmp_path / "torchrun.pt", tmp_path / "ray.pt"
    options = {"env": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, "root": scripts, "nproc_per_node": 2}
    job = TorchrunJob("train_ddp.py", [*TRAIN, "--checkpoint", by_torchrun], nodes=local_nodes(1), **options)
    job.run(show=False)
    cluster.start("n1")
    # A node with another token may not join.
    assert "InvalidAuthToken" in cluster.start("n2", token=secrets.token_hex(32), check=False)
    cluster.start("n2")
    words = [*TRAIN, "--address", cluster.address, "--checkpoint", by_ray]
    out = cluster.run("n1", "python", scripts / "train_ray.py", *words)
    found = re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=(\d), local_rank=0, node_rank=(\d)", out)
    assert {row[0] for row in found} == {cluster.hosts.address(node) for node in ("n1", "n2")}, out
    assert sorted(row[1:] for row in found) == [("0", "0"), ("1", "1")], out
    assert read_weights(by_ray) == read_weights(by_torchrun)
