import pickle
import struct

import numpy as np
import pytest
import torch
from harness.drawn import assert_explains, list_all

from lab_common import LabError
from lab_utils import data
from lab_utils.data import packing

RNG = np.random.default_rng(0)
TRAIN, TEST = 5_020, 30  # the last 5,000 training images become the validation split


@pytest.fixture(autouse=True)
def spare(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "checkout", lambda: tmp_path / "checkout")


def test_fashion_mnist_is_padded_and_repeated(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = RNG.integers(1, 256, (TRAIN + TEST, 28, 28), dtype=np.uint8)
    labels = (np.arange(TRAIN + TEST) % 10).astype(np.uint8)
    for name, part in (("train", slice(TRAIN)), ("t10k", slice(TRAIN, None))):
        # The format of the MNIST family: a magic number, the sizes, the bytes.
        header = struct.pack(">4i", 2051, len(images[part]), 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images[part].tobytes())
        header = struct.pack(">2i", 2049, len(labels[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels[part].tobytes())
    dataset = data.load("fashion_mnist", tmp_path)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (TRAIN - 5_000, 5_000, TEST)
    assert dataset.class_names[0] == "T-shirt/top"
    for split, start in (("train", 0), ("valid", TRAIN - 5_000), ("test", TRAIN)):
        part = getattr(dataset, split)
        stop = start + len(part)
        assert torch.equal(part.labels, torch.from_numpy(labels[start:stop]).long())
        for channel in range(3):
            assert np.array_equal(part.images[:, channel, 2:30, 2:30].numpy(), images[start:stop])
        assert int((part.images > 0).sum()) == 3 * 28 * 28 * len(part)  # the border is black
    assert dataset.summary.endswith("of 10 classes, downloaded by torchvision")
    # From now on the pack is enough.
    for file in raw.iterdir():
        file.unlink()
    assert len(data.load("fashion_mnist", tmp_path).test) == TEST


def test_cifar10_is_packed_in_its_own_order(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = RNG.integers(0, 256, (TRAIN + TEST, 3072), dtype=np.uint8)
    labels = [index % 10 for index in range(TRAIN + TEST)]
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    contents = {
        "data_batch_1": {"data": rows[:3000], "labels": labels[:3000]},
        "data_batch_2": {"data": rows[3000:TRAIN], "labels": labels[3000:TRAIN]},
        "test_batch": {"data": rows[TRAIN:], "labels": labels[TRAIN:]},
        "batches.meta": {"label_names": names},
    }
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
    # torchvision checks the sums of the real files; these stand in for them.
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", None], ["data_batch_2", None]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": None})
    dataset = data.load("cifar10", tmp_path)
    assert dataset.class_names == tuple(names) and dataset.for_nodes["fix"].endswith(" fetch cifar10")
    joined = torch.cat([dataset.train.images, dataset.valid.images, dataset.test.images])
    assert np.array_equal(joined.numpy(), rows.reshape(-1, 3, 32, 32))
    assert len(dataset.valid) == 5_000 and dataset.valid.labels[0] == (TRAIN - 5_000) % 10


def test_a_failed_download_is_explained(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(LabError) as caught:
        data.load("cifar10", tmp_path / "root")
    assert_explains(caught.value, "cifar10 could not be downloaded", str(tmp_path / "root"), "shapes10")
    assert "root/packed/cifar10" not in list_all(tmp_path)
