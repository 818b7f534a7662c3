"""The README's commands, as a new user types them."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest


@pytest.fixture
def make(root):
    """Starts make in the checkout, as a shell does that is not itself started by make."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}

    def start(*arguments, **more):
        return subprocess.Popen(
            ["make", *arguments],
            cwd=root,
            env=environment | {"CI": "true"} | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, *, listening, seconds=20):
    """Whether a server begins, or ceases, to listen within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if (probe.connect_ex(("127.0.0.1", port)) == 0) == listening:
                return True
        time.sleep(0.2)
    return False


def ask(address, token=None):
    """The JSON at an address, or the status with which the server refuses."""
    headers = {"Authorization": f"token {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code


def test_help_lists_every_target_in_one_line_each(root, make):
    listed = re.findall(r"^  make (\w+) {2,}\S.*$", make().communicate()[0], flags=re.MULTILINE)
    targets = re.findall(r"^\.PHONY: (\w+)$", (root / "Makefile").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(targets)
    assert {"lab", "test"} <= set(listed)


def test_a_busy_port_is_said_before_anything_is_done(make, tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        process = make("lab", f"LAB_PORT={port}", f"WORKSPACE={tmp_path / 'workspace'}")
        out = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert f"Port {port} is in use" in out and "make lab LAB_PORT=" in out
    assert not (tmp_path / "workspace").exists()


@pytest.mark.drill
def test_make_lab_serves_the_learners_copy_on_this_computer_only_and_asks_for_a_token(make, tmp_path):
    port = find_free_port()
    arguments = ("lab", f"LAB_PORT={port}", f"WORKSPACE={tmp_path / 'workspace'}")
    process = make(*arguments, SSH_CONNECTION="192.0.2.7 50000 192.0.2.8 22")
    printed, token = [], None
    try:
        for line in process.stdout:
            printed.append(line)
            if found := re.search(rf"http://127\.0\.0\.1:{port}/lab\?token=(\w+)", line):
                token = found[1]
                break
        assert token, "".join(printed)
        out = "".join(printed)
        assert re.search(rf"ssh -N -L {port}:127\.0\.0\.1:{port} \S+@192\.0\.2\.8", out)
        assert "[ok]" in out
        assert "shapes10" in out
        assert wait_for(port, listening=True), "".join(printed)  # it prints its address before it listens
        contents = f"http://127.0.0.1:{port}/api/contents"
        names = {entry["name"] for entry in ask(contents, token)["content"]}
        assert {"00_start_here.ipynb", "01_mixed_precision.ipynb", "figures"} <= names
        assert ask(contents) == 403
        lab = ask(f"{contents}/01_mixed_precision.ipynb", token)["content"]
        sources = "".join(cell["source"] for cell in lab["cells"])
        assert "raise NotImplementedError" in sources and "BEGIN SOLUTION" not in sources
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
    assert wait_for(port, listening=False), "the server still listens"
