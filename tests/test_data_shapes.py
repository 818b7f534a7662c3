import hashlib

import numpy as np
import pytest
import torch

from lab_utils import data
from lab_utils.data import shapes


def test_a_small_sample_is_pinned():
    # Stored outputs of the notebooks rest on these pictures. Whoever changes the drawing changes this sum, raises
    # FINGERPRINT in shapes.py, so that old packs are drawn anew, and re-executes the notebooks.
    digest = hashlib.sha256()
    for split in ("train", "valid", "test"):
        images, labels = shapes.draw_images(split, range(20))
        digest.update(images.tobytes() + labels.tobytes())
    assert digest.hexdigest() == "4538fe5ca1af73f2cd5f523fc0a0407d41da6a317e4689da835c16a5811d440a"


def test_splits_seeds_and_indices_give_different_pictures():
    pictures = [shapes.draw_image(s, i, seed=k)[0].tobytes() for s in shapes.COUNTS for i in range(10) for k in (0, 1)]
    assert len(set(pictures)) == len(pictures)


@pytest.fixture(scope="module")
def shapes10():
    return data.load()


def test_shapes10_is_what_load_gives_without_cinic10(shapes10):
    assert shapes10.name == "shapes10"
    assert shapes10.summary == (
        "shapes10: 10,000 train, 2,000 valid, 2,000 test images of 10 classes, "
        "drawn on the spot (no CINIC-10 was found in LAB_DATA)"
    )
    for split, count in shapes.COUNTS.items():
        part = getattr(shapes10, split)
        assert len(part) == count
        assert (part.images.shape, part.images.dtype) == ((count, 3, 32, 32), torch.uint8)
        assert (part.labels.shape, part.labels.dtype) == ((count,), torch.int64)
        image, label = shapes.draw_image(split, count - 1)
        assert np.array_equal(part.images[-1].numpy(), image)
        assert part.labels[-1] == label and part.labels.bincount().tolist() == [count / 10] * 10
    assert list(shapes10.class_names) == sorted(shapes.CLASS_NAMES)


def test_mean_and_std_are_those_of_the_training_images(shapes10):
    pixels = shapes10.train.images.numpy() / 255
    assert np.allclose(shapes10.mean, pixels.mean((0, 2, 3)), atol=1e-9)
    assert np.allclose(shapes10.std, pixels.std((0, 2, 3)), atol=1e-9)
