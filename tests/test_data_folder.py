import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.drawn import PER_CLASS, assert_explains, list_all, make_archive, make_folder
from harness.forked import drop_root_rights, fork, forked, run_forked
from PIL import Image, ImageFile

from lab_common import LabError, checkout
from lab_utils import data
from lab_utils.data import packing, shapes
from lab_utils.data.packing import CLASS_NAMES, MEAN_STD, find_damage, read_manifest


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


def test_packing_equals_the_pngs_pixel_by_pixel(root):
    dataset = data.load(root=root)
    assert dataset.name == "cinic10" and dataset.class_names == CLASS_NAMES
    assert dataset.summary == (
        "cinic10: 40 train, 20 valid, 30 test images of 10 classes, from a folder in CINIC-10's layout"
    )
    assert (dataset.mean, dataset.std) == MEAN_STD
    assert_equals_image_folder(dataset, root / "cinic10")
    assert str(root) not in dataset.summary


def test_the_manifest_says_what_is_in_the_pack(root):
    data.load(root=root)
    (pack,) = find_packs(root / "packed")
    manifest = read_manifest(pack)
    assert manifest["classes"] == list(CLASS_NAMES)
    for split, count in PER_CLASS.items():
        assert manifest["splits"][split] == {
            "images": 10 * count,
            "per_class": dict.fromkeys(CLASS_NAMES, count),
            "skipped": 0,
        }
    assert find_damage(pack) == []
    assert sorted(manifest["sha256"]) == sorted(p.name for p in pack.iterdir() if p.suffix == ".npy")
    assert find_packs(root / "packed") == [pack] and len(list_all(pack)) == 7


def test_a_second_load_packs_nothing(root):
    data.load(root=root)
    (pack,) = find_packs(root / "packed")
    before = (pack / "manifest.json").stat().st_ino
    data.load(root=root)
    assert (pack / "manifest.json").stat().st_ino == before


def test_a_changed_source_is_packed_anew(root):
    old = data.load(root=root)
    file = root / "cinic10" / "train" / "cat" / "cifar10-train-1.png"
    Image.new("RGB", (32, 32), (1, 2, 3)).save(file)
    new = data.load(root=root)
    assert_equals_image_folder(new, root / "cinic10")
    file.unlink()
    assert len(data.load(root=root).train) == 39
    assert len(find_packs(root / "packed")) == 1 and not list((root / "packed").glob(".*.old"))
    # Who still has the old pack mapped goes on reading it.
    assert int(old.train.images.sum()) != int(new.train.images.sum())


def test_a_change_that_leaves_the_size_is_noticed(root):
    file = root / "cinic10" / "train" / "airplane" / "a.bmp"  # not compressed: as many bytes for any picture
    for grey in (1, 2):
        Image.new("RGB", (32, 32), (grey, grey, grey)).save(file)
        assert data.load(root=root).train.images[0].unique().tolist() == [grey]


def test_grey_palette_and_transparent_images_become_rgb(root):
    place = root / "cinic10" / "train" / "dog"
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    for mode in ("L", "LA", "P", "1", "RGBA", "CMYK"):
        picture.convert(mode).save(place / f"mode-{mode}.{'jpg' if mode == 'CMYK' else 'png'}")
    assert_equals_image_folder(data.load(root=root), root / "cinic10")


def test_pictures_of_16_bits_are_scaled_and_counted(root, capsys):
    place = root / "cinic10" / "train" / "dog"
    ramp = np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64
    for name in ("0a.png", "0b.png"):
        Image.fromarray(ramp).save(place / name)
    dataset = data.load(root=root)
    first = int((dataset.train.labels == CLASS_NAMES.index("dog")).nonzero()[0])
    assert np.array_equal(dataset.train.images[first].numpy(), np.stack([ramp >> 8] * 3))
    said = "scaled from 16 bits a channel to 8: 2 images (such as train/dog/0a.png)"
    assert said in capsys.readouterr().err and said in data.load(root=root).summary
    assert capsys.readouterr().err == ""  # told once, where it is packed


OTHERS = {
    "train/cat/more/a.png": "in folders below a class",
    "train/cat/.ipynb_checkpoints/a.png": "hidden or in a hidden folder",
    "train/.ipynb_checkpoints/a.png": "hidden or in a hidden folder",
    "train/cat/.a.png": "hidden or",
    "train/cat/a.tif": "of another kind than .png",
    "train/cat/a.ppm": "of another kind than .png",
    "valid/cat/a": "of another kind than .png",
    "train/a.png": "outside the classes' folders",
    "a.png": "outside train|valid|test",
    "val/cat/a.png": "outside train|valid|test",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_out_is_told_and_folders_and_archives_count_alike(root, tmp_path, capsys, name):
    folder = root / "cinic10"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes((folder / "train" / "cat" / "cifar10-train-1.png").read_bytes())
    (folder / "train" / "Thumbs.db").touch()
    dataset = data.load(root=root)
    said = capsys.readouterr().err
    assert len(dataset.train) == 40
    for words in (f"left out: 1 file {OTHERS[name]}", f"(such as {name})"):
        assert words in said and words in dataset.summary
    data.import_archive(make_archive(folder, tmp_path / "a.tar.gz"), tmp_path / "imported")
    assert data.load(root=tmp_path / "imported").summary.partition("; ")[2] == dataset.summary.partition("; ")[2]
    (folder / name).unlink()
    assert data.load(root=root).notes == ()


def test_file_names_may_have_any_bytes(root):
    place = os.fsencode(root / "cinic10" / "train" / "cat")
    with Path(os.fsdecode(place + b"/\xff\n.png")).open("wb") as file:
        file.write(b"no image")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "1 of 91 images", "cannot be decoded")
    assert data.load(root=root, skip_bad=True).skipped == 1


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
def test_a_read_only_root_is_packed_elsewhere(root, spare):
    root.chmod(0o555)
    assert run_forked(load_without_rights, root).startswith("cinic10: 40 train")
    assert not (root / "packed").exists()
    assert len(find_packs(spare)) == 1


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
def test_nowhere_to_write_is_explained(root, spare):
    spare.parents[1].mkdir()
    for folder in (root, spare.parents[1]):
        folder.chmod(0o555)
    with pytest.raises(LabError) as caught:
        run_forked(load_without_rights, root)
    assert_explains(caught.value, "cannot be written", "Permission denied", str(spare.parent), "LAB_DATA=")


def spoil(folder):
    """Puts a cut-off, an empty, a wrong-sized and a disguised file among the images; returns how many."""
    whole = (folder / "train" / "cat" / "cifar10-train-1.png").read_bytes()
    (folder / "train" / "cat" / "cifar10-train-1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "dog" / "empty.png").write_bytes(b"")
    (folder / "valid" / "ship" / "page.png").write_text("<html>not found</html>")
    Image.new("RGB", (64, 32)).save(folder / "test" / "frog" / "wide.png")
    return 4


def test_a_cut_picture_is_refused_also_if_a_notebook_told_pillow_to_fill_it_up(root, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    spoil(root / "cinic10")
    with pytest.raises(LabError, match="4 of 93 images"):
        data.load(root=root)
    assert ImageFile.LOAD_TRUNCATED_IMAGES, "the notebook's own pictures are read as it said"


def test_bad_images_are_named_and_counted(root):
    spoil(root / "cinic10")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    names = ("train/cat/cifar10-train-1.png", "train/dog/empty.png", "valid/ship/page.png", "test/frog/wide.png")
    assert_explains(caught.value, "4 of 93 images", *names, "64×32, not 32×32", "--skip-bad")
    assert find_packs(root / "packed") == []


def test_bad_images_are_left_out_when_that_is_asked_for(root):
    bad = spoil(root / "cinic10")
    dataset = data.load(root=root, skip_bad=True)
    assert dataset.skipped == bad and dataset.summary.endswith("; 4 unreadable images were left out")
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (39, 20, 30)
    (pack,) = find_packs(root / "packed")
    manifest = read_manifest(pack)
    assert manifest["splits"]["train"]["per_class"]["cat"] == 3
    assert "train/dog/empty.png (cannot be decoded)" in manifest["source"]["bad"]
    assert find_damage(pack) == []
    # The good ones are as they were: the pack equals that of a folder without the bad.
    for name in manifest["source"]["bad"]:
        (root / "cinic10" / name.split(" (")[0]).unlink()
    # What was left out once stays left out, without asking again, until the folder changes.
    assert_equals_image_folder(dataset, root / "cinic10")
    clean = data.load(root=root)
    assert clean.skipped == 0 and torch.equal(clean.train.images, dataset.train.images)


def test_many_bad_images_are_cut_to_a_few_names(root):
    for file in (root / "cinic10" / "train").rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "40 of 90 images", "and 35 more")
    with pytest.raises(LabError) as caught:
        data.load(root=root, skip_bad=True)
    assert_explains(caught.value, "Not one image of the class 'airplane' in train")


def empty(folder):
    for file in (folder / "valid" / "frog").iterdir():
        file.unlink()


def rename_splits(folder):
    for old, new in {"train": "Train", "valid": "Validation", "test": "test_images"}.items():
        (folder / old).rename(folder / new)


def lower(folder):
    (folder / "train" / "cat").rename(folder / "train" / "x")
    (folder / "train" / "x").rename((folder / "train" / "cat").mkdir() or folder / "train" / "cat" / "x")


def flatten(folder):
    """The split as some data sets come: its images in one folder, their labels in a table."""
    for place in sorted((folder / "valid").iterdir()):
        for image in place.iterdir():
            image.rename(folder / "valid" / f"{place.name}-{image.name}")
        place.rmdir()
    (folder / "valid" / "labels.csv").write_text("name,label\n")


def link(place):
    shutil.rmtree(place)
    place.symlink_to(f"/gone/{place.name}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (empty, ["no images in 1 of its folders, such as 'valid/frog'"]),
        (lambda folder: (folder / "test" / "ship").rename(folder / "ship"), ["such as 'test/ship'", "restore"]),
        (lambda folder: (folder / "train" / "zebra").mkdir(), ["'train/zebra' is none of CINIC-10's ten"]),
        (lambda folder: (folder / "valid").rename(folder / "val"), ["such as 'valid'", "unknown: val", "mv '"]),
        (rename_splits, ["no images in: train, valid, test", "unknown: Train, Validation", "/Train' '"]),
        (lambda folder: (folder / "train" / "cat").rename(folder / "train" / "Cat"), ["'train/Cat'", "train/cat'"]),
        (flatten, ["no images in 10 of its folders", "20 files outside the classes' folders", "restore"]),
        (lower, ["such as 'train/cat'", "4 files in folders below a class"]),
        (lambda folder: shutil.rmtree(folder / "valid"), ["such as 'valid'", "restore", "import CINIC-10"]),
        (lambda folder: shutil.rmtree(folder / "train" / "truck"), ["such as 'train/truck'", "restore"]),
        (lambda folder: link(folder / "train"), ["cannot be read", "a link to /gone/train"]),
        (lambda folder: link(folder / "train" / "cat"), ["cannot be read", "a link to /gone/cat"]),
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


def test_a_class_that_is_a_circle_of_links_is_named(root):
    (root / "cinic10" / "train" / "loop").symlink_to("loop")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "cannot be read", "symbolic links", str(root / "cinic10" / "train" / "loop"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
@pytest.mark.parametrize(("place", "mode"), [("", 0), ("", 0o111), ("cinic10", 0), ("packed", 0)])
def test_a_folder_that_cannot_be_entered_or_listed_is_named(root, spare, place, mode):
    (root / "packed").mkdir()
    (root / place).chmod(mode)
    try:
        with pytest.raises(LabError) as caught:
            run_forked(load_without_rights, root)
        assert_explains(caught.value, "cannot be read", "Permission denied", str(root / place))
    finally:
        (root / place).chmod(0o755)


def test_a_near_miss_that_is_the_root_takes_no_pack(root, spare):
    rename_splits(root / "cinic10")
    before = list_all(root)
    with pytest.raises(LabError) as caught:
        data.load(root=root / "cinic10")
    assert_explains(caught.value, "no images in: train, valid, test", "unknown: Train, Validation, test_images")
    assert packing.list_homes(root / "cinic10") == [spare] and list_all(root) == before
    for split in ("Train", "Validation"):
        (root / "others" / split / "n01440764").mkdir(parents=True)
    with pytest.raises(LabError, match="no images in: train, valid, test"):  # whatever the classes
        data.load(root=root / "others")


def test_a_data_set_is_found_below_other_folders_and_others_are_left_alone(tmp_path):
    (tmp_path / "imagenet" / "train" / "n01440764").mkdir(parents=True)
    (tmp_path / "imagenet" / "val").mkdir()
    for split in ("train", "test"):
        (tmp_path / "pets" / split / "cat").mkdir(parents=True)
    assert data.find_cinic10(tmp_path) is None
    folder = make_folder(tmp_path / "data" / "images" / "set")
    assert data.find_cinic10(tmp_path) == folder
    named = make_folder(tmp_path / "data" / "CINIC" / "set")
    assert data.find_cinic10(tmp_path) == named


def test_two_candidates_are_named(root):
    make_folder(root / "cinic10-half")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "2 folders could be", str(root / "cinic10"), str(root / "cinic10-half"), "LAB_DATA=")


def test_absence_is_explained(tmp_path):
    with pytest.raises(LabError) as caught:
        data.load("cinic10", tmp_path / "nowhere")
    assert_explains(caught.value, "was not found", "nowhere", "fetch cinic10")
    (tmp_path / "CINIC-10.tar.gz").touch()
    with pytest.raises(LabError) as caught:
        data.load("cinic10", tmp_path)
    assert_explains(caught.value, f"import '{tmp_path / 'CINIC-10.tar.gz'}'")


def test_unknown_names_are_explained(root):
    with pytest.raises(LabError) as caught:
        data.load("imagenet", root)
    assert_explains(caught.value, "'imagenet'", "shapes10, cinic10, cifar10, fashion_mnist")
    with pytest.raises(LabError) as caught:
        data.load(root=root).batches("val", 8)
    assert_explains(caught.value, "'val'", "'valid'")


def save_labels(pack, change):
    np.save(pack / "train-labels.npy", change(np.load(pack / "train-labels.npy")))


DAMAGES = {
    "an array is cut": lambda pack: os.truncate(pack / "train-images.npy", 1000),
    "an array has gone": lambda pack: (pack / "valid-labels.npy").unlink(),
    "an array is empty": lambda pack: (pack / "valid-labels.npy").write_bytes(b""),
    "an array is no array": lambda pack: (pack / "test-images.npy").write_text("<html>"),
    "labels of another type": lambda pack: save_labels(pack, lambda labels: labels.astype(np.int32)),
    "labels that are no class": lambda pack: save_labels(pack, lambda labels: labels + 5),
    "too few labels": lambda pack: save_labels(pack, lambda labels: labels[1:]),
}
MANIFESTS = ["", "[]", "{}", "null", '{"format": 1', '{"format": 2}', '{"format": 1, "source": []}']


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pack_is_made_again_or_refused(root, tmp_path, damage):
    dataset = data.load(root=root)
    expected = dataset.train.images.clone()
    DAMAGES[damage](dataset.pack)
    assert find_damage(dataset.pack) != []
    assert torch.equal(data.load(root=root).train.images, expected) and find_damage(dataset.pack) == []
    archive = make_archive(root / "cinic10", tmp_path / "a.tar.gz")
    pack = data.import_archive(archive, tmp_path / "imported")
    DAMAGES[damage](pack)
    with pytest.raises(LabError) as caught:  # its source may have gone
        data.load(root=tmp_path / "imported")
    assert_explains(caught.value, "The pack cinic10 is damaged", str(pack), "import CINIC-10.tar.gz")
    data.import_archive(archive, tmp_path / "imported")
    assert find_damage(pack) == []


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_pack_with_another_manifest_is_made_again(root, manifest):
    pack = data.load(root=root).pack
    (pack / "manifest.json").write_text(manifest)
    assert read_manifest(pack) is None
    assert len(data.load(root=root).train) == 40 and find_damage(pack) == []


def test_arrays_are_mapped_and_cannot_change_the_files(root, recwarn):
    dataset = data.load(root=root)
    before = dataset.train.images[0].clone()
    dataset.train.images[0] = 255 - before
    assert torch.equal(data.load(root=root).train.images[0], before) and find_damage(dataset.pack) == []
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
        for file in pack.iterdir():
            file.unlink()
        pack.rmdir()
        process = fork(announce_and_load, root, writer)
        os.read(reader, 1)
        time.sleep(duration * 1.3 * step / 20)
        process.kill()
        process.join(timeout=30)
        outcomes.append(pack.exists())
        if pack.exists():
            assert find_damage(pack) == [] and read_manifest(pack)
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
    assert find_damage(find_packs(root / "packed")[0]) == []


COUNTS = dict.fromkeys(PER_CLASS, 3)


def write_small_pack(folder, value, *, counts=COUNTS):
    """Writes a pack of one class whose pixels all have one value, which is its fingerprint, too."""
    source = {"words": "from nowhere", "fingerprint": f"value {value}"}
    with packing.write_pack(folder, counts, class_names=("only",), source=source) as draft:
        for images in draft.images.values():
            images[:] = value


def test_a_file_system_without_locks_takes_packs(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    for value in (1, 2):
        write_small_pack(tmp_path / "pack", value)
    assert read_manifest(tmp_path / "pack")["source"]["fingerprint"] == "value 2"


@pytest.mark.drill
def test_a_full_disk_is_told_before_anything_is_packed(small_disk):
    write_small_pack(small_disk / "pack", 1)
    process = fork(write_too_much, small_disk / "pack")  # a full disk under a mapped file would kill the process
    process.join(timeout=30)
    assert process.exitcode == 0
    assert {path.name for path in small_disk.iterdir()} == {"pack", ".pack.lock"}
    assert find_damage(small_disk / "pack") == []


def write_too_much(pack):
    with pytest.raises(LabError) as caught:
        write_small_pack(pack, 2, counts=dict.fromkeys(PER_CLASS, 300))
    assert_explains(caught.value, "No space left", "the disk is full", "LAB_DATA=")


def test_a_link_that_leads_nowhere_is_a_bad_image(root):
    (root / "cinic10" / "train" / "cat" / "gone.png").symlink_to(root / "absent.png")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "1 of 91 images", "train/cat/gone.png (No such file or directory)", "--skip-bad")
    assert data.load(root=root, skip_bad=True).skipped == 1
    assert data.load(root=root).skipped == 1


def test_an_interrupted_pack_leaves_nothing(tmp_path, spare, monkeypatch):
    def interrupt(split, index):
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes, "draw_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.load("shapes10", tmp_path / "root")
    assert [name for name in list_all(tmp_path / "root") if not name.endswith(".lock")] == ["packed"]


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
