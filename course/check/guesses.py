"""The learner's guesses beside what was found, over all labs: how well calibrated were you?"""

from __future__ import annotations

import contextlib
import math
import statistics

from course.check.attempts import CHECKS
from lab_common import LabError
from lab_common.text import clean
from lab_utils.timing import Records

# Questions, of which the labs have some 20; and the largest ratio, either way, that a figure has room for.
MOST_QUESTIONS, FARTHEST = 100, 1e12
NO_GUESS = """There is no guess of yours to show here yet.
To make one, type a number in place of None in the cell under a lab's heading "Predict".
Then run that cell and all cells below it. Your guess is left out if the measurement was too noisy to judge it."""


def keep_guess(what: str, guess: float | None, found: float, *, noise: str = "") -> None:
    """Keeps a guess and what was found under ``LAB_RUNS``; of several for the same question the newest counts.

    Args:
        what: The question, such as ``"lab 1: AMP's speed-up"``.
        guess: What the learner expected; None if there is no guess, and then nothing is kept.
        found: What was measured, in the same unit.
        noise: Why that is no finding, as ``timing.find_noise`` says; then nothing is kept.
    """
    if guess is None or noise:
        return
    # As with the tries: a full disk must not stand between a learner and the figure.
    with contextlib.suppress(LabError):
        Records(CHECKS).add("guess", [what, float(guess), float(found)])


def read_guesses() -> dict[str, tuple[float, float]]:
    """Returns guess and finding for each question, in the order in which they were first asked.

    Of more than 100 questions those that were asked first are left out; the labs have fewer.
    """
    results = [record["result"] for record in Records(CHECKS).read("guess", fits=_is_guess)]
    kept = {what: (float(guess), float(found)) for what, guess, found in results}
    return dict(list(kept.items())[-MOST_QUESTIONS:])


def _is_guess(result: object) -> bool:
    if not isinstance(result, list) or [type(part) for part in result[:1]] != [str] or len(result) != 3:
        return False
    # A number that no float can hold is none of ours; one that is infinite, or none, may have been measured.
    return all(type(number) is float or (type(number) is int and abs(number) < 2**63) for number in result[1:])


def calibration() -> None:
    """Draws by which factor each guess was off, and prints how far off they typically were.

    Only a guess and a finding that are both above 0, and neither infinite nor 10¹²-fold each other, have a ratio that
    can be drawn; others are named.
    """
    from course.check import figures

    kept = {clean(what, 200): pair for what, pair in read_guesses().items()}
    ratios = {what: guess / found for what, (guess, found) in kept.items() if guess > 0 and found > 0}
    ratios = {what: ratio for what, ratio in ratios.items() if 1 / FARTHEST < ratio < FARTHEST}
    for what in [what for what in kept if what not in ratios]:
        print(f"{what}: guessed {kept[what][0]:g}, found {kept[what][1]:g}, which has no ratio")
    if not ratios:
        print(NO_GUESS)
        return
    typical = math.exp(statistics.median(abs(math.log(ratio)) for ratio in ratios.values()))
    high = sum(ratio > 1 for ratio in ratios.values())
    count = f"{len(ratios)} guess{'es' * (len(ratios) > 1)}"
    spread = "half of them within" if len(ratios) > 1 else "within"
    print(f"{count}, {spread} a factor of {typical:.1f}; {high} too high, {len(ratios) - high} too low")
    # In a figure, a formula would begin.
    figures.ratios({what.replace("$", r"\$"): ratio for what, ratio in ratios.items()})
