"""Each check of lab 15 refuses typical wrong answers with the hint that fits, and accepts right ones."""

import itertools
import math
import statistics

import numpy as np
import pytest

from course import check
from course.check import NotYetError
from course.race.board import score_lap

pytestmark = pytest.mark.usefixtures("runs")


def lap_right(curve, epochs):
    times = [seconds for seconds, _ in curve]
    epoch = (times[-1] - times[0]) / (len(times) - 1)
    return times[0] - epoch + epochs * epoch


def lap_right_by_steps(curve, epochs):
    steps = [after[0] - before[0] for before, after in itertools.pairwise(curve)]
    return curve[0][0] + (epochs - 1) * statistics.mean(steps)


def lap_right_by_numpy(curve, epochs):
    times = np.array(curve)[:, 0]
    return times[0] + (epochs - 1) * np.diff(times).mean()


def lap_right_from_the_end(curve, epochs):
    epoch = (curve[-1][0] - curve[0][0]) / (len(curve) - 1)
    start = curve[-1][0] - len(curve) * epoch
    return start + epoch * epochs


def lap_proportional(curve, epochs):
    return curve[-1][0] / len(curve) * epochs


def lap_first_as_epoch(curve, epochs):
    return curve[0][0] * epochs


def lap_first_as_start(curve, epochs):
    return curve[0][0] + epochs * (curve[-1][0] - curve[0][0]) / (len(curve) - 1)


def lap_without_start(curve, epochs):
    return lap_right(curve, epochs) - lap_right(curve, 0)


def lap_start_only(curve, epochs):
    return lap_right(curve, 0)


def lap_points_as_epochs(curve, epochs):
    epoch = (curve[-1][0] - curve[0][0]) / len(curve)
    return curve[0][0] - epoch + epochs * epoch


def lap_rounded(curve, epochs):
    return lap_right(curve, round(epochs))


def lap_last_epoch(curve, epochs):
    return curve[0][0] + (epochs - 1) * (curve[-1][0] - curve[-2][0])


def lap_top1(curve, epochs):
    return lap_right([point[::-1] for point in curve], epochs)


def lap_pops(curve, epochs):
    first = curve.pop(0)[0]
    return first + (epochs - 1) * (curve[-1][0] - first) / len(curve)


def lap_point(curve, epochs):
    return [lap_right(curve, epochs), 0.5]


def lap_last(curve, epochs):
    return curve[-1][0]


def score_right(laps):
    return statistics.median(lap["seconds"] if lap["reached"] else math.inf for lap in laps)


def score_right_as_the_board(laps):
    return statistics.median(map(score_lap, laps))


def score_right_by_hand(laps):
    seconds = sorted(lap["seconds"] if lap["reached"] else math.inf for lap in laps)
    middle = len(seconds) // 2
    return seconds[middle] if len(seconds) % 2 else (seconds[middle - 1] + seconds[middle]) / 2


def score_right_by_numpy(laps):
    return np.median([lap["seconds"] if lap["reached"] else np.inf for lap in laps])


def score_fastest(laps):
    return min(lap["seconds"] if lap["reached"] else math.inf for lap in laps)


def score_mean(laps):
    return statistics.mean(lap["seconds"] if lap["reached"] else math.inf for lap in laps)


def score_all_alike(laps):
    return statistics.median(lap["seconds"] for lap in laps)


def score_missed_left_out(laps):
    return statistics.median([lap["seconds"] for lap in laps if lap["reached"]] or [math.inf])


def score_missed_as_much(laps):
    return statistics.median(lap["seconds"] if lap["reached"] else 1e9 for lap in laps)


def score_any_missed(laps):
    return score_right(laps) if all(lap["reached"] for lap in laps) else math.inf


def score_device_seconds(laps):
    return statistics.median(lap["device_seconds"] if lap["reached"] else math.inf for lap in laps)


def score_unsorted(laps):
    return [lap["seconds"] if lap["reached"] else math.inf for lap in laps][len(laps) // 2]


def score_upper(laps):
    return statistics.median_high(lap["seconds"] if lap["reached"] else math.inf for lap in laps)


def score_nan(laps):
    return np.median([lap["seconds"] if lap["reached"] else math.nan for lap in laps])


def score_sorts_in_place(laps):
    laps.sort(key=lambda lap: lap["seconds"])
    return score_right(laps)


def score_of_each(laps):
    return [lap["seconds"] if lap["reached"] else math.inf for lap in laps]


def score_total(laps):
    return sum(lap["seconds"] for lap in laps)


WRONG = [
    ("15.1", lap_proportional, "does not shrink"),
    ("15.1", lap_first_as_epoch, "between two points"),
    ("15.1", lap_first_as_start, "ended before it"),
    ("15.1", lap_without_start, "comes once"),
    ("15.1", lap_start_only, "add the epochs"),
    ("15.1", lap_points_as_epochs, "n - 1"),
    ("15.1", lap_rounded, "fraction"),
    ("15.1", lap_last_epoch, "the mean"),
    ("15.1", lap_top1, "stand first"),
    ("15.1", lap_pops, "leave it"),
    ("15.1", lap_point, "one number"),
    ("15.1", lap_last, "epoch:"),
    ("15.2", score_fastest, "rewards luck"),
    ("15.2", score_mean, "mean moves"),
    ("15.2", score_all_alike, "infinitely slow"),
    ("15.2", score_missed_left_out, "not left out"),
    ("15.2", score_missed_as_much, "beyond all others"),
    ("15.2", score_any_missed, "only the median"),
    ("15.2", score_device_seconds, "not device-seconds"),
    ("15.2", score_unsorted, "not sorted"),
    ("15.2", score_upper, "two in the middle"),
    ("15.2", score_nan, "nan"),
    ("15.2", score_sorts_in_place, "leave the list"),
    ("15.2", score_of_each, "one number"),
    ("15.2", score_total, "half of the laps"),
]
RIGHT = [
    ("15.1", lap_right),
    ("15.1", lap_right_by_steps),
    ("15.1", lap_right_by_numpy),
    ("15.1", lap_right_from_the_end),
    ("15.2", score_right),
    ("15.2", score_right_as_the_board),
    ("15.2", score_right_by_hand),
    ("15.2", score_right_by_numpy),
]


@pytest.mark.parametrize(("number", "answer", "word"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_answer_is_refused_with_its_hint(number, answer, word):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert word in refused.value.hint
    assert refused.value.yours and refused.value.expected
    assert all(len(line) < 160 for line in str(refused.value).splitlines())


@pytest.mark.parametrize(("number", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", None))
def test_a_right_answer_gets_one_stable_line(number, answer, capsys):
    check.exercise(number, answer)
    first = capsys.readouterr().out
    check.exercise(number, answer)
    assert first == capsys.readouterr().out
    assert first.startswith(f"✔ {number} ") and first.count("\n") == 1
