"""The exercises of lab 1: the AMP step, clipping under a loss scale, the speed-up, and the largest batch."""

from __future__ import annotations

import copy
import itertools
import numbers
from collections.abc import Callable
from statistics import fmean

import torch
from torch import nn

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, expect, refusing
from course.exercises.probe import Probe, make_case, measure_update, run_reference
from lab_utils.timing import Timing

SCALE = 2.0**10
ORDER = "scaler.scale(loss).backward(), scaler.unscale_(optimizer) to clip, scaler.step(optimizer), scaler.update()"
CLEAR = "clear the gradients once per step, before the backward pass, with optimizer.zero_grad()"
AUTOCAST = "the device and dtype of this call, not fixed ones: torch.autocast(images.device.type, dtype=dtype)"
UPDATE = "scaler.update() once per step, after scaler.step(optimizer): it is what lowers or raises the scale"
DETACH = "a step hands back numbers, not its graph: return loss.detach(), logits.detach()"


def verify_amp_step(amp_step: Callable) -> str:
    """Runs two steps in bf16 and in fp16 beside the reference and compares forward dtype, loss, update and scale."""
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = make_case(dtype), make_case(dtype)
        for step in (1, 2):
            case = f"{str(dtype).removeprefix('torch.')}, step {step}"
            before, expected = copy.deepcopy(ours["model"]), run_reference(**theirs)
            returned = _take_step(amp_step, case, ours)
            loss, logits = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
            expect(
                isinstance(loss, torch.Tensor) and isinstance(logits, torch.Tensor) and logits.shape == (6, 10),
                f"{case}: what the function returns",
                yours=type(returned).__name__ if logits is None else f"(loss, {getattr(logits, 'shape', logits)})",
                expected="the tuple (loss, logits), the logits of shape (6, 10)",
                hint="end with: return loss.detach(), logits.detach()",
            )
            _judge_forward(case, ours)
            kept = "with its graph" if loss.requires_grad or logits.requires_grad else "detached"
            judge(kept, right="detached", case=f"{case}: what is returned", hint=DETACH)
            hint = "compute the loss inside autocast too: it runs cross_entropy in float32"
            judge(loss.dtype, right=torch.float32, case=f"{case}: the dtype of the loss", hint=hint)
            wrong = {
                "the gradients still carry the loss scale: scaler.step(optimizer) takes it away": SCALE,
                "nothing moved: scaler.scale(loss).backward(), and the gradients are cleared before it, not after": (
                    AnyOf((0.0, 1 / SCALE))
                ),
            }
            _judge_update(case, before, (ours, theirs), wrong, CLEAR)
            hint = "return the plain loss, neither scaled nor divided"
            judge(loss, right=expected, case=f"{case}: the loss", hint=hint, within=1e-3)
            _judge_scale(case, ours, theirs)
    return "the weights after two steps equal the reference's in bfloat16 and float16, to rounding"


def _take_step(answer: Callable, case: str, ours: dict, **more: float) -> object:
    """Calls the answer; mostly it is GradScaler that raises, at a call that is missing, out of order or there twice."""
    failed = f"{case}: the step failed"
    with refusing(AssertionError, RuntimeError, case=failed, expected="each once, in this order", hint=ORDER):
        return answer(**ours, **more)


def _judge_forward(case: str, ours: dict) -> None:
    model: Probe = ours["model"]
    judge(model.forward_dtype, right=ours["dtype"], case=f"{case}: the dtype of the forward pass", hint=AUTOCAST)
    hint = "autocast wraps forward and loss only; each backward operation takes the dtype of its forward by itself"
    where = "inside autocast" if model.backward_in_autocast else "outside"
    judge(where, right="outside", case=f"{case}: the backward pass", hint=hint)


def _judge_update(case: str, before: nn.Module, pair: tuple[dict, dict], wrong: dict[str, object], hint: str) -> None:
    """Compares the update with the reference's: its length, whose wrong values are multiples, then its direction."""
    ours, theirs = (one["model"] for one in pair)
    right, far = measure_update(before, theirs), measure_update(theirs, ours)
    length, name = measure_update(before, ours) / right, f"{case}: the weights' update, as a multiple of the right one"
    judge(length, right=1.0, case=name, wrong=wrong, hint=hint, within=5e-4)
    hint = "as long as it should be, but in another direction: step with the gradients of this batch's loss"
    away = f"{far:.6f} away from the reference's"
    expect(far < 1e-2 * right, f"{case}: the weights", yours=away, expected="the same, to rounding", hint=hint)


def _judge_scale(case: str, ours: dict, theirs: dict) -> None:
    yours, right = ours["scaler"].get_scale(), theirs["scaler"].get_scale()
    scaler = ours["scaler"]
    unused = scaler.is_enabled() and scaler._scale is None  # which it makes when it scales its first loss
    judge(yours, right=right, case=f"{case}: the loss scale after the step", hint=ORDER if unused else UPDATE)


def verify_clipped_step(clipped_step: Callable) -> str:
    """Runs two clipped steps in either format, with the norm above the limit and below, beside the reference."""
    for dtype, max_norm in itertools.product((torch.float16, torch.bfloat16), (0.1, 100.0)):
        ours, theirs = make_case(dtype), make_case(dtype)
        for step in (1, 2):
            case = f"{str(dtype).removeprefix('torch.')}, max_norm {max_norm:g}, step {step}"
            before, expected = copy.deepcopy(ours["model"]), run_reference(**theirs, max_norm=max_norm)
            norm = _take_step(clipped_step, case, ours, max_norm=max_norm)
            _judge_forward(case, ours)
            hint = "clip with torch.nn.utils.clip_grad_norm_, after backward and scaler.unscale_(optimizer)"
            wrong = {
                "the scaled gradients went into the weights: let scaler.step(optimizer) take the step": SCALE,
                "clipping saw gradients that carry the loss scale: scaler.unscale_(optimizer) comes before": 1 / SCALE,
                "nothing moved: scaler.step(optimizer) comes after clipping": 0.0,
            }
            _judge_update(case, before, (ours, theirs), wrong, hint if step == 1 else CLEAR)
            wrong = {"the norm before clipping, as clip_grad_norm_ returns it": min(float(expected), max_norm)}
            hint = "return what clip_grad_norm_ returns, of unscaled gradients"
            judge(norm, right=expected, case=f"{case}: the norm returned", wrong=wrong, hint=hint, within=1e-3)
            _judge_scale(case, ours, theirs)  # growth_interval=2: two good steps double the scale
    ours = make_case(torch.float16) | {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**40)}
    before = copy.deepcopy(ours["model"])
    clipped_step(**ours, max_norm=1.0)
    case = "a loss scale of 2**40, under which gradients are infinite: the length of the weights' update"
    hint = "let scaler.step(optimizer) take the step: it skips one with infinite gradients"
    judge(measure_update(before, ours["model"]), right=0.0, case=case, hint=hint)
    return "the update has the length asked for, and the norm returned is that of unscaled gradients"


# What was timed, in words, with the seconds of the baseline and of the candidate.
SPEED_UP_CASES = {
    "2 s a step before, 1 s now": ((2, 2, 2), (1, 1, 1)),
    "1 s a step before, 4 s now": ((1, 1, 1), (4, 4, 4)),
    "2 s a step before, 1 s now, and 9 s in one step that was disturbed": ((2, 2, 2, 2, 2), (1, 1, 1, 1, 9)),
    "1, 2, 3 s before, 0.8, 1, 1.2 s now": ((1, 2, 3), (0.8, 1, 1.2)),
    "a baseline that ran out of memory (it has no seconds)": ((), (1, 1, 1)),
}


def verify_speed_up(speed_up: Callable) -> str:
    """Asks for the speed-up of five pairs of made-up timings."""
    for case, pair in SPEED_UP_CASES.items():
        old, new = (Timing("a step", seconds, images=8) for seconds in pair)
        right, wrong = old.median / new.median, {}
        hint = "old time ÷ new time, of the medians: half the time is a speed-up of 2"
        if old.seconds:
            wrong = {
                "old time ÷ new time: half the time is a speed-up of 2": new.median / old.median,
                "a slower candidate has a speed-up below 1": max(1, right),
                "a mean follows every disturbed step: take the medians": fmean(old.seconds) / fmean(new.seconds),
            }
        else:
            hint = "there is nothing to compare with: return NaN, which a median of no seconds already is"
        errors = (ArithmeticError, TypeError, AttributeError, ValueError, IndexError)
        with refusing(*errors, case=case, expected=right, hint=hint):
            yours = speed_up(old, new)
        judge(yours, right=right, case=case, wrong=wrong, hint=hint, within=1e-6)
    return f"{len(SPEED_UP_CASES)} pairs of timings, with a disturbed step and one that ran out of memory"


# Capacity, bytes of the weights, fixed part, bytes per image; the largest batch; the hint.
BATCH_CASES = (
    ((1000, 100, 0, 1), 800, "beside the saved tensors lie weights and momentum, and no gradients yet"),
    ((1000, 100, 10, 1), 790, "the fixed part counts once, whatever the batch"),
    ((1000, 100, 10, 7), 112, "112.9 images: a batch is a whole number, an int, and 113 do not fit"),
    ((310, 100, 10, 1), 100, "at the end of the backward pass 300 bytes are held, which fit: 100 images fit, too"),
    ((250, 100, 10, 1), 0, "weights, gradients and momentum alone are 300 bytes at the end of the backward pass: 0"),
    ((310, 100, 150, 1), 0, "no image fits, and a batch is never negative: 0"),
)


def verify_predict_batch(predict_batch: Callable) -> str:
    """Asks for the largest batch on six made-up cards of a few bytes."""
    for sizes, right, hint in BATCH_CASES:
        case = "predict_batch(capacity={}, weights={}, fixed={}, per_image={})".format(*sizes)
        capacity, weights, fixed, per_image = sizes
        with refusing(TypeError, case=case, expected=right, hint="return the batch, a whole number"):
            yours = predict_batch(*sizes)
        with_gradients, *without = ((capacity - count * weights - fixed) // per_image for count in (3, 1, 0))
        wrong = {
            "zero_grad drops the gradients before the forward pass saves its tensors": with_gradients,
            "weights and momentum, as large as each other, are there all the time": AnyOf(tuple(without)),
        }
        judge(yours, right=right, case=case, wrong=wrong if with_gradients > 0 else {}, hint=hint)
        hint = "return a whole number, an int"
        expect(isinstance(yours, numbers.Integral), case, yours=yours, expected=right, hint=hint)
    return f"{len(BATCH_CASES)} cards, among them two on which no image fits"


EXERCISES = {
    "1.1": Exercise("The AMP step", verify_amp_step),
    "1.2": Exercise("Unscale before clipping", verify_clipped_step),
    "1.3": Exercise("The speed-up", verify_speed_up),
    "1.4": Exercise("The largest batch", verify_predict_batch),
}
