"""Packs of others, whose manifest and arrays may be anything: used, made anew, or refused in one message."""

import errno
import io
import json
import os
import random
import shutil
import time
import tracemalloc
import warnings
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest
from harness.canary import assert_is_message, describe_tree, limit_seconds, make_canary
from harness.drawn import make_pack
from harness.fuzzing import ODD_VALUES, choose_seeds, mutate_bytes, mutate_json

from lab_common import LabError
from lab_utils import data, plots
from lab_utils.data import shapes, sources
from lab_utils.data.__main__ import main
from lab_utils.data.pack import MANIFEST, find_damage, read_manifest, restore_pack, sweep_drafts

SECONDS = 10
EVIL = "\x1b[2J\x1b]0;x\x07\u202e\n  fix: rm -rf"
ODD = (*ODD_VALUES, EVIL, ["x"] * 10, 10**18, "../../../canary/x.png", "/dev/zero", float("inf"), [0.0] * 3, {"x": 1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("whole"), "cinic10")


@pytest.fixture
def few(monkeypatch, tmp_path):
    """shapes10 is small, where it is drawn in place of a damaged pack."""
    monkeypatch.setattr(shapes, "COUNTS", {"train": 10, "valid": 10, "test": 10})
    monkeypatch.setattr(sources, "checkout", lambda: tmp_path / "checkout")


def use(root, capsys):
    """Does with a folder of data sets what the labs do; returns what was printed."""
    dataset = data.load(root=root)
    text = dataset.summary + " ".join(dataset.class_names)
    list(dataset.batches("train", 8))
    data.export(dataset, root / "export")
    return text + see(root, capsys)


def see(root, capsys):
    with mock.patch.dict(os.environ, LAB_DATA=str(root)):
        codes = [main([command]) for command in ("info", "verify")]
    assert set(codes) <= {0, 1}
    return "".join(capsys.readouterr())


def change_manifest(pack, dice):
    manifest = json.loads((pack / MANIFEST).read_text())
    changed = json.dumps(mutate_json(manifest, dice, ODD), ensure_ascii=True)
    if dice.random() < 0.1:
        changed = dice.choice(["[" * 10_000, '{"format":' * 10_000, "1" * 10_000, "", "{}", "null", "\0", "[]"])
    (pack / MANIFEST).write_text(changed)


def change_array(pack, dice):
    path = dice.choice(sorted(pack.glob("*.npy")))
    content = path.read_bytes()
    path.write_bytes(mutate_bytes(content[:128], dice) + content[128:])


def change_labels(pack, dice):
    labels = np.full(20, dice.choice((-1, 10, 2**40))).astype(dice.choice((np.int64, np.int32, np.float64)))
    np.save(pack / "train-labels.npy", labels)


def replace_file(pack, dice):
    path = dice.choice([*sorted(pack.glob("*.npy")), pack / MANIFEST])
    path.unlink()
    match dice.randrange(5):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to("gone")


WAYS = {change_manifest: 8, change_array: 3, change_labels: 1, replace_file: 2}


@pytest.mark.drill
def test_packs_of_others_are_used_made_anew_or_refused(whole, few, tmp_path, capsys):
    seeds = choose_seeds(many=200, few=40)
    canary = make_canary(tmp_path / "canary")
    outside = describe_tree(canary)
    used = refused = 0
    for seed in seeds:
        root, dice = tmp_path / f"{seed}" / "sets", random.Random(seed)
        shutil.copytree(whole, root)
        pack = root / "packed" / "cinic10"
        dice.choices(list(WAYS), WAYS.values())[0](pack, dice)
        if dice.random() < 0.3:  # an own pack, which is made anew, and not an imported one
            pack.rename(pack.with_name("shapes10"))
        start = time.monotonic()
        with limit_seconds(SECONDS), warnings.catch_warnings(action="error"):
            warnings.simplefilter("ignore", ResourceWarning)  # of tests before this one
            try:
                text = use(root, capsys)
                used += 1
            except LabError as error:
                assert_is_message(error, seed)
                text = see(root, capsys)
                refused += 1
        assert all(c.isprintable() or c == "\n" for c in text), (seed, ascii(text))
        assert "\n  fix: rm -rf" not in text, seed
        assert time.monotonic() - start < SECONDS
        shutil.rmtree(root.parent)
    assert describe_tree(canary) == outside
    assert min(used, refused) > len(seeds) // 20
    print(f"{len(seeds)} packs: {used} used or made anew, {refused} refused")


@pytest.mark.drill
def test_a_pack_s_class_names_lead_nowhere_and_are_cleaned(whole, tmp_path, capsys):
    root = tmp_path / "a" / "b" / "sets"
    shutil.copytree(whole, root)
    path = root / "packed" / "cinic10" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["classes"][:4] = ["../../../out", EVIL, "T-shirt/top", r"$\frac{$"]
    manifest["source"]["words"] = EVIL
    path.write_text(json.dumps(manifest))
    before = sorted(tmp_path.iterdir())
    text = use(root, capsys)
    dataset = data.load(root=root)
    axes = plots.image_grid(dataset.train.images[:4], dataset.class_names[:4])
    axes.figure.savefig(io.BytesIO(), format="png")
    plt.close(axes.figure)
    assert "\x1b" not in text and "\n  fix" not in text and "\N{REPLACEMENT CHARACTER}[2J" in text
    assert sorted(tmp_path.iterdir()) == before
    assert len(list((root / "export" / "train").iterdir())) == 10


@pytest.mark.drill
def test_a_manifest_names_its_own_arrays_only(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "sets")
    pack = tmp_path / "sets" / "packed" / "cinic10"
    manifest = json.loads((pack / MANIFEST).read_text())
    for name in ("/dev/zero", "../../../x", MANIFEST):
        (pack / MANIFEST).write_text(json.dumps(manifest | {"sha256": manifest["sha256"] | {name: "0" * 64}}))
        assert read_manifest(pack) is None
    (pack / MANIFEST).write_text(json.dumps(manifest))
    assert find_damage(pack) == []
    assert Path(pack / MANIFEST).exists()


def test_labels_of_another_kind_take_no_memory(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "sets")
    path = tmp_path / "sets" / "packed" / "cinic10" / "train-labels.npy"
    with path.open("wb") as file:
        header = {"descr": "|V10000000", "fortran_order": False, "shape": (20,)}
        np.lib.format.write_array_header_1_0(file, header)
        os.truncate(path, file.tell() + 20 * 10_000_000)  # a hole: 200 MB that are not on the disk
    tracemalloc.start()
    try:
        with pytest.raises(LabError, match="is damaged"):
            data.load(root=tmp_path / "sets")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["draft", "old"])
def test_a_pipe_or_a_link_among_the_drafts_is_left_alone(whole, tmp_path, suffix):
    shutil.copytree(whole, tmp_path / "sets")
    home = tmp_path / "sets" / "packed"
    shutil.copytree(home / "cinic10", tmp_path / "another")
    os.mkfifo(home / f".cinic10-x.{suffix}")
    (home / f".cinic10-y.{suffix}").symlink_to(tmp_path / "another")
    os.utime(home / f".cinic10-x.{suffix}", (1, 1))
    os.utime(tmp_path / "another", (1, 1))
    with limit_seconds(SECONDS):
        sweep_drafts(home / "cinic10", keep=home)
        restore_pack(home / "cinic10")
    assert find_damage(tmp_path / "another") == []


def test_an_error_that_passes_leaves_the_pack(few, tmp_path, monkeypatch):
    root = make_pack(tmp_path / "sets")
    manifest = root / "packed" / "shapes10" / MANIFEST

    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = manifest.stat()
    with monkeypatch.context() as patch, pytest.raises(LabError, match="Too many open files"):
        patch.setattr(sources, "open_arrays", fail)
        data.load("shapes10", root)
    assert manifest.stat() == before
    assert len(data.load("shapes10", root).train) == 20


@pytest.mark.parametrize(
    "change", [list, lambda sums: dict.fromkeys(sums, 1), lambda sums: {name: [] for name in sums}]
)
def test_checksums_are_a_text_for_each_array(whole, tmp_path, capsys, change):
    shutil.copytree(whole, tmp_path / "sets")
    path = tmp_path / "sets" / "packed" / "cinic10" / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"sha256": change(manifest["sha256"])}))
    assert read_manifest(path.parent) is None
    said = see(tmp_path / "sets", capsys)
    assert "cinic10:  not found" in said and "[ok] cinic10:" not in said


def test_an_array_longer_than_its_manifest_says_is_not_hashed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "sets")
    pack = tmp_path / "sets" / "packed" / "cinic10"
    for name in ("train-images.npy", "test-labels.npy"):
        os.truncate(pack / name, 2**40)
    with limit_seconds(SECONDS):
        assert find_damage(pack) == ["train-images.npy", "test-labels.npy"]


def test_an_array_may_lie_behind_a_link_and_one_from_the_kernel_is_damaged(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "sets")
    pack = tmp_path / "sets" / "packed" / "cinic10"
    (pack / "train-images.npy").rename(tmp_path / "images")
    (pack / "train-images.npy").symlink_to(tmp_path / "images")
    assert find_damage(pack) == []
    (pack / "train-images.npy").unlink()
    (pack / "train-images.npy").symlink_to("/proc/kmsg")
    with limit_seconds(SECONDS):
        assert find_damage(pack) == ["train-images.npy"]
