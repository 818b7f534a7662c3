"""Each check of lab 0 refuses typical wrong answers with the hint that fits and accepts right ones."""

import time
from itertools import pairwise

import pandas as pd
import pytest
import torch

from course import check
from course.check import NotYetError
from course.exercises import lab0
from lab_common import LabError
from lab_utils import timing

pytestmark = pytest.mark.usefixtures("runs")


def topk_right(logits, labels, k):
    return (logits.topk(k).indices == labels.unsqueeze(1)).sum()


def topk_right_by_rank(logits, labels, k):
    own = logits.gather(1, labels[:, None])
    return ((logits > own).sum(1) < k).float().sum()


def topk_right_by_sorting(logits, labels, k):
    best = logits.softmax(1).argsort(dim=1, descending=True)[:, :k]
    return best.eq(labels.view(-1, 1)).any(dim=1).sum()


def topk_share(logits, labels, k):
    return topk_right(logits, labels, k) / len(labels)


def topk_mean(logits, labels, k):
    return (logits.topk(k).indices == labels.unsqueeze(1)).any(1).float().mean()


def topk_first_only(logits, labels, k):
    return (logits.argmax(1) == labels).sum()


def topk_always_five(logits, labels, k):
    return topk_right(logits, labels, 5)


def topk_lowest(logits, labels, k):
    return (logits.topk(k, largest=False).indices == labels.unsqueeze(1)).sum()


def topk_values(logits, labels, k):
    return (logits.topk(k).values == labels.unsqueeze(1)).sum()


def topk_over_images(logits, labels, k):
    return (logits.topk(k, dim=0).indices == labels).sum()


def topk_no_unsqueeze(logits, labels, k):
    return (logits.topk(k).indices == labels).sum()


def topk_per_image(logits, labels, k):
    return (logits.topk(k).indices == labels.unsqueeze(1)).sum(1)


def topk_item(logits, labels, k):
    return topk_right(logits, labels, k).item()


def topk_of_five_images(logits, labels, k):
    return topk_mean(logits, labels, k) * 5  # right by luck while every batch has five


def topk_in_place(logits, labels, k):
    rows, hits = torch.arange(len(labels)), torch.zeros((), dtype=torch.int64)
    for _ in range(k):
        best = logits.argmax(1)
        hits += (best == labels).sum()
        logits[rows, best] = -1e9  # the next k would be counted on what is left
    return hits


def topk_numpy(logits, labels, k):
    best = (-logits.numpy()).argsort(1)[:, :k]  # fails in training, where the logits have a gradient
    return torch.tensor((best == labels.numpy()[:, None]).sum())


def topk_no_return(logits, labels, k):
    topk_right(logits, labels, k)


def time_right(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    synchronize()
    seconds = []
    for _ in range(repeats):
        start = clock()
        step()
        synchronize()
        seconds.append(clock() - start)
    return seconds


def time_right_dropping(step, synchronize, repeats, warmup, clock=time.perf_counter):
    readings = []
    for _ in range(warmup + repeats):
        synchronize()
        readings.append(clock())
        step()
    synchronize()
    readings.append(clock())
    return [after - before for before, after in pairwise(readings)][warmup:]


def time_no_synchronize(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return time_right(step, lambda: None, repeats, warmup, clock)


def time_other_synchronize(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return time_right(step, lambda: timing.synchronize("cpu"), repeats, warmup, clock)


def time_no_opening(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(repeats):
        start = clock()
        step()
        synchronize()
        seconds.append(clock() - start)
    return seconds


def time_opening_only(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(repeats):
        synchronize()
        start = clock()
        step()
        seconds.append(clock() - start)
    return seconds


def time_keeps_warmup(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return time_right(step, synchronize, repeats + warmup, 0, clock)


def time_no_warmup(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return time_right(step, synchronize, repeats, 0, clock)


def time_mean(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return sum(time_right(step, synchronize, repeats, warmup, clock)) / repeats


def time_whole_loop(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    synchronize()
    start = clock()
    for _ in range(repeats):
        step()
        synchronize()
    return [(clock() - start) / repeats] * repeats


def time_milliseconds(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return [1000 * second for second in time_right(step, synchronize, repeats, warmup, clock)]


def time_own_clock(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return time_right(step, synchronize, repeats, warmup)


def time_sorted(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return sorted(time_right(step, synchronize, repeats, warmup, clock))


def time_cumulative(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    synchronize()
    start, seconds = clock(), []
    for _ in range(repeats):
        step()
        synchronize()
        seconds.append(clock() - start)
    return seconds


def time_backwards(step, synchronize, repeats, warmup, clock=time.perf_counter):
    return [-second for second in time_right(step, synchronize, repeats, warmup, clock)]


def time_pairs(step, synchronize, repeats, warmup, clock=time.perf_counter):
    for _ in range(warmup):
        step()
    synchronize()
    readings = []
    for _ in range(repeats):
        start = clock()
        step()
        synchronize()
        readings.append((start, clock()))
    return readings


def bytes_right(model):
    return sum(p.nbytes * (3 if p.requires_grad else 1) for p in model.parameters())


def bytes_right_by_element(model):
    total = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        gradient = momentum = size if parameter.requires_grad else 0
        total += size + gradient + momentum
    return float(total)


def bytes_right_by_table(model):
    return pd.Series([p.nbytes * (1 + 2 * p.requires_grad) for p in model.parameters()]).sum()  # numpy's int64


def bytes_of_gradients(model):
    return sum(p.nbytes + 2 * p.grad.nbytes for p in model.parameters())


def bytes_in_a_tensor(model):
    return torch.tensor(bytes_right(model))


def bytes_parameters(model):
    return sum(p.nbytes for p in model.parameters())


def bytes_numbers(model):
    return 3 * sum(p.numel() for p in model.parameters())


def bytes_no_momentum(model):
    return 2 * bytes_parameters(model)


def bytes_adam(model):
    return 4 * bytes_parameters(model)


def bytes_with_buffers(model):
    return 3 * sum(value.nbytes for value in model.state_dict().values())


def bytes_all_float32(model):
    return sum(12 if p.requires_grad else 4 for p in model.parameters() for _ in range(p.numel()))


def bytes_frozen_too(model):
    return 3 * bytes_parameters(model)


WRONG = [
    ("0.1", topk_share, "count, not a share"),
    ("0.1", topk_first_only, "not at one"),
    ("0.1", topk_always_five, "own row"),
    ("0.1", topk_lowest, "highest"),
    ("0.1", topk_values, "indices"),
    ("0.1", topk_over_images, "dim=1"),
    ("0.1", topk_no_unsqueeze, "unsqueeze"),
    ("0.1", topk_per_image, ".sum()"),
    ("0.1", topk_item, ".item()"),
    ("0.1", topk_of_five_images, "smaller than the first"),
    ("0.1", topk_in_place, "as they are"),
    ("0.1", topk_numpy, "stay in torch"),
    ("0.1", topk_no_return, "return the count"),
    ("0.2", time_no_synchronize, "time to queue"),
    ("0.2", time_other_synchronize, "the argument"),
    ("0.2", time_no_opening, "first opening"),
    ("0.2", time_opening_only, "closing"),
    ("0.2", time_keeps_warmup, "not reported"),
    ("0.2", time_no_warmup, "without timing it"),
    ("0.2", time_mean, "every repeat"),
    ("0.2", time_whole_loop, "spread"),
    ("0.2", time_milliseconds, "in seconds"),
    ("0.2", time_own_clock, "clock()"),
    ("0.2", time_sorted, "order"),
    ("0.2", time_cumulative, "for each repeat anew"),
    ("0.2", time_backwards, "negative"),
    ("0.2", time_pairs, "closing reading minus"),
    ("0.3", bytes_of_gradients, "no step"),
    ("0.3", bytes_in_a_tensor, "plain number"),
    ("0.3", bytes_parameters, "gradient"),
    ("0.3", bytes_numbers, "not bytes"),
    ("0.3", bytes_no_momentum, "momentum"),
    ("0.3", bytes_adam, "Adam"),
    ("0.3", bytes_with_buffers, "buffers"),
    ("0.3", bytes_all_float32, "4 bytes"),
    ("0.3", bytes_frozen_too, "frozen"),
]
RIGHT = [
    ("0.1", topk_right),
    ("0.1", topk_right_by_rank),
    ("0.1", topk_right_by_sorting),
    ("0.2", time_right),
    ("0.2", time_right_dropping),
    ("0.3", bytes_right),
    ("0.3", bytes_right_by_element),
    ("0.3", bytes_right_by_table),
]


@pytest.mark.parametrize(("number", "answer", "word"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_answer_is_refused_with_its_hint(number, answer, word):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert word in refused.value.hint
    assert all(len(line) < 160 for line in str(refused.value).splitlines())


@pytest.mark.parametrize(("number", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", None))
def test_a_right_answer_gets_one_stable_line(number, answer, capsys):
    check.exercise(number, answer)
    first = capsys.readouterr().out
    check.exercise(number, answer)
    assert first == capsys.readouterr().out
    assert first.startswith(f"✔ {number} ") and first.count("\n") == 1


def test_the_expected_counts_are_those_of_a_count_by_hand():
    for size, k, expected in lab0.TOPK_CASES:
        rows = zip(lab0.RANKING[:size], lab0.LABELS[:size], strict=True)
        assert sum(label in row[:k] for row, label in rows) == expected


def test_the_bytes_counted_by_hand_are_those_that_an_optimizer_holds():
    for _, build, expected, _ in lab0.STATE_CASES[:2]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        held = [p.nbytes + p.grad.nbytes + optimizer.state[p]["momentum_buffer"].nbytes for p in model.parameters()]
        assert sum(held) == expected


def test_an_exercise_that_is_not_there_is_named():
    with pytest.raises(LabError, match=r"no exercise '0\.9'"):
        check.exercise("0.9", topk_right)
