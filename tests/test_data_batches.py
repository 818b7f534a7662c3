import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lab_common import LabError
from lab_utils.data import Split
from lab_utils.data.batches import Batches

TOTAL = 103  # no world size and no batch size below divides it
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
IMAGES = torch.randint(0, 256, (TOTAL, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(TOTAL)  # the label tells which image it is


def make(batch_size=8, **settings):
    return Batches(IMAGES, LABELS, batch_size, mean=MEAN, std=STD, **settings)


def read_order(batches, epoch=0):
    batches.set_epoch(epoch)
    return [label for _, labels in batches for label in labels.tolist()]


def read_pixels(world_size, batch_size, epoch=0):
    """Returns the pixels that each image has in an epoch, put together from all ranks."""
    seen = {}
    for rank in range(world_size):
        batches = make(batch_size, rank=rank, world_size=world_size, seed=3)
        batches.set_epoch(epoch)
        for images, labels in batches:
            seen.update(zip(labels.tolist(), images, strict=True))
    return torch.stack([seen[index] for index in range(TOTAL)])


@pytest.mark.parametrize(("train", "world_size"), [(True, 1), (True, 3), (False, 4)])
def test_every_image_comes_exactly_once_an_epoch(world_size, train):
    ranks = [make(train=train, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(2):
        shares = [read_order(batches, epoch) for batches in ranks]
        assert sorted(label for share in shares for label in share) == list(range(TOTAL))
        assert [len(share) for share in shares] == [batches.images for batches in ranks]
        assert [len(list(batches)) for batches in ranks] == [len(batches) for batches in ranks]


@pytest.mark.parametrize("world_size", [1, 3])
def test_drop_last_gives_every_rank_equally_many_full_batches(world_size):
    ranks = [make(13, drop_last=True, rank=rank, world_size=world_size) for rank in range(world_size)]
    sizes = [[len(labels) for _, labels in batches] for batches in ranks]
    assert all(size == [13] * len(sizes[0]) for size in sizes)
    assert [len(batches) for batches in ranks] == [len(size) for size in sizes]
    assert [batches.images for batches in ranks] == [sum(size) for size in sizes]
    seen = [label for batches in ranks for label in read_order(batches)]
    assert len(set(seen)) == len(seen)


def test_order_repeats_for_a_seed_and_changes_with_the_epoch():
    state, before = torch.get_rng_state(), IMAGES.clone()
    first = read_order(make(seed=1))
    assert read_order(make(seed=1)) == first
    assert read_order(make(seed=1), epoch=1) != first
    assert read_order(make(seed=2)) != first
    assert read_order(make(seed=0), epoch=1) != read_order(make(seed=1), epoch=0)
    assert read_order(make(train=False, seed=1), epoch=1) == list(range(TOTAL))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(IMAGES, before), "what is global was touched"


def test_an_image_looks_the_same_for_any_batch_size_and_world_size():
    expected = read_pixels(1, 8)
    for world_size, batch_size in ((1, 1), (1, 103), (2, 8), (3, 5), (4, 16)):
        assert torch.equal(read_pixels(world_size, batch_size), expected)
    assert not torch.equal(read_pixels(1, 8, epoch=1), expected)


def test_each_image_is_moved_and_mirrored_as_a_plain_loop_does():
    # With these, a normalised pixel is the pixel.
    batches = Batches(IMAGES, LABELS, 8, mean=(0, 0, 0), std=(1 / 255,) * 3)
    found = {index: set() for index in range(TOTAL)}
    for epoch in range(3):
        batches.set_epoch(epoch)
        for images, labels in batches:
            for image, index in zip(images.numpy(), labels.tolist(), strict=True):
                found[index] |= {place for place, moved in list_moved(index) if np.array_equal(image, moved)}
    assert {index: len(places) for index, places in found.items() if not 1 <= len(places) <= 3} == {}
    rows, columns, mirrored = (
        set(each) for each in zip(*(place for of in found.values() for place in of), strict=True)
    )
    assert rows == columns == set(range(9)) and mirrored == {False, True}


def list_moved(index):
    """Yields ((row, column, mirrored), image) of all that an image can become, made one by one."""
    padded = np.pad(IMAGES[index].numpy(), ((0, 0), (4, 4), (4, 4)))
    for row, column in itertools.product(range(9), range(9)):
        cut = padded[:, row : row + 32, column : column + 32]
        yield (row, column, False), cut
        yield (row, column, True), cut[:, :, ::-1]


def test_images_are_normalised_as_torchvision_does():
    from torchvision.transforms import v2

    images, labels = next(iter(make(32, train=False)))
    expected = v2.Normalize(MEAN, STD)(IMAGES[:32].float() / 255)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert torch.allclose(images, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 2, "world_size": 2}, "no rank 2"),
        ({"batch_size": 0}, "batch of 0"),
        ({"batch_size": 52, "drop_last": True, "world_size": 2}, "not one full batch of 52"),
    ],
)
def test_impossible_shares_are_explained(settings, words):
    with pytest.raises(LabError, match=words) as caught:
        make(**settings)
    assert caught.value.fix


@pytest.mark.parametrize(("before", "after", "train"), [(2, 1, True), (2, 1, False), (1, 3, True)])
def test_an_epoch_goes_on_where_it_was_cut_off_whatever_the_number_of_ranks(before, after, train):
    share = {"train": train, "seed": 4, "drop_last": True}
    first = [make(24 // before, rank=rank, world_size=before, **share) for rank in range(before)]
    whole = read_order(make(24, **share), epoch=1)
    taken = [read_order(batches, epoch=1)[: 2 * 24 // before] for batches in first]  # two steps of 24 images
    rest = [make(24 // after, rank=rank, world_size=after, **share) for rank in range(after)]
    left = []
    for batches in rest:
        batches.set_epoch(1, start=48)
        left.append([labels.tolist() for _, labels in batches])
        assert len(left[-1]) == len(batches) == 2
    steps = [{label for rank in left for label in rank[step]} for step in range(2)]
    assert steps == [set(whole[48:72]), set(whole[72:96])]
    assert {label for share in taken for label in share} == set(whole[:48])
    # The next epoch is whole again.
    assert len(read_order(rest[0], epoch=2)) == 96 // after


def test_an_image_looks_the_same_after_a_resume():
    whole, resumed = make(8, seed=5), make(8, seed=5)
    whole.set_epoch(1)
    resumed.set_epoch(1, start=40)
    for (expected, _), (found, _) in zip(list(whole)[5:], resumed, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}])
def test_nothing_is_left_of_an_epoch_that_was_done(settings):
    batches = make(8, world_size=2, **settings)
    batches.set_epoch(0, start=TOTAL + 50)
    assert (len(batches), batches.images, list(batches)) == (0, 0, [])


@pytest.mark.parametrize("settings", [{}, {"rank": 1, "world_size": 3, "drop_last": True}])
def test_the_images_of_the_batch_handed_out_last_are_known(settings):
    batches = make(seed=2, **settings)
    assert batches.chosen is None
    for _, labels in batches:
        assert torch.equal(batches.chosen, labels)  # the label is the number of the image here


def test_a_split_is_a_dataset_whose_batches_are_one_gather():
    split, fetched = Split(IMAGES, LABELS, MEAN, STD), []
    (expected, labels), *_ = make(train=False)
    image, label = split[3]
    assert label == 3 and torch.equal(image, split[torch.tensor(3)][0]) and split[-1][1] == TOTAL - 1
    fetch, Split.__getitems__ = Split.__getitems__, lambda self, chosen: fetched.append(chosen) or fetch(self, chosen)
    try:
        batches = list(DataLoader(split, 8))
    finally:
        Split.__getitems__ = fetch
    assert [len(chosen) for chosen in fetched] == [8] * 12 + [7] and batches[0][1].tolist() == labels.tolist()
    assert torch.allclose(batches[0][0], expected, atol=1e-5) and torch.equal(batches[0][0][3], image)
    assert [label for _, labels in batches for label in labels.tolist()] == list(range(TOTAL))
    with pytest.raises(IndexError):
        split[TOTAL]
