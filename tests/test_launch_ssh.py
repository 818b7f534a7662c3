"""SSH nodes: the program and its arguments arrive, each refusal is explained in time, and nothing stays behind."""

import gc
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.drawn import assert_explains

from lab_common import LabError
from nodelaunch.backends.refusals import explain_refusal
from nodelaunch.backends.ssh import ssh_nodes

ECHO = "import json, os, sys; print(json.dumps([os.uname().nodename, sys.argv[1:], sys.stdin.read()]))"
HOSTILE = [
    "two words",
    "it's",
    '"quoted"',
    "; touch /tmp/lab-injected",
    "$(touch /tmp/lab-injected)",
    "`touch /tmp/lab-injected`",
    "$HOME ~ *",
    "line one\nline two",
    "-o ProxyCommand=false",
    "--",
    "grüße 日本 ✔",
    "back\\slash\\",
    "!! & | < > # %h",
    "",
    " ",
    "a\tb\r",
]


@pytest.fixture
def make_nodes(hosts):
    """Makes nodes through the hosts' configuration, and closes their connections."""
    made = []

    def make(names=("n1", "n2"), **kwargs):
        nodes = ssh_nodes(names, **{"config": hosts.ssh_config, **kwargs})
        made.extend(nodes)
        return nodes

    yield make
    for node in made:
        node.close()


@pytest.fixture
def real_ssh(hosts, monkeypatch):
    """Lets `ssh` be OpenSSH's client inside n0, so that its own words and its own name look-up are tested."""
    monkeypatch.setenv("PATH", f"{hosts.tools}:{os.environ['PATH']}")
    return hosts.inner_config


def run(node, argv, stdin=b""):
    process = node.popen(argv)
    out, err = process.communicate(stdin, timeout=30)
    return process.returncode, out, err.decode()


def refuse(node, seconds=10.0):
    """Runs a program that cannot run, and returns the error that explains it, which has to come in time."""
    begin = time.monotonic()
    code, _, err = run(node, ["true"])
    took = time.monotonic() - begin
    assert code == 255
    assert took < seconds
    with pytest.raises(LabError) as looked:  # the first use of a node says the same
        _ = node.folder
    error = node.explain(code, err)
    assert looked.value.what == error.what
    return error


def test_a_program_runs_on_its_node_and_hostile_arguments_arrive_unchanged(make_nodes):
    for node in make_nodes():
        code, out, err = run(node, [node.python, "-c", ECHO, *HOSTILE], b"a\x00b\nlast")
        assert (code, err) == (0, "")
        assert json.loads(out) == [node.name, HOSTILE, "a\x00b\nlast"]
    assert not Path("/tmp/lab-injected").exists()


def test_the_three_streams_are_separate_and_the_exit_status_is_the_programs(make_nodes):
    (node,) = make_nodes(["n1"])
    code = "import sys; sys.stdout.write('out'); sys.stderr.write('err'); sys.exit(7)"
    assert run(node, [node.python, "-c", code]) == (7, b"out", "err")


def test_home_and_python_are_looked_up_there_once_and_not_before_the_first_use(make_nodes, monkeypatch):
    node, other = make_nodes(["n1", "nowhere.invalid"], folder="~/my labs")
    assert node.connections._folder is None, "making nodes must not touch anything"
    assert (node.folder, node.python) == ("/node/home/my labs", sys.executable)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert node.folder == "/node/home/my labs"
    assert other.name == "nowhere.invalid"
    (plain,) = make_nodes(["n1"], folder="/node/x", python="/opt/python")
    assert (plain.folder, plain.python) == ("/node/x", "/opt/python")
    assert plain.connections._folder is None
    (found,) = make_nodes(["n1"], python="python3")
    assert found.python == shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert found.folder == "/node/home/distributed-training-labs"


def test_a_python_that_is_this_ones_path_is_not_needed(make_nodes, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert make_nodes(["n1"])[0].python.endswith("/python3")


def test_a_missing_python_is_explained(make_nodes):
    (node,) = make_nodes(["n1"], python="/no such/python")
    code, _, err = run(node, [node.python, "-c", ""])
    assert code in (126, 127)
    assert_explains(node.explain(code, err), "n1", "/no such/python", "install Python and torch there")
    (node,) = make_nodes(["n1"], python="~/none/bin/python")
    with pytest.raises(LabError) as caught:
        _ = node.python
    assert_explains(caught.value, "Python", "n1", "~/none/bin/python")


def test_a_shell_that_talks_does_not_disturb(make_nodes, hosts):
    (hosts.disk("n1") / "home" / ".bashrc").write_text("echo Welcome; echo LAB; echo noise >&2\n")
    try:
        assert make_nodes(["n1"])[0].folder == "/node/home/distributed-training-labs"
    finally:
        (hosts.disk("n1") / "home" / ".bashrc").unlink()


def test_host_keys_are_always_checked(make_nodes):
    (node,) = make_nodes(["n1"])
    command = " ".join(node.popen(["true"]).args)
    for word in ("StrictHostKeyChecking", "UserKnownHostsFile", "PasswordAuthentication"):
        assert word not in command
    assert "BatchMode=yes" in command


# Each drill: OpenSSH itself, inside n0.


@pytest.mark.drill
def test_a_name_that_is_not_known(make_nodes, real_ssh):
    error = refuse(make_nodes(["n3"], config=real_ssh)[0], 2)
    assert_explains(error, "n3 is not known", "/etc/hosts", str(real_ssh), "IP address")


@pytest.mark.drill
def test_a_host_without_sshd(make_nodes, real_ssh):
    assert_explains(refuse(make_nodes(["127.0.0.1"], config=real_ssh)[0], 2), "127.0.0.1", "refuse", "sshd")


@pytest.mark.drill
def test_a_host_behind_a_firewall(make_nodes, real_ssh, hosts):
    hosts.drop("n0", "n2")
    begin = time.monotonic()
    (node,) = make_nodes(["n2"], config=real_ssh)
    code, _, err = run(node, ["true"])
    assert time.monotonic() - begin < 7
    assert_explains(node.explain(code, err), "n2 does not answer", "firewall", "port 22")


@pytest.mark.drill
def test_an_sshd_that_accepts_and_never_speaks(tmp_path, make_nodes):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = tmp_path / "config"
        config.write_text(f"Host mute\n  HostName 127.0.0.1\n  Port {mute.getsockname()[1]}\n")
        (node,) = make_nodes(["mute"], config=config)
        begin = time.monotonic()
        code, _, err = run(node, ["true"])
    assert time.monotonic() - begin < 10
    assert_explains(node.explain(code, err), "mute does not answer")


@pytest.mark.drill
def test_a_host_key_that_was_never_seen(make_nodes, real_ssh, tmp_path):
    config = tmp_path / "config"
    config.write_text(real_ssh.read_text().replace("known_hosts\n", "known_none\n"))
    error = refuse(make_nodes(["n1"], config=config)[0])
    assert_explains(error, "host key of n1", "fingerprint", f"ssh -F {config} n1")
    for word in ("keyscan", "StrictHostKeyChecking"):
        assert word not in str(error)


@pytest.mark.drill
def test_a_host_key_that_has_changed(make_nodes, real_ssh, hosts, tmp_path):
    known, config = tmp_path / "known", tmp_path / "config"
    one, two = (hosts.state / "known_hosts").read_text().splitlines()
    known.write_text(f"{one.split(' ', 1)[0]} {two.split(' ', 1)[1]}\n")
    config.write_text(real_ssh.read_text().replace(str(hosts.state / "known_hosts"), str(known)))
    error = refuse(make_nodes(["n1"], config=config)[0])
    assert_explains(error, "n1 shows another host key", str(known), "-R n1", "ask")


@pytest.mark.drill
def test_no_key_that_the_host_accepts(make_nodes, real_ssh, hosts, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "config"
    config.write_text(real_ssh.read_text().replace("/id\n", "/none\n"))
    error = refuse(make_nodes(["n1"], config=config)[0])
    assert_explains(error, "n1 does not accept", "no key file", "no ssh agent", "ssh-keygen", "ssh-copy-id")


@pytest.mark.drill
def test_a_configuration_with_a_slip(make_nodes, tmp_path):
    config = tmp_path / "config"
    config.write_text("Hots n1\n")
    assert_explains(refuse(make_nodes(["n1"], config=config)[0]), "configuration", str(config), "line 1", "hots")


@pytest.mark.drill
def test_a_node_that_dies_ends_its_programs(make_nodes, hosts):
    (node,) = make_nodes(["n2"])
    process = node.popen([node.python, "-uc", "import time; print('up'); time.sleep(600)"])
    assert process.stdout.readline() == b"up\n"
    begin = time.monotonic()
    hosts.crash("n2")
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 255
    assert_explains(node.explain(255, err.decode()), "n2")
    hosts.boot("n2")
    assert run(node, ["hostname"])[1] == b"n2\n", "the next program finds the host again"


def test_programs_share_one_private_connection_which_close_ends(make_nodes, hosts):
    nodes = make_nodes()
    processes = [node.popen([node.python, "-c", "input()"]) for node in nodes for _ in range(3)]
    for process in processes:
        process.stdin.write(b"\n")
        assert process.communicate(timeout=20)[1] == b"" and process.returncode == 0
    folder = nodes[0].connections._folder
    assert nodes[1].connections._folder == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 2
    assert all(len(str(path)) < 80 for path in folder.iterdir())
    masters = find_masters(folder)
    assert len(masters) == 2
    nodes[0].close()
    assert not folder.exists()
    wait_gone(folder)
    assert run(nodes[0], ["hostname"])[1] == b"n1\n", "after close a new connection is made"
    assert nodes[0].connections._folder != folder


def test_connections_end_with_the_nodes_but_not_under_a_running_program(make_nodes, hosts):
    process = ssh_nodes(["n1"], config=hosts.ssh_config)[0].popen(["cat"])
    folder = process.connections._folder
    gc.collect()
    time.sleep(0.5)
    assert process.communicate(b"still there", timeout=20)[0] == b"still there"
    del process
    gc.collect()
    assert not folder.exists()


def test_connections_end_with_the_interpreter(hosts):
    code = (
        "import sys; from nodelaunch.backends.ssh import ssh_nodes\n"
        "node, = ssh_nodes(['n1'], config=sys.argv[1]); node.popen(['true']).communicate()\n"
        "print(node.connections._folder)"
    )
    done = subprocess.run([sys.executable, "-c", code, hosts.ssh_config], capture_output=True, text=True, timeout=300)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("lab-")
    assert not folder.exists()
    wait_gone(folder)


@pytest.mark.parametrize(
    "names", [["-oProxyCommand=x"], [""], ["a b"], ["n1\nn2"], ["n1", "n1"], [], ["x" * 300]], ids=lambda n: str(n)[:20]
)
def test_names_that_are_none_are_refused(names):
    with pytest.raises(LabError) as caught:
        ssh_nodes(names)
    assert_explains(caught.value, "ssh_nodes")


def test_a_machine_without_ssh_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        ssh_nodes(["n1"])[0].popen(["true"])
    assert_explains(caught.value, "OpenSSH", "apt-get", "local_nodes")


def test_a_configuration_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(LabError, match="not there"):
        ssh_nodes(["n1"], config=tmp_path / "none")


@pytest.mark.parametrize(
    "said", ["", "kex_exchange_identification: Connection closed by remote host", "\x1b[31mred\x07"]
)
def test_what_is_not_known_is_still_explained(said):
    error = explain_refusal("n" * 255, 255, said, python="python3", config=None)
    assert_explains(error, "try it by hand")
    assert "\x1b" not in str(error)


def find_masters(folder):
    """The ssh clients in the background that hold a connection whose socket is in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and text.startswith(b"ssh"):
            found.append(int(path.parent.name))
    return found


def wait_gone(folder):
    for _ in range(100):
        if not find_masters(folder):
            return
        time.sleep(0.05)
    pytest.fail(f"connections are left: {find_masters(folder)}")
