"""Each check of lab 7 refuses typical wrong answers with the hint that fits and accepts right ones."""

import itertools
import linecache

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, get_worker_info
from torchvision.transforms.v2.functional import pil_to_tensor

from course import check
from course.check import NotYetError, OpenError, attempts

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert hint in refused.value.hint, refused.value
    assert refused.value.yours and refused.value.expected


def read(path):
    return pil_to_tensor(Image.open(path).convert("RGB"))


class Files(Dataset):
    """The notebook's solution; what is wrong is a subclass of it."""

    def __init__(self, paths, labels, augment=None):
        self.paths, self.labels, self.augment = paths, labels, augment

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def read_all(self, indices):
        images = [read(self.paths[index]) for index in indices]
        return [self.augment(image) for image in images] if self.augment else images

    def label_all(self, indices):
        return [self.labels[index] for index in indices]

    def __getitems__(self, indices):
        return list(zip(torch.stack(self.read_all(indices)) / 255, self.label_all(indices), strict=True))


class FilesOneByOne(Files):
    """Right as well: an item is read by itself, a batch at once, and converted by `to`."""

    def __getitem__(self, index):
        image = read(self.paths[index])
        if self.augment is not None:
            image = self.augment(image)
        return image.float().div(255), self.labels[index]

    def __getitems__(self, indices):
        images = torch.empty(len(indices), 3, 32, 32, dtype=torch.uint8)
        for place, index in enumerate(indices):
            image = read(self.paths[index])
            images[place] = image if self.augment is None else self.augment(image)
        images = images.to(torch.float32) / 255
        return [(images[place], self.labels[index]) for place, index in enumerate(indices)]


class FilesByNumpy(Files):
    def __getitems__(self, indices):
        images = np.stack([image.numpy() for image in self.read_all(indices)]).astype("float32") / 255
        return [*zip(torch.from_numpy(images), self.label_all(indices), strict=True)]


class FilesInTuple(Files):
    def __getitems__(self, indices):
        batch = torch.stack([read(self.paths[index]) for index in indices])
        if self.augment:
            batch = torch.stack([self.augment(image) for image in batch])
        return [*zip(batch.float().div_(255).unbind(), self.label_all(indices), strict=True)]


def files(**methods):
    return type("Wrong", (Files,), methods)


def convert_singly(self, indices):
    return list(zip([image / 255 for image in self.read_all(indices)], self.label_all(indices), strict=True))


def augment_batch(self, indices):
    images = torch.stack([read(self.paths[index]) for index in indices])
    images = self.augment(images) if self.augment else images
    return list(zip(images / 255, self.label_all(indices), strict=True))


def augment_floats(self, indices):
    images = torch.stack([read(self.paths[index]) for index in indices]) / 255
    images = [self.augment(image) for image in images] if self.augment else images
    return list(zip(images, self.label_all(indices), strict=True))


def convert_by_numpy(self, indices):
    images = [torch.from_numpy(image.numpy().astype("float32") / 255) for image in self.read_all(indices)]
    return list(zip(images, self.label_all(indices), strict=True))


def augment_picture(self, index):
    image = Image.open(self.paths[index]).convert("RGB")
    return pil_to_tensor(self.augment(image) if self.augment else image) / 255, self.labels[index]


def read_at_once(self, paths, labels, augment=None):
    Files.__init__(self, paths, labels, augment)
    self.images = [read(path) for path in paths]


WRONG_FILES = {
    "bytes": (
        files(__getitems__=lambda s, i: list(zip(torch.stack(s.read_all(i)), s.label_all(i), strict=True))),
        "float32 of bytes",
    ),
    "not divided": (
        files(__getitems__=lambda s, i: list(zip(torch.stack(s.read_all(i)).float(), s.label_all(i), strict=True))),
        "divide by 255",
    ),
    "grey stays grey": (
        files(__getitem__=lambda s, i: (pil_to_tensor(Image.open(s.paths[i])) / 255, s.labels[i])),
        "three channels",
    ),
    "channels last": (
        files(__getitem__=lambda s, i: (read(s.paths[i]).permute(1, 2, 0) / 255, s.labels[i])),
        "leave the shape",
    ),
    "a batch of one": (
        files(__getitem__=lambda s, i: (torch.stack([read(s.paths[i])]) / 255, s.labels[i])),
        "take its row, [0]",
    ),
    "converted by NumPy": (files(__getitems__=convert_by_numpy), "in one operation"),
    "a picture augmented": (files(__getitem__=augment_picture), "make the tensor first"),
    "no label": (files(__getitem__=lambda s, i: read(s.paths[i]) / 255), "return image, label"),
    "index as label": (files(__getitem__=lambda s, i: (read(s.paths[i]) / 255, i)), "self.labels[index]"),
    "always the first": (
        files(__getitem__=lambda s, i: (read(s.paths[0]) / 255, s.labels[0])),
        "read the file of this index",
    ),
    "read at the start": (
        files(__init__=read_at_once, read_all=lambda s, i: [s.images[one] for one in i]),
        "when the item is asked for",
    ),
    "sorted": (files(__getitems__=lambda s, i: Files.__getitems__(s, sorted(i))), "keep the order"),
    "each once": (
        files(__getitems__=lambda s, i: Files.__getitems__(s, list(dict.fromkeys(i)))),
        "an index comes twice",
    ),
    "two lists": (
        files(
            __getitem__=lambda s, i: Files.__getitems__(s, [i])[0],
            __getitems__=lambda s, i: (torch.stack(s.read_all(i)) / 255, s.label_all(i)),
        ),
        "a list of pairs",
    ),
    "a generator": (
        files(
            __getitem__=lambda s, i: Files.__getitems__(s, [i])[0],
            __getitems__=lambda s, i: zip(torch.stack(s.read_all(i)) / 255, s.label_all(i), strict=True),
        ),
        "a list, not a generator",
    ),
    "one by one": (files(__getitems__=convert_singly), "stack the bytes first"),
    "no augmentation": (
        files(read_all=lambda s, i: [read(s.paths[one]) for one in i]),
        "goes through it",
    ),
    "a batch augmented": (files(__getitems__=augment_batch), "once for each image"),
    "floats augmented": (files(__getitems__=augment_floats), "augment the bytes"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_datasets_get_their_hint(answer, hint):
    refuse("7.1", answer, hint)


@pytest.mark.parametrize("answer", [Files, FilesOneByOne, FilesByNumpy, FilesInTuple])
def test_right_datasets_get_the_tick(answer, capsys):
    check.exercise("7.1", answer)
    assert capsys.readouterr().out.startswith("✔ 7.1 A Dataset over files: files read when they are asked for")


CELL = """
import math

class Cell:
    def __init__(self, paths, labels, augment=None):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return math.no_such
"""


def test_a_class_of_a_cell_is_read_and_its_errors_have_a_line(tmp_path):
    """As in a notebook, whose cells are files of no module."""
    path = str(tmp_path / "cell.py")
    linecache.cache[path] = (len(CELL), None, CELL.splitlines(keepends=True), path)
    names = {"__name__": "__main__"}
    exec(compile(CELL, path, "exec"), names)
    assert attempts.read_source(names["Cell"]) == CELL[CELL.index("class") :].rstrip()
    with pytest.raises(OpenError) as stopped:
        check.exercise("7.1", names["Cell"])
    assert stopped.value.where == "line 12: return math.no_such"
    assert attempts.read_standings() == {}, "it is no try"


def test_a_stub_is_no_answer():
    class Stub(Files):
        def __getitem__(self, index):
            raise NotImplementedError

    with pytest.raises(OpenError, match="still to be written"):
        check.exercise("7.1", Stub)


def share(order, rank, world_size, pad=False):
    if pad:
        order = (order * world_size)[: -(-len(order) // world_size) * world_size]
    return order[rank::world_size]


def share_by_sampler(order, rank, world_size, pad=False):
    sampler = DistributedSampler(order, world_size, rank, shuffle=False)
    mine = [order[place] for place in sampler]
    return mine if pad else mine[: len(range(rank, len(order), world_size))]


def share_by_cycle(order, rank, world_size, pad=False):
    if not pad:
        return [index for place, index in enumerate(order) if place % world_size == rank]
    endless = itertools.cycle(order)
    return [next(endless) for _ in range(-(-len(order) // world_size) * world_size)][rank::world_size]


def pad_with(more):
    def answer(order, rank, world_size, pad=False):
        missing = -len(order) % world_size if pad else 0
        return (order + more(order, missing))[rank::world_size]

    return answer


def pad_in_place(order, rank, world_size, pad=False):
    if pad:
        order += (order * world_size)[: -len(order) % world_size]
    return order[rank::world_size]


WRONG_SHARES = {
    "places": (lambda o, r, w, pad=False: list(range(len(o)))[r::w], "order[place]"),
    "blocks": (lambda o, r, w, pad=False: o[r * -(-len(o) // w) : (r + 1) * -(-len(o) // w)], "a block of neighbours"),
    "always padded": (lambda o, r, w, pad=False: share(o, r, w, True), "nothing is repeated"),
    "never padded": (lambda o, r, w, pad=False: share(o, r, w), "repeat the order from its start"),
    "four times": (
        lambda o, r, w, pad=False: (o * 4)[: -(-len(o) // w) * w][r::w] if pad else o[r::w],
        "repeated more than once",
    ),
    "dropped": (lambda o, r, w, pad=False: o[r::w][: len(o) // w], "the last indices are lost"),
    "once more": (pad_with(lambda o, missing: o[:missing]), "more ranks than images"),
    "the last again": (pad_with(lambda o, missing: o[-1:] * missing), "from its start"),
    "too long": (pad_with(lambda o, missing: o * 9 if missing else []), "shortest such length"),
    "in place": (pad_in_place, "leave `order` as it is"),
    "sorted": (lambda o, r, w, pad=False: sorted(share(o, r, w, pad)), "their order is not"),
    "a tensor": (lambda o, r, w, pad=False: torch.tensor(share(o, r, w, pad)), "return a list"),
    "a list in a list": (lambda o, r, w, pad=False: [share(o, r, w, pad)], "the indices themselves"),
    "the next rank": (lambda o, r, w, pad=False: share(o, (r + 1) % w, w, pad), "order[rank::world_size]"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_SHARES.values(), ids=WRONG_SHARES)
def test_wrong_shares_get_their_hint(answer, hint):
    refuse("7.2", answer, hint)


@pytest.mark.parametrize("answer", [share, share_by_sampler, share_by_cycle])
def test_right_shares_get_the_tick(answer, capsys):
    check.exercise("7.2", answer)
    expected = (
        "✔ 7.2 The indices of a rank: 8 pairs of images and ranks; padded, the same as torch's DistributedSampler\n"
    )
    assert capsys.readouterr().out == expected


def count(
    *,
    choose=lambda images, rank, ranks: share(list(range(images)), rank, ranks),
    prepare=lambda model: model.eval(),
    grad=False,
    give=lambda right, seen: torch.tensor([right, seen]),
    **loader,
):
    """The counts of the notebook, in which any part can be another."""

    def answer(model, images, rank, world_size):
        prepare(model)
        right = seen = 0
        with torch.set_grad_enabled(grad):
            mine = Subset(images, choose(len(images), rank, world_size))
            for batch, labels in DataLoader(mine, **{"batch_size": 64} | loader):
                right += (model(batch).argmax(1) == labels).sum().item()
                seen += len(labels)
        return give(right, seen)

    return answer


def count_last(model, images, rank, world_size):
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode():
        for batch, labels in DataLoader(Subset(images, share([*range(len(images))], rank, world_size)), 64):
            counts = torch.tensor([(model(batch).argmax(1) == labels).sum(), len(labels)])
    return counts


def count_as_the_notebook(model, images, rank, world_size):
    model.eval()
    mine = Subset(images, share(list(range(len(images))), rank, world_size))
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode():
        for batch, labels in DataLoader(mine, 64):
            counts += torch.tensor([(model(batch).argmax(1) == labels).sum().item(), len(labels)])
    return counts


def cut(images, rank, ranks):
    """A block for each rank: exact, too."""
    return np.array_split(np.arange(images), ranks)[rank].tolist()


def padded(images, rank, ranks):
    return share([*range(images)], rank, ranks, pad=True)


WRONG_COUNTS = {
    "padded": (count(choose=padded), "count twice"),
    "all images": (count(choose=lambda n, rank, ranks: range(n)), "every rank counts all"),
    "dropped": (count(drop_last=True), "are lost"),
    "an accuracy": (count(give=lambda right, seen: right / max(1, seen)), "return one tensor"),
    "two accuracies": (count(give=lambda right, seen: torch.tensor([right / max(1, seen), 1])), "whole numbers"),
    "counts as floats": (count(give=lambda right, seen: torch.tensor([right, seen]).float()), "the counts are right"),
    "short": (count(give=lambda right, seen: torch.tensor([right, seen]).to(torch.uint8)), "dtype=torch.int64"),
    "nothing to add": (count(give=lambda right, seen: torch.tensor([right, seen] if seen else [])), "start from"),
    "the other way round": (count(give=lambda right, seen: torch.tensor([seen, right])), "first how many are right"),
    "wrong ones": (count(give=lambda right, seen: torch.tensor([seen - right, seen])), "highest score"),
    "of all": (count(give=lambda right, seen: torch.tensor([right, 10])), "of this rank"),
    "training": (count(prepare=lambda model: None), "model.eval()"),
    "gradients": (count(grad=True), "inference_mode"),
    "image by image": (count(batch_size=1), "batches of 64"),
    "the last batch": (count_last, "add up over all batches"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_wrong_counts_get_their_hint(answer, hint):
    refuse("7.3", answer, hint)


def test_batches_are_asked_for_as_they_should_be():
    with pytest.raises(NotYetError) as refused:
        check.exercise("7.3", count(batch_size=32))
    assert refused.value.expected == "batches of 64, and a smaller last one"


@pytest.mark.parametrize("answer", [count_as_the_notebook, count(), count(choose=cut)])
def test_right_counts_get_the_tick(answer, capsys):
    check.exercise("7.3", answer)
    assert capsys.readouterr().out.startswith("✔ 7.3 An exact accuracy: sums over up to 4 ranks")


def seed_by(make):
    def answer(worker_id):
        get_worker_info().dataset.random = make(worker_id)

    return answer


def seed_again(worker_id):
    info = get_worker_info()
    info.dataset.random.bit_generator.state = np.random.PCG64(info.seed).state


def stop_with_an_error(worker_id):
    get_worker_info().dataset.random = np.random.default_rng(get_worker_info().sed)


WRONG_SEEDS = {
    "NumPy's global state": (lambda worker_id: np.random.seed(get_worker_info().seed % 2**32), "a newly seeded one"),
    "torch": (lambda worker_id: torch.manual_seed(worker_id), "a newly seeded one"),
    "one seed": (seed_by(lambda worker: np.random.default_rng(1)), "the workers have one seed"),
    "the worker's number": (seed_by(lambda worker: np.random.default_rng(worker + 7)), "change with the epoch"),
    "whatever": (seed_by(lambda worker: np.random.default_rng()), "it follows from the DataLoader's generator"),
    "a seed": (seed_by(lambda worker: get_worker_info().seed), "has to be a generator"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_SEEDS.values(), ids=WRONG_SEEDS)
def test_wrong_seeds_get_their_hint(answer, hint):
    refuse("7.4", answer, hint)


@pytest.mark.parametrize(
    "answer",
    [
        seed_by(lambda worker: np.random.default_rng(get_worker_info().seed)),
        seed_by(lambda worker: np.random.default_rng(torch.initial_seed())),
        seed_by(lambda worker: np.random.default_rng([worker, get_worker_info().seed])),
        seed_again,
    ],
)
def test_right_seeds_get_the_tick(answer, capsys):
    check.exercise("7.4", answer)
    expected = (
        "✔ 7.4 A seed for each worker: 2 workers in 3 epochs drew different numbers, and the same in a second run\n"
    )
    assert capsys.readouterr().out == expected


def test_an_error_in_a_worker_is_named():
    with pytest.raises(OpenError) as stopped:
        check.exercise("7.4", stop_with_an_error)
    assert "sed" in stopped.value.cause and "AttributeError" in stopped.value.cause


def test_a_stub_in_a_worker_is_no_answer():
    def stub(worker_id):
        raise NotImplementedError

    with pytest.raises(OpenError, match="still to be written"):
        check.exercise("7.4", stub)
