"""The exercises of lab 15: predicting a lap from a curve of another one, and the score of an entry."""

from __future__ import annotations

import copy
import itertools
import math
import numbers
import statistics
from collections.abc import Callable, Sequence

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
        for epochs in wanted:
            given, case = copy.deepcopy(curve), f"a curve with the seconds {_show(times)}, {epochs:g} epochs"
            yours = predict_lap(given, epochs)
            hint = "return one number, the seconds of the lap"
            expect(_is_number(yours), case, yours=_show(yours), expected="seconds", hint=hint)
            hint = "read the curve, and leave it as it is: other cells read it, too"
            expect(given == curve, f"{case}: the curve", yours="changed", expected="unchanged", hint=hint)
            epoch = (times[-1] - times[0]) / (len(times) - 1)
            right = times[0] - epoch + epochs * epoch
            hint = _explain_lap(float(yours), times, epochs)
            expect(math.isclose(yours, right), case, yours=f"{yours:.4g}", expected=f"{right:.4g}", hint=hint)
    return f"{sum(len(wanted) for _, wanted in CURVES)} laps of 0 to 8 epochs, predicted from curves of 2 to 4 points"


def _explain_lap(yours: float, times: Sequence[float], epochs: float) -> str:
    """The hint that fits wrong seconds, by comparing them with what typical mistakes give."""
    last, count, epoch = times[-1], len(times), (times[-1] - times[0]) / (len(times) - 1)
    start = times[0] - epoch
    known = (
        (last / count * epochs, "the start-up does not shrink with the epochs: a lap of 0 epochs takes the start-up"),
        (times[0] * epochs, "the first point has the start-up in it, too: an epoch is the time between two points"),
        (times[0] + epochs * epoch, "the first point lies at the end of the first epoch: the start-up ended before it"),
        (epochs * epoch, "these are the epochs alone: add the start-up, which comes once"),
        (start + epochs * (last - times[0]) / count, "between n points lie n - 1 epochs"),
        (times[0] - (last - times[0]) / count * (1 - epochs), "between n points lie n - 1 epochs"),
        (start + round(epochs) * epoch, "`epochs` may be a fraction, such as 0.625: do not round it"),
        (start + int(epochs) * epoch, "`epochs` may be a fraction, such as 0.625: do not round it"),
        (start, "this is the start-up alone: add the epochs"),
    )
    for seconds, hint in known:
        if math.isclose(yours, seconds):
            return hint
    if any(math.isclose(yours, times[0] + (epochs - 1) * (b - a)) for a, b in itertools.pairwise(times)):
        return "epochs differ: take the mean over all that lie between the first point and the last"
    if 0 <= yours < 1:
        return "a point is a pair: the seconds stand first, the top-1 second"
    return "epoch: (last - first) / (points - 1); start-up: first - epoch"


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
        hint = "return one number of seconds; math.inf is the infinite one"
        expect(_is_number(yours), case, yours=_show(yours), expected="a number", hint=hint)
        hint = "leave the list as it is: sorted(…) makes a new one"
        expect(given == laps, f"{case}: the laps", yours="changed", expected="unchanged", hint=hint)
        right = statistics.median(seconds if reached else math.inf for seconds, reached in entry)
        hint = _explain_score(float(yours), entry)
        expect(yours == right, case, yours=f"{yours:g}", expected=f"{right:g}", hint=hint)
    return f"{len(ENTRIES)} entries of 1 to 4 laps, of which some missed the threshold"


def _explain_score(yours: float, entry: Sequence[tuple[float, bool]]) -> str:
    """The hint that fits a wrong score."""
    every = [seconds for seconds, _ in entry]
    reached = [seconds for seconds, right in entry if right]
    counted = [seconds if right else math.inf for seconds, right in entry]
    middle = len(entry) // 2
    if math.isnan(yours):
        return "nan is no score: give a missed lap math.inf, and take statistics.median"
    if len(reached) < len(every):
        if yours == statistics.median(every):
            return "a lap that missed the threshold counts as infinitely slow, however early it ended"
        if reached and yours == statistics.median(reached):
            return "a lap that missed the threshold is not left out: it counts as math.inf, or a lucky lap would win"
        if yours == min(counted):
            return "the fastest lap rewards luck: take the median"
        if math.isinf(yours) and not math.isinf(statistics.median(counted)):
            return "one missed lap among several moves the median little: only the median decides, not each lap"
        return "a lap that missed the threshold counts as math.inf: the number beyond all others"
    if yours in (2 * statistics.median(every), statistics.median(every) / 2):
        return "the league counts seconds, not device-seconds: lap['seconds']"
    if yours == min(every):
        return "the fastest lap rewards luck: take the median"
    if yours == statistics.fmean(every):
        return "the mean moves with one slow lap, and with a missed one it is infinite: take the median"
    if yours in (sorted(every)[middle], sorted(every)[middle - 1]) and len(every) % 2 == 0:
        return "of an even number of laps the median is the mean of the two in the middle: statistics.median does so"
    if yours == every[middle]:
        return "the laps are not sorted by their seconds: statistics.median sorts them"
    return "the median of the seconds: half of the laps are faster, half are slower"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{one:g}" for one in value)
    return type(value).__name__


EXERCISES = {
    "15.1": Exercise("The seconds of a lap", verify_predict_lap),
    "15.2": Exercise("The score of an entry", verify_score),
}
