"""Lab 7: edits of the notebook's solutions are refused with the hint that fits, and other right answers accepted."""

import linecache

import numpy as np
import pytest
import torch
from harness.answers import load_answer, refuse, refuse_edited
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, Subset, get_worker_info
from torchvision.transforms.v2.functional import pil_to_tensor

from course import check
from course.check import OpenError, attempts

pytestmark = pytest.mark.usefixtures("runs")
AUGMENT = "self.augment(image) if self.augment else image"
# For each: the exercise, what is replaced in its solution, by what, and words of the hint.
EDITS = [
    ("7.1", '.convert("RGB")', "", "makes three channels"),
    ("7.1", "torch.stack(images) / 255", "torch.stack(images)", "between 0 and 1"),
    ("7.1", "torch.stack(images) / 255", "torch.stack(images).double() / 255", "float32 of bytes"),
    (
        "7.1",
        "list(zip(torch.stack(images) / 255, labels, strict=True))",
        "torch.stack(images) / 255, labels",
        "image, label",
    ),
    ("7.1", "in indices:", "in sorted(indices):", "in the order of the indices"),
    ("7.1", AUGMENT, "image", "the image goes through it"),
    (
        "7.1",
        f"image = v2.functional.pil_to_tensor(image)\n            images.append({AUGMENT})",
        (
            "image = self.augment(image) if self.augment else image\n"
            "            images.append(v2.functional.pil_to_tensor(image))"
        ),
        "make the tensor first",
    ),
    ("7.2", "        order = (order", "        order[:] = (order", "leave `order` as it is"),
    ("7.2", "return order", "return torch.tensor(order)", "a list, order[rank::world_size]"),
    ("7.3", "    model.eval()\n", "", "call model.eval() first"),
    ("7.3", "torch.inference_mode()", "torch.enable_grad()", "inference_mode"),
    ("7.3", "DataLoader(mine, 64)", "DataLoader(mine, 1)", "batches of 64"),
    ("7.3", "DataLoader(mine, 64)", "DataLoader(mine, 64, drop_last=True)", "leave drop_last off"),
    ("7.3", "dtype=torch.int64", "dtype=torch.float32", "dtype=torch.int64"),
    ("7.3", "counts += ", "counts = ", "add up over all batches"),
    ("7.3", "return counts", "return counts if len(mine) else None", "a rank can have no image"),
    ("7.3", "))], rank, world_size)", "))], 0, 1)", "every rank counts all images"),
    ("7.3", "))], rank, world_size)", "))], rank, world_size, True)", "share without padding"),
    (
        "7.4",
        "info.dataset.random = np.random.default_rng(info.seed)",
        "np.random.seed(info.seed % 2**32)",
        "newly seeded",
    ),
    ("7.4", "info.seed", "1", "the workers have one seed"),
    ("7.4", "info.seed", "worker_id + 7", "change with the epoch"),
    ("7.4", "info.seed", "", "it follows from the DataLoader's generator"),
    ("7.4", "np.random.default_rng(info.seed)", "info.seed", "has to be a generator"),
    ("7.4", "info.dataset.random", "random", "newly seeded"),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), EDITS)
def test_edited_solutions_are_refused(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def test_a_file_that_is_read_too_early_is_refused():
    class ReadsAtOnce(load_answer("7.1")):
        def __init__(self, paths, labels, augment=None):
            super().__init__([Image.open(path).convert("RGB") for path in paths], labels, augment)

        def __getitems__(self, indices):
            images = torch.stack([pil_to_tensor(self.paths[index]) for index in indices]) / 255
            return list(zip(images, [self.labels[index] for index in indices], strict=True))

    assert "when the item is asked for" in refuse("7.1", ReadsAtOnce)


class FilesByNumpy:
    """No Dataset of torch's, and the batch is converted by NumPy."""

    def __init__(self, paths, labels, augment=None):
        self.paths, self.labels, self.augment = paths, labels, augment or (lambda image: image)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.augment(pil_to_tensor(Image.open(self.paths[index]).convert("RGB")))
        return image.float().div(255), self.labels[index]

    def __getitems__(self, indices):
        images = [self.augment(pil_to_tensor(Image.open(self.paths[index]).convert("RGB"))) for index in indices]
        images = np.stack([image.numpy() for image in images]).astype("float32") / 255
        return [*zip(torch.from_numpy(images), [self.labels[index] for index in indices], strict=True)]


def share_by_sampler(order, rank, world_size, pad=False):
    sampler = DistributedSampler(order, world_size, rank, shuffle=False)
    mine = [order[place] for place in sampler]
    return mine if pad else mine[: len(range(rank, len(order), world_size))]


@torch.no_grad()
def count_in_blocks(model, images, rank, world_size):
    """A block for each rank: exact, too."""
    model.eval()
    right = seen = 0
    mine = Subset(images, np.array_split(np.arange(len(images)), world_size)[rank].tolist())
    for batch, labels in DataLoader(mine, batch_size=64):
        right += int((model(batch).argmax(1) == labels).sum())
        seen += len(labels)
    return torch.tensor([right, seen])


def seed_by_torch(worker_id):
    get_worker_info().dataset.random = np.random.default_rng([worker_id, torch.initial_seed()])


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("7.1", FilesByNumpy),
        ("7.2", share_by_sampler),
        ("7.3", count_in_blocks),
        ("7.4", seed_by_torch),
    ],
)
def test_other_right_answers_are_accepted(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number}")


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


def test_an_error_in_a_worker_is_named():
    def stop_with_an_error(worker_id):
        get_worker_info().dataset.random = np.random.default_rng(get_worker_info().sed)

    with pytest.raises(OpenError) as stopped:
        check.exercise("7.4", stop_with_an_error)
    assert "sed" in stopped.value.cause and "AttributeError" in stopped.value.cause
