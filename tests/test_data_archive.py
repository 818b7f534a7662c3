import bz2
import gzip
import hashlib
import io
import lzma
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.canary import limit_seconds
from harness.drawn import assert_explains, list_all, make_archive, make_folder

from lab_common import LabError
from lab_utils import data
from lab_utils.data import archive as module
from lab_utils.data.archive import Caps
from lab_utils.data.fetch import SIZE
from lab_utils.data.pack import digest, find_damage, read_manifest

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


def add_raw(tar, count, kind, content=b""):
    """Adds headers of a kind that only comes before another header, as no program writes them."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(content)
    block = header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    tar.fileobj.write(block * count)
    tar.offset += len(block) * count


def add_sparse(tar, blocks):
    """Adds a header whose list of holes goes on for many blocks, all of which tarfile would keep."""
    header = tarfile.TarInfo("train/cat/x.png")
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[482], block[148:156] = 1, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    tar.fileobj.write(bytes(block) + (b"\1" * 512) * blocks)
    tar.offset += 512 * (1 + blocks)


def make_hostile(archive, file, change):
    """Copies an archive, and lets ``change(tar)`` add to it."""
    with tarfile.open(archive) as old, tarfile.open(file, "w:gz", compresslevel=1) as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        change(new)
    return file


@pytest.mark.parametrize("top", ["", ".", "CINIC-10", "./data/test sets/a/b/cinic-10"])
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
    # No small files on the way: the pack is all that is there.
    assert len(list_all(tmp_path / "root")) == 9
    assert find_damage(pack) == []


def test_the_manifest_remembers_the_archive(archive, tmp_path):
    source = read_manifest(data.import_archive(archive, tmp_path))["source"]
    assert source["archive"] == "CINIC-10.tar.gz"
    assert source["bytes"] == archive.stat().st_size
    assert source["md5"] == hashlib.md5(archive.read_bytes()).hexdigest()


def test_the_official_checksum_is_said(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    data.import_archive(archive, tmp_path)
    assert data.load(root=tmp_path).summary.endswith("imported from CINIC-10.tar.gz, checksum verified")


def test_files_that_describe_are_left_out(archive, tmp_path):
    def describe(tar):
        add(tar, "./README.md", content=b"read me")
        add(tar, "./imagenet-contributors.csv", content=b"n0,1\n" * 400_000)  # two megabytes are no image, but no harm
        add(tar, "./train/cat/._cifar10-train-1.png", content=b"what macOS adds")

    data.import_archive(make_hostile(archive, tmp_path / "a.tar.gz", describe), tmp_path / "root")
    assert len(data.load(root=tmp_path / "root").train) == 40


HOSTILE = {
    "parent": (lambda tar: add(tar, "train/cat/../../../../x.png", content=b"x"), "leads out", "x.png"),
    "absolute": (lambda tar: add(tar, "/etc/x.png", content=b"x"), "leads out", "/etc/x.png"),
    "backslash": (lambda tar: add(tar, "train\\cat\\x.png", content=b"x"), "leads out", "x.png"),
    "hidden parent": (lambda tar: add(tar, "../README.md", content=b"x"), "leads out", "../README.md"),
    "symlink": (
        lambda tar: add(tar, "train/cat/x.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "a link",
        "x.png",
    ),
    "hardlink": (
        lambda tar: add(tar, "train/cat/x.png", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "a link",
        "x.png",
    ),
    "device": (lambda tar: add(tar, "train/cat/x.png", type=tarfile.CHRTYPE, devmajor=1), "a device", "x.png"),
    "block": (lambda tar: add(tar, "sda", type=tarfile.BLKTYPE), "a device", "sda"),
    "fifo": (lambda tar: add(tar, "train/cat/x.png", type=tarfile.FIFOTYPE), "a device", "x.png"),
    "unknown": (lambda tar: add(tar, "train/cat/x.png", type=b"Z"), "neither file nor folder", "x.png"),
    "sparse": (
        lambda tar: add(tar, "train/cat/x.png", type=tarfile.GNUTYPE_SPARSE),
        "neither file nor folder",
        "x.png",
    ),
    "twice": (
        lambda tar: add(tar, "train/cat/cifar10-train-1.png", content=b"x"),
        "same file twice",
        "cifar10-train-1",
    ),
    "large image": (lambda tar: add(tar, "train/cat/x.png", content=bytes(2**20 + 1)), "1,048,577 bytes", "x.png"),
    "large file": (lambda tar: add(tar, "x.txt", content=bytes(2**26 + 1)), "67,108,865 bytes", "x.txt"),
    "large header": (lambda tar: add(tar, "x" * 70_000 + ".png"), "a header that announces", ""),
    "long name": (
        lambda tar: add(tar, "train/cat/" + "x" * 600 + ".png", content=b"x"),
        "a name of 614 letters",
        "xxx",
    ),
    "chain of long links": (lambda tar: add_raw(tar, 3000, tarfile.GNUTYPE_LONGLINK), "more than 8 headers", ""),
    "chain of long names": (lambda tar: add_raw(tar, 9, tarfile.GNUTYPE_LONGNAME), "more than 8 headers", ""),
    "chain of pax headers": (lambda tar: add_raw(tar, 9, tarfile.XHDTYPE, b"9 uid=10\n"), "more than 8 headers", ""),
    "pax headers for all": (
        lambda tar: [
            (add_raw(tar, 1, tarfile.XGLTYPE, b"9 uid=10\n"), add(tar, f"note-{n}.txt", content=b"x")) for n in range(9)
        ],
        "8 headers for all files",
        "",
    ),
    "pax header without end": (lambda tar: add_raw(tar, 1, tarfile.XHDTYPE, b"9999 uid=10\n"), "a pax header", ""),
    "sparse by pax": (
        lambda tar: add(tar, "train/cat/x.png", content=b"x", pax_headers={"GNU.sparse.major": "1"}),
        "a pax header",
        "",
    ),
    "sparse without end": (lambda tar: add_sparse(tar, 1000), "neither file nor folder", "x.png"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_written(archive, tmp_path, kind):
    change, reason, member = HOSTILE[kind]
    file = make_hostile(archive, tmp_path / "hostile.tar.gz", change)
    with pytest.raises(LabError) as caught:
        data.import_archive(file, tmp_path / "root")
    assert_explains(caught.value, "The archive is refused", reason, member, str(file), "nothing was written", "fetch")
    assert list_all(tmp_path) == ["hostile.tar.gz"]


@pytest.mark.parametrize(
    "wrap", [bytes, bz2.compress, lzma.compress, lambda plain: bz2.compress(plain[:9999]) + bz2.compress(plain[9999:])]
)
def test_other_compressions_are_read_within_the_same_bounds(archive, tmp_path, wrap):
    content = wrap(gzip.decompress(archive.read_bytes()))
    (tmp_path / "a.tar").write_bytes(content)
    pack = data.import_archive(tmp_path / "a.tar", tmp_path / "a")
    assert read_manifest(pack)["sha256"] == read_manifest(data.import_archive(archive, tmp_path / "b"))["sha256"]
    with pytest.raises(LabError, match="more than 100,000 bytes when decompressed"):
        data.import_archive(tmp_path / "a.tar", tmp_path / "c", caps=Caps(total_bytes=100_000))
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(LabError, match="cut short or damaged"):
        data.import_archive(tmp_path / "a.tar", tmp_path / "c")


@pytest.mark.parametrize(
    ("caps", "reason"),
    [
        (Caps(files=89), "more than 89 files"),
        (Caps(folders=32), "or 32 folders"),
        (Caps(total_bytes=100_000), "more than 100,000 bytes when decompressed"),
    ],
)
def test_more_than_the_data_set_can_have_is_refused(archive, tmp_path, caps, reason):
    with pytest.raises(LabError) as caught:
        data.import_archive(archive, tmp_path / "root", caps=caps)
    assert_explains(caught.value, "The archive is refused", reason, "nothing was written")
    assert list_all(tmp_path) == []
    data.import_archive(archive, tmp_path / "root", caps=Caps(files=90, folders=33))


def test_cinic10_fits_within_the_caps_and_little_more():
    """270,000 images and four files that describe them, in 34 folders; some 800 MB (data/README.md)."""
    caps = Caps()
    assert 270_004 <= caps.files < 1.01 * 270_004 and 34 <= caps.folders < 4 * 34
    assert 1e9 < caps.total_bytes < 4e9 and SIZE < caps.archive_bytes <= caps.total_bytes


def test_a_file_larger_than_any_archive_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "a.tar.gz").touch()
    os.truncate(tmp_path / "a.tar.gz", 2**40)  # a hole, which takes nothing on the disk, and hours to hash
    with limit_seconds(5), pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
    assert_explains(caught.value, "is refused: it has 1,099,511,627,776 bytes", "a.tar.gz", "fetch cinic10")


@pytest.mark.parametrize(
    ("content", "size", "words"),
    [
        (gzip.compress(b""), 2**28, "cut short or damaged"),
        (b"", 2**28, "cut short or damaged"),
        (gzip.compress(b"") * 200_000, 0, "more than 100,000 parts"),
        (b"\x1f\x8b\x08\x08\0\0\0\0\0\xff" + b"a" * 2**25, 0, "cut short or damaged"),
    ],
    ids=["zeros behind", "zeros", "empty members", "a long name"],
)
def test_what_brings_nothing_takes_seconds(tmp_path, content, size, words):
    (tmp_path / "a.tar.gz").write_bytes(content)
    if size:
        os.truncate(tmp_path / "a.tar.gz", size)
    with limit_seconds(10), pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
    assert_explains(caught.value, words)
    assert list_all(tmp_path) == ["a.tar.gz"]


def test_an_archive_of_many_members_and_with_zeros_behind_is_whole(archive, tmp_path):
    plain = gzip.decompress(archive.read_bytes())
    parts = [gzip.compress(plain[at : at + 65536], 1) for at in range(0, len(plain), 65536)]
    (tmp_path / "a.tar.gz").write_bytes(bytes(100).join(parts) + bytes(100_000))
    pack = data.import_archive(tmp_path / "a.tar.gz", tmp_path / "a")
    again = data.import_archive(archive, tmp_path / "b")
    assert read_manifest(pack)["sha256"] == read_manifest(again)["sha256"]
    (tmp_path / "a.tar.gz").write_bytes(bytes(100).join(parts)[:-1])  # its last checksum is not whole
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "a")
    assert_explains(caught.value, "cut short or damaged")


def test_a_bit_that_tips_over_is_noticed_by_the_checksum(archive, tmp_path):
    content = bytearray(gzip.compress(gzip.decompress(archive.read_bytes()), 0))
    content[len(content) // 2] ^= 1
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(LabError):
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root", skip_bad=True)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="the kernel's messages are for root")
def test_a_file_that_never_ends_is_no_archive(tmp_path):
    with limit_seconds(5), pytest.raises(LabError) as caught:
        data.import_archive("/proc/kmsg", tmp_path)
    assert_explains(caught.value, "cut short or damaged", "/proc/kmsg")


def test_no_more_is_hashed_than_a_file_has():
    """What the kernel makes up, as here, says that it has no bytes; some of it never ends."""
    with Path("/proc/self/status").open("rb") as file:
        assert digest(file, "md5") == hashlib.md5(b"").hexdigest()
    with Path(__file__).open("rb") as file:
        assert digest(file, "sha256") == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def test_a_home_that_is_not_known_is_explained(tmp_path):
    with pytest.raises(LabError) as caught:
        data.import_archive("~nobody-of-this-name/a.tar.gz", tmp_path)
    assert_explains(caught.value, "~nobody-of-this-name/a.tar.gz")
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", "~nobody-of-this-name")
    assert_explains(caught.value, "~nobody-of-this-name")


def test_a_negative_size_does_not_lead_in_circles(archive, tmp_path):
    for size in ("-512", "-1", "99999999999"):
        change = lambda tar, size=size: add(tar, "train/cat/x.png", pax_headers={"size": size})  # noqa: E731
        with pytest.raises(LabError):
            data.import_archive(make_hostile(archive, tmp_path / "a.tar.gz", change), tmp_path / "root")
    assert list_all(tmp_path) == ["a.tar.gz"]


def test_classes_and_splits_are_those_of_cinic10(archive, tmp_path):
    zebra = make_hostile(archive, tmp_path / "a.tar.gz", lambda tar: add(tar, "train/zebra/x.png", content=b"x"))
    with pytest.raises(LabError) as caught:
        data.import_archive(zebra, tmp_path / "root")
    assert_explains(caught.value, "'zebra' in train")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        add(tar, "train/cat/x.png", content=b"x")
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "b.tar.gz", tmp_path / "root")
    assert_explains(caught.value, "splits 'valid', 'test' are missing")
    with tarfile.open(tmp_path / "c.tar", "w") as tar:
        add(tar, "cat/x.png", content=b"x")
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "c.tar", tmp_path / "root")
    assert_explains(caught.value, "not in the archive", "it has: cat")
    for case in (zebra, tmp_path / "b.tar.gz", tmp_path / "c.tar"):  # what is not the layout means no harm
        with pytest.raises(LabError) as caught:
            data.import_archive(case, tmp_path / "root")
        assert "harm" not in str(caught.value)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("fraction", [0, 0.001, 0.3, 0.9, 0.9999])
def test_an_archive_cut_short_is_explained(archive, tmp_path, fraction):
    whole = archive.read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: int(fraction * len(whole))])
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "cut.tar.gz", tmp_path / "root")
    assert_explains(caught.value, "cut short or damaged", "cut.tar.gz", "fetch cinic10")
    assert not (tmp_path / "root").exists()


KINDS = {
    b"PK\3\4": ["a zip archive", "-m zipfile -e '", "export LAB_DATA='"],
    b"\x28\xb5\x2f\xfd": ["zstd", "tar --zstd -xf", "export LAB_DATA="],
    b"7z\xbc\xaf\x27\x1c": ["7z archive", "7z x"],
    b"<!DOCTYPE html><title>Log in": ["a web page", "fetch cinic10"],
    b"\n<HTML>": ["a web page"],
    b"PAR1": ["parquet"],
    b'{"error": 404}': ["JSON"],
    b"version https://git-lfs.github.com": ["Git LFS"],
    b"a letter": ["cut short or damaged"],
    b"": ["cut short or damaged", "it holds nothing"],
}


@pytest.mark.parametrize("start", KINDS)
@pytest.mark.parametrize("wrap", [bytes, gzip.compress, bz2.compress])
def test_what_is_no_archive_is_told_by_its_first_bytes(tmp_path, start, wrap):
    (tmp_path / "a.tar.gz").write_bytes(wrap(start and start.ljust(1000)))
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
    words = KINDS[start]
    if wrap is not bytes and start:
        words = ["compressed, and holds", "something else" if start == b"a letter" else words[0], "fetch cinic10"]
    assert_explains(caught.value, "a.tar.gz", *words)
    assert list_all(tmp_path) == ["a.tar.gz"]


def test_what_cannot_be_opened_is_explained(tmp_path):
    (tmp_path / "link.tar.gz").symlink_to("/gone/a.tar.gz")
    for name, words in {"absent": ["No such file"], "link": ["a link to /gone/a.tar.gz"]}.items():
        with pytest.raises(LabError) as caught:
            data.import_archive(tmp_path / f"{name}.tar.gz", tmp_path / "root")
        assert_explains(caught.value, f"{name}.tar.gz", *words)
    with pytest.raises(LabError) as caught:
        data.import_archive(tmp_path, tmp_path / "root")
    assert_explains(caught.value, "it is a folder", f"export LAB_DATA='{tmp_path}'")


def test_damage_in_headers_never_ends_in_another_error(archive, tmp_path):
    plain, rng = gzip.decompress(archive.read_bytes()), np.random.default_rng(0)
    headers = [at for at in range(0, len(plain), 512) if plain[at + 257 : at + 262] == b"ustar"]
    pack = ["manifest.json", *(f"{split}-{kind}.npy" for split in SPLITS for kind in ("images", "labels"))]
    allowed = {"a.tar.gz", "root", "root/packed", "root/packed/cinic10", *(f"root/packed/cinic10/{n}" for n in pack)}
    refused = 0
    for _ in range(80):
        spoilt = bytearray(plain)
        at = int(rng.choice(headers))
        for _ in range(int(rng.integers(1, 4))):
            spoilt[at + int(rng.integers(0, 512))] = int(rng.integers(0, 256))
        if rng.uniform() < 0.7:  # with a right checksum, as an attacker's would be
            spoilt[at + 148 : at + 156] = b" " * 8
            spoilt[at + 148 : at + 156] = b"%06o\0 " % sum(spoilt[at : at + 512])
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(spoilt), 0))
        try:
            data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
        except LabError:
            refused += 1
        assert set(list_all(tmp_path)) <= allowed
    assert refused > 20


def test_bad_images_are_named_and_counted(archive, tmp_path):
    file = make_hostile(
        archive, tmp_path / "a.tar.gz", lambda tar: add(tar, "valid/ship/page.png", content=b"<html>not found</html>")
    )
    with pytest.raises(LabError) as caught:
        data.import_archive(file, tmp_path / "root")
    assert_explains(caught.value, "1 of 91 images", "valid/ship/page.png (cannot be decoded)", f"'{file}' --skip-bad")
    assert list_all(tmp_path / "root") == ["packed"]
    data.import_archive(file, tmp_path / "root", skip_bad=True)
    dataset = data.load(root=tmp_path / "root")
    assert (dataset.skipped, len(dataset.valid)) == (1, 20)


def test_an_interrupted_import_leaves_the_old_pack(archive, tmp_path, monkeypatch):
    data.import_archive(archive, tmp_path / "root")
    before = list_all(tmp_path / "root")

    def interrupt(image):
        raise KeyboardInterrupt

    smaller = make_archive(
        make_folder(tmp_path / "smaller", per_class=dict.fromkeys(SPLITS, 1)), tmp_path / "smaller.tar.gz"
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lab_utils.data.write.decode", interrupt)
        data.import_archive(smaller, tmp_path / "root")
    assert list_all(tmp_path / "root") == before
    assert len(data.load(root=tmp_path / "root").train) == 40
    data.import_archive(smaller, tmp_path / "root")
    assert list_all(tmp_path / "root") == before
    assert len(data.load(root=tmp_path / "root").train) == 10


def test_a_damaged_import_is_noticed_and_mended_by_importing_again(archive, tmp_path):
    pack = data.import_archive(archive, tmp_path)
    whole = (pack / "train-images.npy").read_bytes()
    (pack / "train-images.npy").write_bytes(whole[:-1])
    with pytest.raises(LabError) as caught:
        data.load(root=tmp_path)
    assert_explains(caught.value, "The pack cinic10 is damaged", str(pack), "import CINIC-10.tar.gz")
    data.import_archive(archive, tmp_path)
    assert (pack / "train-images.npy").read_bytes() == whole


def test_a_folder_that_is_a_data_set_takes_no_archive(folder, archive):
    with pytest.raises(LabError) as caught:
        data.import_archive(archive, folder)
    assert_explains(caught.value, "itself a data set", str(folder), "LAB_DATA")
