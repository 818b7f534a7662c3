"""Jobs of two nodes go wrong, each for real: answered in seconds, named plainly, and nothing is left.

The numbers are those of the list of fault drills. Where the network or the host has a part in it, the nodes are two
hosts; else they are two nodes of this machine.
"""

import os
import re
import signal
import sys
import tempfile
import time

import pytest
from harness.drawn import make_folder
from harness.jobs import (
    PLAIN,
    TROUBLE,
    Heard,
    Launcher,
    assert_gone,
    assert_port_free,
    find_port,
    find_processes,
    kill,
    list_processes,
    run_badly,
    wait_for,
    when_connected,
)
from jupyter_client.manager import KernelManager

from nodelaunch import TorchrunJob, find_log, local_nodes, ssh_nodes

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("runs")]


CHATTY = """
print("connected", flush=True)
while True:
    print("loss 0.123456789 " * 10)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TROUBLE)
    return path


@pytest.fixture
def remote(hosts):
    """The two hosts as nodes."""
    return ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs")


@pytest.fixture
def make(script, request):
    """Makes a job that goes wrong as told, on this machine or on the hosts."""

    def run(mode, *, where="local", **kwargs):
        nodes = request.getfixturevalue("remote") if where == "hosts" else local_nodes(2)
        return TorchrunJob(script, [mode], nodes=nodes, **kwargs)

    return run


def assert_no_listeners(hosts, folder):
    """No host holds the job's port."""
    port = f":{find_port(folder / 'node0.sh'):04X}"
    for node in ("n1", "n2"):
        rows = [row.split() for row in hosts.run_on(node, ["cat", "/proc/net/tcp"]).splitlines()[1:]]
        assert not [row for row in rows if row[1].endswith(port) and row[3] == "0A"], node


def test_2_hosts_whose_own_names_stand_for_the_loopback(make, hosts):
    """As Debian and Ubuntu install it; Gloo, left alone, would listen where the other host cannot reach it."""
    for node in ("n1", "n2"):
        hosts.set_hosts(node, f"127.0.0.1 localhost\n127.0.1.1 {node}\n")
    result = make("ok", where="hosts").run(show=False)
    assert result.results == ({"rank": 0}, {"rank": 1})
    assert [rank.address for rank in result.ranks] == [hosts.address("n1"), hosts.address("n2")]


def test_7_a_node_that_never_starts(make):
    heard, begun = Heard(), []
    heard.when["start by hand: "] = lambda line: begun.append(time.time())  # the time to join runs from here
    job = make("ok", join_timeout=7)
    error = run_badly(job, heard, seconds=7 + 5, since=lambda: begun[0], by_hand=["node1"])
    failure = error.result.failure
    assert (failure.kind, failure.node) == ("join", "node1")
    assert "node1" in error.what and "bash node" in error.fix
    assert any(re.fullmatch(r"waiting for node1(, node0|)? to join: \d s left", line) for line in heard.lines), (
        heard.lines
    )


def test_7_an_interrupt_while_a_node_is_waited_for(script, start_launcher):
    """torchrun alone waits in C, where it does not hear an interrupt, for many minutes."""
    launcher = start_launcher(script, "ok", "local_nodes(2), rank_order='nodes'", run="job.run(by_hand=['node1'])")
    launcher.wait_for("waiting for node1 to join: ")
    job_id = launcher.job_id
    assert find_processes(job_id, "node.agent")
    start = time.monotonic()
    os.killpg(launcher.process.pid, signal.SIGINT)
    launcher.process.wait(15)
    took = time.monotonic() - start
    assert took < 5, took
    assert launcher.output.read_text().rstrip().endswith("KeyboardInterrupt")
    assert_gone(job_id, 10)
    print(f"prompt back after {took:.1f} s")


def test_11_a_model_that_differs(make, hosts):
    heard = Heard()
    error = run_badly(make("model", where="hosts"), heard, seconds=10)
    assert error.result.failure.kind == "exception"
    assert "1.weight" in str(error), "the parameter's name"
    assert "different models" in error.cause and "same arguments" in error.fix
    assert_no_listeners(hosts, error.result.folder)


def test_12_a_rank_that_raises(make, hosts):
    heard = Heard()
    error = run_badly(make("raise", where="hosts"), heard, seconds=10)
    failure, text = error.result.failure, str(error)
    assert (failure.kind, failure.rank, failure.node) == ("exception", 1, "n2")
    assert error.what == "Rank 1 on n2 failed first: ValueError: bad luck in batch 7"
    assert text.count("Traceback (most recent call last)") == 1
    assert 'File "train.py", line' in text and 'raise ValueError("bad luck in batch 7")' in text
    # The other rank failed as a consequence: one line, no traceback, neither here nor in the output.
    assert set(failure.consequences) <= {0}
    assert sum("Traceback" in line for line in heard.lines) == 1
    assert error.result.results == (None, None)
    assert_no_listeners(hosts, error.result.folder)


def test_13_a_rank_that_is_killed(make, hosts):
    heard = Heard()
    error = run_badly(make("kill", where="hosts"), heard, seconds=10)
    failure = error.result.failure
    assert (failure.kind, failure.rank, failure.node) == ("signal", 1, "n2")
    assert error.what == "Rank 1 on n2 was killed by signal 9 (SIGKILL)"
    peak = int(re.search(r"had reached ([\d,]+) MiB", error.cause)[1].replace(",", ""))
    assert 300 < peak < 3000, "its memory: torch, and 200 MiB of its own"
    assert "out-of-memory" in error.cause and "smaller batch" in error.fix
    assert_no_listeners(hosts, error.result.folder)


def test_14_a_rank_that_hangs(make, hosts):
    heard = Heard()
    error = run_badly(make("hang", where="hosts", hang_timeout=4), heard, seconds=4 + 5)
    failure, text = error.result.failure, str(error)
    assert failure.kind == "hang"
    assert set(failure.stacks) == {0, 1}
    lines = TROUBLE.splitlines()
    for rank, place in {0: "    dist.all_reduce(value)", 1: "        dist.recv(value, src=0)"}.items():
        number = re.search(r"train.py, line (\d+), in <module>", failure.stacks[rank])
        assert lines[int(number[1]) - 1] == place.replace("\\", ""), failure.stacks
        assert f"rank {rank} stood at: train.py, line" in text
    assert "different collectives" in error.cause and "rank 1 in dist.recv(value, src=0)" in error.cause
    assert_no_listeners(hosts, error.result.folder)


def test_15_ranks_with_different_numbers_of_batches(make):
    heard = Heard()
    # The drill asks for no hang. Rank 1 ends in order here, which takes torch some seconds on a busy machine.
    error = run_badly(make("uneven"), heard, seconds=20)
    assert error.result.failure.rank == 1
    assert "Rank 1 had ended its work while rank 0 still waited" in error.what
    assert "number" in error.cause and "drop_last=True" in error.fix and "Join" in error.fix


def test_a_killed_rank_is_started_anew(script, tmp_path):
    """With max_restarts a crash does not cost the run; what happened is told all the same."""
    job = TorchrunJob(script, ["once", tmp_path / "flag"], nodes=local_nodes(2), max_restarts=1)
    job_id = job.id
    result = job.run(show=False)
    assert result.ok and result.results == ({"rank": 0}, {"rank": 1})
    assert len(result.restarts) == 1 and "rank 1 on node1: killed by signal 9" in result.restarts[0]
    assert_gone(job_id, 2)


@pytest.fixture
def start_launcher(tmp_path):
    started = []

    def start(script, mode, nodes, **options):
        started.append(Launcher(tmp_path, script, [mode], nodes, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()


@pytest.mark.parametrize("where", ["local", "hosts"])
def test_18_a_launcher_that_is_killed(where, script, start_launcher, request, runs):
    """Also with a worker that ignores SIGTERM: no process outlives its launcher by more than 10 s, anywhere."""
    nodes, program = "local_nodes(2)", ()
    if where == "hosts":
        config = str(request.getfixturevalue("hosts").ssh_config)
        nodes, program = f"ssh_nodes(['n1', 'n2'], config={config!r}, folder='/node/labs')", ["python"]
        script.write_text(PLAIN)
    launcher = start_launcher(script, "stubborn", nodes, program=program)
    launcher.wait_for("] connected", count=2)
    job_id = launcher.job_id
    assert len(find_processes(job_id, "node.supervisor")) == 2
    launcher.process.kill()
    assert_gone(job_id, 10)
    # Whoever comes next finds the log, and nothing in the way.
    assert "connected" in find_log(job_id).read_text()
    if where == "local":
        assert_port_free("127.0.0.1", find_port(runs / "jobs" / job_id / "node0.sh"))
    job = TorchrunJob(script, ["ok"], nodes=local_nodes(2))
    assert not [verdict for verdict in job.preflight().verdicts if job_id in verdict.found]


def test_18_a_rank_that_is_stopped(make):
    """It says nothing itself: its supervisor sees it, and the other rank reports that it waits."""
    job = make("loop", hang_timeout=3)
    heard, since = when_connected(lambda: kill(find_processes(job.id, "node.worker", 1), signal.SIGSTOP))
    error = run_badly(job, heard, seconds=13, since=since)
    assert error.result.failure.kind == "hang" and "Rank 1 on node1 was stopped (SIGSTOP)" in error.what, str(error)


SLOW = """
import time
def show(line):
    time.sleep(0.002)  # as slow as a notebook
    if 'connected' in line:
        print(line, flush=True)
job.run(show=show)
"""


def test_16_a_job_that_prints_without_end(script, start_launcher):
    """The launcher is behind with reading; the prompt is back all the same."""
    script.write_text(CHATTY)
    launcher = start_launcher(script, "loop", "local_nodes(2)", program=["python"], run=SLOW)
    launcher.wait_for("] connected")
    time.sleep(3)
    start = time.monotonic()
    os.killpg(launcher.process.pid, signal.SIGINT)
    launcher.process.wait(30)
    took = time.monotonic() - start
    assert took < 5, took
    assert launcher.output.read_text().rstrip().endswith("KeyboardInterrupt")
    assert_gone(launcher.job_id, 10)


def test_a_host_that_is_gone(make, hosts):
    """The cable is pulled: nobody says goodbye, so that only time tells."""
    job = make("loop", where="hosts")
    heard, since = when_connected(lambda: hosts.link_down("n2"))
    # ssh takes 6 s to notice (3 questions, 2 s apart); two more for what the others say; up to 4.5 for the end.
    # What is on the cut-off host ends by its lease of 6 s and a grace of 2.
    error = run_badly(job, heard, seconds=15, since=since)
    assert (error.result.failure.kind, error.result.failure.node) == ("lost", "n2"), str(error)
    assert "connection to n2 was lost" in error.what and "switched off" in error.cause
    hosts.mend()
    assert_no_listeners(hosts, error.result.folder)


KERNEL = """
import nodelaunch as launch
job = launch.TorchrunJob({script!r}, ["loop"], nodes=launch.local_nodes(2), program=["python"])
open({flag!r}, "w").write(job.id)
job.run()
"""


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_17_a_kernel_that_goes(how, kernel, script, tmp_path, runs):
    """The real kernel of a notebook, with a training that prints nothing more by which a broken pipe could end it."""
    manager, client = kernel
    flag = tmp_path / "id"
    script.write_text(PLAIN)
    client.execute(KERNEL.format(script=str(script), flag=str(flag)))
    job_id = wait_for(lambda: flag.exists() and flag.read_text())
    log = runs / "jobs" / job_id / "output.log"
    wait_for(lambda: log.exists() and log.read_text().count("] connected") == 2)
    if how == "killed":
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        assert_gone(job_id, 10)
    manager.restart_kernel(now=how == "killed")
    assert_gone(job_id, 10)
    client.wait_for_ready(timeout=60)
    # The next cell finds out how far it came.
    said = []
    reply = client.execute_interactive(
        "import nodelaunch as launch; print(launch.find_log(), launch.find_log().read_text())",
        timeout=60,
        output_hook=lambda message: said.append(message["content"].get("text", "")),
    )
    assert reply["content"]["status"] == "ok" and job_id in "".join(said), reply
    assert "[rank 1] connected" in "".join(said)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # Sockets with names instead of ports, of which another program may have one before the kernel does.
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        own = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        manager = KernelManager(kernel_name="python3", **own)
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield manager, client
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_folder(folder / "cinic10", per_class={"train": 8, "valid": 3, "test": 1})
    return folder


def test_36_the_job_of_the_lab_on_two_hosts_goes_on_with_another_world_size(root, hosts, images, monkeypatch):
    """80 images, 5 steps of 16 an epoch: an epoch on two hosts, the next on one, equal one process on this machine."""
    monkeypatch.setenv("LAB_DATA", str(images))
    scripts = root / "notebooks" / "scripts"
    remote = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs", data=str(images))

    def train(nodes, *options, epochs, batch_size):
        args = ["--exact", "train_ddp.py", "--data", "cinic10", "--epochs", epochs, "--batch-size", batch_size]
        job = TorchrunJob(scripts / "observed.py", [*args, *options], nodes=nodes, files=[scripts / "train_ddp.py"])
        return job, job.run(show=False)

    job, half = train(remote, "--checkpoint", "run.pt", epochs=1, batch_size=8)
    assert [rank.host for rank in half.ranks] == ["n1", "n2"]
    assert [len(rank["images"]) for rank in half.results] == [5, 5]
    _, rest = train(remote[:1], "--checkpoint", "run.pt", epochs=2, batch_size=16)
    _, whole = train(local_nodes(1), epochs=2, batch_size=16)
    rest, expected = rest.results[0], whole.results[0]
    assert rest["images"] == expected["images"][5:]
    assert sorted(image for step in rest["images"] for image in step) == list(range(80)), "each image once per epoch"
    assert rest["losses"] == pytest.approx(expected["losses"][5:], abs=1e-6)
    assert rest["weights"] == pytest.approx(expected["weights"], abs=1e-6)
    assert not list(list_processes(job.id))
