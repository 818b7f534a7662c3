"""The preflight: real probes on nodes of this machine, judged facts, and two hosts with a network between them."""

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from harness.jobs import make_odd

from lab_common import LabError
from nodelaunch import DataFolder
from nodelaunch import __main__ as launch_main
from nodelaunch.__main__ import main
from nodelaunch.backends.local import local_nodes
from nodelaunch.backends.ssh import ssh_nodes
from nodelaunch.node import probe, receive, sampler
from nodelaunch.preflight import Preflight, ask_once, check_nodes, routes
from nodelaunch.preflight.verdicts import WILL_COPY, Verdict, judge_jobs, judge_versions
from nodelaunch.transfer import make_command

LISTEN = """import socket, time
listener = socket.socket()
listener.bind(("", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
time.sleep(60)"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
VERSIONS = {
    "python": "3.11.7",
    "program": "/usr/bin/python3",
    "torch": "2.14.1+cu130",
    "cuda": "13.0",
    "nccl": "2.30.7",
}


@pytest.fixture
def pair(tmp_path):
    return local_nodes(2, folder=tmp_path / "nodes")


@pytest.fixture
def start():
    """Starts Python programs, and ends them with the test; returns when one has printed its first line."""
    started = []

    def run(code: str, **env: str) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}, stdout=subprocess.PIPE)
        started.append(process)
        return process, process.stdout.readline().decode().strip()

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def look(nodes, **options) -> Preflight:
    """A preflight without jobs that others, and other tests, run on this machine meanwhile."""
    found = check_nodes(nodes, **options)
    own = tuple(v for v in found.verdicts if v.check != "jobs" or "job preflight-" in v.found)
    return replace(found, verdicts=own)


def find(found: Preflight, check: str, node: str = "") -> list[Verdict]:
    return [verdict for verdict in found.verdicts if verdict.check == check and node in verdict.node]


def test_a_healthy_pair_is_green_within_two_seconds(pair, tmp_path):
    """Also with what a node prints at the login, and with a file that has the name of one of Python's modules."""
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    noise = ("sh", "-c", 'echo "{} welcome"; echo "motd" >&2; exec "$@"', "sh")
    nodes = [make_odd(pair[0], before=noise), make_odd(pair[1], cwd=str(tmp_path))]
    results = [look(nodes) for _ in range(3)]
    for found in results:
        assert found.ok, found
        assert not [verdict for verdict in found.verdicts if verdict.state != "ok"], found
        found.raise_if_red()
    assert min(found.seconds for found in results) <= 2
    found = results[0]
    assert found.addresses == {"node0": "127.0.0.1", "node1": "127.0.0.2"}
    assert found.interfaces == {"node0": "lo", "node1": "lo"}
    assert 30000 <= found.port <= 32767, "none of Slurm's jobs"
    checks = {verdict.check for verdict in found.verdicts}
    assert checks == {"address", "network", "port", "versions", "disk", "GPUs", "clock", "exposure"}
    assert f"{found.port} is free" in str(found)
    assert repr(found) == str(found), "what a cell shows"
    with socket.socket() as listener:  # without SO_REUSEADDR: no connection may be left on it
        listener.bind(("", found.port))


@pytest.mark.parametrize(("module", "stdin"), [(probe, b""), (sampler, b""), (receive, bytes(10240))])
def test_what_travels_needs_python_3_9_and_nothing_installed(module, stdin, tmp_path, root):
    python, *rest = make_command(sys.executable, module, "9", "0", str(tmp_path))
    assert max(map(len, rest)) < 100_000, "an argument has 128 KiB at most"
    command = [python, "-I", "-S", "-X", "importtime", *rest]
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=tmp_path)
    assert b"ImportError" not in done.stderr and b"ModuleNotFoundError" not in done.stderr
    ours = set(re.findall(r"(?:lab_common|nodelaunch)[\w.]*$", done.stderr.decode(), re.MULTILINE))
    assert ours >= {"nodelaunch.node", "lab_common"}
    places = [root / name.replace(".", "/") for name in ours]
    files = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()]
    for path in [*files, Path(module.__file__)]:
        ast.parse(path.read_text(), feature_version=(3, 9))


def test_a_port_that_a_stranger_holds_is_named_with_its_process(pair, start):
    process, port = start(LISTEN)
    found = look(pair, port=int(port))
    (verdict,) = find(found, "port")
    assert verdict.state == "red"
    assert f"port {port} is held by" in verdict.found
    assert f"pid {process.pid}" in verdict.found
    assert "import socket" in verdict.found
    assert "port=None" in verdict.fix
    assert len(found.reds) == 1
    with pytest.raises(LabError) as caught:
        found.raise_if_red()
    assert port in caught.value.what
    assert process.poll() is None


def test_a_port_that_a_leftover_of_ours_holds_comes_with_the_command_that_stops_it(pair, start):
    _, port = start(LISTEN, LAB_JOB_ID="preflight-left")
    (verdict,) = find(look(pair, port=int(port)), "port")
    assert "preflight-left" in verdict.cause
    assert verdict.fix == "python -m nodelaunch stop preflight-left"


def test_a_leftover_is_found_and_stopped_and_nothing_else(pair, start, capsys):
    left, _ = start(STUBBORN, LAB_JOB_ID="preflight-a")
    another, _ = start(STUBBORN, LAB_JOB_ID="preflight-ab")
    stranger, _ = start(STUBBORN)
    found = look(pair)
    assert found.ok, "it holds nothing that this job needs"
    assert {v.fix for v in find(found, "jobs")} == {
        f"python -m nodelaunch stop {job}" for job in ("preflight-a", "preflight-ab")
    }
    assert len(find(found, "jobs")) == 2, "two nodes on one machine report a job once"
    assert f"pid {left.pid}" in str(found)
    assert main(["jobs"]) == 0
    assert f"preflight-a  pid {left.pid}" in capsys.readouterr().out
    started = time.monotonic()
    assert main(["stop", "preflight-a"]) == 0
    assert time.monotonic() - started < 4
    assert "1 process(es) of preflight-a ended" in capsys.readouterr().out
    assert left.wait(1) == -signal.SIGKILL
    assert another.poll() is None
    assert stranger.poll() is None
    assert main(["stop", "preflight-a"]) == 0
    assert "no process of preflight-a runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pid", "supervisor", "state", "fix"),
    [
        ("7", False, "red", "python -m nodelaunch stop job-a n1"),
        ("8", False, "note", "python -m nodelaunch stop job-a n1"),
        ("[N/A]", False, "note", "python -m nodelaunch stop job-a n1"),
        ("7", True, "note", "none is needed"),  # another notebook's
    ],
)
def test_a_leftover_is_red_only_where_it_holds_what_this_job_needs(pid, supervisor, state, fix):
    jobs = {"jobs": [{"id": "job-a", "pid": 7, "command": "python", "supervisor": supervisor}]}
    facts = {"n1": {"system": {"machine": "there"}, "gpu_users": {"rows": [[pid, "python", "900"]]}, "jobs": jobs}}
    (verdict,) = judge_jobs({"n1": ssh_nodes(["n1"])[0]}, facts)
    assert verdict.state == state
    assert verdict.fix.startswith(fix)


def test_another_torch_is_red_with_a_table(pair, tmp_path):
    (tmp_path / "other" / "torch").mkdir(parents=True)
    (tmp_path / "other" / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    text = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\n"
    (tmp_path / "other" / "torch" / "version.py").write_text(text)
    found = look([pair[0], make_odd(pair[1], env={"PYTHONPATH": str(tmp_path / "other")})])
    (verdict,) = found.reds
    assert verdict.found.startswith("torch is not the same on all nodes")
    assert re.search(r"\n  node1  Python \S+, torch 2.9.0\+cpu, no CUDA", verdict.found)
    assert re.search(r"\n  node0  Python \S+, torch 2.1", verdict.found)


def test_versions_that_differ():
    def judge(gpus=(), **other):
        both = {"n1": {"versions": VERSIONS, "gpus": {"gpus": gpus}}, "n2": {"versions": {**VERSIONS, **other}}}
        return [(verdict.state, verdict.found.split()[0]) for verdict in judge_versions(both)]

    assert {state for state, _ in judge()} == {"ok"}
    assert {state for state, _ in judge(python="3.11.9")} == {"ok"}
    assert judge(python="3.12.1") == [("red", "Python")]
    assert judge(nccl="2.27.0") == [("note", "NCCL")], "without a GPU NCCL is not used"
    assert judge(gpus=[["0", "H100", "1", "80000"]], nccl="2.27.0") == [("red", "NCCL")]
    assert judge(torch="2.14.1+cpu", cuda=None) == [("note", "CUDA")]
    assert judge(torch=None, cuda=None, nccl=None)[0] == ("red", "/usr/bin/python3")
    old = judge_versions({"n1": {"versions": {**VERSIONS, "python": "3.10.12"}}})
    assert [verdict.found for verdict in old if verdict.state == "red"] == ["Python 3.10.12: 3.11 or newer is needed"]
    bare = {"n1": {"versions": {**VERSIONS, "torch": None}}}
    assert [verdict.state for verdict in judge_versions(bare, torchrun=False)] == ["ok"], "a program may need no torch"


def write_pack(folder: Path, digest: str, *, arrays: tuple[str, ...] = ("a.npy",)) -> Path:
    pack = folder / "packed" / "shapes10"
    pack.mkdir(parents=True)
    manifest = {"classes": ["x"], "sha256": {"a.npy": digest}, "source": {"words": str(folder)}}
    (pack / "manifest.json").write_text(json.dumps(manifest))
    for name in arrays:
        (pack / name).touch()
    return folder


def test_data_have_to_be_the_same_on_all_nodes_and_those_that_the_launcher_copies(pair, tmp_path):
    here, same = write_pack(tmp_path / "here", "new"), write_pack(tmp_path / "same", "new")
    old, cut = write_pack(tmp_path / "old data", "old"), write_pack(tmp_path / "cut", "new", arrays=())
    manifest = ("packed/shapes10", "manifest.json")

    def check(*folders, path="none", **options):
        nodes = [replace(node, data=str(folder)) for node, folder in zip(pair, folders, strict=True)]
        found = look(nodes, data=DataFolder(path, *manifest, fix="make digits", **options))
        return [(verdict.state, verdict.found, verdict.fix) for verdict in find(found, "data")]

    assert {state for state, *_ in check(here, same)} == {"ok"}, "where and when a pack was made does not matter"
    state, what, _ = check(here, old)[1]
    assert state == "red" and "not that of the other nodes" in what
    state, what, fix = check(here, tmp_path / "none")[1]
    assert (state, fix) == ("red", "copy_data=True, or on that node: make digits") and "is missing" in what
    assert check(here, tmp_path / "none", copy_data=True)[1] == ("ok", WILL_COPY, "")
    # Also where all nodes agree: they would train on what the launcher had another day.
    launcher = {"path": here / "packed" / "shapes10", "copy_data": True}
    assert {state for state, *_ in check(same, same, **launcher)} == {"ok"}
    for folder, words in ((old, "not that of the launcher"), (cut, "a.npy is missing")):
        red = check(folder, folder, **launcher)
        assert [state for state, *_ in red] == ["red", "red"] and words in red[0][1]
        command = re.search(r"rm -r -- .*?(?=   )", red[0][2]).group()
        subprocess.run(shlex.split(command), check=True)
        assert {what for _, what, _ in check(folder, folder, **launcher)} == {WILL_COPY}


def test_a_full_disk_is_red_before_anything_is_copied(pair, small_disk):
    found = look([pair[0], replace(pair[1], folder=str(small_disk / "not" / "there"))])
    assert [(verdict.node, verdict.check) for verdict in found.reds] == [("node1", "disk")]
    assert not (small_disk / "not").exists(), "a preflight changes nothing"


def test_gpus_are_counted_and_their_users_named(pair, tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        '#!/bin/sh\ncase "$1" in *gpu=*) echo "0, NVIDIA H100, 900, 81559, 580.1";;'
        f' *) echo "{os.getpid()}, python, 700"; echo "77, other, 200";; esac\n'
    )
    smi.chmod(0o755)
    path = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    found = look([make_odd(local_nodes(1)[0], env=path)])
    texts = [verdict.found for verdict in find(found, "GPUs")]
    assert texts[0] == f"the launcher's own process (pid {os.getpid()}) holds 700 MiB"
    assert texts[1] == "pid 77 (other) holds 200 MiB"
    assert found.ok
    smi.write_text('#!/bin/sh\necho "Failed to initialize NVML: Driver/library version mismatch"; exit 18\n')
    (verdict,) = find(look([make_odd(pair[1], env=path)]), "gpus")
    assert "Driver/library version mismatch" in verdict.cause


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"instead": ("sleep", "60")}, "did not answer within"),
        ({"instead": ("sh", "-c", "echo no luck >&2; exit 3")}, "A program could not be run on node1."),
    ],
)
def test_a_node_that_does_not_answer_is_red_in_time_and_the_others_are_judged(pair, odd, words):
    third = replace(local_nodes(3)[2], folder=pair[0].folder)
    started = time.monotonic()
    found = look([pair[0], make_odd(pair[1], **odd), third], timeout=4)
    assert time.monotonic() - started <= 6
    (verdict,) = found.reds
    assert (verdict.node, verdict.check) == ("node1", "node")
    assert words in verdict.found
    assert verdict.fix
    judged = {verdict.check for verdict in found.verdicts if "node2" in verdict.node}
    assert judged >= {"address", "network", "disk", "versions", "clock"}
    assert "node1" not in found.addresses
    for program in ("sleep 60", "nodelaunch.node.probe"):
        assert subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", program], capture_output=True).stdout == b""


def test_the_table_shows_red_first_wraps_and_is_safe():
    green = Verdict("n1", "disk", "ok", "much room")
    red = Verdict("n2", "disk", "red", "word " * 60 + "\n  n1  3.11\n  n2  3.12", "cause", "python -m x " + "y" * 150)
    hostile = "\x1b[31m\nroot"
    odd = Verdict(hostile, "names", "red", f"{hostile} is odd", hostile, f"rm {hostile}")
    found = Preflight((green, replace(green, node="n3"), red, odd), seconds=0.1)
    text = str(found)
    assert text.startswith("[red]") and "\x1b" not in text
    assert text.splitlines()[-2].split() == ["[ok]", "n1,", "n3", "disk", "much", "room"]
    assert "y" * 150 in text, "a command is not broken"
    assert re.search(r"\n +n1  3.11\n +n2  3.12\n", text)
    assert text.endswith("Preflight: 2 red; 0.1 s.")
    with pytest.raises(LabError) as caught:
        found.raise_if_red()
    assert len(caught.value.what) <= 120
    assert caught.value.what.endswith("(+ 1 more)")
    assert "n1  3.11; n2  3.12" in caught.value.where


def test_only_who_knows_the_token_is_the_node():
    port = probe.open_listener("127.0.0.1", 0, "secret")
    assert [probe.reach("127.0.0.1", port, token, 1.0) for token in ("secret", "another")] == ["ok", "stranger"]


@pytest.mark.parametrize(
    ("address", "state", "words"),
    [
        ("8.8.8.8", "note", "PUBLIC"),
        *((address, "ok", "no password") for address in ("10.0.0.1", "100.64.0.1")),
        ("127.0.0.1", "ok", "no other machine"),
    ],
)
def test_it_says_what_is_open_to_whom_on_every_node(address, state, words):
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}
    network = routes.Network({}, {name: {"interfaces": interfaces} for name in ("n1", "n2")})
    verdicts = routes.judge_exposure(network, {"n1": address, "n2": address})
    assert [verdict.node for verdict in verdicts] == ["n1", "n2"]
    for verdict in verdicts:
        assert verdict.state == state and words in verdict.found
        assert bool(verdict.fix) == (state == "note")


def test_the_command_line(capsys, start, monkeypatch):
    monkeypatch.setattr(launch_main, "check_nodes", look)
    assert main(["preflight", "--local", "2"]) == 0
    assert "Preflight: all is well" in capsys.readouterr().out
    _, port = start(LISTEN)
    assert main(["preflight", "--local", "2", "--port", port, "--interface", "eth9"]) == 1
    said = capsys.readouterr().out
    assert f"port {port} is held" in said and "interface eth9 is not there" in said


@pytest.fixture
def remote(hosts):
    """n1 and n2 over SSH."""
    return ssh_nodes(["n1", "n2"], config=hosts.ssh_config, python=sys.executable, folder="/node/labs")


def time_check(nodes) -> Preflight:
    found = look(nodes)
    assert found.seconds <= 10
    return found


@pytest.mark.drill
def test_two_hosts_are_green_in_two_seconds(remote, hosts):
    found = min((time_check(remote) for _ in range(3)), key=lambda found: found.seconds)
    assert found.ok, found
    assert found.seconds <= 2
    assert found.addresses == {node: hosts.address(node) for node in ("n1", "n2")}
    assert found.interfaces == {"n1": "eth0", "n2": "eth0"}


@pytest.mark.drill
def test_a_shared_memory_that_is_too_small_is_noted_before_the_start(remote, hosts):
    hosts.run_on("n1", ["mount", "-o", "remount,size=8m", "/dev/shm"])
    try:
        found = time_check(remote)
    finally:
        hosts.run_on("n1", ["mount", "-o", "remount,size=50%", "/dev/shm"])
    assert found.ok, "a job without workers can run"
    (verdict,) = find(found, "memory")
    assert (verdict.node, verdict.state) == ("n1", "note")
    assert "8 MiB of shared memory" in verdict.found and "num_workers=0" in verdict.fix


@pytest.mark.drill
def test_a_firewall_in_one_direction_is_named(remote, hosts):
    hosts.drop("n1", "n2", new=True)
    found = time_check(remote)
    (verdict,) = found.reds
    assert (verdict.node, verdict.check) == ("n1 → n2", "network")
    assert f"n1 does not reach n2 at {hosts.address('n2')}, any port: no answer" in verdict.found
    assert "n2 reaches n1." in verdict.found
    assert f"from {hosts.address('n1')} on n2" in verdict.fix


@pytest.mark.drill
def test_a_leftover_on_another_host_is_stopped_there_alone(remote, hosts, survivors, capsys):
    env = ["env", "LAB_JOB_ID=preflight-far", "sleep", "60"]
    far = [remote[0].popen(env), remote[1].popen(env)]
    config = ["--config", str(hosts.ssh_config), "--python", sys.executable, "--folder", "/node/labs"]
    while len(survivors("preflight-far")) < 2:
        time.sleep(0.05)
    (seen,) = ask_once(local_nodes(1), {"do": "jobs", "id": "preflight-far"}).values()
    assert seen == {"jobs": []}, "what runs in a container is not its host's"
    fixes = [verdict.fix for verdict in find(time_check(remote), "jobs")]
    assert fixes == [f"python -m nodelaunch stop preflight-far {node}" for node in ("n1", "n2")]
    assert main(["stop", "preflight-far", "n1", *config]) == 0
    assert len(survivors("preflight-far")) == 1
    assert main(["stop", "preflight-far", "n1", "n2", *config]) == 0
    assert "n1: no process of preflight-far runs\nn2: 1 process(es) of preflight-far ended" in capsys.readouterr().out
    for process in far:
        process.communicate(timeout=10)


@pytest.mark.drill
def test_the_interface_that_works_is_offered_for_a_wrong_one(remote, hosts):
    found = time_check([replace(node, interface="eth9") for node in remote])
    assert [verdict.fix for verdict in found.reds] == ['interface="eth0"'] * 2
    assert f"eth0 {hosts.address('n1')}" in found.reds[0].found


@pytest.mark.drill
def test_a_bridge_that_both_hosts_have_is_passed_over(remote, hosts):
    for node in ("n1", "n2"):
        hosts.run_on(node, ["ip", "link", "add", "docker0", "type", "bridge"])
        hosts.run_on(node, ["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
        hosts.run_on(node, ["ip", "link", "set", "docker0", "up"])
    try:
        found = time_check(remote)
        given = time_check([replace(node, interface="docker0") for node in remote])
    finally:
        for node in ("n1", "n2"):
            hosts.run_on(node, ["ip", "link", "del", "docker0"])
    assert found.ok, found
    assert found.interfaces == {"n1": "eth0", "n2": "eth0"}
    assert {verdict.check for verdict in given.reds} == {"network"}
    assert "a bridge such as docker0" in given.reds[0].cause
    assert "leave interface= away" in given.reds[0].fix
