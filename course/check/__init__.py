"""Checks of the exercises: yours against expected, one hint, and a stable tick line if the answer is right.

A notebook calls ``check.exercise("1.1", answer)`` in the cell of the exercise. A right answer prints one line that says
what was proven. A wrong one stops the cell with a message in place of a traceback, so that "Run all" never goes on to
measure with it. An untouched stub, and an error in the learner's own code, stop it too, with a message of their own,
and count as no answer. A second wrong answer gets a second, stronger hint. ``check.progress()`` draws where the
learner stands, ``check.diff("1.1")`` sets the solution beside the learner's answer, as ``check.show_diff`` sets any two
functions, ``check.claim`` says what a lab has shown, and ``check.calibration()`` sums up what ``check.keep_guess`` kept
of guesses and findings.
"""

from __future__ import annotations

from datetime import date
from importlib import import_module
from typing import TYPE_CHECKING

from course.bars import clear_ended_bars
from course.check import attempts
from course.check.claims import claim
from course.check.guesses import calibration, keep_guess, read_guesses
from course.check.hints import SECOND_HINTS
from course.check.verdicts import Exercise, NotYetError, OpenError, expect, refusing
from course.diff import show_diff
from lab_common import LabError
from lab_common.text import clean
from lab_utils import machine

if TYPE_CHECKING:
    from IPython.display import HTML

__all__ = [
    "LABS",
    "Exercise",
    "NotYetError",
    "OpenError",
    "calibration",
    "claim",
    "diff",
    "exercise",
    "expect",
    "keep_guess",
    "progress",
    "refusing",
    "show_diff",
]
LABS = range(16)
# Each lab imports this module before its first bar.
clear_ended_bars()


def exercise(number: str, answer: attempts.Answer) -> None:
    """Checks the answer to an exercise and prints its tick line.

    Args:
        number: The exercise as the notebook counts it, for example ``"1.1"``.
        answer: What the exercise asks for: a function, the path of a script, or a fault card.

    Raises:
        NotYetError: The answer is not right yet; the message shows yours, expected and one hint.
        OpenError: There is no answer yet, or it stops with an error, which the message shows with its line.
        LabError: There is no such exercise, or the file that answers it is missing or cannot be read.
    """
    found = _find(number)
    try:
        proven = found.verify(answer)
    except NotYetError as error:
        if attempts.read_standings().get(number, attempts.Standing()).wrong:
            shown = f" The solution: check.diff({number!r})" if _has_solution(number) else ""
            error.more = f"{SECOND_HINTS[number]}.{shown}"
        attempts.note(number, "wrong", attempts.read_source(answer))
        raise
    except LabError:
        raise
    except NotImplementedError as error:
        fix = "put your code where it says YOUR CODE HERE, then run the cell again"
        raise OpenError(f"✎ {number} {found.title}: still to be written.", fix=fix) from error
    except Exception as error:
        line = attempts.find_line(error, answer)
        if not line:
            raise
        what = f"✘ {number} stopped with an error in your code; this counts as no try."
        raise OpenError(what, where=line, cause=f"{type(error).__name__}: {error}") from error
    attempts.note(number, "right", attempts.read_source(answer))
    print(f"✔ {number} {found.title}: {proven}")


def _find(number: str) -> Exercise:
    lab, _, _ = number.partition(".")
    try:
        return import_module(f"course.exercises.lab{lab}").EXERCISES[number]
    except (ImportError, KeyError) as error:
        raise LabError(f"There is no exercise {number!r}.", fix="use the number in the exercise's heading") from error


def progress() -> None:
    """Draws where the learner stands in all labs, and prints it, a line for each lab.

    A row for each lab, a square for each exercise; when all are solved, also a page to keep, with what the learner
    guessed and measured. It reads what was kept under ``LAB_RUNS``; nothing leaves the machine.
    """
    from course.check import figures

    standings, rows = attempts.read_standings(), {}
    for lab in LABS:
        exercises = import_module(f"course.exercises.lab{lab}").EXERCISES
        row = {number: standings.get(number, attempts.Standing()) for number in exercises}
        rows[f"Lab {lab}"] = {
            number: "solved" if standing.solved else f"tried {standing.wrong}×" if standing.wrong else "open"
            for number, standing in row.items()
        }
        solved = sum(standing.solved for standing in row.values())
        tried = [f"{number} {state}" for number, state in rows[f"Lab {lab}"].items() if state.startswith("tried")]
        print(f"Lab {lab}: {'; '.join([f'{solved} of {len(row)} solved', *tried])}")
    figures.progress(rows)
    if standings and all(state == "solved" for row in rows.values() for state in row.values()):
        count, here = sum(len(row) for row in rows.values()), machine.describe()
        measured = [
            f"{what}: guessed {guess:.3g}, found {found:.3g}" for what, (guess, found) in read_guesses().items()
        ]
        lines = [f"{here.label}, torch {here.torch}, {date.today():%d %B %Y}", "", *measured]
        figures.certificate(f"All {count} exercises solved", [clean(line, 100) for line in lines])


def diff(number: str) -> HTML | None:
    """Shows the learner's newest answer (−) beside the solution (+), once it is solved or when asked for twice.

    Args:
        number: The exercise, for example ``"1.2"``.

    Returns:
        The coloured diff; None at the first time of asking for what is not solved.

    Raises:
        LabError: There is no such exercise, no answer was checked yet, or the solutions are not here.
    """
    from course.check.solutions import find_solution

    solve = _find(number).solve or (lambda answer: find_solution(number))
    standing = attempts.read_standings().get(number, attempts.Standing())
    if not standing.answer:
        cause, fix = "its cell has not been run", "write your answer, and run the cell of the exercise"
        raise LabError(f"No answer to {number} is known.", where=f"check.diff({number!r})", cause=cause, fix=fix)
    solution = solve(standing.answer)  # first: nobody asks twice for what is not here
    if not (standing.solved or standing.asked):
        attempts.note(number, "asked")
        print(f"{number} is not solved yet. Try once more; or ask again, and the solution stands beside your answer.")
        return None
    return show_diff(standing.answer, solution)


def _has_solution(number: str) -> bool:
    """True if ``diff`` can show it: a release for learners has no solutions."""
    from course.check.solutions import find_solution

    try:
        return bool(_find(number).solve or find_solution(number))
    except LabError:
        return False
