"""Each wrong value in the table of a check gets its own hint, and the notebook's solution is right."""

import importlib
import inspect

import pytest
import torch
from harness.answers import NOTEBOOKS, load_answer, recording

from course import check
from course.check import NotYetError
from course.check.judge import AnyOf, Expected, agree, judge

pytestmark = pytest.mark.usefixtures("runs")


def list_judged():
    """The exercises whose check compares by ``judge`` and whose answer is a function of the notebook."""
    for lab in check.LABS:
        for number, one in importlib.import_module(f"course.exercises.lab{lab}").EXERCISES.items():
            if "judge(" in inspect.getsource(inspect.getmodule(one.verify)):
                yield number


@pytest.mark.parametrize("number", list(list_judged()))
def test_each_wrong_value_of_a_table_gets_its_hint(number, capsys, record_property, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    with recording() as comparisons:
        check.exercise(number, load_answer(number))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"✔ {number}")
    given, hints, tried = set(), set(), set()
    for one in comparisons:
        rights = one.right.values if isinstance(one.right, AnyOf) else (one.right,)
        for hint, values in one.wrong.items():
            hints.add(hint)
            for place, value in enumerate(values.values if isinstance(values, AnyOf) else (values,)):
                if any(agree(value, right, within=one.within) for right in rights):
                    continue  # for these inputs the mistake does not show
                with pytest.raises(NotYetError) as refused:
                    one.check(value)
                given.add(refused.value.hint)
                tried.add((hint, place))
    record_property("wrong values", sorted(tried))  # for `make checks`
    assert given >= hints, "hints that no wrong value of any case reaches, since an earlier one takes it"


def test_values_agree_to_rounding_in_every_part():
    tensor = torch.arange(3.0)
    same = [
        (1, 1.0),
        ((1, 2), [1, 2]),
        ({"a": tensor}, {"a": tensor.double() + 1e-12}),
        (tensor.numpy(), tensor),
        (torch.tensor(3), 3),
        (None, None),
        ("text", "text"),
        (float("nan"), float("nan")),
    ]
    assert all(agree(*pair, within=1e-9) for pair in same)
    other = [(1, 2), (1, True), (tensor, tensor[:2]), (tensor, [0, 1]), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0)]
    assert not any(agree(*pair, within=1e-9) for pair in other)


def test_the_first_wrong_value_that_agrees_gives_the_hint_and_else_the_general_one():
    table = Expected(6.0, "case", "general", {"sum": 12.0, "one of two": AnyOf((3.0, 2.0)), "later": 3.0})
    table.check(6)
    for value, hint in ((12, "sum"), (2, "one of two"), (3, "one of two"), (7, "general"), (None, "general")):
        with pytest.raises(NotYetError) as refused:
            table.check(value)
        assert refused.value.hint == hint


def test_a_message_shows_the_first_number_that_differs():
    right = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    yours = {"weight": torch.tensor([[0.0, 0, 0], [0, 0.5, 0]]), "bias": torch.zeros(2)}
    with pytest.raises(NotYetError) as refused:
        judge(yours, right=right, case="step 1", hint="divide")
    assert refused.value.yours == "['weight']: …, 0.5, 0 (a tensor of 2×3)"
    assert refused.value.expected == "['weight']: …, 0, 0 (a tensor of 2×3)"
