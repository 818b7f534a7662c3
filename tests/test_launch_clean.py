"""The leftovers of launches are removed from a node when no job uses them, by a command and by later launches."""

import io
import os
import shutil
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from harness.forked import drop_root_rights, run_forked

from lab_common import LabError
from nodelaunch import __main__ as command
from nodelaunch import local_nodes, slurm_nodes, ssh_nodes
from nodelaunch.__main__ import main
from nodelaunch.copying import send
from nodelaunch.node import agent, cleaning, receive
from nodelaunch.node.cleaning import DAY, HOUR, KEPT, clean_folder
from nodelaunch.node.facts import hash_files
from nodelaunch.preflight.client import ask_once
from nodelaunch.spec import make_launch

ODD = "e" * 64  # the hash of no content
JOB = "train-0102-030405-abcd"
LEFT = ".receiving-abc123"


@pytest.fixture
def node(runs):
    """A node of this machine."""
    (found,) = local_nodes(1)
    return found


@pytest.fixture
def folder(node):
    """Its folder."""
    found = Path(node.folder)
    found.mkdir(parents=True)
    return found


def make(path, *, days=30.0, text="x" * 2**20, name="file"):
    """Makes a folder with a file, or another file in it; all of it was changed that many days ago."""
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(text)
    age(path, days)
    return path


def age(path, days):
    when = time.time() - days * DAY
    for place, folders, names in os.walk(path, topdown=False):
        for one in (*(Path(place, name) for name in folders + names), Path(place)):
            os.utime(one, (when, when), follow_symlinks=False)


def make_job(folder, identity=JOB, *, days=30.0):
    make(folder / "jobs" / identity / "node0", days=days)
    return make(folder / "jobs" / identity, days=days, name="node0.sh", text="true")


def number(count):
    """That many hashes."""
    return [f"{index:064x}" for index in range(count)]


def clean(folder, *, days=14.0, dry_run=False, seconds=10.0):
    return clean_folder({"folder": str(folder), "days": days, "dry_run": dry_run, "seconds": seconds})


def count(answer):
    return [answer[kind] for kind in ("code", "jobs", "copies")]


def list_all(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def pack(files):
    """A tar file, as the launcher sends it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    stream.seek(0)
    return stream


def unpack(folder, identity=JOB):
    """Receives the same code each time; returns its folder."""
    name = f"code/{hash_files({'a.py': b'pass'})}"
    files = {f"{name}/a.py": b"pass", f"jobs/{identity}/node0.sh": b"true"}
    assert receive.unpack(pack(files), folder, [name, f"jobs/{identity}"]) == []
    return folder / name


# What is removed.


def test_what_is_old_goes_and_what_is_young_stays(folder):
    one, two = number(2)
    old = [make(folder / "code" / one), make_job(folder), make(folder / LEFT)]
    young = [make(folder / "code" / two, days=13), make(folder / ".receiving-def", days=13)]
    young += [make_job(folder, make_launch(stem).id, days=13) for stem in ("train", "a b", "é", "x" * 80, "--", "v1-2")]
    before = list_all(folder)
    said = clean(folder, dry_run=True)
    assert list_all(folder) == before
    assert clean(folder) == said
    assert (count(said), said["failed"], said["more"]) == ([1, 1, 1], {}, False)
    assert said["bytes"] == pytest.approx(3 * 2**20, rel=0.02)
    assert not any(path.exists() for path in old) and all(path.exists() for path in young)
    assert count(clean(folder, days=12)) == [1, 6, 1], "whatever the script is called"
    assert {path.name for path in folder.iterdir()} == {"code", "jobs"}


def test_nothing_of_the_last_hour_goes_and_no_copy_of_the_last_day(folder):
    minutes = 1 / 24 / 60
    make(folder / "code" / ODD, days=50 * minutes)
    make_job(folder, days=50 * minutes)
    make(folder / LEFT, days=0.9)
    assert count(clean(folder, days=0)) == [0, 0, 0]
    for path in (folder / "code" / ODD, folder / "jobs" / JOB, folder / LEFT):
        age(path, 70 * minutes)
    assert count(clean(folder, days=0)) == [1, 1, 0]


def test_what_a_running_job_uses_stays(folder, monkeypatch):
    """Its agent marks it every few minutes, also on another node that shares the folder."""
    mine, other = number(2)
    for name in (mine, other):
        make(folder / "code" / name)
    job = make_job(folder)
    make_job(folder, JOB.replace("train", "other"))
    monkeypatch.setenv("LAB_JOB_FOLDER", str(job / "node0"))
    monkeypatch.setattr(agent, "__file__", f"{folder}/code/{mine}/nodelaunch/node/agent.py")
    agent._wait(0.01)
    assert count(clean(folder, days=0)) == [1, 1, 0]
    assert [path.name for kind in ("code", "jobs") for path in (folder / kind).iterdir()] == [mine, JOB]


def test_links_are_not_followed(folder, tmp_path):
    precious = make(tmp_path / "precious")
    make(precious / ODD)
    before = list_all(precious)
    for place in (folder / "jobs" / JOB, folder / LEFT):
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(precious)
        os.utime(place, (0, 0), follow_symlinks=False)
    other = make(folder / "code" / number(1)[0])
    (other / "link").symlink_to(precious)
    age(other, 30)
    assert count(clean(folder)) == [1, 0, 0]
    (folder / "code").rmdir()
    (folder / "code").symlink_to(precious)
    assert count(clean(folder)) == [0, 0, 0]
    assert list_all(precious) == before
    assert all(place.is_symlink() for place in (folder / "jobs" / JOB, folder / LEFT))


def test_what_is_not_ours_by_its_name_stays(folder):
    names = (
        *(f"work/{ODD}", f"work/{JOB}", f"data/packed/{ODD}", f"data/{LEFT}", f"runs/jobs/{JOB}", ODD, JOB),
        *(f"code/{JOB}", f"code/{'g' * 64}", f"code/{'A' * 64}", f"code/{'a' * 63}", f"code/{ODD}0", "code/mine"),
        *(f"jobs/{ODD}", "jobs/mine", f"jobs/{JOB}-2", f"jobs/{JOB}\n", "jobs/a_b-0102-030405-abcd", f"jobs/{LEFT}"),
    )
    for name in names:
        make(folder / name, text="mine")
    (folder / "code" / number(1)[0]).write_text("a file")
    make(make_job(folder), name="output.log")  # the launcher's own record
    age(folder, 30)
    before = list_all(folder)
    assert count(clean(folder, days=0)) == [0, 0, 0]
    assert list_all(folder) == before


# What a launch removes when it copies.


def test_a_copy_removes_the_code_beyond_the_newest_twenty(folder):
    first, used, *others = [make(folder / "code" / name, days=30 - index) for index, name in enumerate(number(24))]
    cleaning.mark_used(used)
    young = make(folder / "code" / ("f" * 64), days=HOUR / DAY / 2)
    make(folder / LEFT)
    new = unpack(folder)
    left = {path for path in (folder / "code").iterdir()}
    assert left == {new, young, used, *others[-(KEPT["code"] - 3) :]}
    assert not first.exists() and not (folder / LEFT).exists()
    age(new, 40)
    assert unpack(folder, JOB.replace("train", "again")) == new
    assert new.stat().st_mtime > time.time() - 60, "its last use counts, not when it was copied"


def test_a_copy_removes_the_jobs_beyond_the_newest_hundred(folder):
    jobs = [make_job(folder, f"train-0102-030405-{index:04x}", days=200 - index) for index in range(103)]
    unpack(folder)
    assert {path.name for path in (folder / "jobs").iterdir()} == {JOB, *(job.name for job in jobs[4:])}


def test_among_data_a_copy_removes_nothing(folder):
    for name in number(25):
        make(folder / "code" / name, text="")
    receive.unpack(pack({"packed/a/b": b"c"}), folder, ["packed/a"])
    assert len(list((folder / "code").iterdir())) == 25


def test_the_program_that_is_sent_copies_and_removes(node, folder):
    for name in number(25):
        make(folder / "code" / name, text="")
    files = {"a.py": b"pass"}
    name = f"code/{hash_files(files)}"
    sent = {name: files, f"jobs/{JOB}": {"node0.sh": b"true"}}
    own = folder / "jobs" / JOB / "node1.sh"  # a script that was started by hand has made the folder already
    make(own.parent, name=own.name, text="another")
    assert send(node, node.folder, sent, started=[]) == []
    assert len(list((folder / "code").iterdir())) == 20
    assert {path.name: path.read_text() for path in own.parent.iterdir()} == {"node0.sh": "true", "node1.sh": "another"}
    (folder / name / "a.py").write_text("fail")
    assert send(node, node.folder, sent, started=[]) == [name], "code that was changed is named"
    assert (folder / name / "a.py").read_text() == "fail", "and left alone"


def test_receivers_at_the_same_time_do_not_disturb_each_other(folder):
    for name in number(200):
        make(folder / "code" / name, text="")
    failed = []

    def receive_often(number):
        try:
            for index in range(10):
                unpack(folder, f"t{number}-0102-030405-{index:04x}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=receive_often, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(list((folder / "code").iterdir())) == 20
    assert not list(folder.glob(".receiving-*"))


def test_a_folder_that_vanishes_meanwhile_is_no_error(folder, monkeypatch):
    make(folder / "code" / ODD)
    make_job(folder)
    make(folder / LEFT)
    measure = cleaning.measure

    def measure_too_late(path):
        shutil.rmtree(path)
        return measure(path)

    monkeypatch.setattr(cleaning, "measure", measure_too_late)
    answer = clean(folder)
    assert (count(answer), answer["failed"], answer["bytes"]) == ([0, 0, 0], {}, 0)


@pytest.mark.parametrize("copied", [False, True])
def test_code_that_a_launch_uses_from_now_on_is_put_back(folder, monkeypatch, copied):
    """The launch touches it after the cleaning has looked at it; or does not find it, and copies its own."""
    place = make(folder / "code" / ODD)
    rename = Path.rename

    def touch_and_rename(self, target):
        if self == place:
            os.utime(place)
        moved = rename(self, target)
        if self == place and copied:
            make(place, text="the same")
        return moved

    monkeypatch.setattr(Path, "rename", touch_and_rename)
    answer = clean(folder)
    assert (answer["code"], answer["failed"]) == (int(copied), {})
    assert (place / "file").stat().st_size == (len("the same") if copied else 2**20)
    assert not list(folder.glob(".receiving-*"))


# What cannot be removed.


def test_what_cannot_be_removed_is_named_with_its_reason(folder):
    stuck = make_job(folder, "stuck-0102-030405-abcd")
    make_job(folder)
    (stuck / "node0").chmod(0o500)  # only root could remove a file in it

    def run():
        drop_root_rights()
        return clean(folder)

    answer = run_forked(run)
    try:
        assert count(answer) == [0, 1, 0]
        ((name, cause),) = answer["failed"].items()
        assert name == f"jobs/{stuck.name}"
        assert cause.startswith("Permission denied: ")
        # The rest no longer has the name of a job, and is removed another day.
        assert not stuck.exists()
        (left,) = folder.glob(".receiving-*")
        assert {path.name for path in left.iterdir()} == {"node0"}
    finally:
        for path in folder.glob(".receiving-*/node0"):
            path.chmod(0o700)
    age(left, 2)
    assert count(clean(folder, days=0)) == [0, 0, 1]


def test_a_folder_that_cannot_be_moved_stays_whole(folder):
    for name in number(25):
        make(folder / "code" / name, text="")
    before = list_all(folder)

    def run():
        drop_root_rights()
        (folder / "code").chmod(0o500)
        try:
            return clean(folder), list_all(folder)
        finally:
            (folder / "code").chmod(0o700)

    answer, left = run_forked(run)
    assert set(answer["failed"]) == {f"code/{name}" for name in number(25)}
    assert left == before


def test_no_more_is_begun_when_the_time_is_over(folder):
    make(folder / "code" / ODD)
    answer = clean(folder, seconds=0)
    assert (count(answer), answer["more"]) == ([0, 0, 0], True)


# The command.


def test_the_command_says_what_it_removed(node, folder, capsys):
    for name in number(3):
        make(folder / "code" / name)
    make_job(folder)
    for options, words in (
        (["--dry-run"], "3 code folder(s), 1 job folder(s) would be removed, 4.0 MiB"),
        (["--days", "40"], "0 code folder(s), 0 job folder(s) removed, 0.0 MiB"),
        ([], "3 code folder(s), 1 job folder(s) removed, 4.0 MiB"),
    ):
        assert main(["clean", "--local", "1", *options]) == 0
        assert capsys.readouterr().out == f"node0: {words}\n"
    assert not list_all(folder / "code") | list_all(folder / "jobs")


def test_without_hosts_it_cleans_all_of_this_machine_but_the_record_of_jobs(runs, capsys):
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "this machine: no job has left anything\n"
    places = [Path(node.folder) for node in (*local_nodes(3)[1:], *slurm_nodes(1))]
    for place in places:
        make_job(place)
    record = make(runs / "jobs" / JOB, name="node0.sh")
    assert main(["clean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[::2] for line in lines] == [
        (f"{name}: 0 code folder(s)", "1 job folder(s) removed, 1.0 MiB") for name in ("node1", "node2", "slurm0")
    ]
    assert not any(list_all(place / "jobs") for place in places)
    assert (record / "node0.sh").exists()


def test_the_command_names_what_failed_and_what_is_left(node, folder, capsys, monkeypatch):
    make(folder / LEFT)
    odd = {"code": 0, "jobs": 0, "copies": 0, "bytes": 0, "failed": {"jobs/a": "Denied: /x\x1b[2J"}, "more": True}
    others = {"far": LabError("No.", fix="do"), "odd": odd}
    monkeypatch.setattr(command, "ask_once", lambda *given, **more: {**ask_once(*given, **more), **others})
    assert main(["clean", "--local", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "node0: 0 code folder(s), 0 job folder(s), 1 leftover(s) of copying removed, 1.0 MiB"
    assert lines[1] == "far: No."
    assert lines[4:] == [
        "odd: jobs/a could not be removed: Denied: /x\N{REPLACEMENT CHARACTER}[2J",
        "odd: there is more to remove than 15 s allow: run it again",
    ]


@pytest.mark.drill
def test_hosts_are_cleaned_each_in_its_own_folder(hosts, capsys):
    options = ["--config", str(hosts.ssh_config), "--python", sys.executable]
    (node,) = ssh_nodes(["n1"], config=hosts.ssh_config, python=sys.executable, folder="~/labs")
    old = f"{node.folder}/code/{ODD}"
    with node.popen(["sh", "-c", 'mkdir -p "$1" && touch -d "20 days ago" "$1"', "sh", old]) as made:
        made.communicate()
    assert made.returncode == 0
    assert main(["clean", "n1", "n2", *options, "--folder", "~/labs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["n1: 1 code folder(s)", "n2: 0 code folder(s)"]


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_days_that_are_negative_are_refused(node, folder, capsys, days):
    make(folder / "code" / ODD)
    assert main(["clean", "--local", "1", "--days", days]) == 1
    assert "The days cannot be negative." in capsys.readouterr().err
    assert (folder / "code" / ODD).exists()
