"""TensorBoard as a learner starts it: where it listens, what it shows, and when it ends."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from torch.utils.tensorboard import SummaryWriter

from lab_common import LabError
from lab_utils import board
from nodelaunch.node.probe import find_free_port


@pytest.fixture
def logs(tmp_path):
    """A folder with two runs."""
    folder = tmp_path / "logs"
    for run, tags in {"first": ("loss/train", "acc1/train", "lr"), "second": ("loss/valid",)}.items():
        with SummaryWriter(folder / run) as writer:
            for step in range(5):
                for tag in tags:
                    writer.add_scalar(tag, 0.5 * step, step)
    return folder


def ask(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def read_tags(port, runs=2):
    """Returns the scalar tags of each run, as TensorBoard serves them, once it has read the files."""
    end = time.monotonic() + 30
    while True:
        found = json.loads(ask(f"http://127.0.0.1:{port}/data/plugin/scalars/tags"))
        if len(found) >= runs or time.monotonic() > end:
            return {run: set(tags) for run, tags in found.items()}
        time.sleep(0.2)


def wait_gone(pid, seconds=10):
    """Returns True if a process ends in time."""
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True


def test_a_started_server_answers_on_this_machine_only_and_ends_when_it_is_stopped(logs):
    server = board.start(logs, port=0)
    try:
        assert server.running and str(server.port) in server.note and "in use" not in server.note
        assert read_tags(server.port) == {"first": {"loss/train", "acc1/train", "lr"}, "second": {"loss/valid"}}
        points = f"http://127.0.0.1:{server.port}/data/plugin/scalars/scalars?run=first&tag=loss%2Ftrain"
        assert [(step, value) for _, step, value in json.loads(ask(points))] == [(i, 0.5 * i) for i in range(5)]
        # Of the server and all that it started, nothing listens on another address than 127.0.0.1.
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", server.port)]
        frame = server.show(height=300).data
        address = f"http://127.0.0.1:{server.port}/"
        assert f'<a href="{address}"' in frame and f'<object data="{address}"' in frame and 'height="300"' in frame
        assert ">No TensorBoard answers here. To start it again, run this cell.</object>" in frame
    finally:
        server.stop()
    assert not server.running
    with pytest.raises(urllib.error.URLError):
        ask(server.url)
    server.stop()  # a cell may be run twice


def test_a_busy_port_gets_a_new_one_and_a_word(logs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with board.start(logs, port=port) as server:
            assert server.port != port
            assert server.note.startswith(f"Port {port} is in use, so TensorBoard took {server.port}.\n")
            assert read_tags(server.port)


def test_two_folders_get_a_server_each(logs):
    """The second must neither show the runs of the first nor end it."""
    with board.start(logs / "first", port=0) as first, board.start(logs / "second", port=first.port) as second:
        assert f"Port {first.port} is in use, so TensorBoard took {second.port}." in second.note
        tags = [set().union(*read_tags(server.port, runs=1).values()) for server in (first, second)]
        assert tags == [{"loss/train", "acc1/train", "lr"}, {"loss/valid"}]


def plant_note(folder, logdir, pid, port=6006):
    from tensorboard import version

    (folder / ".tensorboard-info").mkdir()
    note = {"version": version.VERSION, "start_time": 1, "pid": pid, "port": port, "path_prefix": "", "db": ""}
    note |= {"logdir": str(logdir), "cache_key": ""}
    (folder / ".tensorboard-info" / f"pid-{pid}.info").write_text(json.dumps(note))


def test_the_note_of_a_killed_server_is_not_trusted(logs, tmp_path, monkeypatch):
    """``%tensorboard`` trusts such a note, and shows a frame in which nothing answers."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        stale = nobody.getsockname()[1]
        plant_note(tmp_path, logs, gone.pid, stale)
        with board.start(logs, port=0) as server:
            assert server.port != stale and read_tags(server.port)


def test_a_cell_that_runs_twice_leaves_one_server_and_a_dead_one_is_replaced(logs):
    with board.start(logs, port=0) as first:
        assert board.start(logs) is first
        assert board.start(str(logs) + "/") is first
        first.process.kill()
        first.process.wait()
        with board.start(logs, port=0) as second:
            assert second is not first and second.running
    assert not second.running


def test_of_an_event_file_its_folder_is_shown_and_a_home_is_a_home(logs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with board.start("$HOME/tb2", port=0) as server:
        assert server.logdir == tmp_path / "tb2" and not (tmp_path / "$HOME").exists()
    with board.start("~/tb", port=0) as server:
        assert server.logdir == tmp_path / "tb" and not (tmp_path / "~").exists()
        assert server.note.startswith(f"{tmp_path}/tb was not there and was made")
    file = next(logs.rglob("events.out.tfevents*"))
    with board.start(file, port=0) as server:
        assert server.logdir == file.parent and "is a file, so TensorBoard shows its folder" in server.note


@pytest.mark.parametrize("place", ["file/below", "link"])
def test_what_cannot_be_a_folder_of_logs_is_explained(tmp_path, monkeypatch, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file/gone")
    with pytest.raises(LabError, match="lies where a folder is meant"):
        board.start(tmp_path / place)
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / place))
    with pytest.raises(LabError, match="lies where a folder is meant"):
        board.start(tmp_path / "logs")


START = """
import sys, time
from lab_utils import board
server = board.start(sys.argv[1], port=0)
print(server.process.pid, flush=True)
{after}
"""


@pytest.mark.drill
@pytest.mark.parametrize(
    ("after", "number"),
    [
        ("", None),  # the kernel ends
        ("time.sleep(60)", signal.SIGKILL),  # which no atexit survives
    ],
)
def test_the_server_ends_with_the_process_that_started_it_however_that_ends(logs, after, number):
    command = [sys.executable, "-c", START.format(after=after), str(logs)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        if number is not None:
            assert psutil.pid_exists(pid)
            parent.send_signal(number)
        parent.wait(30)
    assert wait_gone(pid)


@pytest.mark.drill
def test_an_interrupted_cell_does_not_end_the_server(logs):
    after = (
        "try:\n    print('waits', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", START.format(after=after), str(logs)]
    # As Jupyter does: the kernel has a process group of its own, and an interrupt goes to all of it.
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "waits\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        time.sleep(0.5)
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_gone(pid)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import sys; sys.exit('no TensorBoard here')", "no TensorBoard here"),
        ("import time; time.sleep(60)", "it said nothing"),
    ],
)
def test_a_server_that_does_not_start_says_why_and_is_not_left_behind(logs, tmp_path, monkeypatch, program, cause):
    monkeypatch.setattr(board, "SERVER", tmp_path / "server.py")
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    board.SERVER.write_text(program)
    before = psutil.Process().children()
    with pytest.raises(LabError) as raised:
        board.start(logs, seconds=5 if "sleep" not in program else 0.3)
    assert raised.value.what.startswith("TensorBoard did not start") and raised.value.cause == cause
    assert raised.value.fix and Path(raised.value.log).is_file()
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("variables", "proxy", "expected"),
    [
        ({}, False, "http://127.0.0.1:7007/"),
        ({"TENSORBOARD_PROXY_URL": "/hub/tb/%PORT%/"}, False, "/hub/tb/7007/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a/"}, True, "/user/a/proxy/7007/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a/"}, False, "http://127.0.0.1:7007/"),
        ({"JPY_PARENT_PID": "41"}, True, "/base/proxy/7007/"),
    ],
)
def test_the_address_is_the_one_that_the_browser_reaches(monkeypatch, variables, proxy, expected):
    for name in ("TENSORBOARD_PROXY_URL", "JUPYTERHUB_SERVICE_PREFIX", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: proxy or None)
    servers = [{"pid": 40, "base_url": "/other/"}, {"pid": 41, "base_url": "/base/"}]
    monkeypatch.setattr("jupyter_server.serverapp.list_running_servers", lambda: servers)
    assert board.choose_url(7007) == expected


def test_through_the_proxy_of_the_jupyter_server_only_with_its_token(logs, tmp_path):
    port = find_free_port()
    command = [sys.executable, "-m", "jupyter_server", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={tmp_path}", "--ServerApp.open_browser=False"]
    command += ["--IdentityProvider.token=secret", "--ServerApp.jpserver_extensions={'jupyter_server_proxy': True}"]
    jupyter = subprocess.Popen(
        [*command, "--allow-root"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        with board.start(logs, port=0) as server:
            read_tags(server.port)
            url = f"http://127.0.0.1:{port}/proxy/{server.port}/data/plugin/scalars/tags"
            end = time.monotonic() + 60
            while True:
                try:
                    answer = ask(f"{url}?token=secret")
                    break
                except OSError:
                    assert time.monotonic() < end, "the Jupyter server did not answer"
                    time.sleep(0.3)
            assert set(json.loads(answer)) == {"first", "second"}
            for wrong in ("", "?token=wrong"):
                try:  # refused outright, or sent to the page that asks for the token
                    assert b"loss" not in ask(url + wrong)
                except urllib.error.HTTPError as error:
                    assert error.code in (401, 403)
    finally:
        jupyter.terminate()
        jupyter.wait(20)


def read_points(port, run, expected):
    """Returns step and value of each point from TensorBoard, once they are as expected or 30 s are over."""
    end, found = time.monotonic() + 30, None
    while found != expected and time.monotonic() < end:
        try:
            points = ask(f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run={run}&tag=loss")
            found = [(step, value) for _, step, value in json.loads(points)]
        except OSError:  # not started, or not read yet
            pass
        time.sleep(0.2)
    return found


@pytest.mark.drill
def test_a_run_that_is_trained_again_replaces_its_old_curve(tmp_path):
    """As when its cell is run again: a new event file replaces the old one before the server has looked."""
    with board.start(tmp_path, port=0) as server:
        for value in (1.0, 2.0):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            with SummaryWriter(tmp_path / "run") as writer:
                for step in range(3):
                    writer.add_scalar("loss", value, step)
            expected = [(step, value) for step in range(3)]
            assert read_points(server.port, "run", expected) == expected
