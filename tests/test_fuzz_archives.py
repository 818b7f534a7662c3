"""Archives with odd members and with damage at random: each is refused in one message, or is whole and imported.

Whatever an archive holds: nothing outside the destination is written, no half pack gets a final name, and no case takes
longer than seconds.
"""

import gzip
import io
import os
import random
import shutil
import tarfile

import pytest
from harness.canary import assert_is_message, describe_tree, limit_seconds, make_canary
from harness.drawn import list_all
from harness.fuzzing import choose_seeds, mutate_bytes
from PIL import Image

from lab_common import LabError
from lab_utils import data
from lab_utils.data import archive
from lab_utils.data.packing import CLASS_NAMES, SPLITS, open_pack

LOCK = "packed/.cinic10.lock"
PACK = {f"packed/cinic10/{split}-{kind}.npy" for split in SPLITS for kind in ("images", "labels")}
PACK |= {"packed", LOCK, "packed/cinic10", "packed/cinic10/manifest.json"}
PNG = io.BytesIO()
Image.new("RGB", (32, 32), (10, 20, 30)).save(PNG, "PNG")
PNG = PNG.getvalue()
NAMES = [
    *("../x.png", "../../etc/passwd", "train/cat/../../../x.png", "train/cat/..", "..", ".", "", "/", "//x.png"),
    *("/etc/x.png", "~/x.png", "C:\\x.png", "link/x.png", "x.png", "cat/x.png", "train/x.png", "train/zebra/x.png"),
    *("train/cat/a/b/x.png", "other/train/cat/x.png", "train/../train/cat/x.png", "train//cat/y.png", "train", "Train"),
    *("train/cat/\x1b[2J\x1b]0;x\x07.png", "train/\x1b[31mred/x.png", "train/cat/\n  fix: rm -rf.png", "\u202e/x.png"),
    *("train/cat/\udcff\udcfe.png", "train/\udc80/x.png", "train/cat/\N{PILE OF POO}.png", "train/cat/x\0y.png"),
    *("train/cat/" + "x" * 300 + ".png", "train/" + "y" * 70_000 + "/x.png", "a/" * 200 + "x.png", "train/cat/con.png"),
    *("packed/cinic10/manifest.json", "train/cat/x.png/y.png", "train/cat", "valid/dog/.hidden.png"),
]
TYPES = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"]
TYPES += [tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME]
SIZES = ["-1", "-512", "0", "99999999999", "nan", "", "0x10"]


def make_case(seed):
    """An archive, and whether nothing is wrong with it."""
    dice, file = random.Random(seed), io.BytesIO()
    way = dice.choices(["names", "types", "sizes", "mutate the tar", "mutate the gzip", "valid"], (4, 2, 2, 4, 1, 2))[0]
    members = [(f"{split}/{name}/0.png", PNG, {}) for split in SPLITS for name in CLASS_NAMES]
    if way == "names":
        members += [(dice.choice(NAMES), dice.choice([PNG, b"x", b"", PNG[:40]]), {}) for _ in range(2)]
    elif way == "types":
        fields = {"type": dice.choice(TYPES), "linkname": dice.choice(["/etc/passwd", "../../x.png", "home", "."])}
        members.append((dice.choice([*NAMES, "train/cat/x.png"]), b"x" * 600, fields))
    elif way == "sizes":
        members.append(("train/cat/x.png", PNG, {"pax_headers": {"size": dice.choice(SIZES)}}))
    dice.shuffle(members)
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, content, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content))
    plain = mutate_bytes(file.getvalue(), dice) if way == "mutate the tar" else file.getvalue()
    content = gzip.compress(plain, 1, mtime=0)
    return mutate_bytes(content, dice) if way == "mutate the gzip" else content, way == "valid"


@pytest.mark.drill
def test_odd_archives_are_refused_or_harmless(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "ARCHIVE_BYTES", 2**22)
    seeds = choose_seeds(many=1000, few=80)
    canary = make_canary(tmp_path / "canary")
    monkeypatch.setenv("PATH", f"{canary / 'programs'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(canary / "home"))
    monkeypatch.chdir(canary / "work")
    file, outside, imported = tmp_path / "any.tar.gz", describe_tree(canary), 0
    for seed in seeds:
        content, valid = make_case(seed)
        file.write_bytes(content)
        root = canary / "work" / "root"  # the destination is among what is watched, where ".." leads to it
        try:
            with limit_seconds(10):
                data.import_archive(file, root)
        except LabError as error:
            assert not valid, (seed, str(error))
            assert_is_message(error, seed)
            assert not root.exists() or set(list_all(root)) <= {"packed", LOCK}, seed
        else:
            imported += 1
            assert set(list_all(root)) == PACK, seed
            assert open_pack(root / "packed" / "cinic10"), seed
        shutil.rmtree(root, ignore_errors=True)
    # The destination was made and removed, as its folder's time of change tells; everything else is as it was.
    after = describe_tree(canary)
    assert {name: state for name, state in after.items() if name != "work"} == {
        name: state for name, state in outside.items() if name != "work"
    }
    assert len(seeds) // 20 < imported < len(seeds) * 4 // 5, "the generator generates nothing"
