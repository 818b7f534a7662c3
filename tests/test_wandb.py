"""Runs of Weights & Biases: offline whenever a server is not sure, in seconds, without a key anywhere; read back."""

import json
import math
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from harness.wandb_server import WandbServer

from lab_common import LabError
from lab_utils import wandb_runs
from lab_utils.wandb_runs import reading

KEY = "PLANTED" + "0123456789abcdef" * 3  # of the form that the SDK asks for
PROGRAM = """
import json, sys, time
import wandb
from lab_utils import wandb_runs
begin = time.perf_counter()
connection = wandb_runs.connect("runs")
print(connection)
run = wandb.init(project="labs", config={"lr": 0.1}, **connection.options)
seconds = time.perf_counter() - begin
for step in range(1, 21):
    run.log({"loss": 1 / step}, step=step)
run.finish()
print(json.dumps({"seconds": seconds, "mode": connection.mode, "folder": run.dir}))
"""


def make_environment(folder, **variables):
    """An environment without anything of wandb, whose home is an empty folder."""
    (folder / "home").mkdir(exist_ok=True)
    plain = {
        key: value for key, value in os.environ.items() if not key.startswith("WANDB") and "proxy" not in key.lower()
    }
    return plain | {"HOME": str(folder / "home"), "LAB_RUNS": str(folder / "runs")} | variables


def run_program(folder, stdin=subprocess.DEVNULL, **variables):
    """Runs the program as a learner's cell would, without a terminal; returns its lines and its last, as a dict."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdin=stdin,
        capture_output=True,
        text=True,
        cwd=folder,
        env=make_environment(folder, **variables),
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    *lines, last = child.stdout.splitlines()
    return lines, json.loads(last)


def find_text(folder, text):
    """The files below a folder that hold a text, or have it in their name."""
    return [
        path
        for path in folder.rglob("*")
        if text in path.name or (path.is_file() and text.encode() in path.read_bytes())
    ]


def expect_whole_run_offline(folder, lines, last, words):
    assert len(lines) == 1, "one line says it"
    assert lines[0].startswith("offline: ") and words in lines[0]
    assert last["mode"] == "offline"
    assert last["seconds"] <= 5
    recorded = wandb_runs.read_run(last["folder"])
    assert recorded.finished and recorded.config == {"lr": 0.1}
    assert recorded.curve("loss") == {step: 1 / step for step in range(1, 21)}
    assert recorded.file.is_relative_to(folder / "runs")
    assert list((folder / "home").iterdir()) == [], "something was written to the home folder"


@pytest.fixture
def silent_server():
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def test_without_a_key_a_run_is_offline(tmp_path):
    lines, last = run_program(tmp_path)
    expect_whole_run_offline(tmp_path, lines, last, f"there is no key for {wandb.Settings().base_url};")


def test_with_a_terminal_there_is_no_question_either(tmp_path):
    ours, theirs = pty.openpty()
    lines, last = run_program(tmp_path, stdin=theirs)
    os.close(ours), os.close(theirs)
    expect_whole_run_offline(tmp_path, lines, last, "there is no key for https://")


@pytest.mark.parametrize("key", ["PLANTED", f"\u00e4{KEY}"])
def test_a_malformed_key_is_offline_and_is_not_repeated(tmp_path, closed_port, key):
    lines, last = run_program(tmp_path, WANDB_API_KEY=key, WANDB_BASE_URL=closed_port)
    expect_whole_run_offline(tmp_path, lines, last, "")
    assert "WANDB_API_KEY" in lines[0] or not key.isascii(), "the SDK looks at the key's length and blanks only"
    assert "PLANTED" not in str((lines, last))
    assert find_text(tmp_path, "PLANTED") == []


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("closed_port", "gave no valid answer in time"),
        ("silent_server", "gave no valid answer in time"),
        ("http://nowhere.invalid", "nowhere.invalid"),
        ("https://user:PLANTED@127.0.0.1", "WANDB_BASE_URL is not the address of a server"),
    ],
)
def test_an_unreachable_server_is_offline(tmp_path, request, server, words):
    url = request.getfixturevalue(server) if server in ("closed_port", "silent_server") else server
    lines, last = run_program(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=url)
    expect_whole_run_offline(tmp_path, lines, last, words)
    assert "PLANTED" not in str((lines, last))
    assert find_text(tmp_path, "PLANTED") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"accepts": False}, "invalid credentials"), ({"status": 401}, "error 401"), ({"status": 502}, "no valid answer")],
)
def test_a_server_that_refuses_is_offline(tmp_path, options, words):
    with WandbServer(**options) as server:
        lines, last = run_program(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    expect_whole_run_offline(tmp_path, lines, last, words)
    assert find_text(tmp_path, "PLANTED") == []


def test_a_redirection_does_not_take_the_key_along(tmp_path):
    with WandbServer() as other, WandbServer(status=302) as server:
        server.location = f"{other.url}/graphql"
        lines, last = run_program(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    expect_whole_run_offline(tmp_path, lines, last, server.url)
    assert server.keys == {KEY} and other.keys == set()


def test_offline_is_kept_where_it_is_asked_for(tmp_path):
    with WandbServer() as server:
        lines, last = run_program(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url, WANDB_MODE="offline")
    expect_whole_run_offline(tmp_path, lines, last, "WANDB_MODE is 'offline'")
    assert server.operations == []


def test_with_a_key_the_same_program_goes_online(tmp_path):
    with WandbServer() as server:
        lines, last = run_program(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert lines == [f"online: {server.url} takes the key"]
    assert last["mode"] == "online" and server.keys == {KEY}
    (rows,) = server.rows.values()
    assert {row["_step"]: row["loss"] for row in rows} == {step: 1 / step for step in range(1, 21)}
    assert len(wandb_runs.read_run(last["folder"]).rows) == 20, "the file is written, too"
    assert find_text(tmp_path, "PLANTED") == []
    assert list((tmp_path / "home").iterdir()) == []


def test_a_key_that_wandb_login_stored_is_taken(tmp_path):
    """In the .netrc, beside the server's address in wandb's own settings file, as `wandb login --host` leaves them."""
    with WandbServer() as server:
        (tmp_path / "home").mkdir()
        stored = tmp_path / "home" / ".netrc"
        stored.write_text(f"machine {server.url.removeprefix('http://')}\n  login user\n  password {KEY}\n")
        stored.chmod(0o600)
        settings = tmp_path / "home" / ".config" / "wandb" / "settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(f"[default]\nbase_url = {server.url}\n")
        lines, last = run_program(tmp_path)
    assert lines == [f"online: {server.url} takes the key"] and last["mode"] == "online" and server.keys == {KEY}
    assert find_text(tmp_path / "runs", "PLANTED") == []


def test_an_offline_run_can_be_sent_later(tmp_path):
    _, last = run_program(tmp_path)
    with WandbServer() as server:
        sent = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", str(Path(last["folder"]).parent)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=make_environment(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url),
            timeout=90,
        )
        assert sent.returncode == 0, sent.stderr
    (rows,) = server.rows.values()
    assert {row["_step"] for row in rows} == set(range(1, 21))


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory):
    """The file of a run of 400 rows, not finite ones among them."""
    where = wandb_runs.connect(tmp_path_factory.mktemp("recorded")).options
    run = wandb.init(project="labs", tags=["a", "b"], **where)
    for step in range(1, 401):
        odd = {7: math.nan, 8: math.inf, 9: -math.inf}
        # A line ends with \\n alone, whatever else a text has in it.
        run.log({"loss": odd.get(step, step / 3), "text": f"number {step}", "odd": "a\x85b\u2028c\x1dd"}, step=step)
    run.finish()
    return wandb_runs.read_run(run.dir).file


def test_a_run_reads_back_exactly(recorded_file):
    recorded = wandb_runs.read_run(recorded_file)
    loss = recorded.curve("loss")
    assert math.isnan(loss.pop(7)) and loss.pop(8) == math.inf and loss.pop(9) == -math.inf
    assert loss == {step: step / 3 for step in range(1, 401) if step not in (7, 8, 9)}
    assert recorded.curve("text")[400] == "number 400" and recorded.curve("odd")[400] == "a\x85b\u2028c\x1dd"
    assert recorded.tags == ("a", "b") and recorded.finished and recorded.last_step == 400


def test_a_torn_file_reads_back_up_to_its_last_whole_record(recorded_file, tmp_path):
    torn = tmp_path / recorded_file.name
    content = recorded_file.read_bytes()
    torn.write_bytes(content[: len(content) * 2 // 3])
    recorded = wandb_runs.read_run(torn)
    assert not recorded.finished
    assert 50 < recorded.last_step < 400
    assert [row["_step"] for row in recorded.rows] == list(range(1, recorded.last_step + 1))


def test_a_run_of_which_nothing_reached_the_disk_has_no_rows(recorded_file, tmp_path):
    empty = tmp_path / recorded_file.name
    empty.write_bytes(recorded_file.read_bytes()[: reading.HEADER_BYTES])
    recorded = wandb_runs.read_run(empty)
    assert (recorded.rows, recorded.last_step, recorded.finished) == ((), -1, False)
    assert f"run-{recorded.id}.wandb" == recorded_file.name


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(LabError, match="There is no record of a run here") as caught:
        wandb_runs.read_run(tmp_path / "nowhere")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ("", 0),
        ("Error: No such command 'leet'.", 2),
        ('{"type": "history", "history": {"item": {"_step": 1}}}', 0),
    ],
)
def test_another_sdk_is_told_in_a_clear_word(recorded_file, monkeypatch, out, code):
    answer = subprocess.CompletedProcess([], code, stdout="" if code else out, stderr=out if code else "")
    monkeypatch.setattr(reading.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(LabError) as caught:
        wandb_runs.read_run(recorded_file)
    assert caught.value.what == "The run's record could not be read back with this version of wandb."
    assert "wandb leet inspect --json" in caught.value.cause
    assert "pip install" in caught.value.fix and caught.value.where == str(recorded_file)


def test_unknown_records_and_fields_are_passed_over():
    lines = [
        {"type": "header", "header": {}},
        {"type": "new in 0.40", "anything": 1},
        {"type": "run", "run": {"run_id": "a", "new": 2}},
        {"type": "history", "history": {"item": {"_step": 3, "loss": "NaN"}, "new": 1}},
        {"type": "summary", "summary": {"update": {"loss": {"min": 1}, "_runtime": 1}}},
    ]
    recorded = reading.collect(lines, Path("run-a.wandb"))
    assert recorded.id == "a" and recorded.summary == {"loss": {"min": 1}} and not recorded.finished
    assert math.isnan(recorded.curve("loss")[3])
