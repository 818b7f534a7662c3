"""Hostile archives, made from a grammar of attacks: each is refused in one message, or is whole and imported.

Whatever an archive holds: nothing outside the destination is written, no half pack gets a final name, no program is
started, and no case takes longer than seconds.
"""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import tarfile
import time
import zipfile

import pytest
from harness.canary import assert_is_message, describe_tree, limit_seconds, make_canary
from harness.drawn import list_all
from harness.fuzzing import choose_seeds, mutate_bytes
from PIL import Image

from lab_common import LabError
from lab_utils import data
from lab_utils.data.archive import Caps
from lab_utils.data.folder import CLASS_NAMES
from lab_utils.data.pack import SPLITS, find_damage, read_manifest

# Small, so that a case that exceeds them takes milliseconds.
CAPS = Caps(files=80, folders=60, total_bytes=2**22, image_bytes=2**16, other_bytes=2**20)
PACK = {"packed/cinic10/manifest.json"}
PACK |= {f"packed/cinic10/{split}-{kind}.npy" for split in SPLITS for kind in ("images", "labels")}
ALLOWED = {"packed", "packed/cinic10"} | PACK
SECONDS = 10


def make_picture(format):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (10, 20, 30)).save(file, format)
    return file.getvalue()


PNG = make_picture("PNG")
OTHERS = [
    b"",
    PNG[:40],
    make_picture("ICO"),
    make_picture("GIF"),
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n",
]
NAMES = [
    *("../x.png", "../../etc/passwd", "train/cat/../../../x.png", "train/cat/..", "..", ".", "", "/", "//x.png"),
    *("/etc/x.png", "~/x.png", "C:\\x.png", "train\\cat\\x.png", "link/x.png", "x.png", "cat/x.png", "train/x.png"),
    *(
        "train/zebra/x.png",
        "train/cat/a/b/x.png",
        "other/train/cat/x.png",
        "train/../train/cat/x.png",
        "train//cat/y.png",
    ),
    *("train/cat/\x1b[2J\x1b]0;x\x07.png", "train/\x1b[31mred/x.png", "train/cat/\n  fix: rm -rf.png", "\u202e/x.png"),
    *("train/cat/\udcff\udcfe.png", "train/\udc80/x.png", "train/cat/\N{PILE OF POO}.png", "train/cat/x\0y.png"),
    *("train/cat/" + "x" * 300 + ".png", "train/" + "y" * 70_000 + "/x.png", "a/" * 200 + "x.png", "train/cat/con.png"),
    *("packed/cinic10/manifest.json", "train/cat/x.png/y.png", "train", "train/cat", "valid/dog/.hidden.png"),
]
TYPES = [
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE),
    *(tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"Z", b"M", b"V"),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.AREGTYPE),
]
TARGETS = ["/etc/passwd", "../../x.png", "home", "..", "link/passwd", ".", "train/cat/0.png", "\x1b[2J"]
PAX_VALUES = [
    *("-1", "-512", "0", "1", "99999999999", "9" * 5000, "1e9", "nan", "inf", "", " 7", "0x10", "\N{DIGIT FOUR}"),
    *("../../x.png", "/etc/x.png", "\x1b[2J", "x" * 5000, "BINARY", "utf-7"),
]
PAX_KEYS = ["size", "path", "linkpath", "mtime", "uid", "uname", "hdrcharset", "GNU.sparse.major", "GNU.sparse.map"]
PAX_KEYS += ["GNU.sparse.size", "GNU.sparse.realsize", "GNU.sparse.name", "SCHILY.xattr.user.x", "x"]


def make_member(name, content=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


def make_raw(kind, content, dice):
    """A header block of a type with any content after it, as no program writes it: bytes, not a member."""
    member = tarfile.TarInfo(dice.choice(["x", "././@LongLink", "././@PaxHeader"]))
    member.type, member.size = kind, len(content)
    return member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def make_records(dice):
    """The content of a pax header, mostly wrong."""
    return dice.choice([
        b"9" * dice.choice((100, 30_000, 60_000)),
        b"5 a=\n" * dice.choice((10, 10_000)),
        b"5 aa" + b"a" * 60_000 + b"=\n",
        b"0 a=b\n", b"-9 a=b\n", b"99999 a=b\n", b"6 a=bc", b"a=b\n", b"\xff\xfe", b"7 \xff=\xff\n",
        b"25 GNU.sparse.major=1\n",
        b"22 GNU.sparse.map=0,9\n", b"18 hdrcharset=xx\n", b"21 hdrcharset=BINARY\n" + b"9 path=\xff\n", b"3 =", b"",
        dice.randbytes(dice.choice((1, 100, 5000))),
    ])  # fmt: skip


def add_name(members, dice):
    members.insert(dice.randrange(len(members) + 1), make_member(dice.choice(NAMES), dice.choice([PNG, b"x"])))


def add_type(members, dice):
    fields = {"type": dice.choice(TYPES), "linkname": dice.choice(TARGETS), "devmajor": dice.choice((0, 1, 8))}
    name = dice.choice([*NAMES, "train/cat/x.png", "notes.txt", "train/cat"])
    members.insert(dice.randrange(len(members) + 1), make_member(name, dice.choice([b"", b"x" * 600]), **fields))


def add_chain_of_links(members, dice):
    names = ["train/cat/a", "train/cat/a/b", "train/cat/a/b/x.png"]
    for name, target in zip(names[:2], ["/", "../" * dice.randrange(9) + "home"], strict=True):
        members.append(make_member(name, type=tarfile.SYMTYPE, linkname=target))
    members.append(make_member(names[2], PNG))


def add_chain_of_headers(members, dice):
    kinds = dice.choice([[tarfile.GNUTYPE_LONGLINK], [tarfile.GNUTYPE_LONGNAME], [tarfile.XHDTYPE], TYPES[7:13]])
    count = dice.choice((2, 8, 9, 100, 3000))
    contents = [b"", b"x\0", b"12 mtime=10\n", b"x" * 200]
    raw = b"".join(make_raw(dice.choice(kinds), dice.choice(contents), dice) for _ in range(count))
    members.insert(dice.randrange(len(members) + 1), raw)


def add_raw_pax(members, dice):
    kind = dice.choice([tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE])
    for _ in range(dice.choice((1, 1, 9))):
        members.insert(dice.randrange(len(members) + 1), make_raw(kind, make_records(dice), dice))


def add_pax(members, dice):
    headers = {dice.choice(PAX_KEYS): dice.choice(PAX_VALUES) for _ in range(dice.choice((1, 2, 5)))}
    member = make_member(dice.choice(["train/cat/x.png", "notes.txt"]), dice.choice([PNG, b"x"]), pax_headers=headers)
    members.insert(dice.randrange(len(members) + 1), member)


def add_again(members, dice):
    for _ in range(dice.choice((1, 100))):
        members.append(dice.choice(members))


def add_many(members, dice):
    suffix, kind = dice.choice([(".png", tarfile.REGTYPE), (".txt", tarfile.REGTYPE), ("", tarfile.DIRTYPE)])
    members.extend(make_member(f"train/cat/more-{n}{suffix}", type=kind) for n in range(200))


def add_bomb(members, dice):
    size = dice.choice((2**16 + 1, 2**20 + 1, 2**22))
    members.append(make_member(dice.choice(["train/cat/x.png", "x.txt", "train/x"]), bytes(size)))


def add_picture(members, dice):
    members.append(make_member("train/cat/x.png", dice.choice(OTHERS)))


def forge_field(members, dice):
    """A header with a right checksum and any bytes in one of its fields."""
    header = bytearray(make_member("train/cat/x.png", PNG)[0].tobuf(tarfile.USTAR_FORMAT))
    start, length = dice.choice([(0, 100), (100, 8), (108, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)])
    forged = dice.choice(
        [b"\x80" + b"\xff" * 20, b"\xff" * 20, b"-1", b"99999999999", dice.randbytes(12), b"\x80" + bytes(8)]
    )
    header[start : start + length] = forged[:length].ljust(length, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    members.insert(dice.randrange(len(members) + 1), bytes(header) + PNG + bytes(-len(PNG) % 512))


ATTACKS = [add_name, add_type, add_chain_of_links, add_chain_of_headers, add_raw_pax, add_pax, add_again, add_many]
ATTACKS += [add_bomb, add_picture, forge_field]


def write_tar(members, dice):
    """Members and raw blocks in one of tar's formats."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dice.choice((0, 1, 2)), errors="surrogateescape") as tar:
        for entry in members:
            if isinstance(entry, bytes):
                file.write(entry)
                tar.offset = file.tell()
                continue
            member, content = entry
            try:
                tar.addfile(member, io.BytesIO(content))
            except ValueError:  # too long for this format
                tar.format = tarfile.GNU_FORMAT
                tar.addfile(member, io.BytesIO(content))
                tar.format = dice.choice((0, 1, 2))
    return file.getvalue()


def wrap_otherwise(plain, dice):
    """The same in a container that is none of ours."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(dice.choice(["train/cat/x.png", "../x.png", "a.tar"]), plain)
    ways = [
        plain,
        zipped.getvalue(),
        bz2.compress(plain),
        lzma.compress(plain, preset=0),
        gzip.compress(gzip.compress(plain)),
    ]
    return dice.choice(
        [*ways, b"\x1f\x8b" + dice.randbytes(200), gzip.compress(b"") * 1000, gzip.compress(dice.randbytes(2000))]
    )


def make_case(seed):
    """An archive, and whether nothing is wrong with it."""
    dice = random.Random(seed)
    top = dice.choice(("", "./", "CINIC-10/"))
    members = [make_member(f"{top}{s}/{name}/{n}.png", PNG) for s in SPLITS for name in CLASS_NAMES for n in range(1)]
    members += [make_member(f"{top}README.md", b"read me"), make_member(f"{top}train", type=tarfile.DIRTYPE)]
    dice.shuffle(members)
    way = dice.choices(["attack", "mutate the tar", "mutate the gzip", "cut", "other", "valid"], (12, 3, 1, 1, 1, 2))[0]
    if way == "attack":
        for attack in dice.choices(ATTACKS, k=dice.choice((1, 1, 1, 2, 3))):
            attack(members, dice)
    plain = write_tar(members, dice)
    if way == "mutate the tar":
        plain = mutate_bytes(plain, dice)
    content = wrap_otherwise(plain, dice) if way == "other" else gzip.compress(plain, 1, mtime=0)
    if way == "mutate the gzip":
        content = mutate_bytes(content, dice)
    elif way == "cut":
        content = content[: dice.randrange(len(content))]
    return content, way == "valid"


@pytest.mark.drill
def test_hostile_archives_are_refused_or_harmless(tmp_path, monkeypatch):
    seeds = choose_seeds(many=1000, few=60)
    canary = make_canary(tmp_path / "canary")
    monkeypatch.setenv("PATH", f"{canary / 'programs'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(canary / "home"))
    monkeypatch.chdir(canary / "work")
    file, outside = tmp_path / "any.tar.gz", describe_tree(canary)
    imported, slowest = 0, 0.0
    for seed in seeds:
        content, valid = make_case(seed)
        file.write_bytes(content)
        # The destination lies among what is watched, where ".." leads to it.
        root = canary / "work" / "root"
        start = time.monotonic()
        try:
            with limit_seconds(SECONDS):
                data.import_archive(file, root, caps=CAPS)
        except LabError as error:
            assert not valid, (seed, str(error))
            assert_is_message(error, seed)
            assert not root.exists() or set(list_all(root)) <= {"packed"}, seed
        else:
            imported += 1
            assert set(list_all(root)) == ALLOWED, seed
            pack = root / "packed" / "cinic10"
            assert read_manifest(pack) and find_damage(pack) == [], seed
        slowest = max(slowest, time.monotonic() - start)
        shutil.rmtree(root, ignore_errors=True)
    # Its own time of change tells that the destination was made and removed; all else is as it was.
    after = describe_tree(canary)
    assert {name: state for name, state in after.items() if name != "work"} == {
        name: state for name, state in outside.items() if name != "work"
    }
    assert len(seeds) // 20 < imported < len(seeds) // 2, (
        "either all pass or none does: the generator generates nothing"
    )
    print(f"{len(seeds)} archives: {imported} imported, the others refused; the slowest took {slowest:.2f} s")


@pytest.mark.drill
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("content", [b"9" * 65_000, b"5 aa" + b"a" * 64_000 + b"=\n", b"5 a=\n" * 13_000])
def test_a_header_that_takes_long_to_search_is_refused_at_once(tmp_path, kind, content):
    raw = make_raw(kind, content, random.Random(0))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(raw * 20 + bytes(1024), 1))
    start = time.monotonic()
    with limit_seconds(SECONDS), pytest.raises(LabError, match="a pax header that no archive"):
        data.import_archive(tmp_path / "a.tar.gz", tmp_path / "root")
    assert time.monotonic() - start < 2
