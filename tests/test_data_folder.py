import errno
import os
import shutil
import signal
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
from lab_utils.data import pack as pack_module
from lab_utils.data import shapes, sources, write
from lab_utils.data.__main__ import _parse
from lab_utils.data.folder import CLASS_NAMES, MEAN_STD
from lab_utils.data.pack import find_damage, read_manifest


@pytest.fixture
def root(tmp_path):
    """A folder that holds a data set in CINIC-10's layout, called ``cinic10``."""
    make_folder(tmp_path / "root" / "cinic10")
    return tmp_path / "root"


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """Where packs go that cannot lie beside their source; in place of the checkout's own ``data/packed``."""
    monkeypatch.setattr(sources, "checkout", lambda: tmp_path / "checkout")
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
    assert find_packs(root / "packed") == [pack] and len(list_all(root / "packed")) == 8


def test_arrays_are_mapped_and_cannot_change_the_files(root, recwarn):
    dataset = data.load(root=root)
    before = dataset.train.images[0].clone()
    dataset.train.images[0] = 255 - before
    assert torch.equal(data.load(root=root).train.images[0], before)
    assert find_damage(find_packs(root / "packed")[0]) == []
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


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
    assert len(find_packs(root / "packed")) == 1 and len(list_all(root / "packed")) == 8
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
def test_what_is_left_out_is_told_and_both_loaders_and_archives_count_alike(root, tmp_path, capsys, name):
    folder, split = root / "cinic10", name.partition("/")[0] if "/" in name else "train"
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
    if split in ("train", "valid"):
        assert len(data.classic_loader(folder, split, 8).dataset) == len(getattr(dataset, split))
    (folder / name).unlink()
    assert data.load(root=root).notes == ()


def test_any_name_with_cinic_and_any_size_will_do(tmp_path):
    make_folder(tmp_path / "my-CINIC-subset", per_class={"train": 1, "valid": 2, "test": 1})
    assert len(data.load(root=tmp_path).valid) == 20


def test_file_names_may_have_any_bytes(root):
    place = os.fsencode(root / "cinic10" / "train" / "cat")
    with Path(os.fsdecode(place + b"/\xff\n.png")).open("wb") as file:
        file.write(b"no image")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    assert_explains(caught.value, "1 of 91 images", "cannot be decoded")
    assert data.load(root=root, skip_bad=True).skipped == 1


def test_files_that_are_no_images_and_hidden_ones_are_left_alone(root):
    folder = root / "cinic10"
    for name in ("README.md", "train/notes.txt", "train/cat/Thumbs.db", "train/cat/._cifar10-train-1.png", ".DS_Store"):
        (folder / name).write_text("not an image")
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    assert len(data.load(root=root).train) == 40


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


def run_without_rights(root, command):
    drop_root_rights()
    if not command:
        return data.load(root=root).summary
    arguments = _parse(command)
    return arguments.run(arguments, root)


def list_without_rights(root):
    drop_root_rights()
    data.load(root=root)
    return sorted(sources.list_packs(root))


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
def test_a_read_only_root_is_packed_elsewhere(root, spare):
    root.chmod(0o555)
    assert run_forked(load_without_rights, root).startswith("cinic10: 40 train")
    assert not (root / "packed").exists()
    assert len(find_packs(spare)) == 1


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
def test_a_pack_in_a_read_only_root_is_used(root, spare):
    data.load(root=root)
    for folder in (root, root / "packed"):
        folder.chmod(0o555)
    assert run_forked(load_without_rights, root).startswith("cinic10: 40 train")
    assert not spare.exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
def test_nowhere_to_write_is_explained(root, spare):
    spare.parents[1].mkdir()
    for folder in (root, spare.parents[1]):
        folder.chmod(0o555)
    with pytest.raises(LabError) as caught:
        run_forked(load_without_rights, root)
    assert_explains(caught.value, "cannot be written", "Permission denied", str(spare), "LAB_DATA=")


def spoil(folder):
    """Puts a cut-off, an empty, a wrong-sized and a disguised file among the images; returns how many."""
    whole = (folder / "train" / "cat" / "cifar10-train-1.png").read_bytes()
    (folder / "train" / "cat" / "cifar10-train-1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "dog" / "empty.png").write_bytes(b"")
    (folder / "valid" / "ship" / "page.png").write_text("<html>not found</html>")
    Image.new("RGB", (64, 32)).save(folder / "test" / "frog" / "wide.png")
    return 4


def test_bad_images_are_named_and_counted(root):
    spoil(root / "cinic10")
    with pytest.raises(LabError) as caught:
        data.load(root=root)
    names = ("train/cat/cifar10-train-1.png", "train/dog/empty.png", "valid/ship/page.png", "test/frog/wide.png")
    assert_explains(caught.value, "4 of 93 images", *names, "64×32, not 32×32", "--skip-bad")
    assert find_packs(root / "packed") == []


def test_a_cut_picture_is_refused_also_if_a_notebook_told_pillow_to_fill_it_up(root, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    spoil(root / "cinic10")
    with pytest.raises(LabError, match="4 of 93 images"):
        data.load(root=root)
    assert ImageFile.LOAD_TRUNCATED_IMAGES, "the notebook's own pictures are read as it said"


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
        (empty, ["'frog' in valid has no images", "valid/frog"]),
        (lambda folder: (folder / "test" / "ship").rename(folder / "ship"), ["'ship' in test is missing"]),
        (lambda folder: (folder / "train" / "zebra").mkdir(), ["'zebra' in train", "none of CINIC-10's ten"]),
        (lambda folder: (folder / "valid").rename(folder / "val"), ["split 'valid' is missing", "'val'", "mv '"]),
        (rename_splits, ["splits 'train', 'valid', 'test' are missing", "'Validation' is 'valid'", "/Train' '"]),
        (lambda folder: (folder / "train" / "cat").rename(folder / "train" / "Cat"), ["'Cat' in train", "train/cat'"]),
        (flatten, ["'valid' has 20 images, and no folders", "sort them", "valid/<class>/"]),
        (lower, ["'cat' in train has no images", "4 files in folders below a class"]),
        (lambda folder: shutil.rmtree(folder / "valid"), ["'valid' is missing", "enlarged set", "restore valid"]),
        (lambda folder: shutil.rmtree(folder / "train" / "truck"), ["'truck' in train is missing", "9 of ten"]),
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
@pytest.mark.parametrize(("place", "mode"), [("", 0), ("", 0o111), ("cinic10", 0), ("packed", 0), ("packed", 0o111)])
def test_a_folder_that_cannot_be_entered_or_listed_is_named(root, spare, place, mode):
    (root / "packed").mkdir()
    (root / place).chmod(mode)
    try:
        with pytest.raises(LabError) as caught:
            run_forked(list_without_rights, root)
        assert_explains(caught.value, "cannot be read", "Permission denied", str(root / place))
    finally:
        (root / place).chmod(0o755)


@pytest.mark.skipif(not Path("/proc").exists(), reason="gives up rights in Linux's way")
@pytest.mark.parametrize("command", [[], ["info"], ["fetch", "cinic10"]])
def test_packs_that_cannot_be_entered_are_never_taken_for_none(tmp_path, spare, monkeypatch, command):
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "root"))
    (tmp_path / "root" / "packed").mkdir(mode=0, parents=True)
    try:
        with pytest.raises(LabError) as caught:
            run_forked(run_without_rights, tmp_path / "root", command)
    finally:
        (tmp_path / "root" / "packed").chmod(0o755)
    assert_explains(caught.value, "cannot be read", "Permission denied", str(tmp_path / "root" / "packed"))


def test_a_home_that_is_not_known_is_explained():
    with pytest.raises(LabError) as caught:
        data.load(root="~nobody-of-this-name/sets")
    assert_explains(caught.value, "~nobody-of-this-name/sets")


def test_an_export_onto_a_file_is_explained(root, tmp_path):
    dataset = data.load(root=root)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(LabError) as caught:
            data.export(dataset, place)
        assert_explains(caught.value, "Not a directory", str(place))


def test_a_near_miss_that_is_the_root_takes_no_pack(root, spare):
    rename_splits(root / "cinic10")
    before = list_all(root)
    with pytest.raises(LabError) as caught:
        data.load(root=root / "cinic10")
    assert_explains(caught.value, "are missing", "'Train' is 'train'")
    assert sources.pack_homes(root / "cinic10") == [spare] and list_all(root) == before
    for split in ("Train", "Validation"):
        (root / "others" / split / "n01440764").mkdir(parents=True)
    with pytest.raises(LabError, match="'train', 'valid', 'test' are missing"):  # whatever the classes
        data.load(root=root / "others")
    with pytest.raises(LabError) as caught:
        data.load(root=make_folder(root / "whole") / "train")
    assert_explains(caught.value, "export LAB_DATA=", str(root / "whole"))


def test_a_data_set_is_found_below_other_folders_and_others_are_left_alone(tmp_path):
    (tmp_path / "imagenet" / "train" / "n01440764").mkdir(parents=True)
    (tmp_path / "imagenet" / "val").mkdir()
    for split in ("train", "test"):
        (tmp_path / "pets" / split / "cat").mkdir(parents=True)
    assert sources.find_cinic10(tmp_path) is None
    folder = make_folder(tmp_path / "data" / "images" / "set")
    assert sources.find_cinic10(tmp_path) == folder
    named = make_folder(tmp_path / "data" / "CINIC" / "set")
    assert sources.find_cinic10(tmp_path) == named


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


def test_a_truncated_pack_is_made_again(root):
    expected = data.load(root=root).train.images.clone()
    (pack,) = find_packs(root / "packed")
    for name in ("train-images.npy", "valid-labels.npy"):
        os.truncate(pack / name, (pack / name).stat().st_size - 100)
        assert torch.equal(data.load(root=root).train.images, expected)
        assert find_damage(pack) == []


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
    # What the killed ones left is removed by the next that packs, once it is too old to be anybody's.
    drafts = list((root / "packed").glob(".*.draft"))
    assert drafts
    for draft in drafts:
        os.utime(draft, (0, 0))
    (root / "cinic10" / "train" / "cat" / "cifar10-train-1.png").unlink()
    data.load(root=root)
    assert list((root / "packed").glob(".*")) == []


def load_and_die_at_rename(root, before):
    rename = Path.rename

    def die(self, target):
        if not before:
            rename(self, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.rename = die
    data.load(root=root)


@pytest.mark.parametrize("before", [True, False])
def test_a_pack_appears_whole_in_the_moment_of_its_renaming(root, before):
    process = fork(load_and_die_at_rename, root, before)
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    packs = find_packs(root / "packed")
    assert len(packs) == (0 if before else 1)
    assert all(find_damage(pack) == [] and len(list_all(pack)) == 7 for pack in packs)
    assert_equals_image_folder(data.load(root=root), root / "cinic10")


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
    assert len(list_all(root / "packed")) == 8
    assert find_damage(find_packs(root / "packed")[0]) == []


COUNTS = dict.fromkeys(PER_CLASS, 3)
SOURCE = {"words": "from nowhere", "fingerprint": "any"}


def write_small_pack(folder, value, *, counts=COUNTS):
    """Writes a pack of one class whose pixels all have one value, which is its fingerprint, too."""
    source = SOURCE | {"fingerprint": f"value {value}"}
    with write.write_pack(folder, counts, class_names=("only",), source=source) as draft:
        for images in draft.images.values():
            images[:] = value


def sweep_at_once(folder, barrier):
    barrier.wait()
    for _ in range(150):
        draft, lock = pack_module.make_draft_folder(folder / "pack")
        pack_module.sweep_drafts(folder / "pack", keep=draft)
        draft.rmdir()
        os.close(lock)


def test_processes_that_pack_anew_all_the_time_leave_no_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "COUNTS", {"train": 10, "valid": 10, "test": 10})
    barrier = forked.Barrier(4)
    processes = [fork(sweep_at_once, tmp_path, barrier) for _ in range(4)]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_neighbours_draft_may_vanish_during_the_sweep(tmp_path, monkeypatch):
    neighbour = tmp_path / ".pack-neighbour.draft"
    stat = Path.stat

    def vanish(self, **arguments):
        if self == neighbour:
            neighbour.rmdir()
        return stat(self, **arguments)

    neighbour.mkdir()
    monkeypatch.setattr(Path, "stat", vanish)
    with write.write_pack(tmp_path / "pack", COUNTS, class_names=("only",), source=SOURCE):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


@pytest.mark.drill
def test_a_full_disk_is_told_before_anything_is_packed(small_disk):
    write_small_pack(small_disk / "pack", 1)
    process = fork(write_too_much, small_disk / "pack")  # a full disk under a mapped file would kill the process
    process.join(timeout=30)
    assert process.exitcode == 0
    assert [path.name for path in small_disk.iterdir()] == ["pack"]
    assert find_damage(small_disk / "pack") == []


def write_too_much(pack):
    with pytest.raises(LabError) as caught:
        write_small_pack(pack, 2, counts=dict.fromkeys(PER_CLASS, 300))
    assert_explains(caught.value, "No space left", "the disk is full", "LAB_DATA=")


@pytest.mark.parametrize("error", [AttributeError, OSError(errno.EOPNOTSUPP, "not here")])
def test_bytes_are_set_aside_where_the_system_has_no_call_for_it(tmp_path, monkeypatch, error):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "array.npy"
    array = np.lib.format.open_memmap(path, "w+", np.uint8, (3_000_000,))
    assert path.stat().st_blocks * 512 < 1_000_000
    write._reserve(path, start=array.offset)
    assert path.stat().st_blocks * 512 >= 3_000_000
    assert np.array_equal(np.load(path), np.zeros(3_000_000, np.uint8))


def replace_and_die(pack, at):
    """Replaces a pack, and is killed before the renaming of that number; the last is the removal of the old pack."""
    rename, calls = Path.rename, []

    def die():
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(1)

    def rename_or_die(self, target):
        die()
        return rename(self, target)

    def remove_or_die(*arguments, **settings):
        if not pack.exists():
            os._exit(3)  # the old one must not go before the new one stands
        die()

    Path.rename, pack_module.shutil.rmtree = rename_or_die, remove_or_die
    write_small_pack(pack, 2)


@pytest.mark.parametrize(("at", "value"), [(0, 1), (1, 2), (2, 2)])
def test_a_kill_while_a_pack_is_replaced_loses_neither(tmp_path, at, value):
    pack = tmp_path / "packed" / "cinic10"
    write_small_pack(pack, 1)
    process = fork(replace_and_die, pack, at)
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    assert sources.find_cinic10(tmp_path) == pack
    assert read_manifest(pack)["source"]["fingerprint"] == f"value {value}" and find_damage(pack) == []
    assert list(sources.list_packs(tmp_path))[:1] == [pack]
    for draft in pack.parent.glob(".*.draft"):
        os.utime(draft, (0, 0))
    write_small_pack(pack, 3)
    assert [path.name for path in pack.parent.iterdir()] == ["cinic10"]
    assert read_manifest(pack)["source"]["fingerprint"] == "value 3"


def test_an_old_pack_is_put_back_when_the_draft_is_not_whole(tmp_path):
    pack = tmp_path / "packed" / "cinic10"
    write_small_pack(pack, 1)
    write_small_pack(tmp_path / "newer", 2)
    pack.rename(pack.with_name(".cinic10-1.old"))
    (tmp_path / "newer").rename(pack.with_name(".cinic10-2.draft"))
    os.truncate(pack.with_name(".cinic10-2.draft") / "test-images.npy", 200)
    assert sources.find_cinic10(tmp_path) == pack
    assert read_manifest(pack)["source"]["fingerprint"] == "value 1"


def test_a_replacing_that_fails_puts_the_old_pack_back(tmp_path, monkeypatch):
    pack, rename = tmp_path / "cinic10", Path.rename
    write_small_pack(pack, 1)

    def fail(self, target):
        if self.suffix == ".draft":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(LabError, match="could not be written"):
        write_small_pack(pack, 2)
    assert list(tmp_path.iterdir()) == [pack]
    assert read_manifest(pack)["source"]["fingerprint"] == "value 1"


def refuse_locks(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_takes_packs(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuse_locks)
    stranger = tmp_path / ".pack-stranger.draft"
    stranger.mkdir()
    os.utime(stranger, (0, 0))
    for value in (1, 2):
        write_small_pack(tmp_path / "pack", value)
    assert read_manifest(tmp_path / "pack")["source"]["fingerprint"] == "value 2"
    assert stranger.exists()  # nobody can tell whether it is still being written


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
    assert list_all(tmp_path / "root") == ["packed"]


def test_export_and_the_classical_loader_give_the_packed_images(root, tmp_path):
    dataset = data.load(root=root)
    folder = data.export(dataset, tmp_path / "cinic10-copy")
    assert_equals_image_folder(dataset, folder)
    classic = data.classic_loader(folder, "valid", 7)
    packed = dataset.batches("valid", 7)
    for (images, labels), (expected, expected_labels) in zip(classic, packed, strict=True):
        assert torch.allclose(images, expected, atol=1e-5)
        assert torch.equal(labels, expected_labels)
    train = torch.cat([labels for _, labels in data.classic_loader(folder, "train", 7)])
    assert not torch.equal(train, dataset.train.labels)
    assert torch.equal(train.sort().values, dataset.train.labels)
    with pytest.raises(LabError) as caught:
        data.export(dataset, folder)
    assert_explains(caught.value, "not empty", str(folder))


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
