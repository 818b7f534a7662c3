"""Checks the text of lab 0 against the outputs of its stored run."""

import re

import nbformat
import pytest


@pytest.fixture
def tables(root):
    """The stored tables of lab 0: for each cell its rows, and in each the numbers behind the name."""
    lab = nbformat.read(root / "notebooks" / "00_start_here.ipynb", as_version=4)

    def read(cell):
        (text,) = (output.data["text/plain"] for output in cell.outputs if "data" in output)
        rows = [re.match(r"(\S.*?) {2,}(\d[\d. ]*)", line) for line in text.splitlines()]
        return {row[1]: [float(number) for number in row[2].split()] for row in rows if row}

    return {cell.id: read(cell) for cell in lab.cells if cell.id in ("interleave", "profile")}


def test_the_profile_names_the_layer_whose_backward_pass_is_cheap(tables):
    layers = tables["profile"]
    assert layers.keys() == {"convolution", "batch norm", "ReLU", "max-pooling"}
    assert min(layers, key=lambda name: layers[name][2]) == "max-pooling" and layers["max-pooling"][2] < 0.5
    del layers["max-pooling"]
    forward, backward, _ = (sum(numbers) for numbers in zip(*layers.values(), strict=True))
    assert backward > forward


def test_the_backward_pass_was_shorter_than_the_forward_pass(tables):
    forward, both = (tables["interleave"][name][0] for name in ("forward", "forward, backward"))
    assert both - forward < forward
