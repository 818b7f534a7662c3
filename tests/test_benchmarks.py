"""Tests of a benchmark's output: the file, the page's table, the picture. `make bench` does the measuring."""

import json

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import batches, loop
from benchmarks.claims import PAGE, Claim, print_table

RATES = {"ImageFolder + DataLoader": 2000.0, "packed batches": 200_000.0, batches.ONE_PASS: 600_000.0}
BEGIN, END = "<!-- BEGIN: make bench -->", "<!-- END: make bench -->"
CLAIMS = [
    Claim("packed batches against others", "100 times", "at least 30 times", True, RATES),
    Claim("a launch", "+9 s", "at most +0.2 s", False),
    Claim("two hosts", "no hosts here", "at most 2 s", None),
    Claim("packed batches against DALI", "13 times"),
]


def test_the_table_says_which_claim_is_broken_and_which_was_only_stated(capsys):
    print_table(CLAIMS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == ["verdict", "ok", "BROKEN", "NOT MEASURED", "13 times"]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a page that has markers for the table."""
    (tmp_path / "data" / "reference").mkdir(parents=True)
    (tmp_path / bench.PICTURE.parent).mkdir(parents=True)
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).write_text(f"# Labs\n\n{BEGIN}\nof before\n{END}\n\n## Next\n")
    return tmp_path


def test_the_page_gets_the_table_in_the_place_of_the_last_one(checkout):
    for _ in range(2):
        bench.keep(CLAIMS, checkout)
    text = (checkout / PAGE).read_text()
    assert "of before" not in text and text.startswith("# Labs") and text.endswith(f"{END}\n\n## Next\n")
    assert text.count("| packed batches against others | 100 times | at least 30 times |") == 1
    assert f"torch {torch.__version__}" in text


def test_the_file_has_the_machine_the_date_and_every_claim(checkout):
    bench.keep(CLAIMS, checkout)
    kept = json.loads((checkout / "data" / "reference" / "bench.json").read_text())
    assert kept["machine"]["label"] and kept["torch"] == torch.__version__ and kept["when"].endswith("+00:00")
    assert [claim["verdict"] for claim in kept["claims"]] == ["ok", "BROKEN", "NOT MEASURED", ""]
    assert kept["claims"][0]["numbers"] == RATES
    assert (checkout / bench.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_the_ways_that_are_compared_make_the_same_images_but_for_their_draws(monkeypatch):
    """Without shift and mirror all of them return the normalised image."""
    dataset = batches.data.load()
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.ones(*size))
    monkeypatch.setattr(torch, "randint", lambda low, high, size, **_: torch.full(size, (low + high - 1) // 2))
    images, labels = batches.ManyAtOnce(dataset).__getitems__([3, 1, 4])
    plain = [batches.OneByOne(dataset)[index] for index in (3, 1, 4)]
    wanted = [dataset.train[index] for index in (3, 1, 4)]
    for (image, label), (one, number), (expected, of_it) in zip(
        zip(images, labels, strict=True), plain, wanted, strict=True
    ):
        assert torch.allclose(image, expected, atol=1e-6) and torch.allclose(one, expected, atol=1e-6)
        assert int(label) == number == of_it


def test_neighbours_in_time_are_compared():
    middle, low, high = loop.compare((1.0, 3.0, 9.0, 2.0, 5.0, 6.0), (0.5, 2.0, 4.0, 2.0, 4.0, 5.0))
    assert (middle, low, high) == (1.0, 0.0, 5.0), "of the differences 0, 0.5, 1, 1, 1 and 5"
