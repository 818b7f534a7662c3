"""Lab 12 outside of its notebook: its figure of what a framework adds to a step, where little or nothing is proven."""

import sys

import pytest

from course import frameworks
from lab_utils.timing import Timing

LOOPS = {"lab 5": 1.0, "Lightning": 1.2, "Fabric": 1.0, "Accelerate": 1.0}


@pytest.fixture
def draw(run_cells_of, monkeypatch):
    """Draws the figure of two batch sizes, the second as long as the first; returns its Axes."""
    monkeypatch.setattr(frameworks, "find_python", lambda _: sys.executable)  # the figure does not need it

    def run(spread):
        found = {}
        for case, loops in {"batch of 8": LOOPS, "DDP, batches of 32": {**LOOPS, "DDP": 1.0}}.items():
            found[case] = [Timing(name, (one - spread, one, one + spread)) for name, one in loops.items()]
        return run_cells_of("12_lightning", "overhead", found=found, noise="", my_milliseconds=None)["axes"]

    return run


@pytest.mark.parametrize(("spread", "heights"), [(0.01, {0.2}), (0.5, set())], ids=["proven", "nothing proven"])
def test_a_bar_stands_only_where_the_quartiles_do_not_overlap(draw, spread, heights):
    axes = draw(spread)
    for ax, times in zip(axes, (1e3, 100), strict=True):
        found = {round(bar.get_height() / times, 6) for bar in ax.patches}
        assert {height for height in found if height > 0} == heights
        assert [label.get_text() for label in ax.get_xticklabels()] == ["Lightning", "Fabric", "Accelerate", "DDP"]
