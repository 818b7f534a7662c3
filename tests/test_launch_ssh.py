"""SSH nodes: the program and its arguments arrive, each refusal is explained in time, and nothing stays behind."""

import gc
import json
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import HOSTILE

from lab_common import LabError
from nodelaunch.backends.ssh import ssh_nodes

ECHO = """import json, os, sys
print(json.dumps([os.uname().nodename, sys.argv[1:], sys.stdin.read()]))
sys.stderr.write("err")
sys.exit(7)"""


@pytest.fixture
def make_nodes(hosts):
    """Makes nodes through the hosts' configuration."""
    return lambda names=("n1", "n2"), **kwargs: ssh_nodes(names, **{"config": hosts.ssh_config, **kwargs})


@pytest.fixture
def real_ssh(hosts, monkeypatch):
    """Lets `ssh` be OpenSSH's client inside n0, so that its own words and its own name look-up are tested."""
    monkeypatch.setenv("PATH", f"{hosts.tools}:{os.environ['PATH']}")
    return hosts.inner_config


def run(node, argv, stdin=b""):
    process = node.popen(argv)
    out, err = process.communicate(stdin, timeout=30)
    return process.returncode, out, err.decode()


def refuse(config, name="n1", seconds=10.0):
    """Runs a program that cannot run, and returns the error that explains it, which has to come in time."""
    (node,) = ssh_nodes([name], config=config)
    begin = time.monotonic()
    code, _, err = run(node, ["true"])
    took = time.monotonic() - begin
    assert code == 255
    assert took < seconds
    return node.explain(code, err)


def test_hostile_arguments_arrive_unchanged_and_the_streams_and_the_exit_status_are_the_programs(make_nodes, hosts):
    for node in make_nodes():
        code, out, err = run(node, [node.python, "-c", ECHO, *HOSTILE], b"a\x00b\nlast")
        assert (code, err) == (7, "err")
        assert json.loads(out) == [node.name, HOSTILE, "a\x00b\nlast"]
        assert not list(hosts.disk(node.name).rglob("canary"))


def test_home_and_python_are_looked_up_there(make_nodes, hosts, monkeypatch):
    rc = hosts.disk("n1") / "home" / ".bashrc"
    rc.write_text("echo Welcome; echo LAB; echo noise >&2\n")
    try:
        (node,) = make_nodes(["n1"], folder="~/my labs")
        assert (node.folder, node.python) == ("/node/home/my labs", sys.executable)
    finally:
        rc.unlink()
    (found,) = make_nodes(["n1"], python="python3")
    assert found.python == shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert found.folder == "/node/home/distributed-training-labs"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert make_nodes(["n1"])[0].python.endswith("/python3"), "this one's path is not needed there"


def test_a_missing_python_is_explained(make_nodes):
    (node,) = make_nodes(["n1"], python="/no such/python")
    code, _, err = run(node, [node.python, "-c", ""])
    assert_explains(node.explain(code, err), "n1", "/no such/python", "install Python and torch there")
    (node,) = make_nodes(["n1"], python="~/none/bin/python")
    with pytest.raises(LabError) as caught:
        _ = node.python
    assert_explains(caught.value, "Python", "n1", "~/none/bin/python")


def test_host_keys_are_always_checked(make_nodes):
    (node,) = make_nodes(["n1"])
    with node.popen(["true"]) as process:
        command = " ".join(process.args)
    for word in ("StrictHostKeyChecking", "UserKnownHostsFile", "PasswordAuthentication"):
        assert word not in command
    assert "BatchMode=yes" in command


# Each refusal: OpenSSH itself, inside n0.


@pytest.mark.drill
def test_a_name_that_is_not_known(real_ssh):
    assert_explains(refuse(real_ssh, "n3", 2), "n3 is not known", "/etc/hosts", str(real_ssh), "IP address")


@pytest.mark.drill
def test_a_host_without_sshd_and_one_behind_a_firewall(real_ssh, hosts):
    assert_explains(refuse(real_ssh, "127.0.0.1", 2), "127.0.0.1 does not answer", "sshd")
    hosts.drop("n0", "n2")
    assert_explains(refuse(real_ssh, "n2", 7), "n2 does not answer", "firewall", "port 22")


@pytest.mark.drill
def test_a_host_key_that_was_never_seen(real_ssh, tmp_path):
    config = tmp_path / "config"
    config.write_text(real_ssh.read_text().replace("known_hosts\n", "known_none\n"))
    error = refuse(config)
    with pytest.raises(LabError) as looked:  # the first use of a node says the same
        _ = ssh_nodes(["n1"], config=config)[0].folder
    assert str(looked.value) == str(error)
    assert_explains(error, "host key of n1", "fingerprint", f"ssh -F {config} n1")
    for word in ("keyscan", "StrictHostKeyChecking"):
        assert word not in str(error)


@pytest.mark.drill
def test_a_host_key_that_has_changed(real_ssh, hosts, tmp_path):
    known, config = tmp_path / "known", tmp_path / "config"
    one, two = (hosts.state / "known_hosts").read_text().splitlines()
    known.write_text(f"{one.split(' ', 1)[0]} {two.split(' ', 1)[1]}\n")
    config.write_text(real_ssh.read_text().replace(str(hosts.state / "known_hosts"), str(known)))
    assert_explains(refuse(config), "n1 shows another host key", "-R n1", "ask")


@pytest.mark.drill
def test_no_key_that_the_host_accepts(real_ssh, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "config"
    config.write_text(real_ssh.read_text().replace("/id\n", "/none\n"))
    assert_explains(refuse(config), "n1 does not accept", "no key file", "no ssh agent", "ssh-keygen", "ssh-copy-id")


def test_programs_share_one_private_connection_and_outlive_its_socket(make_nodes):
    nodes = make_nodes()
    processes = [node.popen(["cat"]) for node in nodes for _ in range(3)]
    for process in processes[1:]:
        assert process.communicate(b"x", timeout=20)[0] == b"x" and process.returncode == 0
    folder = Path(nodes[0].connections.name)
    assert nodes[1].connections.name == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(list(folder.iterdir())) == 2
    del nodes
    gc.collect()
    assert not folder.exists()
    assert processes[0].communicate(b"still there", timeout=20)[0] == b"still there"


def test_a_machine_without_ssh_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        ssh_nodes(["n1"])[0].popen(["true"])
    assert_explains(caught.value, "OpenSSH", "apt-get", "local_nodes")
