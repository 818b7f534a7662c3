"""Exercise 4.1: a training step on replicas in threads, beside the same step on one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from unittest import mock

import torch
from torch.nn import functional as F

from course.check.verdicts import NotYetError, expect
from course.exercises.lab4.replicas import PATIENCE, Net, Step, Watch, is_close, join, make_trial

# Replicas and images. With 5 and 9 ``chunk`` makes five chunks, with 5 and 6 three, and with 4 and 1 a single one.
CASES = ((1, 4), (2, 8), (3, 7), (5, 9), (5, 6), (4, 1))


def _join_gradients(model: Net) -> torch.Tensor | None:
    """The gradients as one vector, those that are missing as zeros; None where all are."""
    parameters = list(model.parameters())
    if all(parameter.grad is None for parameter in parameters):
        return None
    return join(torch.zeros_like(one) if one.grad is None else one.grad for one in parameters)


def verify_data_parallel_step(data_parallel_step: Callable) -> str:
    """Takes two steps for each number of replicas, beside one device, and one step in which a replica fails."""
    watch = Watch()  # one for all, so that replicas that are kept from an earlier step are seen
    for normalized in (False, True):
        for count, batch in CASES:
            _compare_steps(data_parallel_step, watch, count, batch, normalized)
    _expect_error(data_parallel_step, watch)
    where = "on 1, 2, 3 and 5 replicas, for uneven batches too"
    return f"loss, gradients and weights equal one device's in float64, {where}"


def _compare_steps(answer: Callable, watch: Watch, count: int, batch: int, normalized: bool) -> None:
    ours, theirs = make_trial(watch, batch, normalized=normalized), make_trial(None, batch, normalized=normalized)
    model, twin, images, labels = ours["model"], theirs["model"], ours["images"], ours["labels"]
    used: list[torch.Tensor | None] = []  # the gradients that each optimizer.step() finds
    ours["optimizer"].register_step_pre_hook(lambda *_: used.append(_join_gradients(model)))
    earlier = None
    for number in (1, 2):  # what the first leaves behind shows in the second
        name = f"{batch} image{'s' * (batch > 1)} on {count} replica{'s' * (count > 1)}, step {number}"
        step = Step(name, copy.deepcopy(twin), images, labels, earlier)
        before = join(model.parameters())
        used.clear()
        parts = len(images.chunk(count))
        watch.begin(model.list_weights(), parts)
        try:
            returned = answer(**ours, count=count)
        except (RuntimeError, ValueError) as error:
            # Wrong shares say more than the error that they cause, but one before all have run is the learner's own.
            misshapen = any(call.images.shape[1:] != images.shape[1:] for call in watch.calls)
            if (misshapen or len(watch.calls) >= parts) and not isinstance(error, NotImplementedError):
                _expect_shares(step, watch, count)
            raise
        except TypeError as error:
            missing = parts < count and "NoneType" in str(error)
            hint = "there are fewer chunks than `count`: a replica without a chunk has no gradient, so leave it out"
            expect(not missing, name, yours=str(error)[:80], expected=f"{parts} replicas", hint=hint)
            raise
        _expect_shares(step, watch, count)
        _expect_replicas(step, watch)
        loss, gradient = step.differentiate(list(range(batch)))
        _expect_loss(step, returned, loss, watch)
        _expect_gradient(step, used, gradient, watch, moved=not torch.equal(before, join(model.parameters())))
        left = _join_gradients(model)
        expect(
            left is not None and is_close(left, gradient),
            f"{name}: the gradients after the step",
            yours="none" if left is None or not left.any() else "others",
            expected="those of this step",
            hint="leave them in the model: zero_grad() comes before the next backward(), and the next cell reads them",
        )
        theirs["optimizer"].zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        theirs["optimizer"].step()
        expect(
            is_close(join(model.parameters()), join(twin.parameters())),
            f"{name}: the weights after the step",
            yours="others than one device's",
            expected="one device's",
            hint="do not change the model's weights after optimizer.step(): the replicas are dropped after the step",
        )
        earlier = gradient


def _expect_shares(step: Step, watch: Watch, count: int) -> None:
    """Looks at what the replicas were given."""
    batch, parts = len(step.images), len(step.images.chunk(count))
    shapes = [tuple(call.images.shape) for call in watch.calls]
    whole = tuple(step.images.shape[1:])
    expect(
        all(shape[1:] == whole for shape in shapes),
        f"{step.case}: the shapes of the chunks",
        yours=shapes,
        expected=f"(N, {', '.join(map(str, whole))}), each image whole",
        hint="split along dimension 0, the images, as images.chunk(count) does; the others are channels, height, width",
    )
    shares = [step.find_share(call) for call in watch.calls]
    seen = sorted(number for share in shares for number in share)
    hint = "each image goes to one replica: images.chunk(count)"
    if not shapes:
        hint = "no forward pass was seen: call each replica with its chunk, replica(chunk)"
    elif len(shares) > 1 and any(len(share) == batch for share in shares):
        hint = "a replica got the whole batch: the replica with number i gets images.chunk(count)[i]"
    elif len(shares) < parts:
        hint = "some chunks had no replica to go to: as many replicas as chunks, and a forward pass for each"
    elif len(seen) < batch:
        hint = "the remainder was forgotten: images.chunk(count) leaves no image over, its last chunk is smaller"
    expect(
        seen == list(range(batch)),
        f"{step.case}: the images that the replicas got",
        yours=shares,
        expected=f"each of the numbers 0 to {batch - 1} once",
        hint=hint,
    )
    hint = "as many chunks as images.chunk(count) makes, and a replica for each"
    if len(shares) > count:
        hint = "at most count chunks, as images.chunk(count) makes: images.split(size) can make one more"
    expect(
        parts <= len(shares) <= count,
        f"{step.case}: how many replicas had work",
        yours=f"{len(shares)}, with {[len(share) for share in shares]} images",
        expected=parts if parts == count else f"{parts} to {count}",
        hint=hint,
    )


def _expect_replicas(step: Step, watch: Watch) -> None:
    """Looks at who ran, and at the same time as whom."""
    calls = watch.calls
    expect(
        not watch.alone,
        f"{step.case}: the forward passes",
        yours="the replicas run one after the other",
        expected=f"{len(calls)} at the same time",
        hint="start all threads before you wait for any: ThreadPoolExecutor(len(chunks)).map(run, replicas, chunks)",
    )
    owners = len({call.weight.data_ptr() for call in calls})
    expect(
        owners == len(calls),
        f"{step.case}: the replicas",
        yours=f"{owners} with weights of its own",
        expected=f"{len(calls)}, each with weights of its own",
        hint="a replica for each thread, copy.deepcopy(model): one module for all would do on a CPU, but each GPU "
        "needs the weights in its own memory",
    )
    expect(
        all(call.fresh for call in calls),
        f"{step.case}: the replicas' weights",
        yours="not those of the model",
        expected="the model's as the step begins",
        hint="replicas of an earlier step are stale: optimizer.step() moves the model alone, so copy it in each step",
    )
    expect(
        all(call.training == step.start.training for call in calls),
        f"{step.case}: the mode of the replicas",
        yours="training" if calls[0].training else "evaluation",
        expected="training" if step.start.training else "evaluation",
        hint="leave train() and eval() to the caller: the replicas run in the mode that the model is in",
    )


def _expect_loss(step: Step, returned: object, loss: torch.Tensor, watch: Watch) -> None:
    is_scalar = isinstance(returned, torch.Tensor) and returned.dim() == 0
    expect(
        is_scalar and not returned.requires_grad,
        f"{step.case}: what the function returns",
        yours="a loss that still holds its graph" if is_scalar else type(returned).__name__,
        expected="the loss, a tensor of one number without its graph",
        hint="end with: return loss.detach()" + "; with its graph it would keep all replicas in memory" * is_scalar,
    )
    shares = [step.find_share(call) for call in watch.calls]
    means = torch.stack([step.differentiate(share)[0] for share in shares])
    parts = [mean * len(share) / len(step.images) for mean, share in zip(means, shares, strict=True)]
    hint = "one loss of the whole batch, in the order of the chunks: F.cross_entropy(torch.cat(outputs), labels)"
    if is_close(returned, means.mean()):
        hint = "a mean of means: the chunks differ in size. Gather the outputs and take one mean over the whole batch"
    elif is_close(returned, means.sum()):
        hint = "the chunks' means were added up: gather the outputs and take one mean over the whole batch"
    elif any(is_close(returned, part) for part in [*means, *parts]):
        hint = "this is the loss of one replica's chunk alone: gather the outputs of all, torch.cat(outputs)"
    yours = f"{returned.item():.6f}"
    expect(is_close(returned, loss), f"{step.case}: the loss", yours=yours, expected=f"{loss.item():.6f}", hint=hint)


def _expect_gradient(
    step: Step, used: list[torch.Tensor | None], gradient: torch.Tensor, watch: Watch, *, moved: bool
) -> None:
    """Looks at the gradients that the optimizer's step found in the model."""
    hint = "nothing moved: with the gradients added up in the model, optimizer.step() takes the step"
    if len(used) > 1:
        hint = "one step for the whole batch, after the gradients of all replicas have been added up"
    elif moved:
        hint = "the weights moved without it: add the gradients up in the model, whose one optimizer takes the step"
    expect(len(used) == 1, f"{step.case}: calls of optimizer.step()", yours=len(used), expected=1, hint=hint)
    yours = used[0]
    if yours is not None and is_close(yours, gradient):
        return
    raise NotYetError(
        f"{step.case}: the length of the gradient that optimizer.step() finds in the model",
        yours="no gradient" if yours is None else f"{yours.norm().item():.6f}",
        expected=f"{gradient.norm().item():.6f}",
        hint=_explain_gradient(step, yours, gradient, [step.find_share(call) for call in watch.calls]),
    )


def _explain_gradient(step: Step, yours: torch.Tensor | None, right: torch.Tensor, shares: list[list[int]]) -> str:
    """The hint that fits a wrong gradient."""
    if yours is None or not yours.any():
        return "no gradient reached optimizer.step(): parameter.grad = the sum of the copies, after any zero_grad()"
    if len(shares) > 1 and is_close(yours * len(shares), right):
        return "the loss is the mean over the whole batch already, so the parts add up: their mean is too small"
    if step.earlier is not None and is_close(yours, right + step.earlier):
        return "the gradient of the step before is still in it: assign parameter.grad, or clear it first"
    means = [step.differentiate(share)[1] for share in shares]
    parts = [mean * len(share) / len(step.images) for mean, share in zip(means, shares, strict=True)]
    if any(is_close(yours, part) for part in [*means, *parts]):
        return "these are one replica's gradients alone: add up those of all replicas"
    if is_close(yours, torch.stack(means).mean(0)) or is_close(yours, torch.stack(means).sum(0)):
        return "each replica's loss was a mean over its own chunk: the loss is one mean, over the whole batch"
    return "for each parameter of the model the sum of the gradients of its copies: zip(model.parameters(), ...)"


def _expect_error(answer: Callable, watch: Watch) -> None:
    """Lets one replica fail, and wants to hear of it; in a thread, since an answer may wait for the result for ever."""
    trial, heard = make_trial(watch, 4, normalized=False), ["returned as if nothing had happened"]
    watch.begin(trial["model"].list_weights(), 1, failing=2)

    def work() -> None:
        try:
            answer(**trial, count=2)
        except Exception as error:
            heard.append(type(error).__name__)

    # A thread of the learner's that ends by the error would print it.
    with mock.patch.object(threading, "excepthook", lambda _: None):
        caller = threading.Thread(target=work, daemon=True)
        caller.start()
        caller.join(2 * PATIENCE)
    expect(
        len(heard) == 2 and not caller.is_alive(),
        "4 images on 2 replicas, the second of which raises an error",
        yours="waits for ever" if caller.is_alive() else heard[0],
        expected="the error",
        hint="an error in a thread ends that thread alone; list(pool.map(...)) or future.result() raises it again",
    )
