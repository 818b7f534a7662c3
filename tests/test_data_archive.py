import bz2
import gzip
import io
import lzma
import tarfile

import pytest
import torch
from harness.drawn import assert_explains, list_all, make_archive, make_folder

from lab_common import LabError
from lab_utils import data
from lab_utils.data import archive as module
from lab_utils.data.packing import open_pack

SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("source") / "cinic10")


@pytest.fixture(scope="module")
def archive(folder, tmp_path_factory):
    return make_archive(folder, tmp_path_factory.mktemp("archive") / "CINIC-10.tar.gz")


def add(tar, name, *, content=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(content))


def make_hostile(archive, file, change):
    """Copies an archive, and lets ``change(tar)`` add to it."""
    with tarfile.open(archive) as old, tarfile.open(file, "w:gz", compresslevel=1) as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        change(new)
    return file


@pytest.mark.parametrize("top", ["", ".", "./data/test sets/a/b/cinic-10"])
def test_an_archive_gives_the_pack_of_its_folder(folder, tmp_path, top):
    file = make_archive(folder, tmp_path / "any.tar.gz", top=top)
    pack = data.import_archive(file, tmp_path / "root")
    assert pack == tmp_path / "root" / "packed" / "cinic10"
    imported, expected = data.load(root=tmp_path / "root"), data.load(root=folder.parent)
    assert imported.summary == (
        "cinic10: 40 train, 20 valid, 30 test images of 10 classes, imported from an archive in CINIC-10's layout"
    )
    for split in SPLITS:
        assert torch.equal(getattr(imported, split).images, getattr(expected, split).images)
        assert torch.equal(getattr(imported, split).labels, getattr(expected, split).labels)
    assert (imported.mean, imported.std) == (expected.mean, expected.std)
    # No small files on the way: the pack and its lock are all that is there.
    assert len(list_all(tmp_path / "root")) == 10


HOSTILE = {
    "parent": (lambda tar: add(tar, "train/cat/../../../../x.png", content=b"x"), "outside the destination", "x.png"),
    "symlink": (lambda tar: add(tar, "a.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "absolute path", "a.png"),
    "hardlink": (lambda tar: add(tar, "a.png", type=tarfile.LNKTYPE, linkname="../x"), "outside the dest", "a.png"),
    "device": (lambda tar: add(tar, "train/cat/x.png", type=tarfile.CHRTYPE, devmajor=1), "special file", "x.png"),
    "bomb": (
        lambda tar: add(tar, "train/cat/x.png", content=bytes(2**21)),
        "more than 270,200 files or folders, or 1,",
        "",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_written(archive, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "ARCHIVE_BYTES", 1_000_000)
    change, reason, member = HOSTILE[kind]
    file = make_hostile(archive, tmp_path / "hostile.tar.gz", change)
    with pytest.raises(LabError) as caught:
        data.import_archive(file, tmp_path / "root")
    assert_explains(caught.value, "The archive is refused", reason, member, str(file), "nothing was written", "fetch")
    assert list_all(tmp_path) == ["hostile.tar.gz"]


@pytest.mark.parametrize("wrap", [bytes, bz2.compress, lzma.compress])
def test_other_compressions_are_read_within_the_same_bounds(archive, tmp_path, monkeypatch, wrap):
    content = wrap(gzip.decompress(archive.read_bytes()))
    (tmp_path / "a.tar").write_bytes(content)
    pack = data.import_archive(tmp_path / "a.tar", tmp_path / "a")
    assert open_pack(pack)[1]["sha256"] == open_pack(data.import_archive(archive, tmp_path / "b"))[1]["sha256"]
    with monkeypatch.context() as patch, pytest.raises(LabError, match="or 100,000 bytes"):
        patch.setattr(module, "ARCHIVE_BYTES", 100_000)
        data.import_archive(tmp_path / "a.tar", tmp_path / "c")
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(LabError, match="cut short or damaged"):
        data.import_archive(tmp_path / "a.tar", tmp_path / "c")


@pytest.mark.parametrize(("bound", "value"), [("MEMBERS", 122), ("ARCHIVE_BYTES", 100_000)])
def test_more_than_the_data_set_can_have_is_refused(archive, tmp_path, monkeypatch, bound, value):
    with monkeypatch.context() as patch, pytest.raises(LabError) as caught:
        patch.setattr(module, bound, value)
        data.import_archive(archive, tmp_path / "root")
    assert_explains(caught.value, "The archive is refused", f"{value:,}", "nothing was written")
    assert list_all(tmp_path) == []
    monkeypatch.setattr(module, "MEMBERS", 123)  # 90 files in 33 folders
    data.import_archive(archive, tmp_path / "root")


def test_classes_and_splits_are_those_of_cinic10(archive, tmp_path):
    zebra = make_hostile(archive, tmp_path / "a.tar.gz", lambda tar: add(tar, "train/zebra/x.png", content=b"x"))
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        add(tar, "train/cat/x.png", content=b"x")
    with tarfile.open(tmp_path / "c.tar", "w") as tar:
        add(tar, "cat/x.png", content=b"x")
    cases = {"a.tar.gz": "'train/zebra'", "b.tar.gz": "no images in: test, train/airplane, "}
    for name, words in (cases | {"c.tar": "(such as cat/x.png)"}).items():
        with pytest.raises(LabError) as caught:
            data.import_archive(tmp_path / name, tmp_path / "root")
        assert_explains(caught.value, words)
        assert "harm" not in str(caught.value)  # what is not the layout means no harm
    assert zebra.exists() and not (tmp_path / "root").exists()


KINDS = {
    b"PK\3\4": ["a zip archive", "-m zipfile -e ", "export LAB_DATA="],
    b"<!DOCTYPE html><title>Log in": ["a web page", "fetch cinic10"],
    b"a letter": ["cut short or damaged"],
    b"": ["cut short or damaged"],
}


@pytest.mark.parametrize("start", KINDS)
def test_what_is_no_archive_is_told_by_its_first_bytes(tmp_path, start):
    (tmp_path / "a.tar.gz").write_bytes(start and start.ljust(1000))
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
    assert_explains(caught.value, "a.tar.gz", *KINDS[start])
    assert list_all(tmp_path) == ["a.tar.gz"]


def test_what_cannot_be_opened_is_explained(tmp_path):
    (tmp_path / "link.tar.gz").symlink_to("/gone/a.tar.gz")
    for name, words in {"absent.tar.gz": "No such file", "link.tar.gz": "a link to /gone/a.tar.gz"}.items():
        with pytest.raises(LabError) as caught:
            data.import_archive(tmp_path / name, tmp_path / "root")
        assert_explains(caught.value, name, words)


def test_an_import_that_fails_leaves_the_old_pack_and_the_next_replaces_it(archive, tmp_path):
    data.import_archive(archive, tmp_path / "root")
    before = list_all(tmp_path / "root")
    folder = make_folder(tmp_path / "smaller", per_class=dict.fromkeys(SPLITS, 1))
    smaller, bad = make_archive(folder, tmp_path / "smaller.tar.gz"), tmp_path / "bad.tar.gz"
    make_hostile(smaller, bad, lambda tar: add(tar, "valid/ship/page.png", content=b"<html>not found</html>"))
    with pytest.raises(LabError) as caught:
        data.import_archive(bad, tmp_path / "root")
    assert_explains(caught.value, "1 of 31 images", "valid/ship/page.png (cannot be decoded)", "copy them again")
    assert list_all(tmp_path / "root") == before and len(data.load(root=tmp_path / "root").train) == 40
    data.import_archive(smaller, tmp_path / "root")
    assert list_all(tmp_path / "root") == before and len(data.load(root=tmp_path / "root").train) == 10
