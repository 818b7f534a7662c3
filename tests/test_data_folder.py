import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.drawn import assert_explains, list_all, make_archive, make_folder
from harness.forked import drop_root_rights, fork, forked, run_forked
from PIL import Image

from lab_common import LabError, checkout
from lab_utils import data
from lab_utils.data import packing, shapes
from lab_utils.data.packing import CLASS_NAMES, MEAN_STD


@pytest.fixture
def root(tmp_path):
    """A folder that holds a data set in CINIC-10's layout, called ``cinic10``."""
    make_folder(tmp_path / "root" / "cinic10")
    return tmp_path / "root"


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """The folder for packs that cannot be beside their source, in place of the checkout's own ``data/packed``."""
    monkeypatch.setattr(packing, "checkout", lambda: tmp_path / "checkout")
    return tmp_path / "checkout" / "data" / "packed"


def find_packs(home):
    return [folder for folder in sorted(home.iterdir()) if not folder.name.startswith(".")] if home.exists() else []


def assert_equals_image_folder(dataset, folder):
    """Asserts that the packed pixels are those that torchvision's ImageFolder reads, in its order."""
    from torchvision.datasets import ImageFolder

    for split in ("train", "valid", "test"):
        part, files = getattr(dataset, split), ImageFolder(folder / split)
        assert tuple(files.classes) == dataset.class_names
        assert len(part) == len(files)
        for index, (image, label) in enumerate(files):
            assert np.array_equal(part.images[index].numpy(), np.asarray(image).transpose(2, 0, 1)), (split, index)
            assert part.labels[index] == label


def test_packing_equals_the_pictures_pixel_by_pixel_and_is_done_once(root):
    place = root / "cinic10" / "train" / "dog"
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    for mode in ("L", "LA", "P", "1", "RGBA", "CMYK"):
        picture.convert(mode).save(place / f"mode-{mode}.{'jpg' if mode == 'CMYK' else 'png'}")
    dataset = data.load(root=root)
    assert dataset.name == "cinic10" and dataset.class_names == CLASS_NAMES
    assert dataset.summary == (
        "cinic10: 46 train, 20 valid, 30 test images of 10 classes, from a folder in CINIC-10's layout"
    )
    assert (dataset.mean, dataset.std) == MEAN_STD
    assert_equals_image_folder(dataset, root / "cinic10")
    (pack,) = find_packs(root / "packed")
    assert len(list_all(pack)) == 7
    before = (pack / "manifest.json").stat().st_ino
    assert data.load(root=root).pack == pack and (pack / "manifest.json").stat().st_ino == before


def test_a_changed_source_is_packed_again(root):
    old = data.load(root=root)
    file = root / "cinic10" / "train" / "airplane" / "a.bmp"  # not compressed: as many bytes for any picture
    for grey in (1, 2):
        Image.new("RGB", (32, 32), (grey, grey, grey)).save(file)
        new = data.load(root=root)
        assert new.train.images[0].unique().tolist() == [grey]
    assert_equals_image_folder(new, root / "cinic10")
    file.unlink()
    assert len(data.load(root=root).train) == 40
    assert len(find_packs(root / "packed")) == 1 and not list((root / "packed").glob(".*.old"))
    # Whoever still has the old pack mapped can still read it.
    assert int(old.train.images.sum()) != int(new.train.images.sum())


def test_pictures_of_16_bits_are_scaled_and_counted(root):
    place = root / "cinic10" / "train" / "dog"
    ramp = np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64
    for name in ("0a.png", "0b.png"):
        Image.fromarray(ramp).save(place / name)
    dataset = data.load(root=root)
    first = int((dataset.train.labels == CLASS_NAMES.index("dog")).nonzero()[0])
    assert np.array_equal(dataset.train.images[first].numpy(), np.stack([ramp >> 8] * 3))
    assert "scaled from 16 bits a channel to 8: 2 images (such as train/dog/0a.png)" in data.load(root=root).summary


OTHERS = [
    "train/cat/more/a.png",
    "train/cat/.ipynb_checkpoints/a.png",
    "train/cat/a.tif",
    "train/cat/a.ppm",
    "a.png",
]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_out_is_told_and_folders_and_archives_count_alike(root, tmp_path, name):
    folder = root / "cinic10"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes((folder / "train" / "cat" / "cifar10-train-1.png").read_bytes())
    for stray in (folder / "train" / "Thumbs.db", folder / "README"):
        stray.touch()
    dataset = data.load(root=root)
    assert len(dataset.train) == 40
    (note,) = dataset.notes
    assert (
        note.startswith("left out: 1 file other than train|valid|test/<class>/*.png|jpg|") and note in dataset.summary
    )
    assert note.endswith(f"(such as {name})")
    data.import_archive(make_archive(folder, tmp_path / "a.tar.gz"), tmp_path / "imported")
    assert data.load(root=tmp_path / "imported").notes == (note,)
    (folder / name).unlink()
    assert data.load(root=root).notes == ()


def test_a_root_that_is_the_data_set_stays_untouched(root, spare):
    before = list_all(root / "cinic10")
    dataset = data.load(root=root / "cinic10")
    assert_equals_image_folder(dataset, root / "cinic10")
    assert list_all(root / "cinic10") == before
    make_folder(root / "other-cinic10", per_class={"train": 1, "valid": 1, "test": 1})
    assert len(data.load(root=root / "other-cinic10").train) == 10
    assert len(data.load(root=root / "cinic10").train) == 40
    assert len(find_packs(spare)) == 2


def load_without_rights(root):
    drop_root_rights()
    return data.load(root=root).summary


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
def test_a_read_only_root_is_packed_elsewhere_and_nowhere_to_write_is_explained(root, spare):
    root.chmod(0o555)
    assert run_forked(load_without_rights, root).startswith("cinic10: 40 train")
    assert not (root / "packed").exists()
    assert len(find_packs(spare)) == 1
    shutil.rmtree(spare)
    spare.parent.chmod(0o555)
    with pytest.raises(LabError) as caught:
        run_forked(load_without_rights, root)
    assert_explains(caught.value, "cannot be written", "Permission denied", str(spare), "LAB_DATA=")


def spoil(folder):
    """Puts cut-off, empty, wrong-sized and disguised files among the images, and one too large; returns all."""
    whole = (folder / "train" / "cat" / "cifar10-train-1.png").read_bytes()
    (folder / "train" / "cat" / "cifar10-train-1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "dog" / "empty.png").write_bytes(b"")
    (folder / "valid" / "ship" / "page.png").write_text("<html>not found</html>")
    Image.new("RGB", (64, 32)).save(folder / "test" / "frog" / "wide.png")
    (folder / "test" / "cat" / "film.png").write_bytes(bytes(2 * 2**20))
    return [
        *("train/cat/cifar10-train-1.png", "train/dog/empty.png", "valid/ship/page.png", "test/frog/wide.png"),
        "test/cat/film.png",
    ]


def test_bad_images_are_named_and_counted(root):
    names = spoil(root / "cinic10")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    words = "64×32, not 32×32", "film.png (it has 2.0 MB", "prepare --skip-bad"
    assert_explains(caught.value, "5 of 94 images", *names, *words)
    (root / "cinic10" / "train" / "ship" / os.fsdecode(b"\xff\n.png")).write_bytes(b"no image")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "6 of 95 images", "and 1 more")
    assert find_packs(root / "packed") == []


def test_bad_images_are_left_out_when_that_is_asked_for(root):
    bad = spoil(root / "cinic10")
    dataset = data.load(root=root, skip_bad=True)
    assert "left out as unreadable: 5 images (such as train/cat/cifar10-train-1.png" in dataset.summary
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (39, 20, 30)
    # They stay left out, without asking again, until the folder changes.
    assert data.load(root=root).summary == dataset.summary
    # The good ones are as they were: the pack equals that of a folder without the bad.
    for name in bad:
        (root / "cinic10" / name).unlink()
    assert_equals_image_folder(dataset, root / "cinic10")
    clean = data.load(root=root)
    assert clean.notes == () and torch.equal(clean.train.images, dataset.train.images)


def empty(folder):
    for file in (folder / "valid" / "frog").iterdir():
        file.unlink()


def rename_splits(folder):
    for old, new in {"train": "Train", "valid": "Validation", "test": "TEST"}.items():
        (folder / old).rename(folder / new)


def link(place):
    shutil.rmtree(place)
    place.symlink_to(f"/gone/{place.name}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (empty, ["such as 'valid/frog'", "no images in: valid/frog)", "restore missing ones"]),
        (lambda folder: shutil.rmtree(folder / "valid"), ["no images in: valid)"]),
        (
            lambda folder: (folder / "train" / "zebra").mkdir(),
            ["'train/zebra'", "unknown: train/zebra", "remove"],
        ),
        (lambda folder: (folder / "valid").rename(folder / "val"), ["such as 'valid'", "unknown: val;", "rename"]),
        (lambda folder: link(folder / "train"), ["cannot be read", "a link to /gone/train"]),
        (lambda folder: link(folder / "train" / "cat"), ["cannot be read", "a link to /gone/cat"]),
        (
            lambda folder: (folder / "test" / "cat" / "a.png").symlink_to("gone.png"),
            ["a link to gone.png"],
        ),
        (link, ["cannot be read", "a link to /gone/cinic10"]),
    ],
)
def test_an_incomplete_layout_is_explained(root, damage, words):
    damage(root / "cinic10")
    for name in (None, "cinic10"):  # never silently another data set instead
        with pytest.raises(LabError) as caught:
            data.load(name, root)
        assert_explains(caught.value, str(root / "cinic10"), *words)
    assert find_packs(root / "packed") == []


def test_a_near_miss_that_is_the_root_takes_no_pack(root, spare):
    rename_splits(root / "cinic10")
    before = list_all(root)
    with pytest.raises(LabError) as caught:
        data.load(root=root / "cinic10")
    assert_explains(caught.value, "no images in: test, train, valid", "unknown: TEST, Train, Validation")
    assert packing.list_homes(root / "cinic10") == [spare] and list_all(root) == before


def test_a_data_set_is_found_by_its_name_and_others_are_left_alone(root):
    for split in ("train", "test"):
        (root / "pets" / split / "cat").mkdir(parents=True)
    (root / "cinic10-results").mkdir()
    (root / "CINIC-10.tar.gz").touch()
    assert packing.find_cinic10(root) == root / "cinic10"
    make_folder(root / "cinic10-half")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    for words in ("2 folders could be", str(root / "cinic10"), str(root / "cinic10-half"), "export LAB_DATA="):
        assert words in str(caught.value)


def test_absence_and_unknown_names_are_explained(tmp_path):
    with pytest.raises(LabError) as caught:
        data.load("cinic10", tmp_path / "nowhere")
    assert_explains(caught.value, "was not found", "nowhere", "fetch cinic10", "import CINIC-10.tar.gz")
    with pytest.raises(LabError, match="'imagenet'") as caught:
        data.load("imagenet", tmp_path)
    assert "shapes10, cinic10, cifar10, fashion_mnist" in caught.value.fix


DAMAGES = {
    "an array is cut": lambda pack: os.truncate(pack / "train-images.npy", 1000),
    "an array has gone": lambda pack: (pack / "valid-labels.npy").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pack_is_made_again_or_refused(root, tmp_path, damage):
    dataset = data.load(root=root)
    expected = dataset.train.images.clone()
    DAMAGES[damage](dataset.pack)
    assert torch.equal(data.load(root=root).train.images, expected)
    archive = make_archive(root / "cinic10", tmp_path / "a.tar.gz")
    pack = data.import_archive(archive, tmp_path / "imported")
    DAMAGES[damage](pack)
    with pytest.raises(LabError) as caught:  # its source may have gone
        data.load(root=tmp_path / "imported")
    assert_explains(caught.value, "The pack cinic10 is damaged", str(pack), "import CINIC-10.tar.gz")


def test_arrays_are_mapped_and_cannot_change_the_files(root, recwarn):
    dataset = data.load(root=root)
    before = dataset.train.images[0].clone()
    dataset.train.images[0] = 255 - before
    assert torch.equal(data.load(root=root).train.images[0], before)
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


def announce_and_load(root, started):
    os.write(started, b"!")
    data.load(root=root)


def test_a_pack_killed_at_any_moment_leaves_nothing_half(root):
    reader, writer = os.pipe()
    began = time.perf_counter()
    data.load(root=root)
    duration = time.perf_counter() - began
    (pack,) = find_packs(root / "packed")
    outcomes = []
    for step in range(20):
        shutil.rmtree(pack)
        process = fork(announce_and_load, root, writer)
        os.read(reader, 1)
        time.sleep(duration * 1.3 * step / 20)
        process.kill()
        process.join(timeout=30)
        outcomes.append(pack.exists())
        assert not pack.exists() or packing.open_pack(pack)
        assert_equals_image_folder(data.load(root=root), root / "cinic10")
    assert False in outcomes  # some were really killed in the middle
    # What the killed ones left is removed by the next that packs.
    assert [path.suffix for path in (root / "packed").glob(".*")] == [".lock"]


def load_at_once(root, barrier, results):
    barrier.wait()
    dataset = data.load(root=root)
    results.put(int(dataset.train.images.numpy().sum()))  # torch's threads do not survive a fork


def test_processes_that_pack_at_once_agree(root):
    barrier, results = forked.Barrier(4), forked.SimpleQueue()
    processes = [fork(load_at_once, root, barrier, results) for _ in range(4)]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len({results.get() for _ in processes}) == 1
    assert len(find_packs(root / "packed")) == 1 and not list((root / "packed").glob(".*.draft"))


@pytest.mark.drill
def test_a_full_disk_and_an_interrupt_leave_the_old_pack(small_disk, spare, monkeypatch):
    few, many = ({"train": count, "valid": 10, "test": 10} for count in (10, 900))
    for outcome, words in ((LabError, "cannot be written: No space left"), (KeyboardInterrupt, None)):
        monkeypatch.setattr(shapes, "COUNTS", few)
        data.load("shapes10", small_disk)
        monkeypatch.setattr(shapes, "COUNTS", many)
        monkeypatch.setattr(shapes, "FINGERPRINT", f"drawn again for {outcome.__name__}")
        if outcome is KeyboardInterrupt:
            monkeypatch.setattr(shapes, "draw_images", interrupt)
        with pytest.raises(outcome, match=words):
            data.load("shapes10", small_disk)
        assert {path.name for path in (small_disk / "packed").iterdir()} == {"shapes10", ".shapes10.lock"}
        assert len(packing.open_pack(small_disk / "packed" / "shapes10")[2]["train"][1]) == 10


def interrupt(*_):
    raise KeyboardInterrupt


SAMPLE = Path(os.environ.get("LAB_SAMPLE") or checkout().parent / "shared" / "data" / "cinic10-sample")


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample of real CINIC-10 images is not here (LAB_SAMPLE)")
def test_real_images(tmp_path):
    (tmp_path / "cinic10-sample").symlink_to(SAMPLE.resolve())
    dataset = data.load(root=tmp_path)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (1000, 500, 500)
    for split, count in (("train", 100), ("valid", 50), ("test", 50)):
        assert getattr(dataset, split).labels.bincount().tolist() == [count] * 10
    pixels = dataset.train.images.double() / 255
    for found, published in zip((pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))), MEAN_STD, strict=True):
        assert torch.allclose(found, torch.tensor(published, dtype=torch.float64), atol=0.01)
    assert_equals_image_folder(dataset, SAMPLE)
