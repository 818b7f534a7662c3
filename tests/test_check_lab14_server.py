"""The checks of 14.3 and 14.4 refuse typical wrong servers with the hint that fits, accept right ones, and end all."""

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

from course import check
from course.check import NotYetError, OpenError
from course.exercises.lab14 import parameter_server

pytestmark = pytest.mark.usefixtures("runs", "no_fork_is_left")


@pytest.fixture
def soon(monkeypatch):
    """Shortens the time limit for servers that hang."""
    monkeypatch.setattr(parameter_server, "LIMIT", 1.5)


def refuse(number, answer, words):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    assert words in refused.value.hint, refused.value
    return refused.value


def accept(number, answer, capsys):
    check.exercise(number, answer)
    said = capsys.readouterr().out
    assert f"✔ {number}" in said and said.count("\n") == 1
    assert len(said.partition(": ")[2]) < 110


# 14.3


def send_to_all(weights, workers):
    for worker in workers:
        dist.send(weights, dst=worker)


def receive_sum(weights, workers):
    gradient, total = torch.empty_like(weights), torch.zeros_like(weights)
    for worker in workers:
        dist.recv(gradient, src=worker)
        total += gradient
    return total


def step_with_mean(weights, total, workers, lr):
    weights -= lr * total / len(workers)


def serve_in_turn_by(*, count=lambda rounds: rounds, send=send_to_all, receive=receive_sum, step=step_with_mean):
    """A synchronous server with one thing done differently."""

    def serve_in_turn(weights, workers, rounds, lr):
        for _ in range(count(rounds)):
            send(weights, workers)
            step(weights, receive(weights, workers), workers, lr)

    return serve_in_turn


def step_by(change):
    """Makes a server whose step differs from plain SGD; ``change`` changes the weights."""
    return serve_in_turn_by(step=change)


def rebind(weights, workers, rounds, lr):
    for _ in range(rounds):
        send_to_all(weights, workers)
        weights = weights - lr * receive_sum(weights, workers) / len(workers)
    return weights


def send_once(weights, workers, rounds, lr):
    send_to_all(weights, workers)
    for _ in range(rounds):
        step_with_mean(weights, receive_sum(weights, workers), workers, lr)


def receive_first(weights, workers, rounds, lr):
    for _ in range(rounds):
        total = receive_sum(weights, workers)
        send_to_all(weights, workers)
        step_with_mean(weights, total, workers, lr)


def keep_total(weights, workers, rounds, lr):
    total = torch.zeros_like(weights)
    for _ in range(rounds):
        send_to_all(weights, workers)
        total += receive_sum(weights, workers)
        weights -= lr * total / len(workers)


def receive_in_one(weights, workers):
    gradient = torch.empty_like(weights)
    works = [dist.irecv(gradient, src=worker) for worker in workers]
    total = torch.zeros_like(weights)
    for work in works:
        work.wait()
    for _ in works:
        total += gradient
    return total


def receive_last(weights, workers):
    gradient = torch.empty_like(weights)
    for worker in workers:
        dist.recv(gradient, src=worker)
    return gradient


def receive_onto_ones(weights, workers):
    return receive_sum(weights, workers) + 1


def receive_without_wait(weights, workers):
    gradients = [torch.empty_like(weights) for _ in workers]
    works = [dist.irecv(one, src=worker) for one, worker in zip(gradients, workers, strict=True)]
    total = sum(gradients)
    for work in works:
        work.wait()
    return total


def receive_never_waited(weights, workers):
    gradients = [torch.empty_like(weights) for _ in workers]
    for one, worker in zip(gradients, workers, strict=True):
        dist.irecv(one, src=worker)
    time.sleep(0.2)
    return sum(gradients)


def receive_one_number(weights, workers):
    gradient = torch.empty(1)
    for worker in workers:
        dist.recv(gradient, src=worker)
    return gradient


def reduce_sum(weights, workers):
    total = torch.zeros_like(weights)
    dist.reduce(total, dst=0)
    return total


def loop_forever(weights, workers, rounds, lr):
    while True:
        serve_in_turn_by()(weights, workers, rounds, lr)


def spin(*_):
    while True:
        pass


def die(*_):
    os._exit(3)


def serve_with_rank_0(weights, workers, rounds, lr):
    serve_in_turn_by()(weights, range(dist.get_world_size()), rounds, lr)


def serve_but_one(weights, workers, rounds, lr):
    serve_in_turn_by()(weights, [*workers][:-1], rounds, lr)


def end_early(*, step, gradients):
    """Makes servers that skip the last round's step, or the last worker's gradient."""

    def serve_in_turn(weights, workers, rounds, lr):
        serve_in_turn_by()(weights, workers, rounds - 1, lr)
        send_to_all(weights, workers)
        total = receive_sum(weights, [*workers][:gradients])
        if step:
            step_with_mean(weights, total, workers, lr)

    return serve_in_turn


def send_less_to_last(weights, workers):
    send_to_all(weights, workers[:-1])
    send_to_all(weights * (1 if weights[0] == 0.5 else 0.9), workers[-1:])


WRONG_IN_TURN = {
    "no last step": (end_early(step=False, gradients=None), "no step was taken"),
    "one gradient is left": (end_early(step=True, gradients=-1), "the last round, too"),
    "sum": (step_by(lambda w, total, workers, lr: w.sub_(lr * total)), "a step with the sum"),
    "uphill": (
        step_by(lambda w, total, workers, lr: w.add_(lr * total / len(workers))),
        "has the wrong sign: subtract",
    ),
    "uphill with the sum": (step_by(lambda w, total, workers, lr: w.add_(lr * total)), "and it is the sum"),
    "no lr": (step_by(lambda w, total, workers, lr: w.sub_(total / len(workers))), "multiply the mean by it"),
    "no lr, no mean": (step_by(lambda w, total, workers, lr: w.sub_(total)), "the sum in place of the mean"),
    "world size": (
        step_by(lambda w, total, workers, lr: w.sub_(lr * total / dist.get_world_size())),
        "rank 0 has no gradient",
    ),
    "by two": (step_by(lambda w, total, workers, lr: w.sub_(lr * total / 2)), "whatever the number of workers"),
    "twice": (step_by(lambda w, total, workers, lr: w.sub_(lr * total / len(workers) ** 2)), "divided twice"),
    "by seven": (step_by(lambda w, total, workers, lr: w.sub_(lr * total / 7)), "the mean is the sum divided by"),
    "rebinds": (rebind, "change it in place"),
    "sends others first": (
        serve_in_turn_by(send=lambda w, workers: send_to_all(torch.zeros_like(w), workers)),
        "those that you were given",
    ),
    "keeps the total": (keep_total, "set the total to zero in each round"),
    "adds to ones": (serve_in_turn_by(receive=receive_onto_ones), "begins every round at zero"),
    "one buffer": (serve_in_turn_by(receive=receive_in_one), "a receive overwrites its tensor"),
    "only the last": (serve_in_turn_by(receive=receive_last), "gradient is not in it"),
    "unequal shares": (
        serve_in_turn_by(receive=lambda w, workers: receive_sum(w, workers[:1]) * 2 + receive_sum(w, workers[1:])),
        "have the same share in a mean",
    ),
    "reads before wait": (serve_in_turn_by(receive=receive_without_wait), "before you use its tensor"),
    "never waits": (serve_in_turn_by(receive=receive_never_waited), "wait() for each that you start"),
    "a round too few": (serve_in_turn_by(count=lambda rounds: rounds - 1), "there are `rounds` of them"),
    "a round too many": (serve_in_turn_by(count=lambda rounds: rounds + 1), "after the last one nothing is sent"),
    "nothing": (serve_in_turn_by(count=lambda rounds: 0), "it is left out"),
    "rank 0, too": (serve_with_rank_0, "rank 0 serves"),
    "one number": (serve_in_turn_by(receive=receive_one_number), "as long as weights"),
    "double": (serve_in_turn_by(send=lambda w, workers: send_to_all(w.double(), workers)), "a float32 tensor"),
    "collective": (serve_in_turn_by(receive=reduce_sum), "without a collective"),
}
STUCK_IN_TURN = {
    "leaves one out": (serve_but_one, "first send to all of `workers`"),
    "sends once": (send_once, "each round sends the weights anew"),
    "receives first": (receive_first, "each round sends first"),
    "receives from all but one": (
        serve_in_turn_by(receive=lambda w, workers: receive_sum(w, workers[:-1])),
        "receives one from every worker",
    ),
    "goes on for ever": (loop_forever, "how many rounds there are"),
    "dies": (die, "let the process live"),
}


@pytest.mark.parametrize(("answer", "words"), WRONG_IN_TURN.values(), ids=WRONG_IN_TURN)
def test_wrong_servers_in_turn_are_refused(answer, words):
    refuse("14.3", answer, words)


def test_the_worker_is_named_that_got_other_weights():
    refused = refuse("14.3", serve_in_turn_by(send=send_less_to_last), "as they are")
    assert "what worker 2 got in round 2" in refused.what


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("answer", "words"), STUCK_IN_TURN.values(), ids=STUCK_IN_TURN)
def test_servers_in_turn_that_get_stuck_are_refused(answer, words):
    refuse("14.3", answer, words)


def in_turn_with_works(weights, workers, rounds, lr):
    gradients = {worker: torch.empty_like(weights) for worker in workers}
    for _ in range(rounds):
        works = [dist.irecv(gradient, src=worker) for worker, gradient in gradients.items()]
        works += [dist.isend(weights, dst=worker) for worker in workers]
        for work in works:
            work.wait()
        weights.add_(torch.stack([*gradients.values()]).mean(0), alpha=-lr)


def in_turn_as_a_batch(weights, workers, rounds, lr):
    for _ in range(rounds):
        gradients = [torch.zeros_like(weights) for _ in workers]
        sends = [P2POp(dist.isend, weights, worker) for worker in workers]
        receives = [P2POp(dist.irecv, one, worker) for one, worker in zip(gradients, workers, strict=True)]
        [work.wait() for work in batch_isend_irecv(sends + receives)]
        weights[:] = weights - lr * sum(gradients) / len(gradients)


def in_turn_from_whoever_is_first(weights, workers, rounds, lr):
    gradient = torch.empty_like(weights)
    for _ in range(rounds):
        send_to_all(weights, sorted(workers, reverse=True))
        total = 0
        for _ in workers:
            dist.recv(gradient)
            total = total + gradient
        weights.sub_(total, alpha=lr / len(workers))


def in_turn_with_numpy(weights, workers, rounds, lr):
    numbers = weights.numpy()
    while rounds:
        [dist.isend(weights, worker).wait() for worker in workers]
        gradients = np.empty((len(workers), len(numbers)), np.float32)
        for worker, row in zip(workers, gradients, strict=True):
            dist.recv(torch.from_numpy(row), worker)
        numbers -= lr * gradients.mean(0)
        rounds -= 1
    return weights


def in_turn_by_parts(weights, workers, rounds, lr):
    """One small step for each gradient: their sum is the step with the mean."""
    for _ in range(rounds):
        send_to_all(weights, workers)
        for worker in workers:
            gradient = torch.empty_like(weights)
            dist.recv(gradient, src=worker)
            weights -= lr / len(workers) * gradient


@pytest.mark.parametrize(
    "answer",
    [
        serve_in_turn_by(),
        in_turn_with_works,
        in_turn_as_a_batch,
        in_turn_from_whoever_is_first,
        in_turn_with_numpy,
        in_turn_by_parts,
    ],
)
def test_right_servers_in_turn_are_accepted(answer, capsys):
    accept("14.3", answer, capsys)


# 14.4


def find_age(update, seen, worker):
    return update - seen[worker]


def step_at_once(weights, gradient, workers, lr):
    weights -= lr * gradient


def answer_worker(weights, worker, update, updates):
    dist.send(weights, dst=worker)


def serve_at_once_by(
    *,
    begin=send_to_all,
    count=lambda updates: updates,
    receive=lambda gradient, update, workers: dist.recv(gradient),
    age=find_age,
    step=step_at_once,
    has_seen=lambda update: update + 1,
    answer=answer_worker,
    give=lambda ages: ages,
):
    """An asynchronous server with one thing done differently."""

    def serve_at_once(weights, workers, updates, lr):
        seen, ages = dict.fromkeys(workers, 0), []
        gradient = torch.empty_like(weights)
        begin(weights, workers)
        for update in range(count(updates)):
            worker = receive(gradient, update, workers)
            ages.append(age(update, seen, worker))
            step(weights, gradient, workers, lr)
            seen[worker] = has_seen(update)
            answer(weights, worker, update, updates)
        return give(ages)

    return serve_at_once


def receive_in_order(gradient, update, workers):
    return dist.recv(gradient, src=workers[update % len(workers)])


def receive_too_late(gradient, update, workers):
    """Reads the buffer before the gradient has arrived."""
    coming = torch.empty_like(gradient)
    work = dist.irecv(coming)
    gradient.copy_(coming)
    work.wait()
    return work._source_rank()


def wait_for_all(weights, workers, updates, lr):
    seen, ages, buffers = dict.fromkeys(workers, 0), [], {worker: torch.empty_like(weights) for worker in workers}
    send_to_all(weights, workers)
    for first in range(0, updates, len(workers)):
        for worker, gradient in buffers.items():
            dist.recv(gradient, src=worker)
        for number, (worker, gradient) in enumerate(buffers.items(), first):
            weights -= lr * gradient
            ages.append(number - seen[worker])
            seen[worker] = number + 1
            dist.send(weights, dst=worker)
    return ages


def answer_all(weights, worker, update, updates):
    for other in range(1, dist.get_world_size()):
        dist.send(weights, dst=other)


def answer_unless_last(weights, worker, update, updates):
    if update < updates - 1:
        dist.send(weights, dst=worker)


def rebind_at_once(weights, workers, updates, lr):
    gradient, ages, seen = torch.empty_like(weights), [], dict.fromkeys(workers, 0)
    send_to_all(weights, workers)
    for update in range(updates):
        worker = dist.recv(gradient)
        weights = weights - lr * gradient
        ages.append(update - seen[worker])
        seen[worker] = update + 1
        dist.send(weights, dst=worker)
    return ages


def keep_gradients(*, average):
    """Makes a server whose steps also use earlier gradients: all of them, or the newest of each worker."""

    def serve_at_once(weights, workers, updates, lr):
        gradient, ages, seen = torch.empty_like(weights), [], dict.fromkeys(workers, 0)
        newest, total = torch.zeros(len(workers) + 1, len(weights)), torch.zeros_like(weights)
        send_to_all(weights, workers)
        for update in range(updates):
            worker = dist.recv(gradient)
            newest[worker] = gradient
            total += gradient
            weights -= lr * (newest.sum(0) if average else total)
            ages.append(update - seen[worker])
            seen[worker] = update + 1
            dist.send(weights, dst=worker)
        return ages

    return serve_at_once


def receive_ahead(weights, workers, updates, lr):
    """Leaves a receive open, which takes a gradient that is still on its way."""
    ages = serve_at_once_by()(weights, workers, updates, lr)
    dist.irecv(torch.empty_like(weights), src=workers[0])
    return ages


def count_own(weights, workers, updates, lr):
    """Returns ages that count only the worker's own updates."""
    given = Counter()

    def note(update, seen, worker):
        given[worker] += 1
        return given[worker] - 1

    return serve_at_once_by(age=note)(weights, workers, updates, lr)


def go_on(weights, workers, updates, lr):
    while True:
        serve_at_once_by(begin=send_to_all if weights[0] == 0.5 else lambda *_: None)(weights, workers, updates, lr)


def send_last_apart(weights, workers, updates, lr):
    """Gives the last step to the worker, but not to the caller."""
    ages = serve_at_once_by(count=lambda updates: updates - 1)(weights, workers, updates, lr)
    worker = dist.recv(gradient := torch.empty_like(weights))
    dist.send(weights - lr * gradient, dst=worker)
    return [*ages, 1]


WRONG_AT_ONCE = {
    "last step apart": (send_last_apart, "first the step, in place"),
    "uphill": (serve_at_once_by(step=lambda w, g, workers, lr: w.add_(lr * g)), "wrong sign"),
    "no lr": (serve_at_once_by(step=lambda w, g, workers, lr: w.sub_(g)), "multiply the gradient by it"),
    "mean over workers": (
        serve_at_once_by(step=lambda w, g, workers, lr: w.sub_(lr * g / len(workers))),
        "do not divide it",
    ),
    "half of it": (serve_at_once_by(step=lambda w, g, workers, lr: w.sub_(0.4 * lr * g)), "as it is, and no other"),
    "rebinds": (rebind_at_once, "change it in place"),
    "keeps a total": (keep_gradients(average=False), "earlier gradients are in the step again"),
    "others at the start": (
        serve_at_once_by(begin=lambda w, workers: send_to_all(w + 1, workers)),
        "the weights that you were given",
    ),
    "nothing after the last": (serve_at_once_by(answer=answer_unless_last), "the last one included"),
    "an update too few": (serve_at_once_by(count=lambda updates: updates - 1), "one gradient for each of `updates`"),
    "a receive is left open": (receive_ahead, "start no receive after the last"),
    "isend never waited for": (
        serve_at_once_by(answer=lambda w, worker, *_: dist.isend(w, worker)),
        "wait() for each that you start",
    ),
    "all other ranks": (
        lambda w, workers, updates, lr: serve_at_once_by()(w, range(1, dist.get_world_size()), updates, lr),
        "the ranks in `workers`",
    ),
    "nothing at all": (lambda *_: None, "at the start every worker gets the weights"),
    "no ages": (serve_at_once_by(give=lambda ages: None), "return a list with one age for each update"),
    "one too old": (serve_at_once_by(age=lambda u, seen, worker: u - seen[worker] + 1), "all are one too old"),
    "of the update before": (serve_at_once_by(has_seen=lambda update: update), "except for first gradients"),
    "never seen": (
        serve_at_once_by(has_seen=lambda update: 0),
        "how many updates are in them",
    ),
    "own updates": (count_own, "count each worker's own updates"),
    "sorted": (serve_at_once_by(give=sorted), "less how many updates were in the weights"),
    "doubled": (serve_at_once_by(give=lambda ages: [2 * age for age in ages]), "less how many updates were in"),
}
STUCK_AT_ONCE = {
    "in turn": (serve_at_once_by(receive=receive_in_order), "takes whichever comes first"),
    "waits for all": (wait_for_all, "answer each gradient"),
    "answers all": (serve_at_once_by(answer=answer_all), "only to the worker"),
    "begins with one": (serve_at_once_by(begin=lambda w, workers: send_to_all(w, workers[:1])), "has no weights"),
    "goes on for ever": (go_on, "how many gradients to take"),
}


@pytest.mark.parametrize(("answer", "words"), WRONG_AT_ONCE.values(), ids=WRONG_AT_ONCE)
def test_wrong_servers_at_once_are_refused(answer, words):
    refuse("14.4", answer, words)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("answer", "words"), STUCK_AT_ONCE.values(), ids=STUCK_AT_ONCE)
def test_servers_at_once_that_get_stuck_are_refused(answer, words):
    refuse("14.4", answer, words)


def at_once_with_counters(weights, workers, updates, lr):
    """Returns ages to which every update by another worker adds one."""
    older, ages = dict.fromkeys(workers, 0), torch.zeros(updates, dtype=torch.int64)
    for work in [dist.isend(weights, worker) for worker in workers]:
        work.wait()
    for update in range(updates):
        gradient = torch.zeros_like(weights)
        first = dist.recv(gradient)
        ages[update] = older[first]
        weights.add_(gradient, alpha=-lr)
        older = {worker: age + 1 for worker, age in older.items()}
        older[first] = 0
        dist.isend(weights, first).wait()
    return ages


def at_once_with_versions(weights, workers, updates, lr):
    version, versions, ages = 0, np.zeros(len(workers) + 1, int), []
    for work in batch_isend_irecv([P2POp(dist.isend, weights, worker) for worker in workers]):
        work.wait()
    while version < updates:
        work = dist.irecv(gradient := torch.empty_like(weights))
        work.wait()
        first = work._source_rank()
        ages.append(version - versions[first])
        weights.data = weights - lr * gradient
        version += 1
        versions[first] = version
        dist.send(weights, first)
    return np.array(ages)


RIGHT_AT_ONCE = {
    "lists": serve_at_once_by(),
    "tuple": serve_at_once_by(give=tuple),
    "numbers of torch's": serve_at_once_by(give=lambda ages: [torch.tensor(age) for age in ages]),
    "floats": serve_at_once_by(give=lambda ages: [float(age) for age in ages]),
    "counters": at_once_with_counters,
    "versions": at_once_with_versions,
}


@pytest.mark.parametrize("answer", RIGHT_AT_ONCE.values(), ids=RIGHT_AT_ONCE)
def test_right_servers_at_once_are_accepted(answer, capsys):
    accept("14.4", answer, capsys)


# Both


@pytest.mark.usefixtures("soon")
def test_servers_that_do_not_end_are_ended(tmp_path):
    def note_and_spin(*_):
        (tmp_path / str(os.getpid())).touch()
        spin()

    began = time.monotonic()
    for number in ("14.3", "14.4"):
        assert "it stands in line" in refuse(number, note_and_spin, "weights").yours
    assert time.monotonic() - began < 30
    pids = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", ["14.3", "14.4"])
def test_an_error_of_the_answer_is_no_try(number):
    def divide_by_nothing(*_):
        return 1 / 0

    with pytest.raises(OpenError, match="stopped with an error in your code") as left:
        check.exercise(number, divide_by_nothing)
    assert "return 1 / 0" in left.value.where and "ZeroDivisionError" in left.value.cause


@pytest.mark.parametrize("number", ["14.3", "14.4"])
def test_a_stub_is_no_try(number):
    def stub(*_):
        raise NotImplementedError

    with pytest.raises(OpenError, match="still to be written"):
        check.exercise(number, stub)


def test_what_the_server_prints_is_shown(capsys):
    serve = serve_in_turn_by(step=lambda *arguments: (print("a step"), step_with_mean(*arguments)))
    check.exercise("14.3", serve)
    assert capsys.readouterr().out.count("[rank 0] a step") == sum(case.steps for case in parameter_server.IN_TURN)
