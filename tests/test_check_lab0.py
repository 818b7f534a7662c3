"""The checks of lab 0 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

from itertools import pairwise

import pytest
import torch
from harness.answers import refuse_edited

from course import check
from course.check import NotYetError
from lab_common import LabError

pytestmark = pytest.mark.usefixtures("runs")

MATCH = "(best == labels.unsqueeze(1)).sum()"
LOOP = "        start = clock()\n        step()\n        synchronize()\n        seconds.append(clock() - start)\n"
BYTES = "3 * trained + frozen"
TOTAL = "sum(p.nbytes for p in model.state_dict().values())"


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("0.1", "return (best", "(best", "return the count"),
        ("0.1", MATCH, f"{MATCH}.item()", "stays on the device"),
        ("0.1", "topk(k,", "topk(5,", "its own row"),
        ("0.1", "indices", "values", "the k indices"),
        ("0.1", "dim=1", "dim=0", "labels.unsqueeze(1)"),
        ("0.1", ".unsqueeze(1)", "", "unsqueeze"),
        ("0.1", "logits.topk(k, dim=1).indices", "(-logits.numpy()).argsort(1)[:, :k]", "stay in torch"),
        ("0.2", "synchronize()\n    seconds", "seconds", "first opening reading"),
        ("0.2", "        synchronize()\n        seconds", "        seconds", "before each closing reading"),
        ("0.2", LOOP, LOOP.replace("clock() - start", "1000 * (clock() - start)"), "only the step"),
        ("0.2", "return seconds", "return sorted(seconds)", "only the step"),
        ("0.2", "    for _ in range(warmup)", "    clock = time.perf_counter\n    for _ in range(warmup)", "passed in"),
        ("0.3", BYTES, "sum(p.nbytes + 2 * p.grad.nbytes for p in model.parameters())", "no step"),
        ("0.3", BYTES, f"torch.tensor({BYTES})", "plain number"),
        ("0.3", BYTES, f"3 * {TOTAL}", "buffers"),
        ("0.3", BYTES, f"4 * {TOTAL}", "three times"),
        ("0.3", BYTES, "sum(12 if p.requires_grad else 4 for p in model.parameters() for _ in p.flatten())", "4 bytes"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


def test_times_since_one_opening_reading_are_refused():
    once = ("    seconds = []\n", "    seconds, start = [], clock()\n")
    assert "for each repeat anew" in refuse_edited("0.2", once, ("        start = clock()\n", ""))


def topk_in_place(logits, labels, k):
    rows, hits = torch.arange(len(labels)), torch.zeros((), dtype=torch.int64)
    for _ in range(k):
        best = logits.argmax(1)
        hits += (best == labels).sum()
        logits[rows, best] = -1e9  # the next k would be counted on what is left
    return hits


def test_an_answer_that_spoils_the_logits_is_refused():
    with pytest.raises(NotYetError) as refused:
        check.exercise("0.1", topk_in_place)
    assert "leave the logits as they are" in refused.value.hint


def topk_by_rank(logits, labels, k):
    own = logits.gather(1, labels[:, None])
    return ((logits > own).sum(1) < k).float().sum()


def time_by_one_row_of_readings(step, synchronize, repeats, warmup, clock):
    readings = []
    for _ in range(warmup + repeats):
        synchronize()
        readings.append(clock())
        step()
    synchronize()
    readings.append(clock())
    return [after - before for before, after in pairwise(readings)][warmup:]


def bytes_by_element(model):
    total = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        total += size * (3 if parameter.requires_grad else 1)
    return float(total)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("0.1", topk_by_rank),
        ("0.2", time_by_one_row_of_readings),
        ("0.3", bytes_by_element),
    ],
)
def test_a_right_answer_gets_one_stable_line(number, answer, capsys):
    check.exercise(number, answer)
    first = capsys.readouterr().out
    check.exercise(number, answer)
    assert first == capsys.readouterr().out
    assert first.startswith(f"✔ {number} ") and first.count("\n") == 1


def test_an_exercise_that_is_not_there_is_named():
    with pytest.raises(LabError, match=r"no exercise '0\.9'"):
        check.exercise("0.9", topk_by_rank)
