"""A scale of the notebooks for tests: the rounds, epochs and images that some cells take fewer of in `make test`.

Their outputs are times and scores, which nbval does not compare. `make notebooks` runs what stands in the notebooks.
"""

# By the notebook's number and the id of its cell: what stands there, and what runs in its place.
FEWER = {
    ("01", "accuracy"): ("range(3)", "range(1)"),
    ("04", "train"): ("60 if FULL else 5", "60 if FULL else 1"),
    ("04", "rates"): ("10_000", "2_000"),
    ("05", "preflight"): ('"tiny", 32, 5', '"tiny", 32, 1'),
    ("07", "sweep"): ("range(7)", "range(2)"),
    ("09", "link"): ('"computing alone"] * 3', '"computing alone"] * 1'),
    ("09", "accuracy"): ("range(5)", "range(1)"),
    ("11", "schedules"): ("range(6)", "range(3)"),
    ("14", "measure"): ("range(3)", "range(1)"),
    ("15", "card"): ("COUNT = 3", "COUNT = 1"),
    ("15", "split-figure"): ("0.4 * COUNT", "0.4 * 3"),
    ("15", "nodes"): ("min(2 * EPOCHS, 40)", "2"),
}


def take_fewer(item) -> None:
    """Changes the source of one cell that nbval has collected.

    Raises:
        ValueError: The notebook no longer has what is to be replaced.
    """
    change = FEWER.get((item.path.name[:2], item.cell.id))
    if change:
        if change[0] not in item.cell.source:
            raise ValueError(f"{item.nodeid}: tests/harness/fewer.py replaces {change[0]!r}, which is not in this cell")
        item.cell.source = item.cell.source.replace(*change)
