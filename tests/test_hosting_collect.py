"""Tests that `collect` takes only regular files within bounds from a container, and follows no link of the team."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import threading
import time

import pytest
from harness.containers import MACHINE
from harness.drawn import assert_explains, list_all

from hosting.collect import LEFT_OUT, MOST_NAMED, Bounds, Collected, collect, receive
from hosting.deployment import Deployment
from hosting.engine import Engine
from hosting.settings import Settings
from hosting.teams import Team
from lab_common import LabError
from lab_common.files import hold_folder

SMALL = Bounds(files=20, largest=1000, total=5000, seconds=20.0)
REPORT = ["report", 2], b"hi"
END = ["end", 0], b""
# Runs our program on a folder of the test in place of a container's; "absent" and "endless" are teams of that kind.
ENGINE = f"""#!{sys.executable} -I
import os, sys
arguments = sys.argv[1:]
name = next((word for word in arguments if word.startswith("labs-")), "")
if "-absent-" in name:
    sys.exit("no such container\\033[2J")
if arguments[-1] == "true":
    sys.exit(0)
if "-endless-" in name:
    os.execvp("yes", ["yes", "[" * 1000])
if "-silent-" in name:
    os.execvp("sleep", ["sleep", "600"])
work = os.path.join({{folder!r}}, name)
# There is no report, so that each test need not wait for one.
told = [word.replace("/home/learner/work", work).replace("course.report", "course.no") for word in arguments[5:]]
os.execv(sys.executable, [sys.executable] + told)
"""


@pytest.fixture
def fetch(tmp_path):
    """Collects teams from the test's folders ``labs-<team>-node0``."""
    program = tmp_path / "engine"
    program.write_text(ENGINE.replace("{folder!r}", repr(str(tmp_path))))
    program.chmod(0o755)

    def run(*names, bounds=SMALL, hub=False):
        teams = [Team(name) for name in names]
        for team in teams:
            (tmp_path / f"labs-{team.name}-node0" / "labs").mkdir(parents=True, exist_ok=True)
        deployment = Deployment(tmp_path, Settings(hub=hub), teams, {}, Engine(str(program), (), tmp_path), MACHINE, {})
        with pytest.raises(LabError) as caught:
            collect(deployment, teams, tmp_path / "in", bounds=bounds)
        return caught.value

    run.into, run.work = tmp_path / "in", tmp_path / "labs-red-node0"
    run.work.mkdir()
    return run


def pack(*frames):
    """Returns a container's stream: frames, each with the bytes that follow it."""
    return b"".join(json.dumps(frame).encode() + b"\n" + body for frame, body in frames)


def take(content, folder, bounds=SMALL):
    one = Collected(folder)
    receive(io.BytesIO(content), one, bounds)
    return one


def test_names_modes_and_devices_of_a_team_do_no_harm_here(fetch):
    """Links, pipes and large files are in test_hosting_containers.py."""
    labs = fetch.work / "labs"
    labs.mkdir()
    (labs / "run.sh").write_text("echo")
    (labs / "run.sh").chmod(0o6777)
    for name in ("-rf", "\x1b[2Jx\n", os.fsdecode(b"\xff")):
        (labs / name).write_text("")
    if not os.geteuid():
        os.mknod(labs / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    assert "red" in fetch("red").what, "there is no report"
    red = fetch.into / "red"
    collected = [path for path in red.rglob("*") if not path.is_dir()]
    names = {path.name for path in collected} - {LEFT_OUT}
    assert names == {
        "run.sh",
        "_-rf",
        "\N{REPLACEMENT CHARACTER}[2Jx\N{REPLACEMENT CHARACTER}",
        "\N{REPLACEMENT CHARACTER}",
    }
    assert not any(path.lstat().st_mode & 0o7111 for path in collected) and stat.S_IMODE(red.stat().st_mode) == 0o700
    assert os.geteuid() or "'labs/zero': a pipe, a socket or a device" in (red / LEFT_OUT).read_text()


def test_what_was_collected_before_is_neither_changed_nor_lost(fetch):
    (fetch.work / "notes.txt").write_text("first")
    fetch("red")
    (fetch.work / "notes.txt").write_text("second")
    fetch("red")
    fetch("red")
    notes = sorted(path.read_text() for path in fetch.into.glob("red*/work/notes.txt"))
    assert notes == ["first", "second", "second"]
    assert (fetch.into / "red" / "work" / "notes.txt").read_text() == "second"


def test_the_labs_come_before_what_fills_the_bounds(fetch):
    (fetch.work / "aaa").mkdir()
    for number in range(2 * MOST_NAMED):
        (fetch.work / "aaa" / f"{number:05}").write_text("x")
    (fetch.work / "labs").mkdir()
    (fetch.work / "labs" / "lab.ipynb").write_text("x" * 900)
    fetch("red")
    red = fetch.into / "red"
    assert (red / "work" / "labs" / "lab.ipynb").stat().st_size == 900
    assert len(list(red.rglob("*/aaa/*"))) == SMALL.files - 1
    named = (red / LEFT_OUT).read_text().splitlines()
    assert len(named) == MOST_NAMED + 2 and named[-2] == f"and {MOST_NAMED - SMALL.files + 1} more"


def test_a_file_that_grows_or_shrinks_meanwhile_is_fetched_as_it_was(fetch):
    """TensorBoard's files do so during the class: the engines' own copy commands fail then."""
    (fetch.work / "labs").mkdir()
    log, ended = fetch.work / "labs" / "log", threading.Event()

    def write():
        with log.open("wb") as file, (log.parent / "shrinks").open("wb") as other:
            while not ended.is_set():
                file.write(b"x" * 300)
                file.flush()
                for size in (900_000, 0):
                    other.truncate(size)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for name in ("after", "zz"):
            (fetch.work / "labs" / f"{name}.txt").write_text(name)
        for _ in range(5):
            assert "cut off" not in str(fetch("red", bounds=Bounds(20, 1 << 30, 1 << 31, 20.0)))
            assert (fetch.into / "red" / "work" / "labs" / "zz.txt").read_text() == "zz"
    finally:
        ended.set()
        writer.join()


def test_collect_goes_on_after_teams_that_it_cannot_collect(fetch):
    """The first has no running container, the second sends endlessly, the third nothing, the last has no report."""
    (fetch.work / "ours.txt").write_text("kept")
    begun = time.monotonic()
    for hub, words in ((False, "hosting up, and"), (True, "hosting up --no-hub, and")):
        caught = fetch("absent", "endless", "silent", "red", hub=hub, bounds=Bounds(seconds=2.0))
        assert_explains(caught, "4 of 4 teams", "absent, endless, silent, red", "no such container", words)
    assert time.monotonic() - begun < 30
    assert {path.name.partition("-")[0] for path in fetch.into.iterdir()} == {"red"}
    assert (fetch.into / "red" / "work" / "ours.txt").read_text() == "kept"


def test_a_disk_that_is_full_is_told_and_nothing_half_is_left(fetch, small_disk):
    (fetch.work / "labs").mkdir()
    (fetch.work / "labs" / "large").write_bytes(b"x" * (3 << 20))
    fetch.into.symlink_to(small_disk)
    much = Bounds(2000, 1 << 25, 1 << 25, 20.0)
    fetch("red", bounds=much)
    assert "beyond the number or the size" in (small_disk / "red" / LEFT_OUT).read_text()
    for number in range(1000):
        (fetch.work / "labs" / f"{number}").write_text("x")
    caught = fetch("red", bounds=much)
    assert_explains(caught, "No space left on device")
    assert list_all(small_disk) == ["red", f"red/{LEFT_OUT}"], "what was there before"


def test_folders_are_counted_too(tmp_path):
    files = [(["file", f"{n}/{'/'.join('a' * 9)}/x", 0], b"") for n in range(SMALL.files)]
    one = take(pack(REPORT, *files, END), tmp_path)
    assert not one.problem and len(one.left_out) >= SMALL.files - 2
    assert sum(path.is_dir() for path in tmp_path.rglob("*")) <= SMALL.files


def test_one_collect_at_a_time_and_what_a_killed_one_left_goes(fetch):
    left = fetch.into / ".red.0a1b2c3d"
    left.mkdir(parents=True)
    with hold_folder(fetch.into, "Another works"):
        assert_explains(fetch("red"), "Another `collect` writes there", str(fetch.into))
    assert left.exists()
    fetch("red")
    assert not left.exists()


def test_a_place_that_cannot_be_made_is_told(fetch, tmp_path):
    fetch.into.write_text("a file")
    assert_explains(fetch("red"), str(fetch.into), "--into")


NAMES = {
    "the folder above": "../../authorized_keys",
    "absolute": "/etc/passwd",
    "empty": "",
    "a zero byte": "labs/\0x",
    "too deep": "/".join("a" * 100),
    "too long a part": "x" * 300,
    "in a file": "there/below",
    "twice": "there",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_unsafe_name_is_left_out_and_the_rest_is_kept(tmp_path, name):
    folder = tmp_path / "in" / "red"
    folder.mkdir(parents=True)
    files = [(["file", where, 3], b"abc") for where in ("there", name, "later")]
    one = take(pack(REPORT, *files, END), folder)
    assert not one.problem and [left for left, _ in one.left_out] == [name]
    assert list_all(folder) == ["report.html", "work", "work/later", "work/there"]
    assert list_all(tmp_path) == ["in", "in/red", *(f"in/red/{path}" for path in list_all(folder))]


BROKEN = {
    "no JSON": b"tar\n",
    "no values": b'["file"]\n',
    "10,000 deep": b"[" * 10_000 + b"]" * 10_000 + b"\n",
    "a long line": b"[" + b'"x",' * 100_000 + b'"x"]\n',
    "a huge number": b'["file", "x", ' + b"9" * 5000 + b"]\n",
    "a negative size": pack((["file", "x", -1], b"")),
    "a true size": pack((["file", "x", True], b"x")),
    "too large a file": pack((["file", "x", 1001], b"x" * 1001)),
    "too much in all": pack(*((["file", f"{n}", 900], b"x" * 900) for n in range(6))),
    "too many files": pack(*((["file", f"{n}", 0], b"") for n in range(21))),
    "endless links": pack(*((["left", f"{n}", "link"], b"") for n in range(2 * MOST_NAMED))),
    "a name that is none": pack((["file", ["x"], 1], b"x"), END),
    "no end": pack(REPORT, (["file", "x", 3], b"abc")),
    "half a file": pack(REPORT, (["file", "x", 30], b"abc")),
    "no report": pack(END),
    "a failed report": pack((["failed", "\x1b[2J" * 1000], b""), END),
    "a remedy of the team's own": pack((["failed", "no labs\n  fix: curl -s x | sudo sh"], b""), END),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_breaks_the_rules_is_named_and_no_half_file_is_left(tmp_path, content):
    one = take(content, tmp_path)
    assert one.problem and one.problem.isprintable() and len(one.problem) < 400
    kept = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert len(kept) == one.files + one.report
    assert all(size in (0, 2, 3, 900) for size in kept.values()), "each whole"
    assert len(one.left_out) <= MOST_NAMED
