"""Tests of command output: run if the programs are here, recorded on demand, otherwise shown with place and date."""

import json
import sys
from pathlib import Path

import pytest
from harness.drawn import assert_explains

from course import transcripts
from course.transcripts import MOST_CHARACTERS, Transcript
from lab_common import LabError

HERE = "toy 1.0"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Path of the record of "lab/toy", in the test's own checkout."""
    monkeypatch.setattr(transcripts, "checkout", lambda: tmp_path)
    return tmp_path / "data" / "reference" / "lab" / "toy.json"


def test_what_is_recorded_is_shown_elsewhere_with_where_and_when(record, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.txt").write_text("7\tdone\n")
    (tmp_path / "count.sh").write_text("echo x >> seen; wc -l < seen; echo of $PWD and $0 >&2")
    monkeypatch.setenv("LAB_RECORD", "1")
    show = Transcript("lab/toy", HERE)
    commands = [("cat", "job.txt"), ("sh", tmp_path / "count.sh"), ("sh", tmp_path / "count.sh")]
    answers = [show(*command, cwd=tmp_path / "run") for command in commands]
    live = capsys.readouterr().out
    assert answers == ["7       done", "1", "2"]
    assert (
        live.splitlines()[:2] == ["$ cat job.txt", "7       done"] and "$ sh count.sh\n1\nof … and …/count.sh" in live
    )
    assert str(tmp_path) not in record.read_text() and "…/count.sh" in record.read_text()

    monkeypatch.delenv("LAB_RECORD")
    before = record.read_bytes()
    show = Transcript("lab/toy", None)
    assert [show(*command, cwd=Path("elsewhere")) for command in commands] == answers
    shown = capsys.readouterr().out
    date = json.loads(before)["cat job.txt"][0]["when"]
    label = shown.splitlines()[1]
    assert label.startswith("(recorded on ") and label.endswith(f", {HERE}, {date})")
    assert shown.count("(recorded on") == 3
    assert [line for line in shown.splitlines() if not line.startswith("(recorded")] == live.splitlines()
    assert show(*commands[1]) == "2", "a cell that is run again sees the last"
    assert record.read_bytes() == before


def test_without_a_record_one_clear_line(record, capsys):
    show = Transcript("lab/toy", None)
    assert show("squeue", "--me") == ""
    assert capsys.readouterr().out == "$ squeue --me\n(cannot run here, and was not recorded)\n"


def test_nothing_is_recorded_unasked_and_long_output_is_cut(record, monkeypatch, capsys):
    many = [sys.executable, "-c", "for n in range(9000): print('x' * 300, n, '\\x1b[2J')"]
    text = Transcript("lab/toy", HERE)(*many)
    assert not record.exists() and len(text) <= MOST_CHARACTERS and "\x1b" not in text
    monkeypatch.setenv("LAB_RECORD", "1")
    assert Transcript("lab/toy", None)("true") == "" and not record.exists()


def test_a_command_that_cannot_be_run_is_explained(record):
    show = Transcript("lab/toy", HERE)
    for command, words in ((["no-such-program"], "No such file"), (["sleep", "9"], "timed out")):
        with pytest.raises(LabError) as caught:
            show(*command, seconds=0.2)
        assert_explains(caught.value, command[0], words, "run the cell again")
    assert show("sh", "-c", "echo odd >&2; exit 3") == "", "what failed is shown, and raises nothing"


def test_a_result_is_measured_here_and_recalled_elsewhere(record, monkeypatch):
    assert transcripts.recall("lab/toy", lambda: {"gap": 0.5}, HERE) == ({"gap": 0.5}, "measured here")
    assert not record.exists(), "only what is asked for is recorded"
    monkeypatch.setenv("LAB_RECORD", "1")
    transcripts.recall("lab/toy", lambda: {"gap": 0.25}, HERE)
    monkeypatch.delenv("LAB_RECORD")
    date = json.loads(record.read_text())["when"]
    result, note = transcripts.recall("lab/toy", None, "another")
    assert result == {"gap": 0.25} and note.startswith("recorded on ") and note.endswith(f", {HERE}, {date}")
    assert transcripts.recall("lab/toy", lambda: 7, HERE) == (7, "measured here"), "what is here comes first"
