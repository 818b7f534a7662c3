"""Copies of code and folders of jobs on a node: received whole, and removed when they are old and not used."""

import io
import os
import tarfile
import threading
import time

import pytest

from nodelaunch.node.facts import hash_files
from nodelaunch.node.receive import KEPT, WEEK, trim, unpack

JOB = "train-0102-030405-abcd"
FILES = {"a.py": b"pass"}
CODE = f"code/{hash_files(FILES)}"


@pytest.fixture
def folder(tmp_path):
    """That of a node."""
    found = tmp_path / "node"
    found.mkdir()
    return found


def receive(folder, targets):
    """Unpacks these folders, each with files by their name, as the launcher sends them; False if code was changed."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for target, files in targets.items():
            for name, text in files.items():
                entry = tarfile.TarInfo(f"{target}/{name}")
                entry.size, entry.mode = len(text), 0o600
                archive.addfile(entry, io.BytesIO(text))
    stream.seek(0)
    return not unpack(stream, folder, [*targets])


def make(path, *, weeks=2.0):
    """Makes a folder with a file, last used that many weeks ago."""
    path.mkdir(parents=True)
    (path / "file").write_text("x")
    os.utime(path, (time.time() - weeks * WEEK,) * 2)
    return path


def make_code(folder, count):
    """Makes that many folders of code, the oldest first."""
    return [make(folder / "code" / f"{index:064x}", weeks=500 - index) for index in range(count)]


def list_all(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_nothing_but_old_code_of_ours_is_removed(folder, tmp_path):
    kept = [make(folder / name) for name in (f"work/{JOB}", f"data/{'e' * 64}", "code/mine", f"code/{'e' * 63}")]
    kept += [make(folder / "jobs" / JOB), make(folder / ".receiving-new", weeks=0.9)]
    make(tmp_path / "precious")
    (folder / "code" / ("d" * 64)).symlink_to(tmp_path / "precious")
    old, left = make_code(folder, 3), make(folder / ".receiving-old")
    kept += [make(folder / "code" / f"{index:063x}a", weeks=index / 20) for index in range(KEPT)]  # of the last week
    trim(folder)
    assert all(path.exists() for path in kept) and (tmp_path / "precious/file").exists()
    assert not any(path.exists() for path in [*old, left]) and not list(folder.glob(".receiving-old*"))


def test_what_is_sent_is_put_beside_what_is_there(folder):
    make_code(folder, 25)
    sent = {CODE: FILES, f"jobs/{JOB}": {"node0.sh": b"true"}}
    make(folder / "jobs" / JOB)  # a script that was started by hand has made it already
    assert receive(folder, sent)
    assert len(list((folder / "code").iterdir())) == KEPT
    assert list_all(folder / "jobs" / JOB) == {"node0.sh", "file"}
    (folder / CODE / "a.py").write_text("fail")
    os.utime(folder / CODE, (0, 0))
    assert not receive(folder, sent), "code was changed"
    assert (folder / CODE / "a.py").read_text() == "fail", "and is left alone, as what was just used"


def test_copies_at_the_same_time_do_not_disturb_each_other(folder):
    """As with nodes that share a folder."""
    make_code(folder, 100)
    told = []

    def copy(number):
        sent = {CODE: FILES, f"jobs/t-0102-030405-{number:04x}": {"node0.sh": b"true"}}
        told.append(receive(folder, sent))

    threads = [threading.Thread(target=copy, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [True] * 4 and len(list((folder / "jobs").iterdir())) == 4
    assert (folder / CODE / "a.py").read_bytes() == FILES["a.py"]
