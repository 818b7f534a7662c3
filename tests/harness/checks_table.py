"""A plugin of pytest for ``make checks``: how many wrong answers each exercise refuses, and how many right it accepts.

``pytest -p tests.harness.checks_table tests/test_check_*.py`` looks at what the tests hand to a check, and at what
becomes of it. A wrong answer counts where its test, which also looks at the hint, passes. Each wrong value of a table
that ``tests/test_check_tables.py`` tried counts as one refused answer.
"""

import importlib
from collections import defaultdict

import pytest

from course import check

LEAST_WRONG, LEAST_RIGHT = 6, 2


class Catalogue:
    """Collects the outcomes, test by test."""

    def __init__(self):
        self._now = []
        self.refused, self.accepted, self.missed = defaultdict(set), defaultdict(set), defaultdict(set)

    def watch(self, verify):
        """Returns ``check.exercise`` that notes what it answered."""

        def exercise(number, answer):
            try:
                verify(number, answer)
            except check.NotYetError:
                self._now.append((number, "wrong"))
                raise
            self._now.append((number, "right"))

        return exercise

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        self._now.clear()
        outcome = yield
        for number, kind in self._now[:1]:  # a test that tries more than one wrong answer still is one
            where = self.missed if outcome.excinfo else self.refused if kind == "wrong" else self.accepted
            where[number].add(item.nodeid)
            if where is self.accepted:
                tried = dict(item.user_properties).get("wrong values", ())
                self.refused[number].update(f"{item.nodeid}: {one}" for one in tried)

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        write("")
        write(f"{'exercise':<45}{'wrong, refused':>15}{'right, accepted':>17}{'missed':>8}")
        for number, title in list_exercises():
            counts = [len(kind[number]) for kind in (self.refused, self.accepted, self.missed)]
            poor = counts[0] < LEAST_WRONG or counts[1] < LEAST_RIGHT or counts[2]
            text = f"{number + ' ' + title:<45}{counts[0]:>15}{counts[1]:>17}{counts[2]:>8}"
            write(text + (f"   at least {LEAST_WRONG} and {LEAST_RIGHT}, none missed" if poor else ""), red=bool(poor))

    def pytest_sessionfinish(self, session):
        rows = [(len(self.refused[number]), len(self.accepted[number])) for number, _ in list_exercises()]
        if session.exitstatus == 0 and any(wrong < LEAST_WRONG or right < LEAST_RIGHT for wrong, right in rows):
            session.exitstatus = 1


def list_exercises():
    """Number and title of every exercise, in order."""
    for lab in check.LABS:
        for number, one in importlib.import_module(f"course.exercises.lab{lab}").EXERCISES.items():
            yield number, one.title


def pytest_configure(config):
    catalogue = Catalogue()
    check.exercise = catalogue.watch(check.exercise)
    config.pluginmanager.register(catalogue, "catalogue")
