"""The exercises of lab 1: the AMP step, clipping under a loss scale, the speed-up, and the largest batch."""

from __future__ import annotations

import copy
import itertools
import math
import numbers
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from course.check.verdicts import Exercise, expect, refusing
from course.exercises.probe import make_case, measure_update, run_reference
from lab_utils.timing import Timing

# Mostly GradScaler's own errors: a call of its protocol is missing, out of order or there twice.
_refusing_scaler = partial(refusing, AssertionError, RuntimeError)
CLEAR = "clear the gradients once per step, before the backward pass, with optimizer.zero_grad()"
UPDATE = "each step goes through the scaler: scale(loss).backward(), unscale_, clip, step, then scaler.update()"


def _explain_update(ratio: float, scale: float) -> str:
    """The hint that fits an update ``ratio`` times as large as it should be."""
    if ratio == 0:
        return (
            "nothing moved: call scaler.step(optimizer); it needs the gradients of scaler.scale(loss).backward(), "
            "which are cleared before it, not after"
        )
    if ratio > scale / 4:
        return (
            "the gradients still carry the loss scale: scaler.step(optimizer) unscales them, optimizer.step() does not"
        )
    if ratio < 4 / scale:
        return "the loss was not multiplied before backward: scaler.scale(loss).backward()"
    return f"{CLEAR}; scaler.step(optimizer) calls optimizer.step(), which must not run again"


def verify_amp_step(amp_step: Callable) -> str:
    """Runs two steps in bf16 and in fp16 beside the reference and compares forward dtype, loss, update and scale."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        ours, theirs = make_case(dtype), make_case(dtype)
        for step in (1, 2):
            before = copy.deepcopy(ours["model"])
            expected = run_reference(**theirs)
            with _refusing_scaler(
                case=f"{name}, step {step}: the step failed",
                expected="scale, backward, step, update",
                hint="in this order: scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
            ):
                returned = amp_step(**ours)
            _compare_amp_step(f"{name}, step {step}", returned, expected, ours, theirs, before)
    return "the weights after two steps equal the reference's in bfloat16 and float16, to rounding"


def _compare_amp_step(
    case: str, returned: object, expected: torch.Tensor, ours: dict, theirs: dict, before: nn.Module
) -> None:
    model, scale = ours["model"], theirs["scaler"].get_scale()
    loss, logits = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    expect(
        isinstance(loss, torch.Tensor) and isinstance(logits, torch.Tensor) and logits.shape == (6, 10),
        f"{case}: what the function returns",
        yours=type(returned).__name__ if logits is None else f"(loss, {getattr(logits, 'shape', logits)})",
        expected="the tuple (loss, logits), the logits of shape (6, 10)",
        hint="end with: return loss.detach(), logits.detach()",
    )
    expect(
        model.forward_dtype == ours["dtype"],
        f"{case}: the dtype that the forward pass ran in",
        yours=model.forward_dtype or "float32, no autocast",
        expected=ours["dtype"],
        hint="use the device and dtype of this call, not fixed ones: torch.autocast(images.device.type, dtype=dtype)",
    )
    expect(
        not model.backward_in_autocast,
        f"{case}: the backward pass",
        yours="inside autocast",
        expected="outside",
        hint="autocast wraps forward and loss only; each backward operation takes the dtype of its forward by itself",
    )
    expect(
        loss.dtype == torch.float32,
        f"{case}: the dtype of the loss",
        yours=loss.dtype,
        expected="torch.float32",
        hint="compute the loss inside autocast too: it runs cross_entropy in float32",
    )
    expect(
        not loss.requires_grad and not logits.requires_grad,
        f"{case}: what is returned",
        yours="still holds its graph",
        expected="detached",
        hint="a step hands back numbers, not its graph: return loss.detach(), logits.detach()",
    )
    moved, right = measure_update(before, model), measure_update(before, theirs["model"])
    expect(
        abs(moved / right - 1) < 1e-3,
        f"{case}: the length of the weights' update",
        yours=f"{moved:.6f}",
        expected=f"{right:.6f}",
        hint=_explain_update(moved / right, 2.0**10),
    )
    apart = measure_update(theirs["model"], model)
    expect(
        apart < 1e-2 * right,
        f"{case}: the weights after the update",
        yours=f"{apart:.6f} away from the reference's",
        expected="the same, to rounding",
        hint="as long as it should be, but in another direction: step with the gradients of this batch's loss",
    )
    expect(
        torch.allclose(loss, expected, rtol=1e-3),
        f"{case}: the loss",
        yours=f"{loss.item():.4f}",
        expected=f"{expected.item():.4f}",
        hint="return the plain loss, neither scaled nor divided",
    )
    expect(
        ours["scaler"].get_scale() == scale,
        f"{case}: the loss scale after the step",
        yours=f"{ours['scaler'].get_scale():g}",
        expected=f"{scale:g}",
        hint="call scaler.update() once per step, after scaler.step(optimizer): it is what lowers or raises the scale",
    )


def verify_clipped_step(clipped_step: Callable) -> str:
    """Runs two clipped steps in either format, with the norm above the limit and below, beside the reference."""
    for dtype, max_norm in itertools.product((torch.float16, torch.bfloat16), (0.1, 100.0)):
        ours, theirs = make_case(dtype), make_case(dtype)
        for step in (1, 2):
            case = f"{str(dtype).removeprefix('torch.')}, max_norm {max_norm:g}, step {step}"
            _compare_clipped_step(case, clipped_step, ours, theirs, max_norm)
        # growth_interval=2: two good steps double the scale
        yours, expected = ours["scaler"].get_scale(), theirs["scaler"].get_scale()
        expect(yours == expected, f"{case}: the loss scale afterwards", yours=yours, expected=expected, hint=UPDATE)
    _expect_skip(clipped_step)
    return "the update has the length asked for, and the norm returned is that of unscaled gradients"


def _compare_clipped_step(case: str, clipped_step: Callable, ours: dict, theirs: dict, max_norm: float) -> None:
    before, first = copy.deepcopy(ours["model"]), case.endswith("1")
    expected = run_reference(**theirs, max_norm=max_norm)
    with _refusing_scaler(
        case=f"{case}: the step failed",
        expected="scale, backward, unscale_, clip, step, update",
        hint="scaler.unscale_(optimizer) once per step, after backward and before scaler.step" if first else UPDATE,
    ):
        norm = clipped_step(**ours, max_norm=max_norm)
    expect(
        ours["model"].forward_dtype == ours["dtype"],
        f"{case}: the dtype that the forward pass ran in",
        yours=ours["model"].forward_dtype or "float32, no autocast",
        expected=ours["dtype"],
        hint="forward pass and loss go under torch.autocast(images.device.type, dtype=dtype), as in 1.1",
    )
    moved, right = measure_update(before, ours["model"]), measure_update(before, theirs["model"])
    expect(
        abs(moved / right - 1) < 1e-3,
        f"{case}: the length of the weights' update",
        yours=f"{moved:.6f}",
        expected=f"{right:.6f}",
        hint=_explain_clipping(moved / right, 2.0**10, first=first),
    )
    expect(
        isinstance(norm, torch.Tensor | float) and abs(float(norm) / expected.item() - 1) < 1e-3,
        f"{case}: the gradient norm that is returned",
        yours=norm if norm is None else f"{float(norm):.4f}",
        expected=f"{expected.item():.4f}",
        hint="return what clip_grad_norm_ returns: the norm before clipping, of unscaled gradients" if first else CLEAR,
    )


def _explain_clipping(ratio: float, scale: float, *, first: bool) -> str:
    """The hint that fits an update ``ratio`` times as large as it should be."""
    if ratio == 0:
        return "nothing moved: scaler.step(optimizer) comes after clipping"
    if ratio < 0.1:
        return "clipping saw gradients that carry the loss scale: scaler.unscale_(optimizer) comes before clipping"
    if ratio > scale / 4:
        return "the scaled gradients went into the weights: let scaler.step(optimizer) take the step"
    if not first:
        return CLEAR
    return "clip the gradients' common norm with torch.nn.utils.clip_grad_norm_, after backward and before the step"


def _expect_skip(clipped_step: Callable) -> None:
    """A step whose gradients are infinite under the loss scale has to leave the weights alone."""
    case = make_case(torch.float16)
    case["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = copy.deepcopy(case["model"])
    clipped_step(**case, max_norm=1.0)
    moved = measure_update(before, case["model"])
    expect(
        moved == 0,
        "a loss scale of 2**40, under which gradients are infinite: the length of the weights' update",
        yours=moved,
        expected=0,
        hint="let scaler.step(optimizer) take the step: it skips one with infinite gradients",
    )


def _time(*seconds: float) -> Timing:
    return Timing("a step", seconds, images=8)


# What was timed, in words; seconds of the baseline and of the candidate; old time ÷ new time; the hint.
SPEED_UP_CASES = (
    (
        "2 s a step before, 1 s now",
        _time(2, 2, 2),
        _time(1, 1, 1),
        2,
        "old time ÷ new time: half the time is a speed-up of 2",
    ),
    ("1 s a step before, 4 s now", _time(1, 1, 1), _time(4, 4, 4), 0.25, "a slower candidate has a speed-up below 1"),
    (
        "2 s a step before, 1 s now, and 9 s in one step that was disturbed",
        _time(2, 2, 2, 2, 2),
        _time(1, 1, 1, 1, 9),
        2,
        "a mean follows every disturbed step: take the medians: baseline.median",
    ),
    (
        "1, 2, 3 s before, 0.8, 1, 1.2 s now",
        _time(1, 2, 3),
        _time(0.8, 1, 1.2),
        2,
        "neither the best nor the first step stands for all of them: take the medians",
    ),
    (
        "a baseline that ran out of memory (it has no seconds)",
        _time(),
        _time(1, 1, 1),
        math.nan,
        "there is nothing to compare with: return NaN, which a median of no seconds already is",
    ),
)


def verify_speed_up(speed_up: Callable) -> str:
    """Asks for the speed-up of five pairs of made-up timings."""
    for case, baseline, candidate, expected, hint in SPEED_UP_CASES:
        errors = (ArithmeticError, TypeError, AttributeError, ValueError, IndexError)
        with refusing(*errors, case=case, expected=expected, hint=hint):
            yours = speed_up(baseline, candidate)
        right = isinstance(yours, numbers.Real) and (
            math.isclose(yours, expected, rel_tol=1e-6) or (math.isnan(yours) and math.isnan(expected))
        )
        expect(right, case, yours=yours, expected=expected, hint=hint)
    return f"{len(SPEED_UP_CASES)} pairs of timings, with a disturbed step and one that ran out of memory"


# Capacity, bytes of the weights, fixed part, bytes per image; the largest batch; the hint.
BATCH_CASES = (
    (
        (1000, 100, 0, 1),
        800,
        "beside the saved tensors lie weights and momentum, as large as each other, and no gradients: they do not "
        "exist yet",
    ),
    ((1000, 100, 10, 1), 790, "the fixed part counts once, whatever the batch"),
    ((1000, 100, 10, 7), 112, "112.9 images: a batch is a whole number, and 113 do not fit"),
    ((310, 100, 10, 1), 100, "at the end of the backward pass 300 bytes are held, which fit: 100 images fit, too"),
    ((250, 100, 10, 1), 0, "weights, gradients and momentum alone are 300 bytes at the end of the backward pass: 0"),
    ((310, 100, 150, 1), 0, "no image fits, and a batch is never negative: 0"),
)


def verify_predict_batch(predict_batch: Callable) -> str:
    """Asks for the largest batch on six made-up cards of a few bytes."""
    for sizes, expected, hint in BATCH_CASES:
        case = "predict_batch(capacity={}, weights={}, fixed={}, per_image={})".format(*sizes)
        with refusing(TypeError, case=case, expected=expected, hint="return the batch, a whole number"):
            yours = predict_batch(*sizes)
        if isinstance(yours, numbers.Real) and yours == expected and not isinstance(yours, numbers.Integral):
            hint = "return a whole number, an int"
            expect(False, case, yours=yours, expected=expected, hint=hint)
        expect(yours == expected, case, yours=yours, expected=expected, hint=_explain_batch(yours, sizes, hint))
    return f"{len(BATCH_CASES)} cards, among them two on which no image fits"


def _explain_batch(yours: object, case: tuple[int, int, int, int], hint: str) -> str:
    """The hint that fits the wrong batch of a card on which some images fit."""
    capacity, weights, fixed, per_image = case
    known = {
        (capacity - 3 * weights - fixed) // per_image: "gradients and saved tensors are not at their most together: "
        "zero_grad drops the gradients before the forward pass",
        (capacity - weights - fixed) // per_image: "the momentum is there all the time, as large as the weights",
        (capacity - fixed) // per_image: "weights and momentum are there all the time",
    }
    return known.get(yours, hint) if isinstance(yours, numbers.Real) and yours > 0 else hint


EXERCISES = {
    "1.1": Exercise("The AMP step", verify_amp_step),
    "1.2": Exercise("Unscale before clipping", verify_clipped_step),
    "1.3": Exercise("The speed-up", verify_speed_up),
    "1.4": Exercise("The largest batch", verify_predict_batch),
}
