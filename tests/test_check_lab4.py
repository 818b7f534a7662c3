"""Each check of lab 4 refuses typical wrong answers with the hint that fits and accepts right ones."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError
from lab_utils.parallel import CpuDataParallel

pytestmark = pytest.mark.usefixtures("runs")

KEPT = {}  # replicas of earlier steps, for the answer that keeps them


def run_in_pool(replicas, chunks):
    with ThreadPoolExecutor(len(chunks)) as pool:
        return list(pool.map(lambda replica, chunk: replica(chunk), replicas, chunks))


def run_in_turn(replicas, chunks):
    return [replica(chunk) for replica, chunk in zip(replicas, chunks, strict=True)]


def run_in_training(replicas, chunks):
    return run_in_pool([replica.train() for replica in replicas], chunks)


def copy_model(model, chunks):
    return [copy.deepcopy(model) for _ in chunks]


def share_model(model, chunks):
    model.zero_grad()
    return [model] * len(chunks)


def keep_copies(model, chunks):
    replicas = KEPT.setdefault((len(chunks), model.training), copy_model(model, chunks))
    for replica in replicas:
        replica.zero_grad()
    return replicas


def renew_copies(model, chunks):
    """Right: the replicas are kept, and what has changed is copied."""
    replicas = keep_copies(model, chunks)
    for replica in replicas:
        replica.load_state_dict(model.state_dict())
    return replicas


def reduce_sum(model, replicas):
    for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        parameter.grad = sum(one.grad for one in copies)


def reduce_mean(model, replicas):
    reduce_sum(model, replicas)
    for parameter in model.parameters():
        parameter.grad /= len(replicas)


def reduce_first(model, replicas):
    reduce_sum(model, replicas[:1])


def reduce_onto(model, replicas):
    for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        total = sum(one.grad for one in copies)
        parameter.grad = total if parameter.grad is None else parameter.grad + total


def reduce_some(model, replicas):
    reduce_sum(model, replicas)
    list(model.parameters())[-1].grad = None


def clear_and_step(optimizer):
    optimizer.zero_grad()
    optimizer.step()


def step_by_hand(
    *,
    scatter=lambda images, count: images.chunk(count),
    replicate=copy_model,
    apply=run_in_pool,
    reduce=reduce_sum,
    finish=lambda optimizer: optimizer.step(),
    give=lambda loss: loss.detach(),
):
    """The step of the notebook, in which any part can be another."""

    def step(model, images, labels, optimizer, count):
        chunks = scatter(images, count)
        replicas = replicate(model, chunks)
        outputs = apply(replicas, chunks)
        loss = F.cross_entropy(torch.cat(outputs), labels)
        loss.backward()
        reduce(model, replicas)
        finish(optimizer)
        return give(loss)

    return step


def step_as_the_notebook_writes_it(model, images, labels, optimizer, count):
    chunks = images.chunk(count)  # scatter
    replicas = [copy.deepcopy(model) for _ in chunks]  # replicate
    for replica in replicas:
        replica.zero_grad()
    with ThreadPoolExecutor(len(chunks)) as pool:  # apply in parallel
        outputs = list(pool.map(lambda replica, chunk: replica(chunk), replicas, chunks))
    loss = F.cross_entropy(torch.cat(outputs), labels)  # gather
    loss.backward()
    for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
        parameter.grad = sum(copy.grad for copy in copies)  # reduce: the sum
    optimizer.step()
    return loss.detach()


def step_with_a_replica_for_each_device(model, images, labels, optimizer, count):
    replicas = [copy.deepcopy(model) for _ in range(count)]  # also where there are fewer chunks
    outputs = run_in_pool(replicas, images.chunk(count))
    loss = F.cross_entropy(torch.cat(outputs), labels)
    optimizer.zero_grad()
    loss.backward()
    reduce_sum(model, replicas)
    optimizer.step()
    return loss.detach()


def step_with_threads_and_even_chunks(model, images, labels, optimizer, count):
    chunks = [chunk for chunk in images.tensor_split(count) if len(chunk)]
    replicas = [model, *(copy.deepcopy(model) for _ in chunks[1:])]  # as torch does: the model is replica 0
    outputs = [None] * len(chunks)

    def work(index):
        outputs[index] = replicas[index](chunks[index])

    optimizer.zero_grad()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(chunks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = nn.CrossEntropyLoss()(torch.cat(outputs), labels)
    loss.backward()
    for replica in replicas[1:]:
        for parameter, one in zip(model.parameters(), replica.parameters(), strict=True):
            parameter.grad += one.grad
    optimizer.step()
    return loss.detach()


def step_and_clear(model, images, labels, optimizer, count):
    loss = step_with_threads_and_even_chunks(model, images, labels, optimizer, count)
    optimizer.zero_grad()
    return loss


def scatter_labels(*, reduction="sum", gather=None, futures_heard=True):
    """A step in which each replica has its labels, too, and takes its own backward pass."""

    def step(model, images, labels, optimizer, count):
        shares = list(zip(images.chunk(count), labels.chunk(count), strict=True))
        replicas = [copy.deepcopy(model) for _ in shares]
        losses = {}

        def work(index):
            chunk, own = shares[index]
            loss = F.cross_entropy(replicas[index](chunk), own, reduction=reduction)
            if reduction == "sum":
                loss = loss / len(images)
            elif gather == "mean":
                loss = loss / len(shares)
            loss.backward()
            losses[index] = loss.detach()

        with ThreadPoolExecutor(len(shares)) as pool:
            futures = [pool.submit(work, index) for index in range(len(shares))]
        if futures_heard:
            for future in futures:
                future.result()
        for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            parameter.grad = sum(one.grad for one in copies if one.grad is not None)
        optimizer.step()
        return losses[0] if gather == "first" else sum(losses.values())

    return step


def step_of_torch(model, images, labels, optimizer, count):
    optimizer.zero_grad()
    loss = F.cross_entropy(CpuDataParallel(model, count, threads=1)(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_without_clearing(model, images, labels, optimizer, count):
    loss = F.cross_entropy(CpuDataParallel(model, count, threads=1)(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_each_replica(merge):
    """Each replica has its optimizer; afterwards the weights go back into the model."""

    def step(model, images, labels, optimizer, count):
        chunks = images.chunk(count)
        replicas = copy_model(model, chunks)
        loss = F.cross_entropy(torch.cat(run_in_pool(replicas, chunks)), labels)
        loss.backward()
        for replica in replicas:
            torch.optim.SGD(replica.parameters(), lr=0.2, momentum=0.9).step()
        states = [replica.state_dict() for replica in replicas]
        if merge == "mean":
            model.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
        elif merge == "first":
            model.load_state_dict(states[0])
        elif merge == "first, too":
            reduce_sum(model, replicas)
            optimizer.step()
            model.load_state_dict(states[0])
        return loss.detach()

    return step


def step_that_forgets_errors(model, images, labels, optimizer, count):
    chunks, outputs = images.chunk(count), {}
    replicas = copy_model(model, chunks)

    def work(index):
        try:
            outputs[index] = replicas[index](chunks[index])
        except RuntimeError:
            outputs[index] = torch.zeros(len(chunks[index]), 5, dtype=torch.float64, requires_grad=True)

    with ThreadPoolExecutor(len(chunks)) as pool:
        list(pool.map(work, range(len(chunks))))
    loss = F.cross_entropy(torch.cat([outputs[index] for index in range(len(chunks))]), labels)
    loss.backward()
    reduce_sum(model, [replica for replica in replicas if replica.head.bias.grad is not None])
    optimizer.step()
    return loss.detach()


def step_on_one_device(model, images, labels, optimizer, count):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_on_one_chunk(model, images, labels, optimizer, count):
    return step_on_one_device(model, images.chunk(count)[0], labels.chunk(count)[0], optimizer, 1)


WRONG_STEPS = {
    "clears the gradients": (step_and_clear, "leave them in the model"),
    "mean of the gradients": (step_by_hand(reduce=reduce_mean), "so the parts add up"),
    "gradients of replica 0": (step_by_hand(reduce=reduce_first), "one replica's gradients alone"),
    "gradients left behind": (step_by_hand(reduce=lambda *_: None), "no gradient reached"),
    "gradients cleared": (step_by_hand(finish=clear_and_step), "after any zero_grad()"),
    "one parameter forgotten": (step_by_hand(reduce=reduce_some), "for each parameter"),
    "gradients on top": (step_by_hand(reduce=reduce_onto), "the step before"),
    "never cleared": (step_without_clearing, "step before"),
    "channels split": (step_by_hand(scatter=lambda images, count: images.chunk(count, 1)), "dimension 0"),
    "split": (step_by_hand(scatter=lambda images, count: images.split(len(images) // count)[:count]), "remainder"),
    "everything": (step_by_hand(scatter=lambda images, count: [images] * count), "whole batch"),
    "the first chunk twice": (
        step_by_hand(scatter=lambda images, count: [images.chunk(count)[0], *images.chunk(count)[:-1]]),
        "each image goes to one replica",
    ),
    "two at most": (step_by_hand(scatter=lambda images, count: images.chunk(min(count, 2))), "as many chunks"),
    "one too many": (
        step_by_hand(scatter=lambda images, count: images.split(max(1, len(images) // count))),
        "at most count",
    ),
    "one chunk alone": (step_on_one_chunk, "as many replicas as chunks"),
    "mean of means": (scatter_labels(reduction="mean", gather="mean"), "mean of means"),
    "sum of means": (scatter_labels(reduction="mean"), "were added up"),
    "loss of replica 0": (scatter_labels(gather="first"), "one replica's chunk"),
    "weights averaged": (step_each_replica("mean"), "the weights moved without it"),
    "weights of replica 0 on top": (step_each_replica("first, too"), "after optimizer.step()"),
    "weights left behind": (step_each_replica("none"), "nothing moved"),
    "stale replicas": (step_by_hand(replicate=keep_copies), "stale"),
    "one module for all": (step_by_hand(replicate=share_model), "own memory"),
    "one after the other": (step_by_hand(apply=run_in_turn), "start all threads"),
    "another order": (step_by_hand(apply=lambda *a: run_in_pool(*a)[::-1]), "in the order of the chunks"),
    "replicas that train": (step_by_hand(apply=run_in_training), "leave train() and eval()"),
    "two steps": (step_by_hand(finish=lambda optimizer: [optimizer.step() for _ in "12"]), "one step for the whole"),
    "loss with its graph": (step_by_hand(give=lambda loss: loss), "detach"),
    "no loss": (step_by_hand(give=lambda loss: None), "return loss.detach()"),
    "a replica without a chunk": (step_with_a_replica_for_each_device, "fewer chunks than `count`"),
    "nothing at all": (lambda **case: None, "no forward pass"),
    "errors caught": (step_that_forgets_errors, "ends that thread alone"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_steps_get_their_hint(answer, hint):
    KEPT.clear()
    with pytest.raises(NotYetError) as refused:
        check.exercise("4.1", answer)
    assert hint in refused.value.hint, refused.value
    assert refused.value.yours and refused.value.expected


@pytest.mark.parametrize(
    "answer",
    [
        step_as_the_notebook_writes_it,
        step_with_threads_and_even_chunks,
        scatter_labels(),
        step_of_torch,
        step_by_hand(replicate=renew_copies),
        step_by_hand(scatter=lambda images, count: images.tensor_split(count)),  # with chunks of no image
    ],
)
@pytest.mark.filterwarnings("error")
def test_right_steps_get_the_tick(answer, capsys):
    KEPT.clear()
    seed = torch.initial_seed()
    check.exercise("4.1", answer)
    expected = "✔ 4.1 Data parallelism by hand: loss, gradients and weights equal one device's in float64, on 1, 2, "
    assert capsys.readouterr() == (f"{expected}3 and 5 replicas, for uneven batches too\n", "")
    assert torch.initial_seed() == seed


def predict(source=lambda images, count: images.chunk(count)[0], mix=None):
    """A running mean of some of the images, mixed with the old one."""
    mix = mix or (lambda old, new, momentum: (1 - momentum) * old + momentum * new)

    def predict_running_mean(batch_norm, images, count):
        return mix(batch_norm.running_mean, source(images, count).mean((0, 2, 3)), batch_norm.momentum)

    return predict_running_mean


def predict_by_running(batch_norm, images, count):
    batch_norm(images.chunk(count)[0])
    return batch_norm.running_mean


def predict_by_running_a_copy(batch_norm, images, count):
    module = copy.deepcopy(batch_norm).train()
    with torch.no_grad():
        module(images[: math.ceil(len(images) / count)])
    return module.running_mean.clone()


def predict_by_running_all_chunks(batch_norm, images, count):
    for chunk in images.chunk(count):
        batch_norm(chunk)
    return batch_norm.running_mean


def predict_by_averaging(batch_norm, images, count):
    modules = [copy.deepcopy(batch_norm) for _ in images.chunk(count)]
    for module, chunk in zip(modules, images.chunk(count), strict=True):
        module(chunk)
    return sum(module.running_mean for module in modules) / len(modules)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (predict(lambda images, count: images), "SyncBatchNorm"),
        (predict_by_averaging, "not averaged"),
        (predict(lambda images, count: images.chunk(count)[-1]), "not the last replica"),
        (predict(mix=lambda old, new, momentum: new), "left out"),
        (predict(mix=lambda old, new, momentum: momentum * old + (1 - momentum) * new), "weighs the new value"),
        (predict(mix=lambda old, new, momentum: 0.9 * old + 0.1 * new), "(1 - momentum) * batch_norm"),
        (predict(mix=lambda old, new, momentum: old), "it does change"),
        (predict(lambda images, count: images[: len(images) // count]), "chunk rounds up"),
        (predict_by_running_all_chunks, "not one per chunk"),
        (lambda batch_norm, images, count: images.chunk(count)[0].mean(0), "first.mean((0, 2, 3))"),
    ],
)
def test_wrong_running_means_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("4.2", answer)
    assert hint in refused.value.hint, refused.value
    assert refused.value.yours and refused.value.expected


@pytest.mark.parametrize("answer", [predict(), predict_by_running, predict_by_running_a_copy])
def test_right_running_means_are_accepted(answer, capsys):
    check.exercise("4.2", answer)
    expected = "✔ 4.2 Which statistics survive: only replica 0's share of the batch reaches the running mean, as the "
    assert capsys.readouterr().out == f"{expected}emulation of DataParallel leaves it\n"


def list_batches(images, batch_size, drop_last):
    full, rest = divmod(images, batch_size)
    return [batch_size] * (full > 0) + [rest] * (rest > 0 and not drop_last)


def find(split, batches=list_batches):
    """The smallest part of the batches given."""

    def find_smallest_chunk(images, batch_size, count, drop_last):
        return min(part for batch in batches(images, batch_size, drop_last) for part in split(batch, count))

    return find_smallest_chunk


def split_as_torch(batch, count):
    return [len(chunk) for chunk in torch.empty(batch).chunk(count)]


def split_by_arithmetic(batch, count):
    size = -(-batch // count)
    return [size, batch % size or size]


def split_evenly(batch, count):
    return [len(part) for part in torch.empty(batch).tensor_split(count) if len(part)]


def split_with_idle_devices(batch, count):
    sizes = split_as_torch(batch, count)
    return sizes + [0] * (count - len(sizes))


def find_by_sampling(images, batch_size, count, drop_last):
    loader = torch.utils.data.DataLoader(range(images), batch_size=batch_size, drop_last=drop_last)
    return min(len(chunk) for batch in loader for chunk in batch.chunk(count))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda images, batch_size, count, drop_last: batch_size // count, "chunk rounds the size up"),
        (lambda images, batch_size, count, drop_last: -(-batch_size // count), "what is left"),
        (find(split_as_torch, lambda images, size, drop: [size]), "without drop_last"),
        (find(split_as_torch, lambda images, size, drop: list_batches(images, size, False)), "with drop_last"),
        (find(split_as_torch, lambda *case: list_batches(*case)[-1:]), "a small last chunk"),
        (
            find(split_as_torch, lambda images, size, drop: [size, *list_batches(images, size, drop)]),
            "a data set smaller than a batch has no full batch",
        ),
        (find(split_evenly), "tensor_split"),
        (find(split_with_idle_devices), "runs no replica"),
        (lambda *_: 1, "for the full batch and for the last one"),
        (lambda *_: 8.0, "an int"),
    ],
)
def test_wrong_chunks_get_their_hint(answer, hint):
    with pytest.raises(NotYetError) as refused:
        check.exercise("4.3", answer)
    assert hint in refused.value.hint, refused.value
    assert refused.value.yours and refused.value.expected


@pytest.mark.parametrize("answer", [find(split_as_torch), find(split_by_arithmetic), find_by_sampling])
def test_right_chunks_are_accepted(answer, capsys):
    check.exercise("4.3", answer)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "✔ 4.3 The last chunk of one image: the sizes that torch's chunk makes, in 710 cases"


def test_an_error_that_wrong_shares_do_not_explain_passes_through():
    with pytest.raises(OpenError, match="mine"):
        check.exercise("4.1", step_by_hand(give=lambda loss: int("mine")))


def test_an_error_before_all_replicas_ran_passes_through():
    def run_first(replicas, chunks):
        with ThreadPoolExecutor(len(chunks)) as pool:
            return [pool.submit(replicas[0], chunks[0]).result(), int("mine")]

    with pytest.raises(OpenError, match="mine"):
        check.exercise("4.1", step_by_hand(apply=run_first))
