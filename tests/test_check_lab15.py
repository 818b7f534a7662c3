"""The checks of lab 15 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

import itertools
import statistics

import pytest
from harness.answers import refuse_edited

from course import check
from course.race.board import score_lap

pytestmark = pytest.mark.usefixtures("runs")

LAP = "return start + epochs * epoch"
MEDIAN = 'statistics.median(\n        lap["seconds"] if lap["reached"] else math.inf for lap in laps\n    )'


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("15.1", LAP, "return start", "one number"),
        ("15.1", LAP, "return times[-1]", "the first point"),
        ("15.1", "for seconds, _ in curve", "for _, seconds in curve", "stand first"),
        ("15.1", "epoch = (times", "curve.pop(0)\n    epoch = (times", "leave it"),
        ("15.2", MEDIAN, "[lap['seconds'] for lap in laps]", "one number"),
        ("15.2", MEDIAN, "sum(lap['seconds'] for lap in laps)", "the median"),
        ("15.2", "math.inf", "1e9", "beyond all others"),
        ("15.2", "math.inf", "math.nan", "the median"),
        ("15.2", MEDIAN, f"{MEDIAN} if all(lap['reached'] for lap in laps) else math.inf", "the median"),
        ("15.2", "return", "laps.sort(key=lambda lap: lap['seconds'])\n    return", "leave the list"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def lap_by_steps(curve, epochs):
    steps = [after[0] - before[0] for before, after in itertools.pairwise(curve)]
    return curve[0][0] + (epochs - 1) * statistics.mean(steps)


def score_as_the_board(laps):
    return statistics.median(map(score_lap, laps))


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("15.1", lap_by_steps),
        ("15.2", score_as_the_board),
    ],
)
def test_right_answers_get_the_tick(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} ")
