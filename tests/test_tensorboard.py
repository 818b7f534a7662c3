"""TensorBoard as a learner starts it, the event files of a killed run, and the log of several processes."""

import contextlib
import importlib.util
import json
import os
import re
import runpy
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

import nbformat
import numpy as np
import psutil
import pytest
from harness.browser import find_chromium
from tensorboard.backend.event_processing import io_wrapper
from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from torch.utils.tensorboard import SummaryWriter

import nodelaunch as launch
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


def test_of_a_long_log_the_end_is_told(logs, tmp_path, monkeypatch, runs):
    monkeypatch.setattr(board, "SERVER", tmp_path / "server.py")
    board.SERVER.write_text(
        "import os, sys\nos.ftruncate(2, 2**31)\nos.lseek(2, 0, 2)\nsys.exit('\\nthe last\\x1b[2J words')"
    )
    with pytest.raises(LabError) as caught:
        board.start(logs, seconds=10)
    assert caught.value.cause == "the last\ufffd[2J words"


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
        ({"TENSORBOARD_PROXY_URL": "/tb/%PORT%", "JUPYTERHUB_SERVICE_PREFIX": "/user/a/"}, True, "/tb/7007"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a/"}, True, "/user/a/proxy/7007/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a/"}, False, "http://127.0.0.1:7007/"),
        ({"JPY_PARENT_PID": "41"}, True, "/base/proxy/7007/"),
        ({"JPY_PARENT_PID": "42"}, True, "http://127.0.0.1:7007/"),
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


def test_a_browser_shows_the_curves(logs, tmp_path, record_property):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("NOT TESTED HERE: no Chromium is installed (apt-get install chromium)")
    # pytest keeps the folders of its last runs; LAB_ARTEFACTS names a better place.
    folder = Path(os.environ.get("LAB_ARTEFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "tensorboard.png"
    picture.unlink(missing_ok=True)
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,900", "--virtual-time-budget=20000"]
    command += [f"--screenshot={picture}", "--dump-dom"]
    with board.start(logs, port=0) as server:
        read_tags(server.port)
        page = subprocess.run([*command, f"{server.url}#timeseries"], capture_output=True, text=True, timeout=180)
    assert page.returncode == 0, page.stderr
    text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]+>", " ", page.stdout, flags=re.DOTALL)
    words = " ".join(text.split()).replace(" /", "/")
    for expected in ("first", "second", "loss/train", "acc1/train", "loss/valid"):
        assert expected in words, words[:2000]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    record_property("screenshot", str(picture))


WRITE = """
import sys, time
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in range(25):
    writer.add_scalar("step", step, step)
print("logged", flush=True)
time.sleep(60)
"""


@pytest.mark.drill
def test_a_killed_run_keeps_what_it_logged(tmp_path):
    """By ``kill -9``, which no thread survives: each record is appended at once."""
    command = [sys.executable, "-c", WRITE, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "logged\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    log = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert [(event.step, event.value) for event in log.Scalars("step")] == [(step, step) for step in range(25)]


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
def test_two_writers_in_one_directory_lose_points_on_the_page(tmp_path):
    """The lab's server draws both files and continues with the last."""
    first, second = ((0, 1.0), (1, 1.0)), ((0, 2.0), (1, 2.0))
    port = find_free_port()
    with SummaryWriter(tmp_path / "run") as one, SummaryWriter(tmp_path / "run") as other:
        for writer, points in ((one, first), (other, second)):
            for step, value in points:
                writer.add_scalar("loss", value, step)
            writer.flush()
        server = board.start(tmp_path, port=port).process
        try:
            expected = [*first, *second]
            assert read_points(port, "run", expected) == expected
            for writer, value in ((one, 1.0), (other, 2.0)):
                writer.add_scalar("loss", value, 2)
                writer.flush()
            expected += [(2, 2.0)]
            assert read_points(port, "run", expected) == expected
            # The second file is ahead; then the first one's next step comes.
            for writer, steps in ((other, (3, 4)), (one, (3,))):
                for step in steps:
                    writer.add_scalar("loss", 1.0 if writer is one else 2.0, step)
                writer.flush()
                ahead = [*expected, (3, 2.0), (4, 2.0)]
                assert read_points(port, "run", ahead) == ahead
        finally:
            server.terminate()
            server.wait(20)


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


def test_a_run_that_goes_while_the_server_looks_does_not_end_the_reading(logs, monkeypatch):
    for owner, name in ((DirectoryWatcher, "Load"), (EventMultiplexer, "AddRun")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # given back after the test
    runpy.run_path(board.SERVER)["drop_replaced_runs"]()
    runs = EventMultiplexer()
    runs.Reload()  # from now on a run is read as soon as it is found
    find, gone = io_wrapper.GetLogdirSubdirectories, str(logs / "first")

    def find_and_delete(path):
        for folder in sorted(find(path)):
            if folder == gone:
                shutil.rmtree(folder)
            yield folder

    with monkeypatch.context() as moment:
        moment.setattr(io_wrapper, "GetLogdirSubdirectories", find_and_delete)
        runs.AddRunsFromDirectory(str(logs))
    runs.Reload()
    assert set(runs.Runs()) == {"second"}
    with SummaryWriter(gone) as writer:
        writer.add_scalar("loss", 1.0, 0)
    runs.AddRunsFromDirectory(str(logs))
    assert set(runs.Runs()) == {"first", "second"}


# Parts of the notebook.


@pytest.fixture(scope="module")
def cells(root):
    notebook = nbformat.read(root / "notebooks" / "02_tensorboard.ipynb", as_version=4)
    return {cell.id: cell.source for cell in notebook.cells}


EVERY_RANK = """
def log_reduced(rank, sums, all_reduce, open_writer, step):
    all_reduce(sums)
    with open_writer() as writer:
        writer.add_scalar("acc1/valid", sums[2] / sums[0], step)
"""


@pytest.mark.drill
@pytest.mark.parametrize("files", [1, 2])
def test_two_processes_leave_one_event_file_with_reduced_values(cells, root, tmp_path, files):
    source = cells["log-reduced"].split("\n\n\ncheck.")[0] if files == 1 else EVERY_RANK
    (tmp_path / "answer.py").write_text(source)
    job = launch.TorchrunJob(
        root / "notebooks" / "scripts" / "log_shares.py",
        ["--logdir", tmp_path / "logs"],
        nodes=launch.local_nodes(2, folder=tmp_path / "nodes"),
        files=[tmp_path / "answer.py"],
    )
    results = job.run(show=False).results
    shares = np.array([result["sums"] for result in results])
    assert sorted(shares[:, 0].tolist()) == [16, 17]
    assert len(list((tmp_path / "logs").iterdir())) == files
    if files == 1:
        log = EventAccumulator(str(tmp_path / "logs")).Reload()
        images, loss, hits = shares.sum(axis=0)
        assert {tag: [(e.step, np.float32(e.value)) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]} == {
            "loss/valid": [(1, np.float32(loss / images))],
            "acc1/valid": [(1, np.float32(hits / images))],
        }


CLAIM = """
import numpy as np, pandas as pd
from types import SimpleNamespace
from course import check
rows = pd.DataFrame({"images": [4, 2], "loss": [2.1, 2.3], "top1": [1, 1], "top5": [3, 2], "lr": [0.1, 0.05]})
results = [(2, SimpleNamespace(loss=2.2, top1=0.3, top5=0.7))]
values = {"loss/train": [2.1, 2.3], "acc1/train": [0.25, 0.5], "acc5/train": [0.75, 1.0], "lr": [0.1, 0.05]}
events = [(tag, step, float(np.float32(v))) for tag, many in values.items() for step, v in enumerate(many)]
events += [(tag, 2, float(np.float32(v))) for tag, v in (("loss/valid", 2.2), ("acc1/valid", 0.3), ("acc5/valid", 0.7))]
"""


@pytest.mark.parametrize("change", ["", "value", "step", "missing", "twice"])
def test_the_claim_notices_one_wrong_record(cells, tmp_path, capsys, change):
    changes = {
        "value": "events[1] = (*events[1][:2], float(np.nextafter(np.float32(events[1][2]), np.float32(9))))",
        "step": "events[-1] = (events[-1][0], 1, events[-1][2])",
        "missing": "del events[5]",
        "twice": "events.append(events[0])",
    }
    logged = 'logged = pd.DataFrame(events, columns=["tag", "step", "value"])'
    path = tmp_path / "claim.py"
    path.write_text("\n".join([CLAIM, changes.get(change, ""), logged, cells["claim"]]))
    if change:
        with pytest.raises(LabError, match="logged values of 7 tags equal"):
            runpy.run_path(str(path))
    else:
        runpy.run_path(str(path))
        assert "✔ 11 logged values of 7 tags equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "said"),
    [("None", "no answer yet"), ("2", "✔ 2: the event file says so, too"), ("4", "does not say 4: look again")],
)
def test_an_answer_read_from_the_page_is_compared_with_the_event_file(cells, tmp_path, capsys, step, said):
    with SummaryWriter(tmp_path / "baseline") as writer:
        for at, loss in enumerate((2.0, 1.5, 1.0, 1.2, 1.4)):
            writer.add_scalar("loss/valid", loss, at)
    source = re.sub(r"^my_step = None", f"my_step = {step}", cells["ask-run"], flags=re.MULTILINE)
    assert source.startswith(f"my_step = {step} ")
    exec(source, {"RUNS": tmp_path, "EventAccumulator": EventAccumulator})
    assert said in capsys.readouterr().out


def test_the_lab_opens_no_port_to_the_world(cells, root):
    code = "\n".join([*cells.values(), *(p.read_text() for p in (root / "lab_utils" / "board").glob("*.py"))])
    assert "0.0.0.0" not in code
    assert "--bind_all" not in re.sub(r"# No --bind_all, ever|with `--bind_all`", "", code)
