"""The README's commands, as a new user types them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from harness.jobs import wait_for

from course import workspace
from course.check import LABS
from nodelaunch.node.probe import find_free_port


@pytest.fixture(scope="module")
def make(root):
    """Runs make in the checkout, as from a shell that was not started by make."""
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


@pytest.fixture(scope="module")
def release(make, tmp_path_factory):
    """The folder that `make student` writes."""
    folder = tmp_path_factory.mktemp("learners") / "release"
    process = make("student", f"STUDENT={folder}")
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0, out
    return folder


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(address, token=None):
    """Returns the JSON at an address, or the status with which the server refuses."""
    headers = {"Authorization": f"token {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code


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


@pytest.mark.system
def test_make_lab_serves_the_learners_copy_on_this_computer_only_and_asks_for_a_token(make, tmp_path):
    port = find_free_port()
    arguments = ("lab", f"LAB_PORT={port}", f"WORKSPACE={tmp_path / 'workspace'}")
    process = make(*arguments, SSH_CONNECTION="192.0.2.7 50000 192.0.2.8 22")
    printed, token = [], None
    try:
        for line in process.stdout:
            printed.append(line)
            if found := re.search(rf"http://127\.0\.0\.1:{port}/lab/tree/START\.md\?token=(\w+)", line):
                token = found[1]
                break
        assert token, "".join(printed)
        out = "".join(printed)
        assert re.search(rf"ssh -N -L {port}:127\.0\.0\.1:{port} \S+@192\.0\.2\.8", out)
        assert "[ok]" in out
        assert "shapes10" in out
        wait_for(lambda: listens(port), 20.0)  # it prints its address before it listens
        contents = f"http://127.0.0.1:{port}/api/contents"
        names = {entry["name"] for entry in ask(contents, token)["content"]}
        assert {"START.md", "00_start_here.ipynb", "01_mixed_precision.ipynb", "figures"} <= names
        assert ask(contents) == 403
        lab = ask(f"{contents}/01_mixed_precision.ipynb", token)["content"]
        sources = "".join(cell["source"] for cell in lab["cells"])
        assert "raise NotImplementedError" in sources and "BEGIN SOLUTION" not in sources
        assert printed[-1].strip().startswith("http://"), "nothing but the address at the end"
        again = make(*arguments, SSH_CONNECTION="192.0.2.7 50000 192.0.2.8 22").communicate(timeout=60)[0]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in again and "@192.0.2.8" in again
        assert "is running already" in again and f"/?token={token}\n" in again, again
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
    wait_for(lambda: not listens(port), 20.0)


def test_the_release_for_learners_has_no_solutions_and_is_what_the_tests_solve(release, root, tmp_path):
    """Its notebooks are, byte by byte, the learner's copy that the notebook tests run unsolved and solved."""
    folder, copy = release, tmp_path / "copy"
    workspace.update(root / "notebooks", copy)
    names = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    assert len([name for name in names if name.suffix == ".ipynb"]) == len(LABS)
    assert all((folder / "notebooks" / name).read_bytes() == (copy / name).read_bytes() for name in names)
    texts = [
        path.read_text() for path in folder.rglob("*") if path.suffix in (".ipynb", ".py", ".md") and path.is_file()
    ]
    solutions = re.compile(rf"^\s*\"?{workspace.BEGIN}", re.MULTILINE)
    assert not any(solutions.search(text) for text in texts)
    assert not (folder / "tests").exists() and (folder / "requirements.lock").exists()
    # It is a checkout like any other: from it learners' copies are made, and `check.diff` has no solution to show.
    code = (
        "from course import workspace\nfrom lab_common import LabError\n"
        "from course.check.solutions import find_solution\n"
        "print(len(workspace.update(workspace.checkout() / 'notebooks', workspace.checkout() / 'workspace').written))\n"
        "try:\n    find_solution('1.3')\nexcept LabError as error:\n    print(error.fix)\n"
        "from course import check\ndef answer(*_):\n    return None\n"
        "for wrong in range(2):\n    try:\n        check.exercise('0.1', answer)\n"
        "    except check.NotYetError as error:\n        print('check.diff' in str(error))\n"
        "try:\n    check.diff('0.1')\nexcept LabError as error:\n    print(error.fix)"
    )
    # A file, since an answer is kept by its source.
    (tmp_path / "learner.py").write_text(code)
    environment = {**os.environ, "LAB_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(folder)}
    run = subprocess.run(
        [sys.executable, tmp_path / "learner.py"], capture_output=True, text=True, timeout=300, env=environment
    )
    said = [str(len(names) - 1), "ask your instructor", "False", "False", "ask your instructor"]
    assert run.stdout.splitlines() == said, run.stderr


def test_no_page_and_no_target_of_the_release_names_what_was_left_out(release, root):
    targets = set(re.findall(r"^\.PHONY: ([\w-]+)$", (release / "Makefile").read_text(), re.MULTILINE))
    for page in [*release.glob("*.md"), *release.glob("d*/*.md")]:
        named = set(re.findall(r"`make ([a-z][\w-]*)", page.read_text()))
        assert named <= targets, (page.name, named - targets)
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    gone = {name.split("/")[0] + "/" * ("/" in name) for name in listed} - {f"{p.name}/" for p in release.iterdir()}
    gone -= {path.name for path in release.iterdir()}
    assert {"tests/", "hosting/", "benchmarks/", "website/", "CONTRIBUTING.md"} <= gone
    for page in [release / "Makefile", *release.glob("*.md"), *release.glob("d*/*.md")]:
        text = page.read_text()
        assert {name for name in gone if re.search(rf"(?<![\w/]){re.escape(name)}", text)} == set(), page.name
        assert "in a release" not in text and "\n\n\n" not in text, f"{page.name} still has marks, or gaps"


def test_a_release_overwrites_nothing(make, tmp_path):
    (tmp_path / "release").mkdir()
    process = make("student", f"STUDENT={tmp_path / 'release'}")
    assert "is there already" in process.communicate(timeout=120)[0] and process.returncode != 0
    assert list((tmp_path / "release").iterdir()) == []
