"""Each check of lab 1 refuses typical wrong answers with the hint that fits and accepts right ones."""

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


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (amp("zero_grad forward_in_float32 backward step update"), "torch.autocast"),
        (amp("zero_grad forward_in_bfloat16 backward step update"), "not fixed ones"),
        (amp("zero_grad forward backward_in_autocast step update"), "forward and loss only"),
        (amp("zero_grad forward_with_loss_outside backward step update"), "inside autocast too"),
        (amp("zero_grad forward backward_unscaled step update"), "scaler.scale"),
        (amp("zero_grad forward backward plain_step"), "still carry the loss scale"),
        (amp("zero_grad forward backward step"), "scaler.update()"),
        (amp("forward backward step update"), "optimizer.zero_grad()"),
        (amp("zero_grad forward backward"), "nothing moved"),
        (amp(returned="scaled"), "plain loss"),
        (amp(returned="with its graph"), "detach"),
        (amp(returned="logits with their graph"), "detach"),
        (amp(returned="labels"), "return loss.detach(), logits.detach()"),
        (amp(returned="loss alone"), "return loss.detach(), logits.detach()"),
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
    expected = "✔ 1.1 The AMP step: the weights after two steps equal the reference's in bfloat16 and float16\n"
    assert capsys.readouterr().out == expected


def clipped(order, returned="norm"):
    """A clipped step that runs the named parts in the order given."""

    def step(model, images, labels, optimizer, scaler, dtype, max_norm):
        optimizer.zero_grad()
        loss, _ = run(model, images, labels, dtype)
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
        ("backward clip unscale step update", "norm", "comes before clipping"),
        ("backward unscale step update", "norm", "clip_grad_norm_"),
        ("clip backward unscale step update", "norm", "after backward"),
        ("backward unscale clip_value step update", "norm", "clip_grad_norm_"),
        ("backward clip_scaled plain_step update", "norm", "scaler.step"),
        ("backward unscale unscale clip step update", "norm", "once per step"),
        ("backward unscale clip step", "norm", "scaler.update()"),
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


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda device_type, capability: torch.bfloat16, "T4"),
        (lambda device_type, capability: torch.float16, "H100"),
        (
            lambda device_type, capability: torch.bfloat16 if capability and capability > (8, 0) else torch.float16,
            "A100",
        ),
        (
            lambda device_type, capability: [torch.float32, torch.float16, torch.bfloat16][
                (capability >= (7, 0)) + (capability >= (8, 0))
            ],
            "CPU",
        ),
        (
            lambda device_type, capability: (
                torch.bfloat16 if device_type == "cpu" or str(capability) >= "(8, 0)" else torch.float16
            ),
            "compare the major number",
        ),
        (
            lambda device_type, capability: (
                torch.bfloat16 if device_type == "cpu" or capability[0] >= 8 else torch.float16
            ),
            "before 7.0",
        ),
        (lambda device_type, capability: "bfloat16", "H100"),
    ],
)
def test_wrong_dtypes_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("1.3", answer)
    assert hint in refused.value.hint


def choose_by_branches(device_type, capability):
    if device_type == "cpu":
        return torch.bfloat16
    if capability[0] >= 8:
        return torch.bfloat16
    return torch.float16 if capability[0] == 7 else torch.float32


def choose_by_table(device_type, capability):
    table = [((8, 0), torch.bfloat16), ((7, 0), torch.float16), ((0, 0), torch.float32)]
    return next(dtype for least, dtype in table if device_type == "cpu" or capability >= least)


@pytest.mark.parametrize("answer", [choose_by_branches, choose_by_table])
def test_right_dtypes_are_accepted(answer, capsys):
    check.exercise("1.3", answer)
    assert capsys.readouterr().out == "✔ 1.3 A dtype for the device: 7 devices, from a laptop's CPU to an H100\n"
