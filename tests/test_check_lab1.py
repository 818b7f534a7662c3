"""Each check of lab 1 refuses typical wrong answers with the hint that fits and accepts right ones."""

import math
import statistics
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course import check
from course.check import NotYetError

pytestmark = pytest.mark.usefixtures("runs")


def run(model, images, labels, dtype, device="cpu"):
    with torch.autocast(device, dtype=dtype):
        logits = model(images)
        return F.cross_entropy(logits, labels), logits


def amp(order="zero_grad forward backward step update", *, returned="detached"):
    """An AMP step that runs the named parts in the order given."""

    def step(model, images, labels, optimizer, scaler, dtype):
        for part in order.split():
            if part == "zero_grad":
                optimizer.zero_grad(set_to_none=True)
            elif part == "forward":
                loss, logits = run(model, images, labels, dtype)
            elif part == "forward_in_float32":
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
            elif part == "forward_in_bfloat16":
                loss, logits = run(model, images, labels, torch.bfloat16)
            elif part == "forward_with_loss_outside":
                with torch.autocast("cpu", dtype=dtype):
                    logits = model(images)
                loss = F.cross_entropy(logits, labels)
            elif part == "backward":
                scaler.scale(loss).backward()
            elif part == "backward_in_autocast":
                with torch.autocast("cpu", dtype=dtype):
                    scaler.scale(loss).backward()
            elif part == "backward_unscaled":
                loss.backward()
            elif part == "unscale":
                scaler.unscale_(optimizer)
            elif part == "step":
                scaler.step(optimizer)
            elif part == "plain_step":
                optimizer.step()
            elif part == "update":
                scaler.update()
        answers = {
            "detached": (loss.detach(), logits.detach()),
            "scaled": (scaler.scale(loss).detach(), logits.detach()),
            "with its graph": (loss, logits),
            "logits with their graph": (loss.detach(), logits),
            "labels": (loss.detach(), labels),
            "loss alone": (loss.detach(), None),
            "nothing": None,
        }
        return answers[returned]

    return step


def amp_as_the_lab_writes_it(model, images, labels, optimizer, scaler, dtype):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype=dtype):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


def amp_in_another_order(model, images, labels, optimizer, scaler, dtype):
    with torch.amp.autocast(device_type="cpu", dtype=dtype):
        logits = model(images)
        loss = nn.CrossEntropyLoss()(logits, labels)
    scaled = scaler.scale(loss)
    for parameter in model.parameters():
        parameter.grad = None
    scaled.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach().clone(), logits.detach()


def amp_backwards(model, images, labels, optimizer, scaler, dtype):
    with torch.autocast("cpu", dtype=dtype):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    scaler.scale(-loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (amp_backwards, "another direction"),
        (amp("zero_grad forward_in_float32 backward step update"), "torch.autocast"),
        (amp("zero_grad forward_in_bfloat16 backward step update"), "not fixed ones"),
        (amp("zero_grad forward backward_in_autocast step update"), "forward and loss only"),
        (amp("zero_grad forward_with_loss_outside backward step update"), "inside autocast too"),
        (amp("zero_grad forward backward_unscaled step update"), "scaler.scale"),
        (amp("zero_grad forward backward plain_step"), "still carry the loss scale"),
        (amp("zero_grad forward backward step"), "scaler.update()"),
        (amp("zero_grad forward backward step plain_step update"), "must not run again"),
        (amp("forward backward step update"), "optimizer.zero_grad()"),
        (amp("zero_grad forward backward"), "nothing moved"),
        (amp("forward backward zero_grad step update"), "cleared before"),
        (amp(returned="scaled"), "plain loss"),
        (amp(returned="with its graph"), "detach"),
        (amp(returned="labels"), "return loss.detach(), logits.detach()"),
        (amp(returned="nothing"), "return loss.detach()"),
    ],
)
def test_wrong_amp_steps_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("1.1", answer)
    assert hint in refused.value.hint
    assert refused.value.yours and refused.value.expected


@pytest.mark.parametrize(
    "answer", [amp_as_the_lab_writes_it, amp_in_another_order, amp("zero_grad forward backward unscale step update")]
)
def test_right_amp_steps_get_the_tick(answer, capsys):
    check.exercise("1.1", answer)
    expected = (
        "✔ 1.1 The AMP step: the weights after two steps equal the reference's in bfloat16 and float16, to rounding\n"
    )
    assert capsys.readouterr().out == expected


def clipped(order, returned="norm"):
    """A clipped step that runs the named parts in the order given."""

    def step(model, images, labels, optimizer, scaler, dtype, max_norm):
        if "keep" not in order:
            optimizer.zero_grad()
        loss, _ = run(model, images, labels, torch.bfloat16 if "bfloat16" in order else dtype)
        norm = None
        for part in order.split():
            if part == "backward":
                scaler.scale(loss).backward()
            elif part == "unscale":
                scaler.unscale_(optimizer)
            elif part == "clip":
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            elif part == "clip_value":
                nn.utils.clip_grad_value_(model.parameters(), max_norm)
            elif part == "clip_scaled":  # right, too: the limit is scaled instead of the gradients
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale()) / scaler.get_scale()
            elif part == "step":
                scaler.step(optimizer)
            elif part == "plain_step":
                optimizer.step()
            elif part == "update":
                scaler.update()
        return {"norm": norm, "nothing": None, "clipped": min(float(norm or 0), max_norm)}[returned]

    return step


@pytest.mark.parametrize(
    ("order", "returned", "hint"),
    [
        ("backward clip step update", "norm", "comes before clipping"),
        ("backward unscale step update", "norm", "clip_grad_norm_"),
        ("clip backward unscale step update", "norm", "after backward"),
        ("backward clip_scaled plain_step update", "norm", "scaler.step"),
        ("backward unscale unscale clip step update", "norm", "once per step"),
        ("backward unscale clip step", "norm", "scaler.update()"),
        ("backward unscale clip update", "norm", "nothing moved"),
        ("keep backward unscale clip step update", "norm", "optimizer.zero_grad()"),
        ("bfloat16 backward unscale clip step update", "norm", "torch.autocast"),
        ("backward unscale clip plain_step update", "norm", "skips one with infinite gradients"),
        ("backward unscale clip step update", "nothing", "return what clip_grad_norm_ returns"),
        ("backward unscale clip step update", "clipped", "before clipping"),
    ],
)
def test_wrong_clipping_gets_its_hint(order, returned, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("1.2", clipped(order, returned))
    assert hint in refused.value.hint


@pytest.mark.parametrize("order", ["backward unscale clip step update", "backward clip_scaled step update"])
def test_right_clipping_is_accepted(order, capsys):
    check.exercise("1.2", clipped(order))
    assert capsys.readouterr().out.startswith("✔ 1.2")


def mean(timing):
    return statistics.fmean(timing.seconds) if timing.seconds else math.nan


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda old, new: new.median / old.median, "old time ÷ new time"),
        (lambda old, new: max(1, old.median / new.median), "below 1"),
        (lambda old, new: mean(old) / mean(new), "the medians"),
        (lambda old, new: min(old.seconds) / min(new.seconds), "neither the best nor the first"),
        (lambda old, new: statistics.median(old.seconds) / statistics.median(new.seconds), "nothing to compare with"),
        (lambda old, new: old / new, "old time ÷ new time"),
    ],
)
def test_wrong_speed_ups_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("1.3", answer)
    assert hint in refused.value.hint


def by_images_per_second(baseline, candidate):
    return candidate.images_per_second / baseline.images_per_second


def by_hand(baseline, candidate):
    if baseline.out_of_memory or candidate.out_of_memory:
        return float("nan")
    return statistics.median(baseline.seconds) / statistics.median(candidate.seconds)


@pytest.mark.parametrize(
    "answer", [by_images_per_second, by_hand, lambda baseline, candidate: baseline.median / candidate.median]
)
def test_right_speed_ups_are_accepted(answer, capsys):
    check.exercise("1.3", answer)
    assert capsys.readouterr().out.startswith("✔ 1.3 The speed-up: 5 pairs of timings")


def solve(capacity, weights, fixed, per_image, *, state=2, at_end=3, least=0, whole=int):
    if capacity < at_end * weights:
        return 0
    return max(least, whole((capacity - state * weights - fixed) / per_image))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (partial(solve, state=3), "are not at their most together"),
        (partial(solve, state=1), "the momentum is there"),
        (partial(solve, state=0), "weights and momentum are there"),
        (lambda capacity, weights, fixed, per_image: solve(capacity, weights, 0, per_image), "counts once"),
        (partial(solve, whole=round), "a whole number"),
        (partial(solve, whole=float), "an int"),
        (partial(solve, at_end=0), "300 bytes"),
        (partial(solve, at_end=4), "which fit"),
        (partial(solve, least=-math.inf), "never negative"),
        (lambda *_: None, "weights and momentum"),
    ],
)
def test_wrong_batches_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("1.4", answer)
    assert hint in refused.value.hint


def by_both_moments(capacity, weights, fixed, per_image):
    forward = (capacity - 2 * weights - fixed) // per_image
    return int(forward) if forward > 0 and 3 * weights <= capacity else 0


def by_counting(capacity, weights, fixed, per_image):
    batch = 0
    while 2 * weights + max(weights, fixed + per_image * (batch + 1)) <= capacity:
        batch += 1
    return batch


@pytest.mark.parametrize("answer", [solve, by_both_moments, by_counting])
def test_right_batches_are_accepted(answer, capsys):
    check.exercise("1.4", answer)
    assert capsys.readouterr().out.startswith("✔ 1.4 The largest batch: 6 cards")
