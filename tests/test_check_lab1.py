"""The checks of lab 1 refuse mistakes of structure and accept right answers (wrong values: test_check_tables.py)."""

import pytest
import torch
from harness.answers import load_answer, refuse_edited
from torch import nn
from torch.nn import functional as F

from course import check

pytestmark = pytest.mark.usefixtures("runs")

ZERO, BACK, UNSCALE = (
    "optimizer.zero_grad(set_to_none=True)",
    "scaler.scale(loss).backward()",
    "scaler.unscale_(optimizer)",
)
STEP, LOSS = "scaler.step(optimizer)", "loss = F.cross_entropy(logits, labels)"
AUTOCAST = "with torch.autocast(images.device.type, dtype=dtype):"
CLIP, DIVIDE = (
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "baseline.median / candidate.median",
)
RETURN = "loss.detach(), logits.detach()"


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("1.1", AUTOCAST, "if True:", "torch.autocast"),
        ("1.1", "dtype=dtype", "dtype=torch.bfloat16", "not fixed ones"),
        ("1.1", f"    {BACK}", f"        {BACK}", "forward and loss only"),
        ("1.1", f"        {LOSS}", f"    {LOSS}", "inside autocast too"),
        ("1.1", BACK, "loss.backward()", "scaler.scale"),
        ("1.1", f"{STEP}\n    scaler.update()", "optimizer.step()", "still carry the loss scale"),
        ("1.1", STEP, f"{STEP}\n    optimizer.step()", "once per step"),
        ("1.1", STEP, f"optimizer.zero_grad()\n    {STEP}", "cleared before"),
        ("1.1", f"{STEP}\n    scaler.update()", "pass", "nothing moved"),
        ("1.1", "scaler.update()", "pass", "scaler.update()"),
        ("1.1", ZERO, "pass", "optimizer.zero_grad()"),
        ("1.1", RETURN, "scaler.scale(loss).detach(), logits.detach()", "plain loss"),
        ("1.1", RETURN, "loss, logits", "detach"),
        ("1.2", f"{UNSCALE}\n    ", "", "comes before"),
        ("1.2", CLIP, "norm = torch.tensor(1.0)", "clip_grad_norm_"),
        ("1.2", f"{BACK}\n    {UNSCALE}\n    {CLIP}", f"{CLIP}\n    {BACK}\n    {UNSCALE}", "after backward"),
        ("1.2", STEP, "optimizer.step()", "skips one with infinite gradients"),
        ("1.2", UNSCALE, f"{UNSCALE}\n    {UNSCALE}", "unscale_(optimizer)"),
        ("1.2", "return norm", "", "return what clip_grad_norm_ returns"),
        ("1.3", DIVIDE, "min(baseline.seconds) / min(candidate.seconds)", "of the medians"),
        (
            "1.3",
            DIVIDE,
            "sorted(baseline.seconds)[len(baseline.seconds) // 2] / candidate.median",
            "nothing to compare with",
        ),
        ("1.3", DIVIDE, "baseline / candidate", "old time ÷ new time"),
        ("1.4", " - fixed", "", "counts once"),
        ("1.4", "int((capacity - 2 * weights - fixed) // per_image)", "capacity - 2 * weights - fixed", "an int"),
        ("1.4", "3 * weights > capacity", "False", "300 bytes"),
        ("1.4", "max(0, int(", "max(-10**9, int(", "never negative"),
        ("1.4", "return max", "max", "weights and momentum"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))


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


def clipped_by_a_scaled_limit(model, images, labels, optimizer, scaler, dtype, max_norm):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale()) / scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return norm


def speed_up_by_images_per_second(baseline, candidate):
    return candidate.images_per_second / baseline.images_per_second


def batch_by_counting(capacity, weights, fixed, per_image):
    batch = 0
    while 2 * weights + max(weights, fixed + per_image * (batch + 1)) <= capacity:
        batch += 1
    return batch


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("1.1", amp_in_another_order),
        ("1.2", clipped_by_a_scaled_limit),
        ("1.3", speed_up_by_images_per_second),
        ("1.4", batch_by_counting),
    ],
)
def test_right_answers_get_the_tick(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} ")


def test_right_clipping_may_return_a_number():
    check.exercise("1.2", load_answer("1.2", ("return norm", "return norm.item()")))
