"""Lab 9: edits of the notebook's solutions are refused with the hint that fits, and other right answers accepted."""

import pytest
import torch
import torch.distributed as dist
from harness.answers import refuse_edited
from torch.distributed.nn import all_reduce as all_reduce_with_gradient

from course import check
from course.exercises import lab9

pytestmark = pytest.mark.usefixtures("runs")
# For each: the exercise, what is replaced in its solution, by what, and words of the hint.
EDITS = [
    ("9.1", ", async_op=True", "", "without async_op it waits"),
    ("9.1", "async_op=True)))", "async_op=True)))\n        sent[-1][2].wait()", "into finish()"),
    ("9.1", "work.wait()", "work", "call work.wait() for each Work"),
    ("9.1", "return finish", "return finish()", "without calling it"),
    ("9.1", "sent.clear()", "pass", "sent.clear()"),
    ("9.1", "limit, send)", "100, send)", "one all-reduce for each bucket of limit bytes"),
    ("9.1", "limit, send)", "10**9, send)", "as soon as the gradients"),
    ("9.2", "async_op=True", "async_op=False", "without async_op it waits"),
    ("9.2", "get_future()", "get_future()\n    future.wait()", "no wait() in the hook"),
    ("9.2", "return future", "future", "has to return a future"),
    ("9.2", ".then(lambda done: done.value()[0] / dist.get_world_size())", "", "a list of one tensor"),
    ("9.3", "images - mean[:, None, None]", "images - mean", "[:, None, None]"),
    ("9.3", "    mean = total", "    images -= 1\n    mean = total", "has to leave a graph"),
    ("9.3", "SumOverRanks.apply(torch.stack(own))", "map(SumOverRanks.apply, own)", "join sums, squares and the count"),
    ("9.3", "return SumOverRanks.forward(ctx, gradient)", "return gradient", "all-reduce the gradient"),
    ("9.3", "torch.stack(own))", "torch.stack(own).detach())", "no gradient flows"),
    ("9.4", "    optimizer.step()\n", "    number % every or optimizer.step()\n", "optimizer.step() in every step"),
    ("9.4", "== 0", "== 1", "send nothing unless"),
    ("9.4", " if t.is_floating_point()", "", "counts batches"),
    ("9.4", "net.state_dict().values() if t.is_floating_point()", "net.parameters()", "torch.no_grad()"),
    (
        "9.4",
        "state = [",
        "state = [s['momentum_buffer'] for s in optimizer.state.values()] + [",
        "and not of the momentum",
    ),
]


@pytest.mark.parametrize(("number", "old", "new", "hint"), EDITS)
def test_edited_solutions_are_refused(number, old, new, hint, monkeypatch):
    if "async_op" in old or ".wait()" in new:  # the late rank waits in vain
        monkeypatch.setattr(lab9, "LATE", 1.0)
    assert hint in refuse_edited(number, (old, new))


def pack(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(flat, tensors):
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def overlap_in_fixed_buckets(net, limit):
    """The buckets are made before, as DDP does; it divides first, and waits in backward's own order."""
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


def hook_that_divides_first(notes, bucket):
    notes += [sum(gradient.numel() * gradient.element_size() for gradient in bucket.gradients())]
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def norm_by_moments(images, weight, bias, eps):
    """Means of values and of squares, weighted by the count; torch has an all-reduce with a gradient, too."""
    count = images.numel() / images.shape[1]
    parts = [count * images.mean((0, 2, 3)), count * (images * images).mean((0, 2, 3)), images.new_tensor([count])]
    total = all_reduce_with_gradient(torch.cat(parts))
    channels = len(weight)
    mean, square = total[:channels] / total[-1], total[channels:-1] / total[-1]
    weight, bias, mean, variance = (one.view(1, -1, 1, 1) for one in (weight, bias, mean, square - mean.square()))
    return (images - mean) / torch.sqrt(variance + eps) * weight + bias


@torch.no_grad()
def average_by_lists(net, optimizer, number, every):
    """Parameters and all buffers that are not integers."""
    optimizer.step()
    if number % every == 0:
        tensors = [*net.parameters(), *(buffer for buffer in net.buffers() if buffer.is_floating_point())]
        flat = pack(tensors)
        dist.all_reduce(flat)
        unpack(flat / dist.get_world_size(), tensors)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("9.1", overlap_in_fixed_buckets),
        ("9.2", hook_that_divides_first),
        ("9.3", norm_by_moments),
        ("9.4", average_by_lists),
    ],
)
def test_other_right_answers_are_accepted(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number}")
