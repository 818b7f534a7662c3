"""Copies of code and folders of jobs on a node are received whole."""

import io
import tarfile
import threading

import pytest

from nodelaunch.node.facts import hash_files
from nodelaunch.node.receive import unpack

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


def list_all(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_what_is_sent_is_put_beside_what_is_there(folder):
    sent = {CODE: FILES, f"jobs/{JOB}": {"node0.sh": b"true"}}
    (folder / "jobs" / JOB).mkdir(parents=True)  # a script that was started by hand has made it already
    (folder / "jobs" / JOB / "file").write_text("x")
    assert receive(folder, sent)
    assert list_all(folder / "jobs" / JOB) == {"node0.sh", "file"}
    (folder / CODE / "a.py").write_text("fail")
    assert not receive(folder, sent), "code was changed"
    assert (folder / CODE / "a.py").read_text() == "fail"


def test_copies_at_the_same_time_do_not_disturb_each_other(folder):
    """As with nodes that share a folder."""
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
