"""The ports that a job opens to others: listed from another network namespace, and attacked."""

import os
import re
import signal
import subprocess
import sys

import pytest
from harness.jobs import TROUBLE, Heard, assert_gone, list_listeners, wait_for

import nodelaunch as launch
from nodelaunch import TorchrunJob, local_nodes, ssh_nodes

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("runs")]

# A local job of two nodes, started by a program of its own, which can be put into another namespace.
LAUNCHER = """
import sys
from nodelaunch import TorchrunJob, local_nodes
script, order, restarts = sys.argv[1:]
job = TorchrunJob(script, ["stubborn"], nodes=local_nodes(2), rank_order=order, max_restarts=int(restarts), limit=60)
print("id", job.id, "id", flush=True)
job.run()
"""
# Connects to every port that is named, at one address; prints those that answer.
KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=2).close()
        print(port)
    except OSError:
        pass
"""
# Puts a pickle in the place of every rendezvous' state in a store; what it says is to leave a mark.
ATTACK = """
import base64, os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore
class Mark:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=10))
keys = [key for key in store.list_keys() if "rendezvous" in key]
for key in keys:
    store.set(key.removeprefix("/"), base64.b64encode(pickle.dumps(Mark())))
print("attacked", *keys)
"""


@pytest.fixture
def script(write):
    return write("train.py", TROUBLE)


@pytest.mark.parametrize(("order", "restarts"), [("nodes", 0), ("address", 1)])
def test_a_local_job_cannot_be_reached_from_another_host(order, restarts, script, hosts, tmp_path):
    log = tmp_path / "launcher.log"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        command = [sys.executable, "-c", LAUNCHER, str(script), order, str(restarts)]
        launcher = hosts.popen_in_n0(command, env, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(lambda: log.read_text().count("connected") == 2)
        job_id = re.search(r"id (\S+) id", log.read_text())[1]
        heard = list_listeners(f"LAB_JOB_ID={job_id}", hosts._enter("n0"))
        assert len(heard) >= 3, heard  # the rendezvous, and Gloo on both ranks
        assert all(address.startswith("127.") for address, _ in heard), heard
        ports = [str(port) for _, port in heard]
        knock = [sys.executable, "-ISc", KNOCK]
        assert hosts.run_on("n1", [*knock, hosts.address("n0"), *ports]) == ""
        inside = hosts.run_on("n0", [*knock, "127.0.0.1", *ports])
        assert inside.split(), "nothing answers within n0 either: the knocking is broken"
    finally:
        os.kill(launcher.pid, signal.SIGINT)
        launcher.wait(30)
    assert_gone(job_id, 5)


def test_hosts_listen_on_their_own_interface_and_run_nothing_of_a_stranger(script, hosts, tmp_path):
    nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs")
    seen, readable = {}, ["find", "/node/labs/jobs", "-name", "node*.sh", "-perm", "/077"]

    def look(line):
        for node in ("n1", "n2"):
            seen[node] = list_listeners(f"LAB_JOB_ID={job_id}", hosts._enter(node))
            assert hosts.run_on(node, readable) == "", "the scripts contain a secret"
        job.stop()

    job = TorchrunJob(script, ["loop"], nodes=nodes)
    job_id = job.id
    heard = Heard()
    heard.when = {"connected": look}
    with pytest.raises(launch.JobError):
        job.run(show=heard)
    for node, listeners in seen.items():
        assert listeners, node
        assert {address for address, _ in listeners} == {hosts.address(node)}, seen
    mark = tmp_path / "mark"
    # Node 1 never comes, while node 0 asks the store again and again, until it refuses.
    job = TorchrunJob(script, ["ok"], nodes=nodes, join_timeout=200)
    job_id, folder = job.id, job.folder
    running = job.start(show=Heard(), by_hand=["n2"])
    try:
        (host, port) = re.search(r"rdzv-endpoint=([\d.]+):(\d+)", (folder / "node0.sh").read_text()).groups()
        command = [*hosts._enter("n0"), sys.executable, "-c", ATTACK, host, port, str(mark)]
        wait_for(lambda: "rendezvous" in subprocess.run(command, capture_output=True, text=True).stdout)
        wait_for(lambda: "no part of the state of a rendezvous" in (folder / "output.log").read_text())
    finally:
        running.stop()
    with pytest.raises(launch.JobError):
        running.wait()
    assert_gone(job_id, 5)
    assert not mark.exists()


def test_the_id_of_the_rendezvous_is_a_secret(script):
    job = TorchrunJob(script, nodes=local_nodes(2), port=29500)
    for path in job.write():
        lines = [line for line in path.read_text().splitlines() if job._launch.rendezvous_id in line]
        assert len(lines) == 1
        assert re.match("export PET_RDZV_ID=[0-9a-f]{32} ", lines[0]), "every user of the machine sees a command line"
        assert not path.stat().st_mode & 0o077, path
