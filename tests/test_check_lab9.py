"""Each check of lab 9 refuses typical wrong answers with the hint that fits, accepts right ones, and ends its ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError
from course.exercises import ranks
from course.exercises.lab9 import comm_hook, overlap
from lab_common import LabError

pytestmark = pytest.mark.usefixtures("runs")


def pack(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(flat, tensors):
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


@pytest.fixture
def late(request, monkeypatch):
    """Makes an answer that waits for the late rank wait in vain, but for a shorter time in tests."""
    if request.node.callspec.id in ("blocking", "no work", "waits in send", "waits", "returns the buffer"):
        monkeypatch.setattr(overlap, "LATE", 1.0)
        monkeypatch.setattr(comm_hook, "LATE", 1.0)


# 9.1


def overlap_by(
    *,
    start=lambda flat: dist.all_reduce(flat, async_op=True),
    keep=list,
    full=lambda bucket, limit: sum(gradient.nbytes for gradient in bucket) >= limit,
    empty=list.clear,
    flush=True,
    finish=lambda work: work.wait(),
    back=lambda flat: flat / dist.get_world_size(),
    forget=list.clear,
    give=lambda wait: wait,
):
    """The lab's answer, in which any part can be another."""

    def overlap(net, limit):
        bucket, sent = [], []

        def send():
            flat = pack(bucket)
            sent.append((keep(bucket), flat, start(flat)))
            empty(bucket)

        def collect(parameter):
            bucket.append(parameter.grad)
            if full(bucket, limit):
                send()

        def wait():
            if bucket and flush:
                send()
            for gradients, flat, work in sent:
                finish(work)
                if back:
                    unpack(back(flat), gradients)
            forget(sent)

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(collect)
        return give(wait)

    return overlap


def overlap_that_never_exceeds_the_limit(net, limit):
    """Right: a bucket is sent when the next gradient would not fit."""
    bucket, sent = [], []

    def send():
        flat = pack(bucket)
        sent.append((list(bucket), flat, dist.all_reduce(flat, async_op=True)))
        bucket.clear()

    def collect(parameter):
        if bucket and sum(gradient.nbytes for gradient in [*bucket, parameter.grad]) > limit:
            send()
        bucket.append(parameter.grad)

    def wait():
        send()
        for gradients, flat, work in sent:
            work.wait()
            unpack(flat / dist.get_world_size(), gradients)
        sent.clear()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(collect)
    return wait


def overlap_that_waits_for_the_last(net, limit):
    works = []

    def start(flat):
        works.append(dist.all_reduce(flat, async_op=True))
        return len(works)

    return overlap_by(start=start, finish=lambda number: number == len(works) and works[-1].wait())(net, limit)


def start_and_wait(flat):
    work = dist.all_reduce(flat, async_op=True)
    work.wait()
    return work


def overlap_in_fixed_buckets(net, limit):
    """Right: the buckets are made before, as DDP does; it divides first, and waits in backward's own order."""
    buckets, owner, count, sent = [[]], {}, {}, []
    for parameter in reversed(list(net.parameters())):
        if sum(one.nbytes for one in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(parameter)
        owner[parameter] = len(buckets) - 1

    def send(number):
        used = [parameter for parameter in buckets[number] if parameter.grad is not None]
        flat = pack([parameter.grad for parameter in used]) / dist.get_world_size()
        sent.append((used, flat, dist.all_reduce(flat, async_op=True)))

    def collect(parameter):
        number = owner[parameter]
        count[number] = count.get(number, 0) + 1
        if count[number] == len(buckets[number]):
            send(number)

    def wait():
        for number, bucket in enumerate(buckets):
            if 0 < count.get(number, 0) < len(bucket):
                send(number)
        while sent:
            used, flat, work = sent.pop(0)
            work.wait()
            unpack(flat, [parameter.grad for parameter in used])
        count.clear()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(collect)
    return wait


def overlap_without_limit(net, limit):
    return overlap_by()(net, 100)


def overlap_that_only_rank_0_finishes(net, limit):
    return overlap_by(flush=dist.get_rank() == 0)(net, limit)


WRONG_OVERLAP = {
    "sum": (overlap_by(back=lambda flat: flat), "divide by dist.get_world_size()"),
    "divided twice": (overlap_by(back=lambda flat: flat / 4), "divided twice"),
    "divided by two": (overlap_by(back=lambda flat: flat / 2), "whatever the number of ranks"),
    "blocking": (overlap_by(start=dist.all_reduce, finish=lambda work: None), "async_op=True"),
    "no work": (overlap_by(start=dist.all_reduce), "without async_op it waits, and returns None"),
    "limit of its own": (overlap_without_limit, "other sizes than limit demands"),
    "waits in send": (overlap_by(start=start_and_wait), "belongs into finish()"),
    "no rest": (overlap_by(flush=False), "last bucket is not full"),
    "same list": (overlap_by(keep=lambda bucket: bucket), "list(bucket), a copy"),
    "nothing back": (overlap_by(back=None), "did not come back"),
    "kept bucket": (overlap_by(empty=lambda bucket: None), "which is empty after that"),
    "kept rest": (
        overlap_by(empty=lambda bucket: None if len(bucket) < 3 else bucket.clear()),
        "is left for the second",
    ),
    "one each": (overlap_by(full=lambda bucket, limit: True), "version 2"),
    "one for all": (overlap_by(full=lambda bucket, limit: False), "as soon as the gradients"),
    "called": (overlap_by(give=lambda wait: wait()), "without calling it"),
    "never forgets": (overlap_by(forget=lambda sent: None), "sent.clear()"),
    "last wait alone": (overlap_that_waits_for_the_last, "not for the last alone"),
    "one rank": (overlap_that_only_rank_0_finishes, "only one rank calls"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_OVERLAP.values(), ids=WRONG_OVERLAP)
@pytest.mark.usefixtures("late")
def test_wrong_overlaps_are_refused(answer, hint):
    assert hint in refuse("9.1", answer)


@pytest.mark.parametrize("answer", [overlap_by(), overlap_in_fixed_buckets, overlap_that_never_exceeds_the_limit])
def test_right_overlaps_are_accepted(answer, capsys):
    check.exercise("9.1", answer)
    assert capsys.readouterr().out == (
        "✔ 9.1 Send while backward runs: both steps' gradients equal the ranks' mean, in buckets that are sent while "
        "the other rank is still late\n"
    )


# 9.2


def hook_by(
    *,
    size=lambda bucket: bucket.buffer().nbytes,
    start=lambda buffer: dist.all_reduce(buffer, async_op=True),
    promise=lambda work: work.get_future(),
    value=lambda future: future.value()[0] / dist.get_world_size(),
):
    """The lab's answer, in which any part can be another."""

    def note_and_average(notes, bucket):
        if size:
            notes.append(size(bucket))
        return promise(start(bucket.buffer())).then(value)

    return note_and_average


def hook_without_return(notes, bucket):
    hook_by()(notes, bucket)


def hook_that_returns_the_work(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)


def hook_that_returns_the_buffer(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    dist.all_reduce(bucket.buffer(), async_op=True).wait()
    return bucket.buffer() / dist.get_world_size()


def hook_that_waits(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done


def hook_that_sends_nothing(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def hook_that_divides_twice(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    bucket.buffer().div_(dist.get_world_size())
    return hook_by(size=None)(notes, bucket)


def hook_that_divides_first(notes, bucket):
    """Right: as torch's own does."""
    notes += [sum(gradient.numel() * gradient.element_size() for gradient in bucket.gradients())]
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def hook_of_torch(notes, bucket):
    """Right: torch's own does the rest."""
    notes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return allreduce_hook(dist.group.WORLD, bucket)


def hook_without_then(notes, bucket):
    notes.append(bucket.buffer().nbytes)
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def hook_of_other_names(notes, some):
    return hook_by()(notes, some)


def note_total(notes, bucket):
    notes.append((notes[-1] if notes else 0) + bucket.buffer().nbytes)
    return hook_by(size=None)(notes, bucket)


def note_first(notes, bucket):
    return hook_by(size=None if notes else lambda bucket: bucket.buffer().nbytes)(notes, bucket)


WRONG_HOOKS = {
    "sum": (hook_by(value=lambda future: future.value()[0]), "does not divide"),
    "divides twice": (hook_that_divides_twice, "divided twice"),
    "divides by two": (hook_by(value=lambda future: future.value()[0] / 2), "whatever the number of ranks"),
    "returns nothing": (hook_without_return, "has to return a future"),
    "returns the work": (hook_that_returns_the_work, "a Work is not a future"),
    "returns the buffer": (hook_that_returns_the_buffer, "return work.get_future().then"),
    "no then": (hook_without_then, "future.value()[0]"),
    "other name": (hook_of_other_names, "called bucket"),
    "no work": (hook_by(start=dist.all_reduce), "without async_op it waits, and returns None"),
    "waits": (hook_that_waits, "no wait() in the hook"),
    "sends nothing": (hook_that_sends_nothing, "rank 0's own gradients"),
    "numbers": (hook_by(size=lambda bucket: bucket.buffer().numel()), "not bytes"),
    "four bytes each": (hook_by(size=lambda bucket: 4 * bucket.buffer().numel()), "these have 8"),
    "index": (hook_by(size=lambda bucket: bucket.index()), "buckets' indices"),
    "total": (note_total, "do not add up"),
    "first only": (note_first, "a note in every call"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_HOOKS.values(), ids=WRONG_HOOKS)
@pytest.mark.usefixtures("late")
def test_wrong_hooks_are_refused(answer, hint):
    assert hint in refuse("9.2", answer)


@pytest.mark.parametrize("answer", [hook_by(), hook_that_divides_first, hook_of_torch])
def test_right_hooks_are_accepted(answer, capsys):
    check.exercise("9.2", answer)
    assert "✔ 9.2" in capsys.readouterr().out


# 9.3


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


class SumForwardOnly(SumOverRanks):
    @staticmethod
    def backward(ctx, gradient):
        return gradient


def sum_without_gradient(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def add_up(images):
    dims = 0, 2, 3
    count = torch.full_like(images[0, :, 0, 0], images.numel() / images.shape[1])
    return torch.stack([images.sum(dims), (images**2).sum(dims), count])


def view(tensor):
    return tensor.view(1, -1, 1, 1)


def norm_by(
    *,
    add_up=add_up,
    total=SumOverRanks.apply,
    find=lambda sums, squares, count: (sums / count, squares / count - (sums / count) ** 2),
    scale=lambda variance, eps: (variance + eps).rsqrt(),
    affine=lambda images, weight, bias: images * view(weight) + view(bias),
):
    """The lab's answer, in which any part can be another."""

    def sync_batch_norm(images, weight, bias, eps):
        mean, variance = find(*total(add_up(images)))
        return affine((images - view(mean)) * view(scale(variance, eps)), weight, bias)

    return sync_batch_norm


def norm_alone(images, weight, bias, eps):
    return F.batch_norm(images, None, None, weight, bias, True, eps=eps)


def norm_of_means(images, weight, bias, eps):
    local = torch.stack([images.mean((0, 2, 3)), images.var((0, 2, 3), correction=0)])
    mean, variance = SumOverRanks.apply(local) / dist.get_world_size()
    return (images - view(mean)) * view((variance + eps).rsqrt()) * view(weight) + view(bias)


def norm_of_equal_shares(images, weight, bias, eps):
    """Means of means and of mean squares: right where the shares are equal."""
    local = torch.stack([images.mean((0, 2, 3)), (images**2).mean((0, 2, 3))])
    mean, square = SumOverRanks.apply(local) / dist.get_world_size()
    return (images - view(mean)) * view((square - mean**2 + eps).rsqrt()) * view(weight) + view(bias)


def norm_without_axes(images, weight, bias, eps):
    mean, variance = norm_by.__kwdefaults__["find"](*SumOverRanks.apply(add_up(images)))
    return (images - mean) * (variance + eps).rsqrt() * weight + bias


def norm_of_two_passes(images, weight, bias, eps):
    count = SumOverRanks.apply(torch.tensor(float(images.numel() / images.shape[1])))
    mean = SumOverRanks.apply(images.sum((0, 2, 3))) / count
    variance = SumOverRanks.apply(((images - view(mean)) ** 2).sum((0, 2, 3))) / count
    return (images - view(mean)) * view((variance + eps).rsqrt()) * view(weight) + view(bias)


def norm_in_place(images, weight, bias, eps):
    mean, variance = norm_by.__kwdefaults__["find"](*SumOverRanks.apply(add_up(images)))
    images.data.sub_(view(mean).detach())
    return images * view((variance + eps).rsqrt()) * view(weight) + view(bias)


def norm_that_forgets_counts(images, weight, bias, eps):
    """Divides by the number of its own images times the number of ranks."""
    sums, squares, count = add_up(images)
    sums, squares = SumOverRanks.apply(torch.stack([sums, squares]))
    return norm_by(total=lambda _: (sums, squares, count * dist.get_world_size()))(images, weight, bias, eps)


def norm_by_moments(images, weight, bias, eps):
    """Right: means of means and of squares, weighted by the count."""
    count = images.numel() / images.shape[1]
    parts = [count * images.mean((0, 2, 3)), count * (images * images).mean((0, 2, 3)), images.new_tensor([count])]
    total = SumOverRanks.apply(torch.cat(parts))
    channels = len(weight)
    mean, square = total[:channels] / total[-1], total[channels:-1] / total[-1]
    return (images - view(mean)) / view(torch.sqrt(square - mean.square() + eps)) * view(weight) + view(bias)


def norm_by_torchs_all_reduce(images, weight, bias, eps):
    """Right: torch has an all-reduce with a gradient, too."""
    from torch.distributed.nn import all_reduce

    return norm_by(total=all_reduce)(images, weight, bias, eps)


WRONG_NORMS = {
    "alone": (norm_alone, "a rank's own images"),
    "means of means": (norm_of_means, "how far the ranks' means are apart"),
    "equal shares": (norm_of_equal_shares, "shares are unequal"),
    "no axes": (norm_without_axes, "[:, None, None]"),
    "own counts": (norm_that_forgets_counts, "of all ranks"),
    "count - 1": (
        norm_by(
            find=lambda sums, squares, count: (
                sums / count,
                (squares / count - (sums / count) ** 2) * count / (count - 1),
            )
        ),
        "not by count − 1",
    ),
    "eps outside": (norm_by(scale=lambda variance, eps: 1 / (variance.sqrt() + eps)), "eps belongs under the root"),
    "no eps": (norm_by(scale=lambda variance, eps: variance.rsqrt()), "eps is left out"),
    "squares alone": (norm_by(find=lambda sums, squares, count: (sums / count, squares / count)), "and not E[x²]"),
    "no weight": (norm_by(affine=lambda images, weight, bias: images), "weight + bias"),
    "backward of its own": (norm_by(total=SumForwardOnly.apply), "all-reduce the gradient"),
    "no gradient": (norm_by(total=sum_without_gradient), "no gradient flows through the statistics"),
    "two passes": (norm_of_two_passes, "join sums, squares and the count"),
    "in place": (norm_in_place, "leave the images as they are"),
    "count of a square": (
        norm_by(add_up=lambda images: torch.stack([*add_up(images)[:2], images[0, :, 0, 0] * 0 + len(images) * 4])),
        "images · height · width",
    ),
    "shape": (norm_by(affine=lambda images, weight, bias: images.flatten(1)), "in the shape of the images"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_NORMS.values(), ids=WRONG_NORMS)
def test_wrong_norms_are_refused(answer, hint):
    assert hint in refuse("9.3", answer)


@pytest.mark.parametrize("answer", [norm_by(), norm_by_moments, norm_by_torchs_all_reduce])
def test_right_norms_are_accepted(answer, capsys):
    check.exercise("9.3", answer)
    assert "✔ 9.3" in capsys.readouterr().out


# 9.4


def find_state(net, optimizer):
    return [tensor for tensor in net.state_dict().values() if tensor.is_floating_point()]


def find_momentum(net, optimizer):
    return [optimizer.state[parameter]["momentum_buffer"] for parameter in net.parameters()]


def local_by(
    *,
    due=lambda number, every: number % every == 0,
    tensors=find_state,
    divide=lambda flat: flat / dist.get_world_size(),
    back=unpack,
):
    """The lab's answer, in which any part can be another."""

    def local_step(net, optimizer, number, every):
        optimizer.step()
        if due(number, every):
            chosen = tensors(net, optimizer)
            with torch.no_grad():
                flat = pack(chosen)
                dist.all_reduce(flat)
                back(divide(flat), chosen)

    return local_step


def average_gradients(net, optimizer, number, every):
    if number % every == 0:
        flat = pack([parameter.grad for parameter in net.parameters()])
        dist.all_reduce(flat)
        unpack(flat / dist.get_world_size(), [parameter.grad for parameter in net.parameters()])
    optimizer.step()


def average_first(net, optimizer, number, every):
    local_by()(net, torch.optim.SGD(net.parameters(), lr=0.0), number, every)
    optimizer.step()


def average_each(net, optimizer, number, every):
    optimizer.step()
    if number % every == 0:
        for tensor in find_state(net, optimizer):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()


def forget_momentum(net, optimizer, number, every):
    local_by()(net, optimizer, number, every)
    if number % every == 0:
        optimizer.state.clear()


def step_seldom(net, optimizer, number, every):
    if number % every == 0:
        local_by()(net, optimizer, number, every)


def local_in_a_graph(net, optimizer, number, every):
    optimizer.step()
    if number % every == 0:
        for parameter in net.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


def average_by_load(net, optimizer, number, every):
    """Right: a state dict is made and loaded; integers are left as they are."""
    optimizer.step()
    if number % every:
        return
    state = net.state_dict()
    chosen = {name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point}
    flat = torch.cat([tensor.reshape(-1) for tensor in chosen.values()]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in chosen.values()])
    pairs = zip(chosen.items(), parts, strict=True)
    net.load_state_dict(state | {name: part.view_as(tensor) for (name, tensor), part in pairs})


def average_by_lists(net, optimizer, number, every):
    """Right: parameters and all buffers that are not integers."""
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    local_by(tensors=lambda *_: [*net.parameters(), *buffers])(net, optimizer, number, every)


WRONG_LOCAL = {
    "sum": (local_by(divide=lambda flat: flat), "the sum of the ranks' weights"),
    "divided by two": (local_by(divide=lambda flat: flat / 2), "whatever the number of ranks"),
    "gradients": (average_gradients, "same weights"),
    "average first": (average_first, "first optimizer.step()"),
    "no buffers": (local_by(tensors=lambda net, optimizer: list(net.parameters())), "are buffers"),
    "from 0": (local_by(due=lambda number, every: (number - 1) % every == 0), "send nothing unless"),
    "never": (local_by(due=lambda number, every: False), "steps count from 1"),
    "every third": (local_by(due=lambda number, every: number % 3 == 0), "when number % every == 0"),
    "one each": (average_each, "join weights and statistics in one tensor"),
    "nothing back": (local_by(back=lambda flat, tensors: None), "did not come back"),
    "momentum": (
        local_by(tensors=lambda *both: find_state(*both) + find_momentum(*both)),
        "momentum belongs to the optimizer of each rank",
    ),
    "momentum is gone": (forget_momentum, "keep the optimizer as it is"),
    "integers": (
        local_by(tensors=lambda net, optimizer: list(net.state_dict().values())),
        "counts batches",
    ),
    "in a graph": (local_in_a_graph, "torch.no_grad()"),
    "rounded": (local_by(divide=lambda flat: flat.float() / dist.get_world_size()), "in their own dtype"),
    "steps seldom": (step_seldom, "optimizer.step() in every step"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_LOCAL.values(), ids=WRONG_LOCAL)
def test_wrong_local_steps_are_refused(answer, hint):
    assert hint in refuse("9.4", answer)


@pytest.mark.parametrize("answer", [local_by(), average_by_load, average_by_lists])
def test_right_local_steps_are_accepted(answer, capsys):
    check.exercise("9.4", answer)
    assert "✔ 9.4" in capsys.readouterr().out


# The ranks of all four


@pytest.fixture
def short(monkeypatch):
    """Bounds that a test can wait for."""
    monkeypatch.setattr(ranks, "COLLECTIVE", 1.0)
    monkeypatch.setattr(ranks, "LIMIT", 3.0)


def note_pids(folder, work):
    """Wraps the function so that it first writes its process id into a file of the folder."""

    def noted(*arguments):
        (folder / str(os.getpid())).touch()
        return work(*arguments)

    return noted


def loop_forever(net, optimizer, number, every):
    while True:
        pass


def wait_alone(net, optimizer, number, every):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))


def send_unequal(net, optimizer, number, every):
    dist.all_reduce(torch.zeros(10 + 90 * dist.get_rank()))


BAD = {
    "loop": (loop_forever, "does not end"),
    "alone": (wait_alone, "only one rank calls"),
    "unequal": (send_unequal, "differs in size"),
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("answer", "hint"), BAD.values(), ids=BAD)
def test_ranks_that_do_not_end_are_ended(answer, hint, tmp_path):
    began = time.monotonic()
    hint_given = refuse("9.4", note_pids(tmp_path, answer))
    assert hint in hint_given or "size" in hint_given
    assert time.monotonic() - began < 15
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


ALONE = """
import os, sys, time
from pathlib import Path
from course.exercises.ranks import run_on_ranks

def work(rank):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(60)

run_on_ranks(work, work, case="a check")
"""


def test_the_ranks_end_with_a_kernel_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path)]) as kernel:
        pids = wait_for(lambda: found if len(found := list(tmp_path.iterdir())) == 2 else None)
        kernel.kill()
    assert wait_for(lambda: not any(is_running(path.name) for path in pids))


def wait_for(find, seconds=60):
    """Returns a function's result once it is true; None if it never is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := find():
            return found
        time.sleep(0.05)
    return None


def is_running(pid):
    """Returns True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop_with_an_error(net, optimizer, number, every):
    return net.no_such_thing


def untouched(net, optimizer, number, every):
    raise NotImplementedError("YOUR CODE HERE")


def test_errors_of_the_answer_are_named_with_their_line():
    with pytest.raises(OpenError) as stopped:
        check.exercise("9.4", stop_with_an_error)
    assert "net.no_such_thing" in stopped.value.where and "AttributeError" in stopped.value.cause
    with pytest.raises(OpenError, match="still to be written"):
        check.exercise("9.4", untouched)


def test_what_the_ranks_print_is_shown(capsys):
    def chatty(*arguments):
        print("step", arguments[2])
        local_by()(*arguments)

    check.exercise("9.4", chatty)
    assert "[rank 2] step 6\n✔ 9.4" in capsys.readouterr().out


def test_an_open_process_group_is_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LabError, match="A process group is open here"):
            check.exercise("9.4", local_by())
    finally:
        dist.destroy_process_group()
