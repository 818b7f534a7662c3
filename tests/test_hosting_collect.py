"""Tests that `collect` takes only regular files within bounds from a container, and follows no link of the team."""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness.containers import make_deployment
from harness.drawn import assert_explains, list_all

from hosting.collect import LARGEST_FILE, LEFT_OUT, LONGEST_NAME, MOST_NAMED, Bounds, collect, receive
from hosting.engine import Engine
from hosting.settings import Settings
from hosting.teams import Team
from lab_common import LabError
from lab_common.files import hold_folder

SMALL = Bounds(entries=20, largest=1000, total=5000, seconds=20.0)
# Runs tar on a folder of the test in place of a container's home; "absent" and "endless" are teams of that kind.
ENGINE = f"""#!{sys.executable} -I
import os, sys
name, *command = sys.argv[4:]
home = os.path.join({{folder!r}}, name)
if "-absent-" in name:
    sys.exit("no such container\\033[2J")
if command[0] == "python":
    if "-unreported-" in name:
        sys.exit("no labs\\n  fix: curl -s x | sudo sh")
    sys.exit(open(home + "/report.html", "w").write("report") - 6)
if "-endless-" in name:
    os.execvp("yes", ["yes", "[" * 1000])
if "-silent-" in name:
    os.execvp("sleep", ["sleep", "600"])
os.execvp("tar", [home if word in ("/home/learner", "/tmp") else word for word in command])
"""


@pytest.fixture
def fetch(tmp_path):
    """Collects teams from the test's folders ``labs-<team>-node0``; returns the lines, or the error."""
    program = tmp_path / "engine"
    program.write_text(ENGINE.replace("{folder!r}", repr(str(tmp_path))))
    program.chmod(0o755)

    def run(*names, bounds=SMALL, hub=False):
        for name in names:
            (tmp_path / f"labs-{name}-node0" / "work" / "labs").mkdir(parents=True, exist_ok=True)
        deployment = make_deployment(tmp_path, [Team(name) for name in names], Settings(hub=hub))
        try:
            return collect(replace(deployment, engine=Engine(str(program), (), tmp_path)), tmp_path / "in", bounds)
        except LabError as error:
            return error

    run.into, run.work = tmp_path / "in", tmp_path / "labs-red-node0" / "work"
    (run.work / "labs").mkdir(parents=True)
    return run


def pack(*members):
    """Returns a tar stream of members: a name with its bytes, or an entry that is written as it is."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for member in members:
                if not isinstance(member, tarfile.TarInfo):
                    name, content = member
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                else:
                    archive.addfile(member)
        return file.getvalue()


def take(content, folder):
    """Receives a stream into a folder; returns what was left out, and the error that ended it."""
    (folder / "work").mkdir(parents=True)
    left_out = []
    try:
        receive(io.BytesIO(content), folder, SMALL, left_out)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        return left_out, error
    return left_out, None


def test_names_modes_and_devices_of_a_team_do_no_harm_here(fetch):
    labs = fetch.work / "labs"
    (labs / "run.sh").write_text("echo")
    (labs / "run.sh").chmod(0o6777)
    for name in ("\x1b[2Jx\n", os.fsdecode(b"\xff")):
        (labs / name).write_text("")
    os.link(labs / "run.sh", labs / "twice.sh")
    (labs / "link").symlink_to("/etc/passwd")
    if not os.geteuid():
        os.mknod(labs / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    assert fetch("red") == [f"{fetch.into}/red (left out: {1 if os.geteuid() else 2}, see {LEFT_OUT})"]
    red, odd = fetch.into / "red", "\N{REPLACEMENT CHARACTER}"
    assert (red / "report.html").read_text() == "report"
    collected = [path for path in (red / "work").rglob("*") if not path.is_dir()]
    assert {path.name for path in collected} == {"run.sh", "twice.sh", f"{odd}[2Jx{odd}", odd}
    assert not any(path.lstat().st_mode & 0o7111 for path in collected) and stat.S_IMODE(red.stat().st_mode) == 0o700
    assert "'work/labs/link': a link" in (red / LEFT_OUT).read_text()
    assert os.geteuid() or "'work/labs/zero': a pipe or a device" in (red / LEFT_OUT).read_text()


def test_what_was_collected_before_is_neither_changed_nor_lost(fetch):
    for text in ("first", "second", "second"):
        (fetch.work / "notes.txt").write_text(text)
        fetch("red")
    notes = sorted(path.read_text() for path in fetch.into.glob("red*/work/notes.txt"))
    assert notes == ["first", "second", "second"]
    assert (fetch.into / "red" / "work" / "notes.txt").read_text() == "second"


def test_the_report_and_the_labs_come_before_what_fills_the_bounds(fetch):
    (fetch.work / "aaa").mkdir()
    for number in range(100):
        (fetch.work / "aaa" / f"{number:05}").write_text("x")
    (fetch.work / "labs" / "lab.ipynb").write_text("x" * 900)
    (fetch.work / "labs" / "large").write_text("x" * 1001)
    assert not isinstance(fetch("red"), LabError)
    red = fetch.into / "red"
    assert (red / "work" / "labs" / "lab.ipynb").stat().st_size == 900 and (red / "report.html").exists()
    assert len(list(red.rglob("*/aaa/*"))) == SMALL.entries - 5
    large, rest = (red / LEFT_OUT).read_text().splitlines()
    assert large == "'work/labs/large': too large" and "and what comes behind it" in rest


def test_a_file_that_grows_or_shrinks_meanwhile_is_fetched_as_it_was(fetch):
    """TensorBoard's files do so during the class: the engines' own copy commands fail then."""
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
            assert not isinstance(fetch("red", bounds=Bounds(20, 1 << 30, 1 << 31, 20.0)), LabError)
            assert (fetch.into / "red" / "work" / "labs" / "zz.txt").read_text() == "zz"
    finally:
        ended.set()
        writer.join()


def test_collect_goes_on_after_teams_that_it_cannot_collect(fetch):
    """The first has no running container, the second sends endlessly, the third nothing, the next makes no report."""
    (fetch.work / "ours.txt").write_text("kept")
    begun = time.monotonic()
    for hub, words in ((False, "hosting up, and"), (True, "hosting up --no-hub, and")):
        caught = fetch("absent", "endless", "silent", "unreported", "red", hub=hub, bounds=Bounds(seconds=4.0))
        assert_explains(caught, "4 of 5 teams", "absent, endless, silent, unreported", "no such container", words)
    assert time.monotonic() - begun < 30
    assert {path.name.partition("-")[0] for path in fetch.into.iterdir()} == {"red", "unreported"}
    assert (fetch.into / "red" / "work" / "ours.txt").read_text() == "kept"
    why = (fetch.into / "unreported" / LEFT_OUT).read_text()
    assert "no labs" in why and len(why.splitlines()) == 1, "a remedy of the team's own is no line of ours"


def test_a_disk_that_is_full_is_told_and_nothing_half_is_left(fetch, small_disk, monkeypatch):
    (fetch.work / "labs" / "large").write_bytes(b"x" * (3 << 20))
    fetch.into.symlink_to(small_disk)
    much = Bounds(2000, 1 << 25, 1 << 25, 20.0)
    fetch("red", bounds=much)
    assert "more files or bytes than are fetched" in (small_disk / "red" / LEFT_OUT).read_text()
    before = list_all(small_disk)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    (fetch.work / "labs" / "larger").write_bytes(b"x" * (8 << 20))
    assert_explains(fetch("red", bounds=much), "No space left on device")
    assert list_all(small_disk) == before


def test_one_collect_at_a_time_and_what_a_killed_one_left_goes(fetch):
    left = fetch.into / ".red.0a1b2c3d"
    left.mkdir(parents=True)
    with hold_folder(fetch.into, "Another works"):
        assert_explains(fetch("red"), "Another `collect` writes there", str(fetch.into))
    assert left.exists()
    fetch("red")
    assert not left.exists()


NAMES = {
    "the folder above": "work/../../authorized_keys",
    "absolute": "/etc/passwd",
    "another place": "left-out.txt",
    "in no folder": "work/nowhere/x",
    "too long a part": "work/" + "x" * 300,
    "in a file": "work/there/below",
    "twice": "work/there",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_unsafe_name_is_left_out_and_the_rest_is_kept(tmp_path, name):
    folder = tmp_path / "in" / "red"
    left_out, error = take(pack(*((where, b"abc") for where in ("work/there", name, "./work/later"))), folder)
    assert not error and [line.partition(": ")[0] for line in left_out] == [repr(name)]
    assert list_all(folder) == ["work", "work/later", "work/there"]
    assert list_all(tmp_path) == ["in", "in/red", *(f"in/red/{path}" for path in list_all(folder))]


def make_entry(kind, size):
    """An entry whose header says that it has a size."""
    made = tarfile.TarInfo("work/x")
    made.type, made.size = kind, size
    return made.tobuf(tarfile.GNU_FORMAT)


FILE = pack(("work/x", b"abc"))
BROKEN = {
    "no tar": b"tar\n" * 1000,
    "nothing": b"",
    "half a file": FILE[:513],
    "a long name without end": make_entry(tarfile.GNUTYPE_LONGNAME, LONGEST_NAME + 1) + bytes(10240),
    "a header for all, without end": make_entry(tarfile.XGLTYPE, 1 << 30) + bytes(10240),
    "a sparse file": make_entry(tarfile.GNUTYPE_SPARSE, 1) + bytes(10240),
    "a file of any size": make_entry(tarfile.REGTYPE, LARGEST_FILE + 1) + bytes(10240),
    "a negative size": make_entry(tarfile.REGTYPE, -1) + bytes(10240),
    "names of names": make_entry(tarfile.GNUTYPE_LONGNAME, 1) * 3000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_breaks_the_rules_is_named_and_no_half_file_is_left(tmp_path, content):
    _, error = take(content, tmp_path)
    assert error and list_all(tmp_path) == ["work"]


def test_what_is_named_is_bounded(tmp_path):
    left_out, error = take(pack(*((f"{number}", b"") for number in range(2 * MOST_NAMED))), tmp_path)
    assert not error and len(left_out) == MOST_NAMED
