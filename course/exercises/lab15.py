"""The exercises of lab 15: predicting a lap from a curve of another one, and the score of an entry."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import fmean, median

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect

# A curve's seconds, and the epochs to predict.
CURVES = (
    ((7.0, 9.0), (2, 1, 0, 0.5, 5)),
    ((3.75, 5.75, 8.25), (3, 0, 1.25)),
    ((9.0, 11.5, 15.5, 18.0), (4, 0.625, 0, 8)),
)
# Seconds of each lap, and whether it reached the threshold.
ENTRIES = (
    ((9.0, True), (14.0, True), (10.0, True)),
    ((9.0, True), (10.0, True), (13.0, True), (21.0, True)),
    ((30.0, True), (8.0, False), (11.0, True)),
    ((8.0, False), (12.0, True), (7.5, False)),
    ((10.0, True), (8.0, False)),
    ((14.0, True),),
    ((9.0, False),),
)


def verify_predict_lap(predict_lap: Callable) -> str:
    """Asks for predictions from three curves, also of no epoch and of parts of one."""
    for times, wanted in CURVES:
        curve = [[seconds, 0.3 + 0.1 * place] for place, seconds in enumerate(times)]
        first, last, count = times[0], times[-1], len(times)
        epoch = (last - first) / (count - 1)
        start = first - epoch
        for epochs in wanted:
            given = copy.deepcopy(curve)
            case = f"a curve with the seconds {', '.join(f'{one:g}' for one in times)}, {epochs:g} epochs"
            yours = predict_lap(given, epochs)
            hint = "read the curve, and leave it as it is: other cells read it, too"
            expect(given == curve, f"{case}: the curve", yours="changed", expected="unchanged", hint=hint)
            short = (last - first) / count  # as if between n points there were n epochs
            wrong = {
                "the start-up does not shrink with the epochs: a lap of 0 epochs takes it": last / count * epochs,
                "the first point has the start-up in it, too: an epoch is the time between two points": first * epochs,
                "the first point lies at the end of the first epoch: the start-up ended before": first + epochs * epoch,
                "these are the epochs alone: add the start-up, which comes once": epochs * epoch,
                "between n points lie n - 1 epochs": AnyOf((start + epochs * short, first + (epochs - 1) * short)),
            }
            hint = "one number, start-up and epochs: an epoch is (last - first) / (points - 1), the start-up first - "
            judge(yours, right=start + epochs * epoch, case=case, wrong=wrong, hint=hint + "epoch; seconds stand first")
    return f"{sum(len(wanted) for _, wanted in CURVES)} laps of 0 to 8 epochs, predicted from curves of 2 to 4 points"


def verify_score(score: Callable) -> str:
    """Asks for the score of entries of one to four laps, some of which missed the threshold."""
    for entry in ENTRIES:
        laps = [
            # All that a score might be made of by mistake differs.
            {"seconds": seconds, "reached": reached, "top1": 0.55 if reached else 0.5, "threshold": 0.52}
            | {"device_seconds": 2 * seconds, "busy": 0.9}
            for seconds, reached in entry
        ]
        case = "laps: " + ", ".join(f"{seconds:g} s{'' if reached else ' (missed)'}" for seconds, reached in entry)
        given = copy.deepcopy(laps)
        yours = score(given)
        hint = "leave the list as it is: sorted(…) makes a new one"
        expect(given == laps, f"{case}: the laps", yours="changed", expected="unchanged", hint=hint)
        every, reached = [seconds for seconds, _ in entry], [seconds for seconds, reached in entry if reached]
        counted = [seconds if reached else math.inf for seconds, reached in entry]
        ordered, middle = sorted(counted), len(entry) // 2
        wrong = {
            "a lap that missed the threshold is infinitely slow, however early it ended": median(every),
            "a lap that missed the threshold is not left out: it is math.inf, or luck would win": median(
                reached or [0]
            ),
            "the fastest lap rewards luck: take the median": min(counted),
            "the mean moves with one slow lap, and with a missed one it is infinite: take the median": fmean(counted),
            "of an even number of laps the median is the mean of the two in the middle": AnyOf(
                (ordered[middle], ordered[middle - 1])
            ),
            "the laps are not sorted by their seconds: statistics.median sorts them": counted[middle],
        }
        hint = "one number, the median of the seconds, in which a missed lap counts as math.inf, beyond all others"
        judge(yours, right=median(counted), case=case, wrong=wrong, hint=hint)
    return f"{len(ENTRIES)} entries of 1 to 4 laps, of which some missed the threshold"


EXERCISES = {
    "15.1": Exercise("The seconds of a lap", verify_predict_lap),
    "15.2": Exercise("The score of an entry", verify_score),
}
